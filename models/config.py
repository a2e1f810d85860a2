"""Settings of the model: its width, and the sub-blocks of each layer. Torch-free."""

import itertools
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
    model_validator,
)

from baton.models.initializers import Normal
from baton.models.settings import MixerConfig, kinds, settings_class
from baton.models.settings.declarations import ParameterDeclaration, rms_norm


def _of_any_kind(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Settings of a kind of Baton's by `handler`, of any other by its class."""
    kind = value.get("kind") if isinstance(value, dict) else value.kind if isinstance(value, MixerConfig) else None
    cls = settings_class(kind) if isinstance(kind, str) and kind not in kinds() else None
    if cls is None:
        return handler(value)
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ValueError(f"unknown key {where}; known: {', '.join(cls.model_fields)}") from None
        raise ValueError(f"{where}={first['input']!r}: {first['msg'].removeprefix('Value error, ')}") from None


def _written(value: Any, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
    return handler(value) if value.kind in kinds() else value.model_dump(mode=info.mode)


if TYPE_CHECKING:
    AnyMixer = MixerConfig
else:
    AnyMixer = Annotated[
        Annotated[Union[tuple(kinds().values())], Field(discriminator="kind")],  # noqa: UP007
        WrapValidator(_of_any_kind),
        WrapSerializer(_written),
    ]

_ENTRY = re.compile(r"^([A-Za-z]\w*(?:[+|][A-Za-z]\w*)*)(?:\*([1-9]\d*))?$")


def with_settings_of_once(model: Any) -> Any:
    """The values of a model that a version of Baton wrote down with all its settings: those that it did not know have the values
    that its models meant."""
    mixers = model.get("mixers") if isinstance(model, dict) else None
    if not isinstance(mixers, dict):
        return model
    own = {
        name: {**kinds()[mixer["kind"]].once, **mixer}
        for name, mixer in mixers.items()
        if isinstance(mixer, dict) and isinstance(mixer.get("kind"), str) and mixer["kind"] in kinds()
    }
    return {**model, "mixers": {**mixers, **own}}


Layer = tuple[str, ...]
"""Names of a layer's mixers, in order."""

SubBlocks = tuple[tuple[str, ...], ...]
"""The same by sub-block: x + mixer(norm(x)), or of several mixers, which read the same norm, x + the sum of their outputs."""


def places(layer: SubBlocks) -> list[tuple[str, bool]]:
    """A layer's names, and whether each is the first of its sub-block, which has the norm."""
    return [(name, n == 0) for block in layer for n, name in enumerate(block)]


def padding_to_rows(vocab_size: int, rows: int, preferred: int) -> int:
    """pad_vocab_to of an embedding of `rows` rows for a vocabulary of 1 to `rows` tokens: `preferred` if it gives these rows, else
    the least power of two that does, else the least number."""
    fitting = (n for n in range(rows - vocab_size + 1, rows + 1) if rows % n == 0)
    return min(fitting, key=lambda n: (n != preferred, n & (n - 1) != 0, n))


class ModelConfig(BaseModel):
    """A language model: embedding, n_layers layers of sub-blocks, final norm, head."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    d_model: int = Field(ge=1, description="width of the residual stream")
    n_layers: int = Field(ge=1, description="number of layers")
    pattern: tuple[str, ...] = Field(
        ("mamba",),
        min_length=1,
        description="layers of the model, repeated until there are n_layers: `mamba*7` is seven layers, `attention+swiglu` is one "
        "layer with two sub-blocks, and in `attention|mamba2+swiglu` the first is two mixers that read the same norm and whose "
        "outputs are added. A name is a kind of mixer or a key of `mixers`",
    )
    mixers: dict[str, AnyMixer] = Field(
        default_factory=dict,
        description="settings of each name in the pattern: {kind: ..., ...}; kind defaults to the name",
    )
    shared: tuple[str, ...] = Field(
        (),
        description="names of the pattern that have one set of weights, norm included, however many layers have them: "
        "`[attention, swiglu]` for attention and an MLP that are used at several depths, as in Zamba. Each layer has its own State",
    )
    vocab_size: int | None = Field(None, ge=1, description="number of tokens in the vocabulary; null: the tokenizer's")
    pad_vocab_to: int = Field(
        8, ge=1, description="the embedding's rows are padded to a multiple of this; the padding has no part in the loss"
    )
    tie_embeddings: bool = Field(True, description="use the embedding's weight for the head; false: a weight of its own")
    init_std: float | None = Field(
        None,
        gt=0,
        description="standard deviation of the projections' normal initial values; null: uniform in +-fan_in^-1/2, as in Mamba",
    )
    norm_eps: float = Field(1e-5, gt=0, description="epsilon added to the mean square in RMSNorm")
    decay_embedding: bool = Field(
        False, description="apply weight decay to the embedding and the head; the papers do not say whether they do"
    )
    loss_chunk: int = Field(
        4096, ge=1, description="tokens whose logits are in memory at once; those of a long sequence would not fit"
    )

    @model_validator(mode="before")
    @classmethod
    def _every_name_has_settings(cls, values: Any) -> Any:
        """Gives a name without settings its kind's defaults, so that the resolved configuration is complete."""
        if not isinstance(values, dict):
            return values
        pattern, mixers = values.get("pattern", cls.model_fields["pattern"].default), values.get("mixers", {})
        if not isinstance(mixers, dict) or not isinstance(pattern, list | tuple):
            return values
        filled = dict(mixers)
        for entry in pattern:
            match = _ENTRY.match(entry) if isinstance(entry, str) else None
            for name in re.split(r"[+|]", match[1]) if match else ():
                filled.setdefault(name, {})
        for name, settings in filled.items():
            if isinstance(settings, dict) and "kind" not in settings:
                filled[name] = {"kind": name, **settings}
        return {**values, "mixers": filled}

    @model_validator(mode="after")
    def _the_pattern_fits(self) -> "ModelConfig":
        used = {name for layer in self.period for name in layer}
        for name, settings in self.mixers.items():
            if name not in used:
                raise ValueError(f"mixers.{name} is not in pattern={list(self.pattern)}; remove it or put it there")
            try:
                settings.check(self.d_model)
            except ValueError as error:
                raise ValueError(f"mixers.{name}: {error}") from None
        self._what_is_shared_fits(used)
        self._what_is_read_was_handed_on()
        return self

    def _what_is_shared_fits(self, used: set[str]) -> None:
        """Raises ValueError for a shared name that is not in the pattern, or that does not have a norm in all of its layers."""
        for name in self.shared:
            if name not in used:
                raise ValueError(f"shared: {name} is not in pattern={list(self.pattern)}; known: {', '.join(sorted(used))}")
            if len({first for layer in self._period for other, first in places(layer) if other == name}) > 1:
                raise ValueError(
                    f"shared: {name} is behind a | in one layer, where it has no norm, and not in another; give the two a name "
                    f"each in mixers"
                )

    def _what_is_read_was_handed_on(self) -> None:
        """Raises ValueError unless each tensor that layers share is handed on once, and before it is read, in the same width."""
        handed_on: dict[str, int] = {}
        for name in (name for layer in self.layers for name in layer):
            settings = self.mixers[name]
            for tensor, width in settings.reads(self.d_model).items():
                if handed_on.get(tensor) != width:
                    found = f"with width {handed_on[tensor]}" if tensor in handed_on else "by no layer before it"
                    raise ValueError(
                        f"mixers.{name} reads {tensor} of width {width}, which is handed on {found}; put a layer that does "
                        f"in front of it in the pattern"
                    )
            for tensor, width in settings.hands_on(self.d_model).items():
                if tensor in handed_on:
                    raise ValueError(f"mixers.{name} hands on {tensor} a second time; let one layer of the n_layers do so")
                handed_on[tensor] = width

    @property
    def period(self) -> tuple[Layer, ...]:
        """The pattern's layers, without repetition. Raises ValueError for an invalid entry."""
        return tuple(tuple(itertools.chain(*layer)) for layer in self._period)

    @property
    def _period(self) -> tuple[SubBlocks, ...]:
        layers: list[SubBlocks] = []
        for entry in self.pattern:
            match = _ENTRY.match(entry)
            if match is None:
                raise ValueError(
                    f"pattern: {entry!r} is not NAME, NAME*COUNT, NAME+NAME or NAME|NAME; for example [mamba*7, attention+swiglu]"
                )
            layer = tuple(tuple(block.split("|")) for block in match[1].split("+"))
            names = list(itertools.chain(*layer))
            if len(set(names)) != len(names):
                raise ValueError(f"pattern: {entry!r} has a name twice; give the second one another name in mixers")
            layers += [layer] * int(match[2] or 1)
        return tuple(layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The mixers of each of the n_layers layers."""
        period = self.period
        return tuple(period[n % len(period)] for n in range(self.n_layers))

    @property
    def sub_blocks(self) -> tuple[SubBlocks, ...]:
        """The sub-blocks of each of the n_layers layers."""
        period = self._period
        return tuple(period[n % len(period)] for n in range(self.n_layers))

    @property
    def shared_blocks(self) -> dict[str, bool]:
        """The shared names that any of the n_layers layers has, and whether each has its sub-block's norm."""
        return {name: first for layer in dict.fromkeys(self.sub_blocks) for name, first in places(layer) if name in self.shared}

    def place(self, number: int, name: str) -> str:
        """What the names of the parameters of a layer's mixer, and of its norm, begin with."""
        return f"shared.{name}" if name in self.shared else f"layers.{number}.{name}"

    @property
    def is_parallel(self) -> bool:
        """Whether a sub-block has several mixers."""
        return any(len(block) > 1 for layer in self._period for block in layer)

    @property
    def residual_adds(self) -> int:
        """Number of additions to the residual stream in the whole model."""
        return sum(len(layer) for layer in self.layers)

    @property
    def embedding(self) -> ParameterDeclaration:
        """The embedding. With tied embeddings it is also the head, and `uses` counts the head's matmul."""
        return self._vocabulary("embedding", uses=int(self.tie_embeddings))

    @property
    def head(self) -> ParameterDeclaration | None:
        """The head; None with tied embeddings."""
        return None if self.tie_embeddings else self._vocabulary("head", uses=1)

    @property
    def final_norm(self) -> ParameterDeclaration:
        """The norm in front of the head."""
        return rms_norm("norm", self.d_model)

    def _vocabulary(self, layer: Literal["embedding", "head"], uses: int) -> ParameterDeclaration:
        shape = (self.padded_vocab_size, self.d_model)
        return ParameterDeclaration(
            f"{layer}.weight", shape, Normal(0.02), split=0, decay=self.decay_embedding, uses=uses, layer=layer
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. Raises ValueError while vocab_size is None."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not known yet: it comes from the tokenizer")
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to
