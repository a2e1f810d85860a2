"""Settings of the data pipeline: which dataset and tokenizer a run reads, and how text is turned into a dataset.

The one thing to know: `unit_documents` and `unit_bytes` decide the order of the data, so a run cannot change them midway;
`prefetch` may change at any time.
"""

from pydantic import BaseModel, ConfigDict, Field

MIB = 1 << 20

#: Files taken from a folder when no include pattern is given (names, matched without regard to their folder).
DEFAULT_INCLUDE = ("*.txt", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
#: Text bytes aimed at per shard: big enough for sequential reads, small enough to spread over ranks and to verify in a second.
DEFAULT_SHARD_BYTES = 256 * MIB
#: Share of documents held out for validation.
DEFAULT_VALIDATION_FRACTION = 0.02


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Settings):
    """What a training run reads."""

    path: str = Field(
        default="data/shards",
        description="Folder or URL of a prepared dataset (what `prepare` wrote). A URL is anything the webdataset library opens: "
        "http(s):, file:, pipe: with {} where the file's name goes, ...",
    )
    tokenizer: str = Field(
        default="data/tokenizer.model",
        description="Path of the SentencePiece .model file. Its vocabulary, not its path, must be that of token shards "
        "and checkpoints.",
    )
    unit_documents: int = Field(
        default=64,
        ge=1,
        description="Most documents in a unit, the run of neighbouring documents a lane reads at once and shuffles within. More "
        "mixes better, fewer lets more lanes share a small corpus. Part of the data order: fixed for a run.",
    )
    unit_bytes: int = Field(
        default=32 * MIB,
        ge=1,
        description="Most UTF-8 text bytes in a unit (a single larger document is a unit by itself). Bounds a lane's buffer, as "
        "each lane holds one unit in memory. Part of the data order: fixed for a run.",
    )
    prefetch: int = Field(
        default=2,
        ge=1,
        description="Steps of batches made ahead by a background thread. Two hide a slow document; more only cost memory.",
    )


class PrepareConfig(_Settings):
    """How text becomes a dataset. Everything here but the worker count is part of the dataset's settings fingerprint."""

    shard_bytes: int = Field(
        default=DEFAULT_SHARD_BYTES,
        ge=1,
        description="UTF-8 text bytes aimed at per shard. Larger shards read better, smaller ones spread better over workers.",
    )
    validation_fraction: float = Field(
        default=DEFAULT_VALIDATION_FRACTION,
        ge=0.0,
        lt=1.0,
        description="Share of documents held out, chosen by a hash of their text, so equal documents never fall on both sides.",
    )
    text_field: str = Field(
        default="text",
        min_length=1,
        description="Field of a .jsonl record, or column of a .parquet table, that holds the document's text.",
    )
    include: tuple[str, ...] = Field(
        default=DEFAULT_INCLUDE,
        min_length=1,
        description="Patterns of files to take from a folder. Without a slash a pattern is matched against the file's name, with "
        "one against its path below the folder. A matched file that is not .jsonl or .parquet is one document of text.",
    )
    exclude: tuple[str, ...] = Field(
        default=(),
        description="Patterns of files and folders to leave out of a folder: without a slash matched against every part of the "
        "path, with one against the path below the folder.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="Worker processes; none means one per usable core. The shards are the same bytes whatever the number.",
    )
