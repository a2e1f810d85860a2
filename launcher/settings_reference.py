"""The reference of all settings of a run file, generated from the typed classes, for `baton settings` and docs/settings.md.
Torch-free."""

import difflib
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.launcher.experiments.config import ExperimentConfig
from baton.launcher.validation import likely_setting


@dataclass(frozen=True)
class Setting:
    """One setting.

    key: as on the command line, with NAME for a free name.
    values: accepted values.
    default: as YAML; None: the setting is required.
    """

    key: str
    values: str
    default: str | None
    description: str

    def lines(self, width: int = 96) -> Iterator[str]:
        """Lines for `baton settings`: the key with its values, and the description below."""
        default = "required" if self.default is None else f"default {self.default}"
        yield f"{self.key}: {self.values}; {default}"
        line = ""
        for word in self.description.split():
            if line and len(line) + 1 + len(word) > width:
                yield f"    {line}"
                line = ""
            line = f"{line} {word}".strip()
        if line:
            yield f"    {line}"


@dataclass(frozen=True)
class Group:
    """Settings of one class. key: of the group, "" for the top; kind: where the group has several kinds; about: the first sentence
    of the class's docstring."""

    key: str
    kind: str | None
    about: str
    settings: tuple[Setting, ...]

    @property
    def title(self) -> str:
        name = self.key or "the run"
        return f"{name}, kind: {self.kind}" if self.kind else name


def groups() -> tuple[Group, ...]:
    """All groups of a run file, each before the groups in it."""
    return tuple(_groups(RunConfig, "", None))


def lookup(words: list[str]) -> list[Group]:
    """The groups with only the settings that the words name: a key, a group of keys, or a kind of mixer or data. No words: all.

    Raises ConfigError, which suggests the nearest one, for a word that names none.
    """
    everything, found = groups(), list[Group]()
    for word in words:
        here = [cut for group in everything if (cut := _cut(group, word)) is not None]
        if not here:
            raise ConfigError(_unknown(word, everything))
        found += [group for group in here if group not in found]
    return found if words else list(everything)


def markdown() -> str:
    """docs/settings.md."""
    experiment = tuple(_groups(ExperimentConfig, "", None))
    return "\n".join([INTRODUCTION, *_tables(groups()), "", EXPERIMENTS, *_tables(experiment[1:], experiment[0])]) + "\n"


def _tables(shown: tuple[Group, ...], untitled: Group | None = None) -> Iterator[str]:
    """A table for each group; the one without a title first."""
    for group in (untitled, *shown) if untitled else shown:
        if not group.settings:
            continue
        if group is not untitled:
            yield from ("", f"## {group.title}")
        if group.about:
            yield from ("", group.about)
        yield from ("", "| setting | values | default | |", "| --- | --- | --- | --- |")
        for setting in group.settings:
            default = "required" if setting.default is None else f"`{setting.default}`"
            yield f"| `{setting.key}` | {_cell(setting.values)} | {_cell(default)} | {_cell(setting.description)} |"


KINDS = ("data", "model.mixers.NAME")
"""Groups of which a kind alone names one."""

INTRODUCTION = """# Settings

All settings of a run file. On the command line a setting is `KEY=VALUE`, as `training.steps=100`; in the file the parts of its
key are nested. NAME is a name of your own: of a mixer in `model.pattern`, of a source of data. `baton settings KEY` prints a part
of this page, for a key, a group (`baton settings training.optimizer`) or a kind of mixer (`baton settings mamba`). `make
reference` writes this page from the classes that check a run file."""


EXPERIMENTS = """# Settings of an experiment

The file of an experiment, for `baton experiment` ([experiments.md](experiments.md)). `run` has the settings above."""


# ------------------------------------------------------------------------------------------------------------------- the classes


def _groups(model: type[BaseModel], key: str, kind: str | None) -> Iterator[Group]:
    prefix = f"{key}." if key else ""
    settings, below = list[Setting](), list[Group]()
    for name, field in model.model_fields.items():
        models = _models(field.annotation)
        many = get_origin(_bare(field.annotation)) is dict
        place = f"{prefix}{name}" + (".NAME" if many and models else "")
        # a single class with a kind is no choice among classes
        kinds = [one for one in models if "kind" in one.model_fields and isinstance(one.model_fields["kind"].default, str)]
        kinds = kinds if len(models) > 1 else []
        if models and get_origin(_bare(field.annotation)) is not tuple:
            for one in models:
                below += _groups(one, place, one.model_fields["kind"].default if one in kinds else None)
        if not models or many or _description(field) or get_origin(_bare(field.annotation)) is tuple or len(models) > 1:
            settings.append(Setting(f"{prefix}{name}", _values(field), _default(field), _description(field)))
    yield Group(key, kind, _first_sentence(model), tuple(settings))
    yield from below


def _bare(annotation: Any) -> Any:
    """Without `Annotated` and without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        if len(parts) == 1:
            return _bare(parts[0])
    return annotation


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [found for part in get_args(annotation) for found in _models(part)]


def _values(field: FieldInfo) -> str:
    text, null = _type(field.annotation).removesuffix(" or null"), _type(field.annotation).endswith(" or null")
    bounds = [bound for one in field.metadata if (bound := _bound(one)) is not None]
    return " ".join([text, *bounds]) + (" or null" if null else "")


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [bound for one in parts[1:] if (bound := _bound(one)) is not None]
        return " ".join([_type(parts[0]), *bounds])
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin in (Union, types.UnionType):
        if _models(annotation) and all(part is type(None) or _models(part) for part in parts):
            kinds = [str(model.model_fields["kind"].default) for model in _models(annotation) if "kind" in model.model_fields]
            group = f"settings of a kind ({', '.join(kinds)})" if kinds else "settings"
            return f"{group} or null" if type(None) in parts else group
        return " or ".join(_type(part) for part in parts)
    if origin is tuple or origin is list:
        inner = [_type(part) for part in parts if part is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 and Ellipsis in parts else f"[{', '.join(inner)}]"
    if origin is dict:
        return f"{{NAME: {_type(parts[1])}}}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}.get(annotation, str(annotation))


def _bound(one: Any) -> str | None:
    for kind, name, sign in (
        (annotated_types.Ge, "ge", ">="),
        (annotated_types.Gt, "gt", ">"),
        (annotated_types.Le, "le", "<="),
        (annotated_types.Lt, "lt", "<"),
        (annotated_types.MultipleOf, "multiple_of", "a multiple of"),
    ):
        if isinstance(one, kind):
            return f"{sign} {getattr(one, name):g}"
    return None


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, str):
        return value or '""'
    return "null" if value is None else json.dumps(list(value) if isinstance(value, tuple) else value)


def _description(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _first_sentence(model: type[BaseModel]) -> str:
    text = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    return "" if text.startswith("!!!") else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("{", "&#123;").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


# -------------------------------------------------------------------------------------------------------------------- the lookup


def _cut(group: Group, word: str) -> Group | None:
    """The group with the settings that a word names; None: it names none here."""
    names = _named(group.key)
    if word in (group.key, f"{group.key}.{group.kind}", names) or group.key.startswith(f"{word}."):
        return group
    if word == group.kind and group.key in KINDS:
        return group
    if group.kind and word == f"{names}.{group.kind}":
        return group
    kept = tuple(setting for setting in group.settings if word in _names(group, setting))
    return Group(group.key, group.kind, "", kept) if kept else None


def _names(group: Group, setting: Setting) -> tuple[str, ...]:
    """What a setting is called: by its key, with the group's kind in the place of NAME, or after the kind alone."""
    leaf = setting.key.rpartition(".")[2]
    kinds = (f"{group.kind}.{leaf}", f"{_named(group.key)}.{group.kind}.{leaf}") if group.kind else ()
    return (setting.key, _named(setting.key), *kinds)


def _named(key: str) -> str:
    """A key without the place for a name of one's own."""
    return key.replace(".NAME", "")


def _unknown(word: str, everything: tuple[Group, ...]) -> str:
    meant = likely_setting(word, RunConfig)
    names = {_named(group.key) for group in everything if group.key} | {group.kind for group in everything if group.kind}
    names |= {_named(setting.key) for group in everything for setting in group.settings}
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    leaf = word.rpartition(".")[2]
    same = sorted(name for name in names if name.rpartition(".")[2] == leaf)
    hint = meant or (same[0] if same else close[0] if close else None)
    groups = ", ".join(dict.fromkeys(group.key.partition(".")[0] for group in everything if group.key))
    return f"no setting is called {word}; " + (f"did you mean {hint}?" if hint else f"groups: {groups}")
