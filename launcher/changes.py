"""Which settings of a run may change at any start, which with --change, which only in a fork, and which not at all. Torch-free.

A change is in place if the run directory stays the same. Settings in MAY_CHANGE may change at any start. training.steps may change
if the learning rates of all completed steps stay the same. Settings of the optimizer and the schedule need --change, which records
them in events.jsonl. All others need a new run directory (`baton fork`) or a new run.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.launcher.config import RunConfig
from baton.training.lr_schedule import equal_lr_steps

MAY_CHANGE = (
    "device",
    "imports",
    "jobs",
    "profile",
    "layout",
    "model.loss_chunk",
    "data.path",
    "data.sources",
    "data.mixture",
    "data.append",
    "data.tokenizer",
    "data.cache",
    "data.cache_bytes",
    "data.prefetch",
    "data.workers",
    "data.cases",
    "training.micro_batch_size",
    "training.recompute",
    "training.cuda_graphs",
    "training.offload_kv",
    "training.replica_check_every",
    "training.log_every",
    "training.callbacks",
    "training.checkpoint",
    "training.evaluation",
    "training.monitoring",
    "training.guard",
)
"""Settings that may change at any start. None of them changes the result (beyond rounding), except data.mixture and data.append,
which are meant to be changed. data.path, data.sources and data.tokenizer are locations, whose contents are checked by fingerprint.
data.cases decides only what is measured."""

IN_PLACE = ("training.steps", "training.optimizer", "training.schedule")
"""Settings that may change with --change, which records the change in events.jsonl."""

ORDER = (
    "data",
    "training.seed",
    "training.lanes",
    "training.sequence_length",
    "training.global_batch_tokens",
    "training.sequence_length_warmup",
    "training.batch_size_warmup",
)
"""Further settings that decide which tokens a step reads. A fork that changes one restarts its data."""

_GROUPS = ("training.optimizer.lr_overrides", "training.bptt")
"""Settings that a command line sets as a whole."""

_SHOWN = 4
"""Maximum number of changes that a suggested command spells out."""

BEGINNING = ("training.initial_weights",)
"""Settings that affect only a run's first step, so a fork ignores them."""


@dataclass(frozen=True)
class Change:
    """A setting that differs between two configurations."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"

    def is_of(self, keys: Sequence[str]) -> bool:
        """Whether it is one of these settings, or of one of these groups."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)


def changes(old: RunConfig, new: RunConfig) -> list[Change]:
    """The settings that differ, but for those that may change at any start, and the run's name and directory."""
    return [change for change in all_changes(old, new) if not change.is_of(MAY_CHANGE)]


def all_changes(old: RunConfig, new: RunConfig) -> list[Change]:
    """The settings that differ, but for the run's name and directory."""
    before, after = (_flatten(_what_is_learned(run)) for run in (old, new))
    found = (Change(key, before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys()))
    return [change for change in found if change.old != change.new and change.key not in ("name", "directory")]


def words(different: Sequence[Change], new: RunConfig) -> str:
    """The changes as they are given on the command line, after a space; "" where there are none, and their form where there are
    many."""
    found = []
    for change in different:
        group = next((group for group in _GROUPS if change.is_of((group,))), None)
        value = change.new
        if group is not None:  # keys of a dictionary may hold dots, and a group may be null
            value = new.model_dump(mode="json")
            for key in group.split("."):
                value = value[key]
        word = f"{group or change.key}={value if isinstance(value, str) else json.dumps(value)}"
        if word not in found:
            found.append(word)
    return " key=value …" if len(found) > _SHOWN else "".join(f" {shlex.quote(word)}" for word in found)


def with_changes_in_place(old: RunConfig, new: RunConfig) -> RunConfig:
    """`old`, with what `new` may change in place of the same run."""
    taken = {name: getattr(new.training, name) for name in ("steps", "optimizer", "schedule")}
    return old.model_copy(update={"training": old.training.model_copy(update=taken)})


def refusal(folder: Path, old: RunConfig, new: RunConfig, done: int, *, change: bool) -> str | None:
    """Why the run in `folder` cannot continue with the new settings, and what to do instead; None: it can.

    done: step of its newest checkpoint. change: whether --change was given.
    """
    different = changes(old, new)
    others = [each for each in different if not each.is_of(IN_PLACE)]
    if not others:
        return _refusal_in_place(folder, old, new, different, done, change=change)
    anew = any(each.is_of(ORDER) for each in others) or (new.training.carries_lane_states and not old.training.carries_lane_states)
    advice = "Use another name (name=...) or directory (directory=...)"
    if not any(each.is_of(BEGINNING) for each in others):
        how = " with its data begun anew" if anew else ""
        how += ", if all shapes stay the same" if any(each.is_of(("model",)) for each in others) else ""
        advice += f", or fork the run{how} (`{_fork(folder, different, new, anew=anew)}`)"
    return f"{folder} belongs to another configuration: {'; '.join(map(str, different))}. {advice}, or take the changes back"


def _fork(folder: Path, different: Sequence[Change], new: RunConfig, *, anew: bool = False, step: str = "") -> str:
    """The command that makes a fork with these changes."""
    return f"baton fork {shlex.quote(str(folder))}{step}{' --restart-data' if anew else ''} --out NEW{words(different, new)}"


def _refusal_in_place(
    folder: Path, old: RunConfig, new: RunConfig, different: list[Change], done: int, *, change: bool
) -> str | None:
    steps = new.training.steps
    if steps < done:
        return (
            f"{folder}: training.steps={steps} is less than the {done} steps that are done; give {done} or more, or fork the run "
            f"from an earlier checkpoint, `{_fork(folder, different, new, step=' --step N')}`"
        )
    if change or not different:
        return None
    listed, fork = "; ".join(map(str, different)), f"`{_fork(folder, different, new)}`"
    if [each.key for each in different] != ["training.steps"]:
        return (
            f"{folder} belongs to another configuration: {listed}. Add --change to go on in this run, which records it in "
            f"events.jsonl, or fork the run ({fork}), or take the changes back"
        )
    alike = equal_lr_steps(old.training, steps)
    if done <= alike:
        return None
    kind, where = old.training.schedule.kind, ""
    if kind == "wsd":
        fork = f"`{_fork(folder, different, new, step=' --step N')}`"
        where = f"; no decay has begun in a checkpoint of N = {int(alike)} steps or less"
    return (
        f"{folder}: {'; '.join(map(str, different))}: by the {kind} schedule, steps that are done would have had another learning "
        f"rate. Fork the run ({fork}{where}), or add --change to go on in this run, which records it in events.jsonl"
    )


def _what_is_learned(run: RunConfig) -> dict[str, Any]:
    """The settings, with exact segments replaced by none, to which they are equivalent."""
    values = run.model_dump(mode="json")
    if run.training.bptt is not None and run.training.bptt.mode == "exact":
        values["training"]["bptt"] = None
    return values


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
