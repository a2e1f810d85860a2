"""Settings of the synthetic tasks. Those that decide the examples are fixed for a run, `prefetch` and `cases` are not."""

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from baton.data_pipeline.errors import DataError


class Settings(BaseModel):
    """Base class of the data pipeline's settings: an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskCase(Settings):
    """A difficulty at which evaluation measures a synthetic task; null: as in training."""

    length: int | None = Field(default=None, ge=1, description="Tokens of an example; may exceed the rows of training.")
    examples: int | None = Field(
        default=None,
        ge=1,
        description="Examples that are measured; null: as many as fill evaluation.tokens, of which long ones are few.",
    )


class TaskConfig(Settings):
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

    def evaluated(self) -> "dict[str, tuple[Self, int | None]]":
        """The settings of each evaluation case, and its number of examples if it names one, by its name, such as
        length-256-pairs-16; one at least. Raises ValueError for a case that cannot be, and for two that are the same."""
        found: dict[str, tuple[Self, int | None]] = {}
        for number, case in enumerate(self.cases or (self.case(),)):
            changes = case.model_dump(exclude_none=True, exclude={"examples"})
            try:
                settings = type(self).model_validate(self.deciding() | changes)
            except ValidationError as error:
                raise ValueError(f"case {number}: {error.errors()[0]['msg']}") from None
            names = [key for key in self.case.model_fields if key != "examples"]
            name = "-".join(f"{key}-{getattr(settings, key)}" for key in names).replace("_", "-")
            if name in found:
                raise ValueError(f"case {number} is a second {name}; leave one out")
            found[name] = settings, case.examples
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
        """What the other settings ask for and the vocabulary does not hold, or another contradiction; "" when there is none."""
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


class NoisyRecallConfig(TaskConfig):
    """Recall in noise: keys and their values, again and again, and between them noise of a vocabulary of its own. Each key that
    comes again is a question.

    Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (MAD), and its public benchmark, whose sizes
    the defaults are. There training predicts every token; here, as in all tasks, it answers the questions.
    """

    kind: Literal["noisy_recall"] = "noisy_recall"
    length: int = Field(default=128, ge=1, description="Tokens of an example, even: places of two tokens.")
    vocab_size: int = Field(
        default=32, ge=4, description="Tokens that there are: keys, then values, half each of what is no noise, then noise."
    )
    noise_vocab_size: int = Field(default=16, ge=1, description="Tokens of the noise, the last ones of the vocabulary.")
    noise: float = Field(default=0.2, ge=0, lt=1, description="Chance of a place to hold two tokens of noise.")

    @property
    def keys(self) -> int:
        """Number of different keys."""
        return (self.vocab_size - self.noise_vocab_size) // 2

    @property
    def shortest(self) -> int:
        return 4

    def _too_large(self) -> str:
        if self.length % 2:
            return f"length={self.length} is odd, and places have two tokens; set {self.length + 1}"
        if self.keys < 1:
            return (
                f"noise_vocab_size={self.noise_vocab_size} leaves no key and value of vocab_size={self.vocab_size}; raise "
                f"vocab_size"
            )
        return ""


class FuzzyRecallConfig(TaskConfig):
    """Fuzzy recall: as noisy recall without noise, with keys and values of one token up to several. Each key that comes again is a
    question for all tokens of its value.

    Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (MAD), and its public benchmark, whose sizes
    the defaults are. There training predicts every token, and evaluation has keys of the largest size alone.
    """

    kind: Literal["fuzzy_recall"] = "fuzzy_recall"
    length: int = Field(default=128, ge=1, description="Tokens of an example, blanks in front of it included.")
    vocab_size: int = Field(
        default=16, ge=4, description="Tokens that there are: of keys, then as many or one more of values; the last is the blank."
    )
    key_tokens: int = Field(default=3, ge=1, description="Most tokens of a key; each number up to it is as likely.")
    value_tokens: int = Field(default=3, ge=1, description="Most tokens of a value; each number up to it is as likely.")

    @property
    def key_vocabulary(self) -> int:
        """Number of tokens of which keys are made; those of values are the next ones, up to the blank."""
        return (self.vocab_size - 1) // 2

    @property
    def shortest(self) -> int:
        return 2 * (self.key_tokens + self.value_tokens)

    def _too_large(self) -> str:
        if max(self.key_tokens, self.value_tokens) <= self.key_vocabulary:
            return ""
        return (
            f"key_tokens={self.key_tokens} and value_tokens={self.value_tokens} are of different tokens, and "
            f"vocab_size={self.vocab_size} has {self.key_vocabulary} for each; raise vocab_size"
        )


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
