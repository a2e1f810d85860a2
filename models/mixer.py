"""The interface between a mixer and the layer around it, and the registry of mixers.

A mixer maps (x [B, T, d_model], pos [B, T], State or None) to (y [B, T, d_model], State); None is the state before any token. It is
written like single-device code over tensor-parallel projections; its file says how its heads or channels split.

Where tensor ranks share the residual stream, x is gathered for the mixer, and its output projection scatters the sum, so that each
rank has y for its part of the tokens, [tokens_per_rank(B T), d_model]. Gathering sums x's gradient over the ranks in its backward,
so neither the projections of x nor layers that every rank computes alike (models.replicated_linear) sum it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from baton.kernels.protocol import Inputs, Recurrence, State, StateSpec
from baton.models.build_parameters import build_parameters
from baton.models.mixer_context import MixerContext
from baton.models.settings import MixerConfig
from baton.models.settings.declarations import Dtype, StateDeclaration
from baton.parallel.context_parallel import ContextLink
from baton.parallel.state_passing import run_recurrence

_CLASSES: dict[type[MixerConfig], type["Mixer"]] = {}


class Mixer(nn.Module, ABC):
    """Base class of every mixer: `class Mamba(Mixer, settings=MambaConfig)` makes it the class of that kind.

    The constructor builds nested mixers and the parameters that the settings declare, under their declared names; a subclass
    annotates them, and `state_specs` follows from the declared State.

    kept_operators: operators whose results full recomputation keeps instead of computing again, because a discrete choice depends
    on their last bit.
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

    def __init__(self, config: MixerConfig, context: MixerContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        for name, nested in config.nested.items():
            self.add_module(name, build_mixer(nested, context.nested()))
        build_parameters(self, config.parameters(context.d_model), context)

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
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The State of a sequence, in whole shapes (all tensor ranks together); () for what looks at one token at a time."""
        return tuple(self._state_spec(state) for state in self.config.all_state(self.context.d_model))

    def _state_spec(self, state: StateDeclaration) -> StateSpec:
        # float32 is the parameters' type: States and accumulation follow a model that is converted to float64
        types: dict[Dtype, torch.dtype] = {
            "compute": self.context.compute_dtype,
            "float32": next(self.parameters()).dtype,
            "int64": torch.int64,
            "bool": torch.bool,
        }
        return StateSpec(state.name, state.shape, types[state.dtype], tp=state.tp, grad=state.grad, grows=state.grows)

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
