"""Costs of a mixer with the norm of its sub-block, or beside others that read the same norm. Torch-free."""

from dataclasses import replace

from baton.models.settings.cost_model import MixerCosts, SavedTensor
from baton.models.settings.declarations import prefixed, sub_block_norm


def behind_norm(costs: MixerCosts, d_model: int) -> MixerCosts:
    """Includes the norm of the sub-block x + mixer(norm(x)). The norm's GPU kernel saves only its output. That is the mixer's input
    and already counted, except with sequence parallelism, where the mixer's input is the gathered output."""
    gathered = SavedTensor(
        "norm result", d_model, "compute", split=False, residual_stream=True, device="gpu", sequence_parallel=True
    )
    return replace(
        costs,
        parameters=(sub_block_norm(d_model), *prefixed("mixer", costs.parameters)),
        saved=(
            SavedTensor("norm input", d_model, "float32", split=False, residual_stream=True, device="cpu"),
            gathered,
            SavedTensor("norm scale", 1, "float32", split=False, residual_stream=True),
            SavedTensor("norm normalised", d_model, "float32", split=False, residual_stream=True, device="cpu"),
            *costs.saved,
        ),
    )


def beside(costs: MixerCosts, d_model: int) -> MixerCosts:
    """Of a mixer that reads the norm of another one, which counts the input that both save."""
    whole = (d_model, "compute", False, None, None)
    shared = next((x for x in costs.saved if (x.width, x.dtype, x.split, x.device, x.ranks) == whole), None)
    saved = tuple(x for x in costs.saved if x is not shared)
    return replace(costs, parameters=tuple(prefixed("mixer", costs.parameters)), saved=saved)
