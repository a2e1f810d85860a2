"""The run configuration, `RunConfig`, and `load`, which reads it from YAML and key=value arguments. Torch-free.

An unknown key is an error that names the nearest known one. The resolved configuration, with every default filled in, is written
to the run directory, from which the ranks read it.
"""

import difflib
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from baton.data_pipeline.config import DataConfig, ShardsConfig
from baton.data_pipeline.task_config import TaskConfig
from baton.data_pipeline.written_by import PACKAGE, own_version
from baton.launcher.errors import ConfigError
from baton.launcher.jobs_config import JobsConfig
from baton.launcher.validation import first_problem
from baton.launcher.yaml_file import parse_yaml, read_yaml_and_text
from baton.models.config import ModelConfig, with_settings_of_once
from baton.models.settings import import_kinds
from baton.models.stages import partition_layers
from baton.parallel.config import LayoutConfig, divisors
from baton.training.config import ComputeDtype, TrainingConfig
from baton.training.config_checks import check_long_evaluation, with_vocabulary
from baton.training.micro_batch_size import fit_micro_batch_size
from baton.training.monitoring.config import ProfileConfig

WRITTEN_BY = f"# resolved by {PACKAGE} "
"""How the first line of a resolved configuration begins; the version follows."""

IMPORTED = "by `baton import`"
"""How the first line of a model's settings ends that were read from another library's folder; all settings follow."""


def resolved_by(text: str) -> str | None:
    """The version of Baton that wrote a resolved configuration; None: it does not say."""
    first = text.partition("\n")[0]
    return first.removeprefix(WRITTEN_BY).strip() if first.startswith(WRITTEN_BY) else None


class RunConfig(BaseModel):
    """Settings of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(
        min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run and, by default, of its directory"
    )
    directory: str | None = Field(None, description="run directory; null: runs/NAME in the current directory")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device of the ranks; auto: one GPU per rank if GPUs are available, otherwise the CPU"
    )
    imports: tuple[str, ...] = Field(
        (),
        description="modules to import first, for example [my_package.leaky], which may define kinds of mixers for `model`. An "
        "installed package with an entry point in the group baton.mixers need not be named",
    )
    model: ModelConfig
    data: DataConfig = Field(default_factory=ShardsConfig)
    layout: LayoutConfig = Field(default_factory=LayoutConfig)
    training: TrainingConfig
    jobs: JobsConfig = Field(default_factory=JobsConfig)
    profile: ProfileConfig | None = Field(
        None, description="profile a few steps; true: with the default settings; null or false: no profiling"
    )

    @field_validator("imports")
    @classmethod
    def _imported(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Imports the modules; the field precedes `model` because they may define its kinds of mixers."""
        import_kinds(value)
        return value

    @field_validator("profile", mode="before")
    @classmethod
    def _switched(cls, value: Any) -> Any:
        """Accepts true and false in the place of a group of settings."""
        if value is not None and not isinstance(value, (bool, dict, ProfileConfig)):
            raise ValueError("expected true, false or settings, as profile.steps=3")
        return ({} if value else None) if isinstance(value, bool) else value

    @property
    def folder(self) -> Path:
        return Path(self.directory or f"runs/{self.name}")

    @property
    def compute_dtype(self) -> ComputeDtype:
        """training.compute_dtype. While that is null, the dtype for a GPU, or for a CPU where device is "cpu"."""
        return self.training.compute_dtype_on("cpu" if self.device == "cpu" else "cuda")

    def with_compute_dtype(self, compute_dtype: ComputeDtype) -> "RunConfig":
        """A copy with this training.compute_dtype. Raises as `check`."""
        config = self.model_copy(update={"training": self.training.model_copy(update={"compute_dtype": compute_dtype})})
        config.check()
        return config

    def to_yaml(self) -> str:
        """Of all settings, below a line that says which version wrote it."""
        return f"{WRITTEN_BY}{own_version()}\n{yaml.safe_dump(self.model_dump(mode='json'), sort_keys=False)}"

    def check(self) -> None:
        """Check that the run is possible, before any process is started. Raises LayoutError, RunError, DataError or ConfigError."""
        self.layout.check()
        self.training.check(self.layout.data)
        if self.profile is not None:
            self.profile.check(self.training.steps)
        if self.layout.zero == 0 and self.training.optimizer.moments_dtype != "float32":
            raise ConfigError(
                f"training.optimizer.moments_dtype={self.training.optimizer.moments_dtype} does not go with layout.zero=0, where "
                f"PyTorch makes the update; set layout.zero=1"
            )
        self._check_graphs()
        self._check_sequence(self.layout.context)
        check_long_evaluation(self.model, self.training, self.layout.context, documents=not isinstance(self.data, TaskConfig))
        partition_layers(self.model, self.layout.pipeline, self.training.sequence_length)
        tensor, model = self.layout.tensor, self.model
        if isinstance(self.data, TaskConfig):
            for _, settings in self.training.phases:
                self.data.check_sequence_length(settings.sequence_length)
            model = with_vocabulary(model, self.data.vocab_size, None)
        sizes = {
            f"model.mixers.{name}.{what}": size
            for name, settings in self.model.mixers.items()
            for what, size in settings.sizes(self.model.d_model).items()
        }
        if model.vocab_size is not None:
            sizes["the padded vocabulary"] = model.padded_vocab_size
        for name, size in sizes.items():
            if size % tensor:
                raise ConfigError(
                    f"layout.tensor={tensor} does not divide {name}={size}; layout.tensor that does: {divisors(size)}"
                )

    def unrecordable(self) -> list[str]:
        """Settings with which passes cannot be recorded as CUDA graphs: passes in parts or of changing sizes, or not on a GPU."""
        unfit = [name for name, settings in self.model.mixers.items() if settings.state_grows]
        reasons = {
            f"layout.pipeline={self.layout.pipeline}": self.layout.pipeline > 1,
            f"training.bptt over layout.context={self.layout.context}": self.training.bptt is not None and self.layout.context > 1,
            f"training.bptt of model.mixers.{', '.join(unfit)}": self.training.bptt is not None and bool(unfit),
            "device=cpu": self.device == "cpu",
            # a graph's kernels are not launched one by one, so nothing says what each of them belongs to
            "profile": self.profile is not None,
        }
        return [name for name, there in reasons.items() if there]

    def _check_graphs(self) -> None:
        """Refuse to record passes that cannot be recorded."""
        if self.training.cuda_graphs is not True:
            return
        if found := self.unrecordable():
            raise ConfigError(
                f"training.cuda_graphs=true does not go with {' and '.join(found)}: a graph is of passes through all layers on a "
                f"GPU, over whole sequences, or in segments on one context rank, without full attention; set "
                f"training.cuda_graphs=false"
            )

    def _check_sequence(self, ranks: int) -> None:
        """Check that each phase's segments divide over the context ranks and that the mixers' States can be passed on."""
        shorter = [length.sequence_length for length in self.training.sequence_length_warmup]
        for _, settings in self.training.phases:
            warmup = settings.sequence_length in shorter and settings.segment == settings.sequence_length
            key = "training.sequence_length" if settings.bptt is None else "training.bptt.segment"
            where = f"training.sequence_length_warmup.{shorter.index(settings.sequence_length)}.sequence_length" if warmup else key
            self._check_spans(ranks, settings, where)

    def _check_spans(self, ranks: int, training: TrainingConfig, key: str) -> None:
        tokens = training.segment
        if tokens % ranks:
            raise ConfigError(f"layout.context={ranks} does not divide {key}={tokens}; those that do: {divisors(tokens)}")
        carried = training.carries_lane_states or training.segments > 1
        for name, settings in self.model.mixers.items():
            if training.carries_lane_states and settings.state_grows:
                raise ConfigError(
                    f"training.bptt.mode=truncated: model.mixers.{name} attends to the whole document, whose keys would be carried "
                    f"from step to step and never end; set training.bptt.mode=exact, or model.mixers.{name}.window"
                )
            tail = settings.longest_tail
            if ranks > 1 and tokens // ranks < tail:
                raise ConfigError(
                    f"layout.context={ranks} leaves {tokens // ranks} of {key}={tokens} tokens to a rank, and "
                    f"model.mixers.{name} passes on its last {tail}; layout.context that leaves enough: "
                    f"{[n for n in divisors(tokens) if n == 1 or tokens // n >= tail]}; or with {ranks} ranks "
                    f"{_longer(key, ranks * tail, ranks, training)}"
                )
            if carried and tokens < tail:
                raise ConfigError(
                    f"training.bptt.segment={tokens} is shorter than the last {tail} tokens that model.mixers.{name} passes on; "
                    f"set {_longer(key, tail, 1, training)}"
                )

    def check_ranks(self, started: int) -> None:
        """Raises ConfigError, which names a layout that fits, if the number of started ranks is not the layout's."""
        layout = self.layout
        if started == layout.world_size:
            return
        copies, rest = divmod(started, layout.world_size // layout.data)
        fitting = self.model_copy(update={"layout": layout.model_copy(update={"data": copies})})
        instead = (
            f"set layout.data={copies}" if not rest and fitting.is_legal() else f"set a layout whose sizes multiply to {started}"
        )
        raise ConfigError(
            f"the layout is tensor x pipeline x context x data = {layout.tensor} x {layout.pipeline} x {layout.context} x "
            f"{layout.data} = {layout.world_size} ranks, but {started} {'was' if started == 1 else 'were'} started; start "
            f"{layout.world_size}, or {instead}"
        )

    @property
    def keeps_kv(self) -> bool:
        """Whether full attention keeps keys and values from segment to segment."""
        return self.training.segments > 1 and any(mixer.state_grows for mixer in self.model.mixers.values())

    def notes(self) -> Iterator[str]:
        """Settings that have no effect, and warnings of the model's mixers about this run's document length, a line each."""
        schedule = self.training.schedule
        unused = [name for name in ("decay_steps", "decay_shape") if getattr(schedule, name) != getattr(type(schedule)(), name)]
        if schedule.kind != "wsd" and unused:
            named = " and ".join(f"{name}={getattr(schedule, name)}" for name in unused)
            yield f"note: training.schedule.{named} without effect with kind={schedule.kind}; it is of kind=wsd"
        for name in self.model.shared:
            if sum(name in layer for layer in self.model.layers) < 2:
                yield f"note: model.shared: {name} without effect, because fewer than two of the layers have it"
        if self.training.offload_kv is True and not self.keeps_kv:
            yield "note: training.offload_kv=true without effect: no full attention keeps keys and values from segment to segment"
        if isinstance(self.data, TaskConfig):
            key, tokens = "data.length", self.data.length
        elif self.training.carries_lane_states:
            return
        else:
            key, tokens = "training.sequence_length", self.training.sequence_length
        for name, settings in self.model.mixers.items():
            if (note := settings.note(tokens)) is not None:
                yield f"note: model.mixers.{name} with {key}={tokens}: {note}"

    def is_legal(self) -> bool:
        """Whether `check` passes."""
        try:
            self.check()
        except Exception as error:
            if getattr(error, "exit_status", None) != ConfigError.exit_status:
                raise
            return False
        return True


def load(path: str | Path, overrides: list[str] | None = None, *, resolved: bool = False) -> RunConfig:
    """Reads a run file, applies key=value overrides, resolves and checks it. Raises ConfigError with one line.

    A resolved configuration means what it meant to the version that wrote it, as in `run_directory.read_config`. resolved: it is
    one, whether or not its first line says so.

    A training.micro_batch_size that does not divide a data rank's sequences is reduced to the next size that does, with a note on
    stderr.
    """
    text, values = read_yaml_and_text(Path(path))
    if "model" in values and (resolved or resolved_by(text) is not None):
        values["model"] = with_settings_of_once(values["model"])
    for word in overrides or []:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"{word!r} is not key=value; for example training.steps=100")
        put_setting(values, key.split("."), _parse(text, word), word)
    config, given = resolve(values, str(path))
    if given is not None:
        print(
            f"note: training.micro_batch_size={given} does not divide the sequences that a data rank takes per step: "
            f"cut to {config.training.micro_batch_size}",
            file=sys.stderr,
        )
    return config


def resolve(values: dict[str, Any], where: str) -> tuple[RunConfig, int | None]:
    """The checked configuration with these values, as read from a run file, and the training.micro_batch_size that was reduced for
    it (None: it fits). where: of the values, for errors. Raises as `RunConfig.check`."""
    if "model" in values:
        values = values | {"model": _resolve_model(values["model"], where)}
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error, RunConfig)}") from None
    training = fit_micro_batch_size(config.training, config.layout.data)
    given, cut_to = config.training.micro_batch_size, training.micro_batch_size
    config = config.model_copy(update={"training": training})
    config.check()
    return config, given if cut_to != given else None


def _longer(key: str, least: int, ranks: int, training: TrainingConfig) -> str:
    """A setting of `key` with at least `least` tokens that passes the other checks too: a segment divides the sequence, and both
    divide over the context ranks."""
    if key != "training.bptt.segment":
        return f"{key}={least} or more"
    sizes = [n for n in divisors(training.sequence_length) if n >= least and n % ranks == 0]
    return (
        f"{key}={sizes[0]}"
        if sizes
        else f"training.bptt=null: training.sequence_length={training.sequence_length} has no longer segment"
    )


def _parse(text: str, word: str) -> Any:
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(f"{word!r}: the value is not valid YAML") from None
    if isinstance(value, str):
        try:  # YAML 1.1 reads 1e-3 as a string
            return float(value)
        except ValueError:
            pass
    return value


def put_setting(values: dict[str, Any], keys: list[str], value: Any, word: str) -> None:
    """Sets a setting in the values of a run file by the parts of its key. word: what asks for it. Raises ConfigError."""
    if keys[0] == "model" and isinstance(values.get("model"), str) and len(keys) > 1:
        values["model"] = _resolve_model(values["model"], word)
    for key in keys[:-1]:
        if values.get(key) is None or isinstance(values[key], bool):  # absent, null, or true/false in place of a group
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise ConfigError(f"{word!r}: {key} is not a group of settings")
    values[keys[-1]] = value


def _merged_mixers(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The base's mixers with the changes of each name; one that gets another kind begins anew, and one that a new pattern does not
    have is left out."""
    entries = [str(entry).partition("*")[0] for entry in changes.get("pattern", base.get("pattern", ()))]
    names = {name for entry in entries for name in re.split(r"[+|]", entry)}
    merged = {name: settings for name, settings in base["mixers"].items() if "pattern" not in changes or name in names}
    for name, settings in changes["mixers"].items():
        before, kind = merged.get(name), settings.get("kind") if isinstance(settings, dict) else None
        if isinstance(before, dict) and isinstance(settings, dict) and kind in (None, before.get("kind", name)):
            settings = {**before, **settings}
        merged[name] = settings
    return merged


def _resolve_model(value: Any, where: str) -> Any:
    """The settings that `model:` names: mamba-130m is configs/models/mamba-130m.yaml, a path is that file, and a group with `base`
    is either of them with the group's other settings applied, those of mixers by name."""
    if isinstance(value, dict) and isinstance(value.get("base"), str):
        base, changes = _resolve_model(value["base"], where), {key: v for key, v in value.items() if key != "base"}
        if not isinstance(changes.get("mixers"), dict) or not isinstance(base.get("mixers"), dict):
            return base | changes
        return base | changes | {"mixers": _merged_mixers(base, changes)}
    if not isinstance(value, str):
        return value
    shipped = files("baton.configs") / "models"
    names = sorted(entry.name.removesuffix(".yaml") for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
    if value in names:
        return parse_yaml((shipped / f"{value}.yaml").read_text(encoding="utf-8"))
    if value.endswith((".yaml", ".yml")):
        text, settings = read_yaml_and_text(Path(value))
        first = text.partition("\n")[0].rstrip()
        return with_settings_of_once(settings) if first.startswith("#") and first.endswith(IMPORTED) else settings
    if (Path(value) / "config.json").exists():
        raise ConfigError(f"{where}: model: {value} is a model's folder; `baton import {value} --out NAME` makes a NAME.yaml of it")
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
    raise ConfigError(f"{where}: model: no model is called {value!r}; {hint} (or the path of a .yaml file)")
