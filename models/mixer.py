"""The interface between a mixer and the layer around it, and the registry of mixers.

A mixer maps (x [B, T, d_model], pos [B, T], State or None) to (y [B, T, d_model], State); None is the state before any token. It is
written like single-device code over tensor-parallel projections; its file says how its heads or channels split.

Where tensor ranks share the residual stream, x is gathered for the mixer, and its output projection scatters the sum, so that each
rank has y for its part of the tokens, [tokens_per_rank(B T), d_model]. Gathering sums x's gradient over the ranks in its backward,
so neither the projections of x nor layers that every rank computes alike (models.replicated_linear) sum it.
"""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from baton.kernels.protocol import Inputs, Recurrence, State, StateSpec
from baton.models.build_parameters import build_parameters
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer_context import MixerContext
from baton.models.settings import MixerConfig, kinds
from baton.models.settings.declarations import Dtype, StateDeclaration
from baton.parallel.state_passing import run_recurrence

_CLASSES: dict[type[MixerConfig], type["Mixer"]] = {}


class Mixer(nn.Module, ABC):
    """Base class of every mixer: `class Mamba(Mixer, settings=MambaConfig)` makes it the class of that kind.

    The constructor builds nested mixers and the parameters that the settings declare, under their declared names; a subclass
    annotates them, and `state_specs` follows from the declared State.

    recompute_keeps: operators whose results full recomputation keeps instead of computing again, because a discrete choice depends
    on their last bit.
    """

    recompute_keeps: ClassVar[tuple[Any, ...]] = ()
    path: str = "a mixer"
    """This mixer's name in the model, "layers.3.mamba", in errors and message counts."""

    def __init__(self, config: MixerConfig, context: MixerContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        for name, nested in config.nested.items():
            self.add_module(name, build_mixer(nested, context.nested()))
        build_parameters(self, config.parameters(context.d_model), context)

    def run_recurrence(
        self, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, forward_context: ForwardContext
    ) -> tuple[Tensor, State]:
        """Outputs and final State of a recurrence, on whichever rank the preceding tokens are. Every State goes through here.

        forward_context: the one that `forward` was called with.
        """
        if forward_context.recorded is not None:
            forward_context.recorded.add(recurrence)
            if not inputs[0].is_meta:  # definitions read values
                # the definition, so that nothing is compiled for a few tokens; later operators see the dtype of a training step
                float64 = tuple(x.double() if x.is_floating_point() else x for x in inputs)
                y, final_state = recurrence.reference(float64, pos, state)
                return y.to(inputs[0].dtype), final_state
        link, need_final_state = forward_context.link, forward_context.need_final_state
        return run_recurrence(link, recurrence, inputs, pos, state, self.path, need_final_state)

    def __init_subclass__(cls, settings: type[MixerConfig] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if settings is not None:
            _CLASSES[settings] = cls

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The State of a sequence, in whole shapes (all tensor ranks together); () for a mixer without a recurrence."""
        return tuple(self._state_spec(state) for state in self.config.all_state(self.context.d_model))

    def _state_spec(self, state: StateDeclaration) -> StateSpec:
        # float32 means the parameters' dtype, so that the State of a model converted to float64 is float64
        types: dict[Dtype, torch.dtype] = {
            "compute": self.context.compute_dtype,
            "float32": next(self.parameters()).dtype,
            "int64": torch.int64,
            "bool": torch.bool,
        }
        return StateSpec(state.name, state.shape, types[state.dtype], tp=state.tp, grad=state.grad, grows=state.grows)

    @abstractmethod
    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]: ...


def import_mixer(config: MixerConfig) -> None:
    """Import the module that defines the mixer of config.kind, and thereby registers it."""
    own = kinds().get(config.kind) is type(config)
    import_module(f"baton.models.mixers.{config.kind}" if own else config.mixer_module or type(config).__module__)


def build_mixer(config: MixerConfig, context: MixerContext) -> Mixer:
    """The mixer of config.kind. Raises ValueError where its module defines none."""
    import_mixer(config)
    if type(config) not in _CLASSES:
        where = config.mixer_module or type(config).__module__
        raise ValueError(f"{where} defines no Mixer with settings={type(config).__name__}, the settings of kind {config.kind!r}")
    return _CLASSES[type(config)](config, context)


@torch.no_grad()
def recurrences_of(model: nn.Module, d_model: int, dtype: torch.dtype) -> list[Recurrence]:
    """The recurrences of the model's mixers, sorted by name. A collective of the tensor group.

    Each kind of mixer runs once on 16 tokens, with the dtype and positions of a training step, so that it needs no kernel that
    training does not need.
    """
    nested = {part for module in model.modules() if isinstance(module, Mixer) for part in module.modules() if part is not module}
    outer = {type(module): module for module in model.modules() if isinstance(module, Mixer) and module not in nested}
    recurrences: set[Recurrence] = set()
    for mixer in outer.values():
        device = next(mixer.parameters()).device
        pos = torch.arange(16, dtype=torch.int32, device=device)[None]
        x = torch.zeros(1, 16, d_model, dtype=dtype, device=device)
        mixer(x, pos, None, ForwardContext(recorded=recurrences))
    return sorted(recurrences, key=str)
