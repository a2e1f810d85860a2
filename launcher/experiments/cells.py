"""The runs of an experiment: one for each cell of its grid, learning rate and seed. Torch-free."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from baton.data_pipeline.task_config import TaskConfig
from baton.launcher.config import RunConfig, put_setting, resolve
from baton.launcher.errors import ConfigError
from baton.launcher.experiments import statement
from baton.launcher.experiments.config import ExperimentConfig

FOLDER = Path("runs/experiments")
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Trial:
    """One run. cell: its labels in the grid. rate: its learning rate; None: the run's own. windows: tokens of the windows in which
    held-out text is evaluated after the last step, by case."""

    cell: tuple[str, ...]
    rate: float | None
    seed: int
    config: RunConfig
    windows: dict[str, int]

    @property
    def name(self) -> str:
        return self.config.name


def trials(name: str, experiment: ExperimentConfig, device: Device, seeds: tuple[int, ...] | None = None) -> list[Trial]:
    """All runs, the first seed of every cell before the second. seeds: None: the experiment's own; a run with another has another
    directory. Checks the whole experiment. Raises ConfigError and the other errors of a run's settings, with the cell's name."""
    check_names(name, experiment)
    made = [
        _trial(name, experiment, cell, rate, seed, device)
        for seed in seeds or experiment.seeds
        for rate in experiment.learning_rates or (None,)
        for cell in product(*(labels for labels in experiment.grid.values()))
    ]
    for trial in made:
        _check(experiment, trial, f"{name}: cell {'/'.join(trial.cell)}")
    return made


def check_names(name: str, experiment: ExperimentConfig) -> None:
    """Raises ConfigError for a statement or a figure of cells that there are not."""
    for number, text in enumerate(experiment.statement):
        statement.parse(text, experiment.axes, f"{name}: statement.{number}")
        if statement.DISTANCE in text.split() and not experiment.paper.figures:
            raise ConfigError(f"{name}: statement.{number}: {text!r}: there is no distance without paper.figures")
    figures_by_cell(name, experiment)


def figures_by_cell(name: str, experiment: ExperimentConfig) -> dict[tuple[str, ...], float]:
    """The paper's figures by the labels of the table's cells. Raises ConfigError."""
    found = {}
    for key, value in experiment.paper.figures.items():
        at = statement.cell_of(key, experiment.axes, f"{name}: paper.figures")
        if missing := [axis for axis in experiment.axes if axis not in at]:
            raise ConfigError(f"{name}: paper.figures: {key!r} has no label of {' and '.join(missing)}; name one cell")
        found[tuple(at[axis] for axis in experiment.axes)] = value
    return found


def chosen(made: list[Trial], experiment: ExperimentConfig, only: str | None) -> list[Trial]:
    """The runs of the cells that `only` names, as bmojo/12; None: all. Raises ConfigError."""
    if only is None:
        return made
    at = statement.cell_of(only, {axis: tuple(labels) for axis, labels in experiment.grid.items()}, "--only")
    return [trial for trial in made if all(dict(zip(experiment.grid, trial.cell))[axis] == label for axis, label in at.items())]


def _trial(name: str, experiment: ExperimentConfig, cell: tuple[str, ...], rate: float | None, seed: int, device: Device) -> Trial:
    own = [f"lr{rate:g}"] if len(experiment.learning_rates) > 1 else []
    own += [f"seed{seed}"] if experiment.seeds != (seed,) else []
    run = "-".join([*cell, *own])
    where = f"{name}: cell {'/'.join(cell)}"
    values = copy.deepcopy(experiment.run)
    for key in ("name", "directory", "device"):
        if key in values:
            raise ConfigError(f"{name}: run.{key}: the experiment sets it; leave it out")
    for key, value in _settings(experiment, cell):
        put_setting(values, key.split("."), copy.deepcopy(value), f"{where}: {key}")
    if rate is not None:
        put_setting(values, ["training", "optimizer", "lr"], rate, where)
    put_setting(values, ["training", "seed"], seed, where)
    # what nothing is trained for is computed for a GPU, whatever is here
    values |= {"name": run, "directory": str(FOLDER / name / run), "device": "cuda" if experiment.is_computed else device}
    try:
        config = resolve(values, where)[0]
    except Exception as error:
        if getattr(error, "exit_status", None) != ConfigError.exit_status or str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from None
    return Trial(cell, rate, seed, config, _windows(experiment, config, where))


def _settings(experiment: ExperimentConfig, cell: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a cell's labels."""
    for labels, label in zip(experiment.grid.values(), cell, strict=True):
        yield from (labels[label] or {}).items()


def _check(experiment: ExperimentConfig, trial: Trial, where: str) -> None:
    config = trial.config
    if experiment.is_computed:
        return
    if config.layout.world_size != 1:
        raise ConfigError(f"{where}: layout has {config.layout.world_size} ranks; the runs of an experiment have one each")
    if not config.training.evaluation.every:
        raise ConfigError(f"{where}: training.evaluation.every=0: a cell's figure is an evaluation; set it")
    task = isinstance(config.data, TaskConfig)
    if experiment.measure == "accuracy" and not task:
        raise ConfigError(f"{where}: measure=accuracy is of synthetic tasks, and data.kind={config.data.kind}; set measure=loss")
    if not isinstance(config.data, TaskConfig):
        if experiment.cases and config.data.sources:
            raise ConfigError(f"{where}: cases: windows are of one dataset, and data.sources has several; give data.path")
        return
    cases = config.data.evaluated()
    for label, case in experiment.cases.items():
        if case not in cases:
            raise ConfigError(f"{where}: cases.{label}: no evaluation case is called {case!r}; known: {', '.join(cases)}")


def _windows(experiment: ExperimentConfig, config: RunConfig, where: str) -> dict[str, int]:
    """Tokens of the windows that cases of text name. Raises ConfigError."""
    if isinstance(config.data, TaskConfig):
        return {}
    found = {case: re.fullmatch(r"window-([1-9][0-9]*)", case) for case in experiment.cases.values()}
    for label, case in experiment.cases.items():
        if found[case] is None:
            raise ConfigError(f"{where}: cases.{label}: {case!r} is no case of text; name a length in tokens, as window-1024")
    return {case: int(match[1]) for case, match in found.items() if match}
