"""The interface between a mixer and the layer around it, and the registry of mixers.

A mixer maps (x [B, T, d_model], pos [B, T], State or None) to (y [B, T, d_model], State); None is the State before any token. It is
written like single-device code with tensor-parallel projections; its file says how its heads or channels are split.

With sequence parallelism, x is all-gathered for the mixer, and its output projection reduce-scatters y, so that each rank has y for
its part of the tokens, [tokens_per_rank(B T), d_model]. The backward of the all-gather sums x's gradient over the ranks, so neither
the projections of x nor replicated layers (models.replicated_linear) sum it.
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
    """Base class of mixers. `class Mamba(Mixer, settings=MambaConfig)` registers Mamba for the kind of MambaConfig.

    The constructor builds nested mixers and the declared parameters under their declared names, which subclasses annotate.
    `state_specs` follows from the declared State.

    recompute_keeps: operators whose outputs are saved even with full recomputation, because a discrete choice depends on their
    last bit.
    """

    recompute_keeps: ClassVar[tuple[Any, ...]] = ()
    path: str = "a mixer"
    """This mixer's name in its layer, for example "mamba", for errors and message counts; the layer is ForwardContext.layer."""

    def __init__(self, config: MixerConfig, context: MixerContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        for name, nested in config.nested.items():
            self.add_module(name, build_mixer(nested, context.nested()))
        build_parameters(self, config.parameters(context.d_model), context)

    def run_recurrence(
        self, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, forward_context: ForwardContext
    ) -> tuple[Tensor, State]:
        """Runs a recurrence and returns its outputs and final State. Mixers must call it for every State that they carry.

        With context parallelism the initial State comes from the rank with the preceding tokens.

        Args:
            recurrence: the operator.
            inputs: its inputs, [B, T, ...] each for those with a time dimension.
            pos: positions in the document, int32 [B, T]; 0 starts a new document.
            state: the State before the first token; None: no tokens before.
            forward_context: the argument of `forward`.
        """
        if forward_context.recorded is not None:
            forward_context.recorded.add(recurrence)
            if not inputs[0].is_meta:  # definitions read values
                # the reference is used so that no kernel is compiled for a few tokens; outputs have the dtype of a training step
                float64 = tuple(x.double() if x.is_floating_point() else x for x in inputs)
                y, final_state = recurrence.reference(float64, pos, state)
                return y.to(inputs[0].dtype), final_state
        if forward_context.overwrite_states and state is not None:
            return recurrence.step(inputs, pos, state)
        link, need_final_state = forward_context.link, forward_context.need_final_state
        return run_recurrence(link, recurrence, inputs, pos, state, forward_context.layer + self.path, need_final_state)

    def __init_subclass__(cls, settings: type[MixerConfig] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if settings is not None:
            _CLASSES[settings] = cls

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The State of one sequence with global shapes (over all tensor ranks); () for a mixer without a recurrence."""
        return tuple(self._state_spec(state) for state in self.config.all_state(self.context.d_model))

    def _state_spec(self, state: StateDeclaration) -> StateSpec:
        # float32 means the parameters' dtype, so that the State of a model converted to float64 is float64
        types: dict[Dtype, torch.dtype] = {
            "compute": self.context.compute_dtype,
            "float32": next(self.parameters()).dtype,
            "int64": torch.int64,
            "bool": torch.bool,
        }
        return StateSpec(
            state.name, state.shape, types[state.dtype], tp=state.tp, grad=state.grad, grows=state.grows, tail=state.tail
        )

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

    Each kind of mixer runs once on 16 tokens with the dtype and positions of a training step, so that only kernels that training
    uses are compiled.
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
