"""The hooks of a training run, and loading a user's callbacks.

The built-in callbacks run first, in the order of `training.run_setup`; those of `training.callbacks` follow, in the order of the
run file; the profiler is last. Every rank calls every hook at the same point, so a hook may use collectives, on all ranks alike.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

from baton.parallel.mesh import Mesh
from baton.training.build import TrainState
from baton.training.errors import RunError
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepResult

ENTRY_POINTS = "baton.callbacks"
"""Group of entry points in which a package may give its callbacks short names."""


class Callback:
    """Base class of callbacks: every hook does nothing by default.

    Order in a run: on_train_start; after_step after every step that was not rolled back; on_rollback whenever the run has gone back
    to a checkpoint, after which steps go on from `progress.step`; on_train_end. A hook that raises RunError or StorageError on all
    ranks ends the run with one line; any other exception ends it with a traceback.

    Attributes:
        time_category: key of `baton.training.monitoring.goodput.PARTS` to which the hook's time is charged.
        slow: the hook may take as long as a start (`jobs.startup_timeout_s`) before its rank counts as hanging.
    """

    time_category: ClassVar[str] = "other"
    slow: ClassVar[bool] = False

    def on_train_start(self, progress: RunProgress) -> None:
        """After the checkpoint, if any, has been loaded, before the first step of this start."""

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        """After a step. progress.step counts it. With guard.policy=skip also after a step without an update (`result.updated`)."""

    def on_rollback(self, progress: RunProgress) -> None:
        """After a checkpoint has been loaded because of an anomaly; progress is that of the checkpoint."""

    def on_train_end(self, progress: RunProgress) -> None:
        """After the last step of this start, which may be the run's last one or the one after which it was asked to stop."""


@dataclass(frozen=True)
class CallbackContext:
    """What a user's callback is given as its first argument.

    Attributes:
        settings: the run's settings.
        train_state: model (or this rank's stage of it), engine with the optimizer, and mesh.
        metrics: on the main rank, for `metrics.log_scalars`; None on the other ranks.
    """

    settings: RunSettings
    train_state: TrainState
    metrics: MetricsLogger | None

    @property
    def mesh(self) -> Mesh:
        """The ranks and their groups."""
        return self.train_state.mesh


def load_callbacks(callbacks: Mapping[str, Mapping[str, Any]], context: CallbackContext) -> list[Callback]:
    """The callbacks of `training.callbacks`: name to keyword arguments, each made as Class(context, **arguments).

    Raises:
        RunError: a name is neither an entry point nor a module path, its module cannot be imported, or its class is no Callback.
    """
    return [_load(name)(context, **arguments) for name, arguments in callbacks.items()]


def _load(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            loaded = getattr(importlib.import_module(module), attribute)
        else:
            (entry,) = entry_points(group=ENTRY_POINTS, name=name)
            loaded = entry.load()
    except ValueError:
        known = ", ".join(sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))) or "none"
        raise RunError(
            f"training.callbacks: no package has a callback {name!r} (entry points {ENTRY_POINTS}: {known}); install the "
            f"package, or write module:Class"
        ) from None
    except (ImportError, AttributeError) as error:
        raise RunError(
            f"training.callbacks: {name} cannot be loaded ({error}); install its package, or put its folder into PYTHONPATH"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Callback)):
        raise RunError(f"training.callbacks: {name} is not a subclass of baton.training.callbacks.callback.Callback")
    return loaded
