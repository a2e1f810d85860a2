"""Parts that the commands' parsers share: commands and groups of them, the run file with its overrides, and types of options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeAlias

if TYPE_CHECKING:
    from baton.launcher.config import RunConfig

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CHANGE_HELP = "continue with another learning rate, schedule or optimizer setting than before, and record it in events.jsonl"
"""Help of --change, an option of `train` and `submit`."""


def add_command(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], int | None], help: str
) -> argparse.ArgumentParser:
    """A command's parser. run: called with the parsed arguments; returns the exit status (None: 0)."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_group(commands: Subparsers, name: str, help: str) -> Subparsers:
    """A command that has commands of its own, as `baton data prepare`."""
    return commands.add_parser(name, help=help, description=help).add_subparsers(metavar="COMMAND", required=True)


def add_run_file(parser: argparse.ArgumentParser, example: str) -> None:
    """The arguments RUN.yaml and key=value."""
    parser.add_argument("config", metavar="RUN.yaml", help="the run's configuration")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=f"settings over the file's, e.g. {example}")


def load_run(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that `add_run_file`'s arguments name. Raises ConfigError."""
    from baton.launcher.config import load

    return load(arguments.config, arguments.overrides)


def refuse_without(arguments: argparse.Namespace, needed: str, *options: str) -> None:
    """Raises ConfigError for one of the options that was given without `needed`, the option to which it belongs."""
    if getattr(arguments, _name(needed)) in (None, False):
        for option in options:
            if _is_given(arguments, option):
                _refuse(f"{option} has no effect without {needed}; give {needed}, or leave it out")


def refuse_with(arguments: argparse.Namespace, other: str, *options: str) -> None:
    """Raises ConfigError for one of the options that was given together with `other`, with which it has no effect."""
    if _is_given(arguments, other):
        for option in options:
            if _is_given(arguments, option):
                _refuse(f"{option} has no effect with {other}; leave one of them out")


def _is_given(arguments: argparse.Namespace, option: str) -> bool:
    parser: argparse.ArgumentParser = arguments.parser
    return bool(getattr(arguments, _name(option)) != parser.get_default(_name(option)))


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _refuse(message: str) -> NoReturn:
    from baton.launcher.errors import ConfigError

    raise ConfigError(message)


def compute_capability(text: str) -> int:
    """Ten times the major number plus the minor one: 90 of "9.0"."""
    major, minor = map(int, text.split("."))
    return 10 * major + minor


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def non_negative_int(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a positive number")
    return value


def positive_float(text: str) -> float:
    value = non_negative_float(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def distinct_seeds(text: str) -> tuple[int, ...]:
    """The numbers of 2,3 in order, each once."""
    try:
        values = tuple(non_negative_int(word) for word in text.split(","))
    except ValueError:
        values = ()
    if not values or len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} names no seeds; write different whole numbers, as 2,3")
    return tuple(sorted(values))


def time_span(text: str) -> float:
    """Seconds of 90s, 20m or 2h."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        value = float(text[:-1])
    except ValueError:
        value = 0.0
    if unit is None or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time; write it as 90s, 20m or 2h")
    return unit * value
