"""`baton logs`: the output of a run's ranks."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "logs", _run, "what a run's ranks said, over all its attempts")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--rank", type=int, default=0, help="whose (default 0)")
    parser.add_argument("--attempt", type=int, help="of one attempt alone")
    parser.add_argument("--follow", action="store_true", help="go on as it grows, from attempt to attempt, until the run is over")


def _run(arguments: argparse.Namespace) -> None:
    from baton.slurm.logs import show

    show(arguments.folder, arguments.rank, arguments.attempt, follow=arguments.follow)
