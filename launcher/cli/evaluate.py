"""`baton evaluate`: evaluates one checkpoint of a run in one process."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command, non_negative_int


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "evaluate", _run, "evaluate one checkpoint of a run, on one process")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--step", type=non_negative_int, help="the checkpoint's (default: the newest checkpoint)")
    parser.add_argument("--out", type=Path, help="the file that gets a row (default RUN/evaluations.jsonl)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _run(arguments: argparse.Namespace) -> None:
    from baton.launcher.evaluate import evaluate_checkpoint

    evaluate_checkpoint(arguments.folder, arguments.step, arguments.device, arguments.out)
