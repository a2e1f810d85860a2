"""`baton experiment`: runs an experiment of a paper, and writes what it shows."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command, distinct_seeds, positive_int, time_span


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "experiment", _run, "run an experiment of a paper: its runs, a table, a picture and a verdict")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a shipped experiment, or a .yaml file (default: list them)")
    parser.add_argument("--on", choices=("cpu", "gpu"), help="where to train (default: a GPU if there is one)")
    parser.add_argument("--budget", type=time_span, metavar="TIME", help="begin no run after this time: 90s, 20m or 2h")
    parser.add_argument("--only", metavar="CELL", help="run only the cells that labels name, as bmojo or bmojo/12")
    parser.add_argument(
        "--seeds", type=distinct_seeds, metavar="N,N", help="seeds to train with; not the experiment's: a page of their own"
    )
    parser.add_argument(
        "--processes", type=positive_int, metavar="N", help="that train together (default: one a core; on GPUs what has room)"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/reproduced"), help="folder of the page (default docs/reproduced)")


def _run(arguments: argparse.Namespace) -> int:
    from baton.launcher.experiments.conduct import conduct, overview

    if arguments.name is None:
        print(overview())
        return 0
    settings = {name: getattr(arguments, name) for name in ("on", "only", "out", "processes", "seeds")}
    return conduct(arguments.name, budget_s=arguments.budget, **settings)
