"""Settings of the data pipeline: what a run reads, by its kind, and how text is prepared.

The settings that decide the lanes' contents (`unit_documents` and `unit_bytes` of shards; everything but `prefetch` and `cases` of
a synthetic task) are fixed for a run. The others may change at any time.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.task_config import (
    FuzzyRecallConfig,
    InductionConfig,
    MqarConfig,
    NoisyRecallConfig,
    SelectiveCopyConfig,
    Settings,
)

MIB = 1 << 20

#: Files taken from a folder when no include pattern is given (names, matched without regard to their folder).
DEFAULT_INCLUDE = (
    *(
        "*.txt",
        "*.jsonl",
        "*.ndjson",
        "*.parquet",
        "*.arrow",
    ),  # not .json and .tar, of which many are no text: they are named or included
    *(f"*.{kind}.{packed}" for kind in ("txt", "jsonl", "ndjson", "json") for packed in ("gz", "zst", "xz", "bz2")),
)
#: The same of token ids.
DEFAULT_IDS_INCLUDE = ("*.bin", "*.npy", "*.parquet", "*.arrow", "*.tar")
#: Text bytes aimed at per shard: big enough for sequential reads, small enough to spread over ranks and to verify in a second.
DEFAULT_SHARD_BYTES = 256 * MIB
#: Processes per reading rank, at most, that `data.workers: auto` stands for; each makes about a million tokens a second.
MOST_WORKERS = 4
#: Share of documents held out for validation.
DEFAULT_VALIDATION_FRACTION = 0.02


#: How far from 1 the weights' sum may be: what decimals with a few digits leave.
TOLERANCE = 1e-6


def check_weights(schedule: Sequence[tuple[int, Mapping[str, float]]], sources: Sequence[str]) -> None:
    """Raises DataError unless the weights begin at step 0, go forward, name every source and sum to 1."""
    firsts = [first for first, _ in schedule]
    if firsts[:1] != [0] or any(a >= b for a, b in pairwise(firsts)):
        raise DataError(f"data.mixture begins at steps {firsts}; give weights from step 0 on, and later ones in order")
    for first, weights in schedule:
        where = f"data.mixture from step {first}"
        wrong = sorted(set(weights) ^ set(sources))
        if wrong:
            raise DataError(f"{where}: weights and data.sources disagree about {', '.join(wrong)}; give each source one weight")
        negative = [name for name, weight in weights.items() if weight < 0]
        if negative:
            raise DataError(f"{where}: the weight of {negative[0]} is negative; use 0 to leave a source out")
        total = sum(weights.values())
        if abs(total - 1) > TOLERANCE:
            raise DataError(
                f"{where}: the weights sum to {total:g}, not 1; they are shares, such as "
                + ", ".join(f"{name}: {weight / total if total else 1 / len(weights):.4g}" for name, weight in weights.items())
            )


class MixtureConfig(Settings):
    """Weights of several sources from a step on."""

    from_step: int = Field(default=0, ge=0, description="First step, counted from 0, in which units are chosen by these weights.")
    weights: dict[str, float] = Field(description="Each source's share of the text's bytes, together 1.")


class ShardsConfig(Settings):
    """Text: the documents of a prepared dataset or of several, and the tokenizer that makes their ids."""

    kind: Literal["shards"] = "shards"
    path: str = Field(
        default="data/shards",
        description="Folder or URL of a prepared dataset (what `prepare` wrote). A URL is anything the webdataset library opens: "
        "http(s):, file:, pipe: with {} where the file's name goes, ...",
    )
    sources: dict[str, str] = Field(
        default_factory=dict,
        description="Several datasets instead of `path`, by name: where each lies. The names are part of the data order: "
        "fixed for a run.",
    )
    mixture: tuple[MixtureConfig, ...] = Field(
        default=(),
        description="Weights of the sources, as [{weights: {web: 0.7, code: 0.3}}, {from_step: 1000, weights: ...}]. May change at "
        "any start of a run, for the units that are opened from then on.",
    )
    append: bool = Field(
        default=False,
        description="Read shards that a dataset has got since the run began, from the next epoch on; off: refuse such a dataset.",
    )
    cache: str | None = Field(
        default=None,
        description="Local folder that keeps whole shards from elsewhere, for all ranks of the machine; null: they are transferred "
        "again whenever one of their units is read.",
    )
    cache_bytes: int = Field(
        default=64 << 30,
        ge=1,
        description="Most bytes in `cache`; the shards that were not used for the longest make room.",
    )
    tokenizer: str = Field(
        default="data/tokenizer.model",
        description="Path of a SentencePiece .model or a tokenizer.json, or of a folder with one. Its vocabulary, not its path, "
        "must be that of token shards and checkpoints.",
    )
    eod_token: str | None = Field(
        default=None,
        description="Name of the token that stands between documents; null: the tokenizer's own EOS token.",
    )
    unit_documents: int = Field(
        default=64,
        ge=1,
        description="Most documents in a unit, the run of neighbouring documents a lane reads at once and shuffles within. More "
        "mixes better, fewer lets more lanes share a small corpus. Part of the data order: fixed for a run. Unless this and "
        "unit_bytes are the default ones, a start computes the units from every shard's index.",
    )
    unit_bytes: int = Field(
        default=32 * MIB,
        ge=1,
        description="Most UTF-8 text bytes in a unit (a single larger document is a unit by itself). Bounds a lane's buffer: "
        "it holds one unit's documents, but for those beyond 1 MiB, which are read in pieces. Part of the data order: fixed for a "
        "run.",
    )
    prefetch: int = Field(
        default=2,
        ge=1,
        description="Steps of batches made ahead by a background thread, and some more by workers. Two hide a slow document; more "
        "only cost memory.",
    )
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="Processes per reading rank that read and tokenize; 0: a thread of the rank, which delays the launches of a "
        "GPU's kernels. auto: half of the rank's cores, at most 4; on a CPU 0. The tokens are the same whatever the number.",
    )

    def worker_count(self, cores: int) -> int:
        """`workers`, or what auto stands for. cores: that a rank has beside a GPU; 0: it computes on them."""
        return min(MOST_WORKERS, cores // 2) if self.workers == "auto" else self.workers

    @property
    def places(self) -> dict[str, str]:
        """Where each source lies, by name; "" for one alone."""
        return self.sources or {"": self.path}

    @property
    def schedule(self) -> tuple[tuple[int, dict[str, float]], ...]:
        """The mixture as the streams take it."""
        return tuple((each.from_step, each.weights) for each in self.mixture)

    @model_validator(mode="after")
    def _sources_have_weights(self) -> Self:
        if self.sources and self.path != type(self).model_fields["path"].default:
            raise ValueError("path and sources both say what to read; leave one out")
        if len(self.sources) == 1:
            raise ValueError("one source alone needs no mixture; give its place as path")
        if self.mixture and not self.sources:
            raise ValueError("a mixture is of several sources; name them in sources")
        if self.sources:
            try:
                check_weights(self.schedule, tuple(self.sources))
            except DataError as error:
                raise ValueError(str(error)) from None
        return self


def _shards_unless_said(value: Any) -> Any:
    """A run file that names no kind reads shards."""
    return {"kind": "shards"} | value if isinstance(value, dict) else value


DataConfig = Annotated[
    Annotated[
        ShardsConfig | MqarConfig | NoisyRecallConfig | FuzzyRecallConfig | InductionConfig | SelectiveCopyConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_shards_unless_said),
]
"""What a training run reads: text from shards, or a synthetic task."""


class IdsConfig(Settings):
    """Input files that hold token ids instead of text."""

    dtype: Literal["uint16", "uint32"] = Field(
        default="uint16", description="Type of the ids in a flat .bin file, little-endian; other files name theirs."
    )
    separator_id: int = Field(
        ge=0, description="Id that ends a document in a flat file, and that is dropped from documents' ends in others."
    )
    field: str = Field(
        default="input_ids", min_length=1, description="Column of a Parquet or Arrow table that holds a document's ids as a list."
    )
    vocab_size: int = Field(ge=1, description="Tokens of the tokenizer that made the ids; an id beyond them is an error.")


class PrepareConfig(Settings):
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
        description="Field of a JSON record, or column of a Parquet table, that holds the document's text.",
    )
    ids: IdsConfig | None = Field(default=None, description="Of input files that hold token ids; null: they hold text.")
    include: tuple[str, ...] = Field(
        default=DEFAULT_INCLUDE,
        min_length=1,
        description="Patterns of files to take from a folder. Without a slash a pattern is matched against the file's name, with "
        "one against its path below the folder, and with one at its beginning against the name that reports give the file. A "
        "matched file is read as what it is: JSON lines or arrays, Parquet, Arrow, a WebDataset tar, else one document of text.",
    )
    exclude: tuple[str, ...] = Field(
        default=(),
        description="Patterns of files and folders to leave out: without a slash matched against every part of the path below an "
        "input, with one against that path, with one at its beginning against the name that reports give the file. May be changed "
        "while a dataset is unfinished: finished parts stay.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="Worker processes; none means one per usable core. The shards are the same bytes whatever the number.",
    )
