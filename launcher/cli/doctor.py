"""`baton doctor`: compares every recurrence's kernels with their definition on this machine."""

import argparse

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "doctor", _run, "compare every recurrence with its definition on this machine")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _run(arguments: argparse.Namespace) -> int:
    from baton.launcher.kernels import check_machine

    return check_machine(arguments.device)
