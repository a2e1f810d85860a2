"""The `baton` command: a module for each command or group of commands.

Every import that takes time happens inside the function that runs a command, so that help is instant. This package is on top of
all others: it imports `slurm` and the rest of `launcher`, and neither imports it.
"""

import argparse
import difflib
import sys
from importlib.metadata import version
from typing import NoReturn

from baton.launcher import bytecode
from baton.launcher.cli import (
    cancel,
    checkpoint,
    compile,
    data,
    doctor,
    evaluate,
    experiment,
    fork,
    generate,
    goodput,
    interchange,
    logs,
    plan,
    plot,
    readmit,
    settings,
    status,
    submit,
    tokenizer,
    train,
    tune,
)

COMMANDS = (
    train,
    plan,
    settings,
    doctor,
    tune,
    compile,
    generate,
    evaluate,
    experiment,
    plot,
    checkpoint,
    interchange,
    submit,
    status,
    logs,
    cancel,
    readmit,
    goodput,
    fork,
    data,
    tokenizer,
)
"""In the order in which help lists them."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status (0 well, 1 failed, 2 bad input, 74 files that fail at present, 75 busy or stopped)."""
    root = parser()
    arguments, rest = root.parse_known_args(argv)
    if rest and not (hasattr(arguments, "overrides") and all("=" in word and not word.startswith("-") for word in rest)):
        _refuse_words(arguments.parser, rest)
    if rest:  # key=value words after an option, which argparse does not expect there
        arguments.overrides += rest
    bytecode.keep()
    try:
        return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        from baton.launcher.errors import explained

        status, text = explained(error)
        if status is None:
            raise
        print(f"baton: {text}", file=sys.stderr)
        return status


def parser() -> argparse.ArgumentParser:
    """The command's parser, with those of all commands."""
    root = argparse.ArgumentParser(prog="baton", description="Pretrain recurrent language models on very long contexts.")
    root.add_argument("--version", action="version", version=f"baton {version('baton-lm')}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return root


def _refuse_words(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    """End with the usage of the command that does not know these words, and the option that was probably meant."""
    options = [option for action in parser._actions for option in action.option_strings]
    close = [difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.7) for word in words if word[:1] == "-"]
    if any(close):
        hint = f" (did you mean {' '.join(match[0] for match in close if match)}?)"
    elif close and any(action.dest == "overrides" for action in parser._actions):
        hint = " (settings are words of the form key=value, as training.steps=100)"
    else:
        hint = ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")
