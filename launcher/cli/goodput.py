"""`baton goodput`: how a run's time was spent."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "goodput", _run, "where every second of a run went")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="the picture (default RUN/goodput.png)")


def _run(arguments: argparse.Namespace) -> None:
    import json

    from baton.training.monitoring.goodput import compute_goodput, plot_goodput

    found = compute_goodput(arguments.folder)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print("\n".join(found.lines()))
    print(plot_goodput(found, arguments.out or arguments.folder / "goodput.png"))
