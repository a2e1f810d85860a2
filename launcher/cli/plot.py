"""`baton plot`: draws the curves of runs."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "plot", _run, "draw a run's curves, or several runs' validation losses, into a PNG")
    parser.add_argument("folders", metavar="RUN", nargs="+", type=Path, help="a run directory; several: all in one picture")
    parser.add_argument("--out", type=Path, help="the picture (default RUN/curves.png; of several, RUN/compared.png of the first)")


def _run(arguments: argparse.Namespace) -> None:
    from baton.training.monitoring.plots import plot_runs

    print(plot_runs(arguments.folders, arguments.out))
