"""What a run is, and where it stands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.data_pipeline.config import DataConfig
from baton.data_pipeline.run_source import ShardSource, TaskSource
from baton.models.config import ModelConfig
from baton.training.build import model_fingerprint
from baton.training.config import ProfileConfig, TrainingConfig


@dataclass(frozen=True)
class RunSettings:
    """What a run is, from the launcher. folder: the run directory. config_text: the resolved configuration as YAML. attempt: number
    of this start, from 1; 0: not counted. profile: what to look at, None: nothing; flops_per_token: of the whole model in
    a training step of such settings, matmuls and mixers counted once forwards and twice backwards. changed: settings that
    differ from those of the start before, key to (old, new). notices: lines to say before the first step. await_kernels: returns
    when what the run launches on a GPU is compiled."""

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
    """Where the run stands: optimizer steps and tokens done, and the cursor of every lane that this rank reads. validation: loss
    measured at this very step, if it was. ending: the run was asked to end here, and goes on in another start. waited: seconds that
    the slowest reading rank waited for this step's batches."""

    step: int
    tokens: int
    cursors: dict[int, Any]
    validation_loss: float | None = None
    stop_requested: bool = False
    data_wait_s: float = 0.0

    def advance(self, tokens: int, cursors: dict[int, Any]) -> None:
        """A step of so many tokens is done."""
        self.step, self.tokens, self.cursors, self.validation_loss = self.step + 1, self.tokens + tokens, cursors, None


def stream_order(training: TrainingConfig) -> dict[str, int]:
    """What decides the lanes' contents, next to the data's own settings: arguments of a source's `fingerprint` and `adopt`."""
    return {"seed": training.seed, "lanes": training.lane_count}


def fingerprints_of(model: ModelConfig, source: ShardSource | TaskSource, training: TrainingConfig) -> dict[str, str]:
    """Of what must be the same when a run goes on from a checkpoint. model: with its vocabulary."""
    found = {"model": model_fingerprint(model), "stream": source.fingerprint(**stream_order(training))}
    if training.carries_lane_states:
        found["set of carried States"] = f"{training.lane_count} lanes"
    return found
