"""What a mixer is to the layer around it, and which class builds which kind.

A mixer maps (x [B, T, d_model], pos [B, T], State or None) to (y [B, T, d_model], State); None is the state before any token. It is
written like single-device code over tensor-parallel projections; its file says how its heads or channels split.

Where tensor ranks share the residual stream, x is gathered for the mixer and its output projection gives each rank its part of the
tokens, y [tokens_per_rank(B T), d_model]. Whoever reads x then finds only this rank's part of x's gradient, and gathering sums the
parts: so the projections of a MixerContext sum nothing, and what every rank computes alike must not sum either
(models.replicated_linear).
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from baton.kernels.protocol import Inputs, Recurrence, State, StateSpec
from baton.models import init
from baton.models.settings import MixerConfig
from baton.parallel.context_parallel import ContextLink
from baton.parallel.megatron import ModelParallelConfig
from baton.parallel.param_layout import Init, ParameterLayout, declare
from baton.parallel.state_passing import run_recurrence
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear

_CLASSES: dict[type[MixerConfig], type["Mixer"]] = {}


@dataclass(frozen=True)
class MixerContext:
    """Where a mixer is built in.

    residual_adds: how often the whole model adds to its residual stream; output projections' initial values are scaled by its
    -1/2 power. compute_dtype: of matmuls and activations between them. init_std: of normal initial values of the projections; None:
    uniform ones. sequence_parallel: tensor ranks share the residual stream, each a part of the tokens; a mixer's input is gathered.
    is_nested: the mixer is a part of another, which reads its output whole on every rank. selective_recompute: cheap activations
    are recomputed in the backward pass (models.selective_recompute).
    """

    d_model: int
    residual_adds: int
    norm_eps: float
    megatron: ModelParallelConfig
    compute_dtype: torch.dtype
    init_std: float | None = None
    sequence_parallel: bool = False
    is_nested: bool = False
    selective_recompute: bool = False

    def nested(self) -> "MixerContext":
        """Of a mixer within this one: what it gives is not added to the residual stream."""
        return dataclasses.replace(self, residual_adds=1, is_nested=True)

    @property
    def tensor_size(self) -> int:
        """Ranks that share the mixer."""
        return int(self.megatron.tensor_model_parallel_size)

    def initializer(self, fan_in: int, scale: float = 1.0) -> Init:
        """Initial values of a projection's weight."""
        return init.linear(fan_in, scale) if self.init_std is None else init.normal(scale * self.init_std)

    def column(
        self, out_features: int, *, fused_splits: Iterable[tuple[str, int]] = (), initializer: Init | None = None
    ) -> ColumnParallelLinear:
        """A projection from d_model to features that are split over the tensor group."""
        initializer = initializer or self.initializer(self.d_model)
        return ColumnParallelLinear(
            self.d_model,
            out_features,
            initializer,
            self.megatron,
            compute_dtype=self.compute_dtype,
            fused_splits=tuple(fused_splits),
            disable_grad_reduce=self.sequence_parallel,
        )

    def output(self, in_features: int) -> RowParallelLinear:
        """The projection from features that are split over the tensor group back to d_model, summed over the group; where ranks
        share the residual stream, each has the sum for its part of the tokens."""
        return RowParallelLinear(
            in_features,
            self.d_model,
            self.initializer(in_features, scale=self.residual_adds**-0.5),
            self.megatron,
            compute_dtype=self.compute_dtype,
            scatter=self.sequence_parallel and not self.is_nested,
        )

    def split(self, shape: Iterable[int], initializer: Init, *, decay: bool) -> nn.Parameter:
        """A parameter with one row per channel or head, split over the tensor group; it stays fp32 in the computation."""
        layout = ParameterLayout(tuple(shape), initializer, split=0, decay=decay)
        return declare(nn.Parameter(torch.empty(layout.local_shape(self.tensor_size))), layout)


class Mixer(nn.Module, ABC):
    """Base of every mixer: `class Mamba(Mixer, settings=MambaConfig)` makes it the class of that kind.

    A subclass's constructor takes (config, context).

    kept_operators: operators whose results recomputation of activations keeps instead of computing again, because a choice hangs on
    their last bit.
    """

    kept_operators: ClassVar[tuple[Any, ...]] = ()
    link: ContextLink | None = None
    """The sequence group's neighbours; None: this rank has whole sequences."""
    seen: ClassVar[set[Recurrence] | None] = None
    """Where recurrences that are carried are noted, within `record_recurrences`: they are then run as they are defined."""
    state_wanted: ClassVar[bool] = True
    """Whether the States that leave are wanted, within `need_final_state`. Else they are not made where nothing is handed on."""
    where: str = "a mixer"
    """This mixer's name in the model, "layers.3.mamba", as errors and counts of messages call it."""

    def carry(self, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Outputs and leaving State of a recurrence, whoever has the tokens before these. Everything carried goes through here."""
        if Mixer.seen is not None:
            Mixer.seen.add(recurrence)
            if not inputs[0].is_meta:  # definitions look at numbers
                # of a few tokens, for which nothing has to be compiled: no kernel takes float64, and what comes behind has a step's
                y, leaving = recurrence.reference(tuple(x.double() if x.is_floating_point() else x for x in inputs), pos, state)
                return y.to(inputs[0].dtype), leaving
        return run_recurrence(self.link, recurrence, inputs, pos, state, self.where, Mixer.state_wanted)

    def __init_subclass__(cls, settings: type[MixerConfig] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if settings is not None:
            _CLASSES[settings] = cls

    @property
    @abstractmethod
    def state_specs(self) -> tuple[StateSpec, ...]:
        """What is carried per sequence, in whole shapes (all tensor ranks together); () for what looks at one token at a time."""

    @abstractmethod
    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]: ...


def import_mixer(config: MixerConfig) -> None:
    """Import the file of config.kind, which registers its mixer."""
    import_module(f"baton.models.mixers.{config.kind}")


def build_mixer(config: MixerConfig, context: MixerContext) -> Mixer:
    """The mixer of config.kind."""
    import_mixer(config)
    return _CLASSES[type(config)](config, context)


@contextmanager
def need_final_state(wanted: bool) -> Iterator[None]:
    """Within it mixers are run whose leaving States are wanted, or not. To be entered also where a layer is run again."""
    before, Mixer.state_wanted = Mixer.state_wanted, wanted
    try:
        yield
    finally:
        Mixer.state_wanted = before


@torch.no_grad()
@contextmanager
def record_recurrences() -> Iterator[set[Recurrence]]:
    """Within it, what mixers carry."""
    Mixer.seen = set()
    try:
        yield Mixer.seen
    finally:
        Mixer.seen = None


def recurrences_of(model: nn.Module, d_model: int, dtype: torch.dtype) -> list[Recurrence]:
    """What the model's mixers carry, by name: found by running each kind on a few tokens, in the dtype and with the positions of a
    step, so that no kernel is needed that steps do not need. A tensor group calls it together."""
    nested = {part for module in model.modules() if isinstance(module, Mixer) for part in module.modules() if part is not module}
    outer = {type(module): module for module in model.modules() if isinstance(module, Mixer) and module not in nested}
    with record_recurrences() as seen:
        for mixer in outer.values():
            device = next(mixer.parameters()).device
            pos = torch.arange(16, dtype=torch.int32, device=device)[None]
            mixer(torch.zeros(1, 16, d_model, dtype=dtype, device=device), pos, None)
    return sorted(seen, key=str)
