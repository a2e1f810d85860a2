"""`baton eval`: evaluates a checkpoint on its run's validation set, other data, lm-eval's tasks, or questions about long texts."""

import argparse
import shlex
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from baton.launcher.cli.arguments import Subparsers, add_command, non_negative_int, positive_int, refuse_without

OPTIONS = {
    "--data": ("--length", "--tokens", "--split", "--by-position", "--ranks"),
    "--tasks": ("--include", "--shots", "--limit"),
    "--long-context": ("--text", "--lengths", "--depths", "--samples", "--seed", "--plot"),
}
"""Of one kind of evaluation alone."""


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "eval", _run, "evaluate a checkpoint: on its validation set, other data, tasks, or long texts")
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="a run directory; for all but its own validation set also a model's folder"
    )
    parser.add_argument("--step", type=non_negative_int, help="the checkpoint's (default: the newest checkpoint)")
    on = parser.add_mutually_exclusive_group()
    on.add_argument("--data", metavar="SHARDS", help="a prepared dataset: loss, perplexity and bits per byte")
    on.add_argument("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness, by name (pip install 'baton-lm[eval]')")
    on.add_argument("--long-context", metavar="A,B", help="questions about long texts, by name (docs/evaluation.md), or all")
    parser.add_argument("--length", type=positive_int, help="with --data: tokens of a window (default: those of training)")
    parser.add_argument("--tokens", type=positive_int, help="with --data: labels at most, but one document (default: all)")
    parser.add_argument("--split", default="validation", help="with --data: the split (default validation)")
    parser.add_argument("--by-position", action="store_true", help="with --data: also the loss by tokens seen before")
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="with --tasks: a folder with task files of your own")
    parser.add_argument("--shots", type=non_negative_int, metavar="N", help="with --tasks: examples in front of each question")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="with --tasks: examples of each task at most")
    parser.add_argument("--text", type=Path, metavar="FILE", help="with --long-context: UTF-8 text around what is asked for")
    parser.add_argument("--lengths", metavar="N,M", default="1024,4096,16384", help="with --long-context: tokens of the prompts")
    parser.add_argument("--depths", type=positive_int, default=5, metavar="N", help="with --long-context: places of a needle")
    parser.add_argument("--samples", type=positive_int, default=8, metavar="N", help="with --long-context: prompts of each kind")
    parser.add_argument("--seed", type=int, default=0, help="with --long-context: of what is asked for")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --long-context: the heat map (default: beside the row)")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="with --data: processes (default: one for each GPU)")
    parser.add_argument("--batch", type=positive_int, default=16, metavar="N", help="rows evaluated together (default 16)")
    parser.add_argument("--out", type=Path, help="the file that gets a row (default RUN/evaluations.jsonl)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


class _Lines(argparse.ArgumentParser):
    """Raises ConfigError where another parser ends the process."""

    def error(self, message: str) -> NoReturn:
        from baton.launcher.errors import ConfigError

        raise ConfigError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        self.error(message or "it asks for help, and evaluates nothing")


def check_evaluations(lines: Iterable[str]) -> None:
    """Raises ConfigError for a line of jobs.evaluations that `baton eval` would refuse whatever the checkpoint."""
    from baton.data_pipeline.storage import Location
    from baton.launcher.errors import ConfigError

    parser: argparse.ArgumentParser = _Lines(add_help=False)
    add(parser.add_subparsers())
    for line in lines:
        try:
            found = parser.parse_args(["eval", "RUN", *shlex.split(line)])
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"jobs.evaluations: {line!r}: {error}; give options of `baton eval`, quoted as in a shell") from None
        try:
            _check_options(found)
        except ConfigError as error:
            raise ConfigError(f"jobs.evaluations: {line!r}: {error}") from None
        if found.step is not None:
            raise ConfigError(f"jobs.evaluations: {line!r}: --step is the new checkpoint's; leave it out")
        if found.tasks is not None and find_spec("lm_eval") is None:
            raise ConfigError(f"jobs.evaluations: {line!r}: lm_eval is not installed; pip install 'baton-lm[eval]'")
        # of data, only local folders: no server is asked
        for path in (found.include, found.text, found.data and Location(found.data).folder):
            if path is not None and not path.exists():
                raise ConfigError(f"jobs.evaluations: {line!r}: {path}: no such file or folder")


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for options that the evaluation asked for does not have."""
    for kind, options in OPTIONS.items():
        refuse_without(arguments, kind, *options)


def _run(arguments: argparse.Namespace) -> None:
    _check_options(arguments)
    folder, step, device, out = arguments.folder, arguments.step, arguments.device, arguments.out
    if arguments.data is not None:
        from baton.launcher.evaluate_model import evaluate_data

        settings = {"length": arguments.length, "tokens": arguments.tokens, "split": arguments.split}
        settings |= {"batch": arguments.batch, "ranks": arguments.ranks}
        evaluate_data(folder, arguments.data, step=step, device=device, out=out, by_position=arguments.by_position, **settings)
        return
    if arguments.tasks is not None:
        from baton.launcher.evaluate_model import evaluate_tasks

        settings = {"include": arguments.include, "shots": arguments.shots, "limit": arguments.limit, "batch": arguments.batch}
        evaluate_tasks(folder, arguments.tasks.split(","), step=step, device=device, out=out, **settings)
        return
    if arguments.long_context is not None:
        from baton.launcher.evaluate_model import evaluate_long_context

        settings = {"text": arguments.text, "lengths": arguments.lengths.split(","), "plot": arguments.plot}
        settings |= {name: getattr(arguments, name) for name in ("depths", "samples", "seed", "batch")}
        evaluate_long_context(folder, arguments.long_context.split(","), step=step, device=device, out=out, **settings)
        return
    from baton.launcher.evaluate import evaluate_checkpoint

    evaluate_checkpoint(folder, step, device, out)
