"""Recurrences of a run that have no GPU kernel, and the time that they take, for `baton plan` and the first lines of `baton train`.

Torch-free.
"""

from dataclasses import dataclass

from baton.launcher.config import RunConfig
from baton.launcher.planner.memory import Arithmetic, of_stages
from baton.models.settings.cost_model import MixerCosts
from baton.models.settings.eager import Eager

ASSUMED_TB_S = 2.0
"""Memory bandwidth of an A100 in TB/s, used without a cluster file. It matters for large batches; else launches dominate."""


@dataclass(frozen=True)
class SlowPath:
    """A mixer whose recurrence has no kernel for its settings.

    mixer: its name in the model.
    layers: number of layers with it.
    eager: the reason, and settings with a kernel.
    seconds: time per optimizer step on the slowest pipeline stage, without overlap; None: unknown, because a mixer of the model has
        no `activation_costs`.
    """

    mixer: str
    layers: int
    eager: Eager
    seconds: float | None

    def __str__(self) -> str:
        launches = sum(self.eager.launches)
        cost = "" if self.seconds is None else f", about {self.seconds:,.1f} s of each step"
        return (
            f"slow: {self.mixer} ({self.layers} layers) has no kernel for a GPU: {self.eager.why}; PyTorch computes it with "
            f"{launches:.0f} operators a token{cost}; {self.eager.instead}"
        )


def slow_paths(config: RunConfig, device: str, memory_bandwidth_tb_s: float = ASSUMED_TB_S) -> tuple[SlowPath, ...]:
    """The slow paths of a configuration whose vocabulary size is known; none on a CPU, which always runs PyTorch operators.

    device: "cpu" or "cuda". memory_bandwidth_tb_s: the GPU's memory bandwidth. Mixers without `activation_costs` are not included.
    """
    model = config.model
    if device == "cpu":
        return ()
    found, unknown = dict[str, Eager](), False
    for name, mixer in model.mixers.items():
        try:
            eager = _eager(mixer.costs(model.d_model))
        except ValueError:
            unknown = True
            continue
        if eager is not None:
            found[name] = eager
    stages = [] if unknown or not found else [seconds_by_mixer(one, memory_bandwidth_tb_s) for one in of_stages(config)]
    return tuple(
        SlowPath(
            name,
            sum(layer.count(name) for layer in model.layers),
            eager,
            None if unknown else max(stage.get(name, 0.0) for stage in stages),
        )
        for name, eager in found.items()
    )


def seconds_by_mixer(one: Arithmetic, memory_bandwidth_tb_s: float) -> dict[str, float]:
    """Of one stage's ranks in an optimizer step, surveys and recomputation included."""
    found: dict[str, float] = {}
    forwards = one.passes * (1 + int(one.training.recompute == "full")) + one.surveys
    for (name, _), block in one.blocks.items():
        if (eager := _eager(block)) is not None:
            forward, backward = eager.seconds(one.work.batch, one.tensor, memory_bandwidth_tb_s)
            each = one.work.length * (forwards * forward + one.passes * backward)
            found[name] = each * sum(block.count(name) for layer in one.layers for block in layer)
    return found


def _eager(block: MixerCosts) -> Eager | None:
    return next((recurrence.eager for recurrence in block.recurrences if recurrence.eager is not None), None)
