"""`baton readmit`: uses nodes again that a run has excluded."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "readmit", _run, "use nodes again that a run has excluded, when they are repaired")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("nodes", metavar="NODE", nargs="+", help="as `baton status` names them")


def _run(arguments: argparse.Namespace) -> None:
    from baton.slurm.status import readmit

    print(readmit(arguments.folder, arguments.nodes))
