"""Mixers and language models as plain modules on one device, with initial values, for use in other training loops.

`mixer` builds one mixer and `language_model` a whole model. Both map their input and a State (None at the start of a sequence) to
their output and the State after the input. A State is a dictionary of tensors (States: one State per layer). Pass it to the next
call to continue the sequence, or detach its tensors first to stop the gradient there.

Shape suffixes: B batch, T tokens, M d_model.
"""

from typing import Any, overload

import torch

from baton.kernels.protocol import State
from baton.kernels.protocol import detach as detach_state
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel, States
from baton.models.mixer import Mixer, build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import kinds, settings_class
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config


def mixer(
    kind: str,
    d_model: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    seed: int = 0,
    **settings: Any,
) -> Mixer:
    """A mixer of its own: (x [B, T, M], pos [B, T] int32, State or None) -> (y [B, T, M], State).

    kind: a name of baton.models.settings.kinds(), such as "mamba", "gsa" or "delta_net". dtype: of matmuls and activations;
    parameters and States are float32. seed: of the initial values, which are a function of it and of each parameter's name.
    settings: fields of the kind's settings class, such as d_state=64.

    pos has the position of each token in its document: 0 makes the recurrence forget what was before it.

    Raises ValueError for an unknown kind, and for settings that the kind or d_model does not admit.
    """
    cls = settings_class(kind)
    if cls is None:
        raise ValueError(f"kind={kind!r}: no such mixer; known: {', '.join(sorted(kinds()))}")
    config = cls(**settings)
    config.check(d_model)
    context = MixerContext(d_model, residual_adds=1, norm_eps=1e-5, megatron=megatron_config(1), compute_dtype=dtype)
    with torch.device(device or "cpu"):
        built = build_mixer(config, context)
    initialize_parameters(built, seed, 0, 1)
    return built


def language_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> LanguageModel:
    """A language model: (tokens [B, T] int64, pos [B, T] int32, States or None) -> (hidden [B, T, M], States).

    Its `logits(hidden)` are those of the vocabulary, padded to config.padded_vocab_size, and `loss(hidden, labels)` sums
    cross-entropy without having all logits at once. dtype, device, seed: as in `mixer`.

    Raises ValueError if config.vocab_size is None.
    """
    with torch.device(device or "cpu"):
        model = LanguageModel(config, compute_dtype=dtype)
    initialize_parameters(model, seed, 0, 1)
    return model


@overload
def detach(states: State) -> State: ...
@overload
def detach(states: States) -> States: ...
def detach(states: Any) -> Any:
    """A State, or the States of a model, cut from its graph: the border of truncated backpropagation through time."""
    if all(isinstance(value, torch.Tensor) for value in states.values()):
        return detach_state(states)
    return {layer: detach_state(state) for layer, state in states.items()}
