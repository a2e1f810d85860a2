"""`baton cancel`: ends a run's jobs."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "cancel", _run, "end a run's jobs: it saves first, and `baton submit` goes on from there")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--now", action="store_true", help="do not wait for a save")


def _run(arguments: argparse.Namespace) -> None:
    from baton.slurm.status import cancel

    print(cancel(arguments.folder, now=arguments.now))
