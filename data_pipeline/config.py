"""Settings of the data pipeline: what a run reads, by its kind, and how text is prepared.

The settings that decide the lanes' contents (`unit_documents` and `unit_bytes` of shards; everything but `prefetch` and `cases` of
a synthetic task) are fixed for a run. The others may change at any time.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from baton.data_pipeline.errors import DataError

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


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MixtureConfig(_Settings):
    """Weights of several sources from a step on."""

    from_step: int = Field(default=0, ge=0, description="First step, counted from 0, in which units are chosen by these weights.")
    weights: dict[str, float] = Field(description="Each source's share of the text's bytes, together 1.")


class ShardsConfig(_Settings):
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
    workers: int = Field(
        default=0,
        ge=0,
        description="Processes per reading rank that read and tokenize; 0: the background thread, which makes some hundred "
        "thousand tokens a second. The tokens are the same whatever the number.",
    )

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


class TaskCase(_Settings):
    """A difficulty at which evaluation measures a synthetic task; null: as in training."""

    length: int | None = Field(default=None, ge=1, description="Tokens of an example; may exceed the rows of training.")


class TaskConfig(_Settings):
    """What the synthetic tasks share: examples without end, made when they are needed; no files and no tokenizer."""

    case: ClassVar[type[TaskCase]] = TaskCase
    kind: str
    length: int = Field(
        ge=1,
        description="Tokens of an example, questions included; an example is a document. training.sequence_length is a multiple.",
    )
    vocab_size: int = Field(ge=4, description="Tokens that there are, special ones included; the model's vocabulary.")
    prefetch: int = Field(
        default=2,
        ge=1,
        description="Steps of batches made ahead by a background thread. Two hide the making; more only cost memory.",
    )
    cases: tuple[TaskCase, ...] = Field(
        default=(),
        description="Difficulties at which evaluation measures, each as changes of the task's own settings; none: as in training.",
    )

    @property
    def shortest(self) -> int:
        """The least `length` that the other settings leave room for."""
        raise NotImplementedError

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the examples, JSON-able."""
        return self.model_dump(mode="json", exclude={"prefetch", "cases"})

    def evaluated(self) -> dict[str, Self]:
        """The settings of each evaluation case by its name, such as length-256-pairs-16; one at least. Raises ValueError for a
        case that cannot be, and for two that are the same."""
        found: dict[str, Self] = {}
        for number, case in enumerate(self.cases or (self.case(),)):
            changes = case.model_dump(exclude_none=True)
            try:
                settings = type(self).model_validate(self.deciding() | changes)
            except ValidationError as error:
                raise ValueError(f"case {number}: {error.errors()[0]['msg']}") from None
            name = "-".join(f"{key}-{getattr(settings, key)}" for key in self.case.model_fields).replace("_", "-")
            if name in found:
                raise ValueError(f"case {number} is a second {name}; leave one out")
            found[name] = settings
        return found

    def check_sequence_length(self, sequence_length: int) -> None:
        """Raises DataError, naming sizes that would do, unless whole examples fill a row of `context` tokens exactly."""
        if sequence_length % self.length == 0:
            return
        down = sequence_length // self.length * self.length
        lengths = [str(n) for n in range(self.shortest, sequence_length + 1) if sequence_length % n == 0]
        raise DataError(
            f"training.sequence_length={sequence_length} is not a multiple of data.length={self.length}, and rows are full of "
            f"whole examples; nearest that are: {' and '.join(str(n) for n in (down, down + self.length) if n)}"
            + (f"; lengths that fill this one: {', '.join(lengths)}" if lengths else "")
        )

    def _too_large(self) -> str:
        """What the other settings ask for and the vocabulary does not hold; "" when it holds it."""
        return ""

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        problem = self._too_large()
        if problem:
            raise ValueError(problem)
        if self.length < self.shortest:
            raise ValueError(f"length={self.length} is too short: these settings need {self.shortest} tokens or more")
        if self.cases:
            self.evaluated()
        return self


class MqarCase(TaskCase):
    """Changes of MqarConfig for one evaluation case."""

    pairs: int | None = Field(default=None, ge=1, description="Pairs of key and value in an example.")


class MqarConfig(TaskConfig):
    """Multi-query associative recall: pairs of key and value, then each key once more, whose value is to be named.

    Layout and defaults: Arora et al., "Zoology", and its public benchmark.
    """

    case = MqarCase
    kind: Literal["mqar"] = "mqar"
    length: int = Field(default=256, ge=1, description="Tokens of an example: pairs, questions and what is between them.")
    pairs: int = Field(default=16, ge=1, description="Pairs of key and value in an example; the benchmark has 4 to 256.")
    vocab_size: int = Field(
        default=8192,
        ge=4,
        description="Tokens that there are: 0 stands for nothing, keys are from the lower half, values from the upper.",
    )
    power: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="Exponent a of the gaps g between the pairs and a question, p(g) ~ g^(a-1): near 0 most questions come early, "
        "at 1 all places are alike.",
    )
    filler: Literal["random", "zero"] = Field(
        default="random",
        description="What stands where no question does: random tokens, none of them a key of the example, or token 0.",
    )
    cases: tuple[MqarCase, ...] = Field(default=(), description=TaskConfig.model_fields["cases"].description)

    @property
    def shortest(self) -> int:
        return 4 * self.pairs  # a question takes two places: the key, and one where its value would follow

    def _too_large(self) -> str:
        most = self.vocab_size // 2 - 1
        if self.pairs <= most:
            return ""
        return f"pairs={self.pairs} need as many different keys, and vocab_size={self.vocab_size} has {most}; raise vocab_size"


class InductionConfig(TaskConfig):
    """Induction heads: a special token somewhere among random ones, and once more at the end; what came after it is to be named.

    Source: Gu & Dao, "Mamba", section 4.1.2. The special token is vocab_size - 1.
    """

    kind: Literal["induction"] = "induction"
    length: int = Field(default=256, ge=1, description="Tokens of an example; the paper trains at 256 and tests 64 to 2^20.")
    vocab_size: int = Field(default=16, ge=4, description="Tokens that there are, the special one included.")

    @property
    def shortest(self) -> int:
        return 3


class SelectiveCopyCase(TaskCase):
    """Changes of SelectiveCopyConfig for one evaluation case."""

    data_tokens: int | None = Field(default=None, ge=1, description="Tokens to be remembered.")


class SelectiveCopyConfig(TaskConfig):
    """Selective copying: data tokens at random places among blanks, to be named in their order at the end.

    Source: Gu & Dao, "Mamba", section 4.1.1. Token 0 is the blank, vocab_size - 1 asks for an answer, the others are data.
    """

    case = SelectiveCopyCase
    kind: Literal["selective_copy"] = "selective_copy"
    length: int = Field(default=4096, ge=1, description="Tokens of an example, its answer places included.")
    data_tokens: int = Field(default=16, ge=1, description="Tokens to be remembered, and answer places at the end.")
    vocab_size: int = Field(default=16, ge=4, description="Tokens that there are, the blank and the asking one included.")
    cases: tuple[SelectiveCopyCase, ...] = Field(default=(), description=TaskConfig.model_fields["cases"].description)

    @property
    def shortest(self) -> int:
        return 2 * self.data_tokens


def _shards_unless_said(value: Any) -> Any:
    """A run file that names no kind reads shards."""
    return {"kind": "shards"} | value if isinstance(value, dict) else value


DataConfig = Annotated[
    Annotated[ShardsConfig | MqarConfig | InductionConfig | SelectiveCopyConfig, Field(discriminator="kind")],
    BeforeValidator(_shards_unless_said),
]
"""What a training run reads: text from shards, or a synthetic task."""


class IdsConfig(_Settings):
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
