"""The settings of a run from the launcher, its progress, and the fingerprints that a checkpoint must match."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.data_pipeline.config import DataConfig
from baton.data_pipeline.run_source import ShardSource, TaskSource
from baton.models.config import ModelConfig
from baton.training.build import model_fingerprint
from baton.training.config import TrainingConfig
from baton.training.monitoring.config import ProfileConfig


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    Attributes:
        folder: the run directory.
        config_text: the resolved configuration as YAML.
        attempt: number of this start, from 1; 0: not counted.
        profile: which steps are profiled; None: none.
        flops_per_token: FLOPs per token of the whole model in a training step with given settings, forward once and
            backward twice.
        changed: settings that differ from those of the previous start, key to (old, new).
        notices: lines to print before the first step.
        await_kernels: returns once all kernels that the run launches on a GPU are compiled.
    """

    folder: Path
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    config_text: str
    attempt: int = 0
    profile: ProfileConfig | None = None
    flops_per_token: Callable[[TrainingConfig], float] | None = None
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    await_kernels: Callable[[], None] = lambda: None


@dataclass
class RunProgress:
    """How far the run is.

    Attributes:
        step, tokens: optimizer steps and tokens done.
        cursors: position in the data of every lane that this rank reads.
        validation_loss: measured after this very step, nats per token; None: not measured.
        stop_requested: this start ends after this step, as a signal asked.
        data_wait_s: seconds for which the slowest reading rank waited for this step's batches.
        recent: `Manifest.recent` of the checkpoint that the run went on from.
    """

    step: int
    tokens: int
    cursors: dict[int, Any]
    validation_loss: float | None = None
    stop_requested: bool = False
    data_wait_s: float = 0.0
    recent: dict[str, list[float]] = field(default_factory=dict)

    def advance(self, tokens: int, cursors: dict[int, Any]) -> None:
        """Count a step."""
        self.step, self.tokens, self.cursors, self.validation_loss = self.step + 1, self.tokens + tokens, cursors, None


def stream_order(training: TrainingConfig) -> dict[str, int]:
    """Settings that decide the lanes' contents besides those of the data: arguments of a source's `fingerprint` and `adopt`."""
    return {"seed": training.seed, "lanes": training.lane_count}


def fingerprints_of(model: ModelConfig, source: ShardSource | TaskSource, training: TrainingConfig) -> dict[str, str]:
    """Fingerprints that must equal those of a checkpoint for the run to continue from it. model: with its vocabulary size."""
    found = {"model": model_fingerprint(model), "stream": source.fingerprint(**stream_order(training))}
    if training.carries_lane_states:
        found["set of carried States"] = f"{training.lane_count} lanes"
    return found
