"""`baton status`: the state of a run and of its jobs."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "status", _run, "how a run stands: step, loss, speed, goodput, last save, ETA, queue, attempts")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> None:
    import json

    from baton.slurm.status import read_status

    found = read_status(arguments.folder)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else "\n".join(found.lines()))
