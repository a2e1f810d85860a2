"""The file of an experiment, `ExperimentConfig`, and `find`, which reads a shipped one or one of your own. Torch-free."""

import difflib
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from baton.launcher.errors import ConfigError
from baton.launcher.validation import first_problem
from baton.launcher.yaml_file import parse_yaml, read_yaml

Measure = Literal["accuracy", "loss", "perplexity", "parameters", "state", "memory"]

UNITS: dict[str, str] = {
    "accuracy": "accuracy in %",
    "loss": "validation loss in nats per label",
    "perplexity": "validation perplexity",
    "parameters": "parameters in millions",
    "state": "numbers in a layer's State",
    "memory": "memory in GiB",
}
COMPUTED = ("parameters", "state", "memory")
"""Measures that follow from the settings, so that nothing is trained."""


def _text_keys(value: Any) -> Any:
    """Labels such as 8 are numbers in YAML."""
    return {str(k) if isinstance(k, int) else k: v for k, v in value.items()} if isinstance(value, dict) else value


Name = Annotated[str, Field(pattern=r"^[A-Za-z_]+$")]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # part of the run's name
CaseLabel = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.^-]+$")]
Settings = Annotated[dict[str, Any] | None, Field(description="settings over the run's, by their dotted keys; null: none")]
Labels = Annotated[dict[Label, Settings], BeforeValidator(_text_keys), Field(min_length=1)]
Rate = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PaperConfig(_Settings):
    """What the paper prints."""

    where: str = Field(min_length=1, description="the paper's table or figure, for example table 3")
    figures: Annotated[dict[str, Rate], BeforeValidator(_text_keys)] = Field(
        default_factory=dict,
        description="the paper's figures by cell, in the unit of `measure`: a cell is named by its labels, as bmojo/12. Empty: the "
        "paper has a picture without numbers",
    )


class ExperimentConfig(_Settings):
    """An experiment: cells of a grid, a run for each learning rate and seed of a cell, and what is to be shown of them."""

    title: str = Field(min_length=1, description="one line: what is compared")
    about: str = Field("", description="what the paper leaves open, and how this experiment differs from it")
    run: dict[str, Any] = Field(
        description="settings of the run file that all runs share. name, directory and device, and the learning rate and seed of "
        "learning_rates and seeds, are the experiment's"
    )
    grid: dict[Name, Labels] = Field(
        min_length=1,
        description="axes of the grid by name; each has labels, with the settings that a label stands for, by their dotted keys "
        "as on the command line. Settings of later axes replace those of earlier ones",
    )
    learning_rates: tuple[Rate, ...] = Field(
        (),
        description="peak learning rates that each cell is trained with. Of each cell those runs are shown whose validation loss "
        "is lowest, in the mean over the seeds. Empty: the run's own",
    )
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="seeds that each cell is trained with")
    measure: Measure = Field(
        description="what a cell's figure is, after the last step. accuracy: of a synthetic task, in percent; loss: validation "
        "loss, in nats; perplexity: its exponential. Not trained but computed: parameters: of the whole model, in millions; state: "
        "numbers that the mean layer carries from token to token, without the last inputs of convolutions; memory: of a rank, in "
        "GiB, as `baton plan` has it for a GPU"
    )
    cases: Annotated[dict[CaseLabel, str], BeforeValidator(_text_keys)] = Field(
        default_factory=dict,
        description="evaluation cases of a synthetic task (data.cases) by label, for example {'2^6': length-64}; or, of text, "
        "windows of any length, as {8x: window-1024}: held-out documents are cut into such, each of which begins without a State, "
        "after the last step. One more axis of the table, called `case`, without more runs. Empty: the mean over all cases, or the "
        "validation loss",
    )
    paper: PaperConfig
    statement: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1,
        description="inequalities that are to be shown, as `bmojo >= mamba + 5` or `bmojo/12 >= 99`: cells named by labels (a "
        "label that is a number by axis=label), numbers, and `distance`, the largest distance of a cell from its paper's figure. "
        "Axes that are not named run over all their labels",
    )

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The labels of each axis of the table: the grid's, then the cases."""
        cases = {"case": tuple(self.cases)} if self.cases else {}
        return {name: tuple(labels) for name, labels in self.grid.items()} | cases

    @property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """Labels of each cell of the table, in the order of the axes."""
        return tuple(product(*self.axes.values()))

    @property
    def is_computed(self) -> bool:
        return self.measure in COMPUTED

    @property
    def in_points(self) -> bool:
        """Whether distances from the paper are differences of percentages, and not percentages themselves."""
        return self.measure == "accuracy"


def shipped() -> dict[str, Any]:
    """The experiments that come with the package, name to file."""
    folder = files("baton.configs") / "experiments"
    return {entry.name.removesuffix(".yaml"): entry for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)}


def find(word: str) -> tuple[str, ExperimentConfig]:
    """The name and the settings of a shipped experiment, or of the file that `word` is the path of. Raises ConfigError."""
    if word.endswith((".yaml", ".yml")):
        return Path(word).stem, read_experiment(read_yaml(Path(word)), word)
    known = shipped()
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        raise ConfigError(f"no experiment is called {word!r}; {hint} (or the path of a .yaml file)")
    return word, read_experiment(parse_yaml(known[word].read_text(encoding="utf-8")), word)


def read_experiment(values: dict[str, Any], where: str) -> ExperimentConfig:
    """An experiment from the values of its file. where: of the values, for errors. Raises ConfigError."""
    try:
        config = ExperimentConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error, ExperimentConfig, words=False)}") from None
    if "case" in config.grid:
        raise ConfigError(f"{where}: grid.case: this is the axis of `cases`; give the axis another name")
    if config.is_computed and (config.learning_rates or len(config.seeds) > 1 or config.cases):
        raise ConfigError(
            f"{where}: measure={config.measure} is computed and not trained; leave out learning_rates, seeds and cases"
        )
    return config
