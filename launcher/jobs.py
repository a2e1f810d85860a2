"""The commands around jobs: submit, status, logs, cancel, goodput. What they do is in baton.slurm; they are part of `baton`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGE = "go on with another learning rate, schedule or optimizer setting than before, and record it in events.jsonl"
"""Help of an option of `train` and `submit`."""

Add = Callable[[Any, str, Callable[[argparse.Namespace], int | None], str], argparse.ArgumentParser]


def add_commands(commands: Any, add: Add) -> None:
    """Put the commands into the parser. add: makes one of a name, a function and a sentence."""
    submit = add(commands, "submit", _submit, "hand a run to SLURM, which keeps it going over jobs, failures and nodes")
    submit.add_argument("config", metavar="RUN.yaml", help="the run's configuration")
    submit.add_argument("overrides", metavar="key=value", nargs="*", help="settings over the file's, e.g. training.steps=20000")
    submit.add_argument(
        "--cluster", metavar="FILE", required=True, help="a cluster's .yaml file with a section slurm, or a shipped one"
    )
    submit.add_argument(
        "--nodes", metavar="N[-M]", help="nodes, or a range: layout.data follows what is free (default: the layout's)"
    )
    submit.add_argument("--change", action="store_true", help=CHANGE)
    submit.add_argument("--dry-run", action="store_true", help="print the plan and the script, write and submit nothing")

    status = add(commands, "status", _status, "how a run stands: step, loss, speed, goodput, last save, ETA, queue, attempts")
    status.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    status.add_argument("--json", action="store_true", help="print one JSON object")

    logs = add(commands, "logs", _logs, "what a run's ranks said, over all its attempts")
    logs.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    logs.add_argument("--rank", type=int, default=0, help="whose (default 0)")
    logs.add_argument("--attempt", type=int, help="of one attempt alone")
    logs.add_argument("--follow", action="store_true", help="go on as it grows, from attempt to attempt, until the run is over")

    cancel = add(commands, "cancel", _cancel, "end a run's jobs: it saves first, and `baton submit` goes on from there")
    cancel.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    cancel.add_argument("--now", action="store_true", help="do not wait for a save")

    readmit = add(commands, "readmit", _readmit, "use nodes again that a run has excluded, when they are repaired")
    readmit.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    readmit.add_argument("nodes", metavar="NODE", nargs="+", help="as `baton status` names them")

    goodput = add(commands, "goodput", _goodput, "where every second of a run went")
    goodput.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    goodput.add_argument("--json", action="store_true", help="print one JSON object")
    goodput.add_argument("--out", type=Path, help="the picture (default RUN/goodput.png)")


def _submit(arguments: argparse.Namespace) -> int:
    from baton.launcher.cluster import load_cluster
    from baton.launcher.config import load
    from baton.launcher.inputs import check_inputs, missing_inputs, with_known_vocabulary
    from baton.launcher.plan import make_plan
    from baton.slurm import command, submit

    config, cluster = load(arguments.config, arguments.overrides), load_cluster(arguments.cluster)
    submission = submit.prepare(config, cluster, arguments.nodes, change=arguments.change)
    plan = make_plan(with_known_vocabulary(config), cluster)
    if arguments.dry_run:
        print("\n".join(plan.lines()), end="\n\n")
        print(submission.script, end="")
        for line in missing_inputs(config):
            print(line, file=sys.stderr)
        return 2 if plan.fits is False else 0
    if plan.fits is False:
        print("\n".join(plan.lines()))
        return 2
    check_inputs(config)
    print(*(f"{note}\n" for note in plan.notes), sep="", end="")
    job = submit.submit(submission)
    print(plan.verdict())
    if cluster.slurm is not None and (left_out := command.dropped(cluster.slurm)):
        print(f"not handed on to the job, whose options are the cluster file's: {', '.join(left_out)}")
    print(f"submitted job {job} on {submission.nodes} nodes; `baton status {submission.run}` says how it stands")
    return 0


def _status(arguments: argparse.Namespace) -> None:
    import json

    from baton.slurm.status import read_status

    found = read_status(arguments.folder)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else "\n".join(found.lines()))


def _logs(arguments: argparse.Namespace) -> None:
    from baton.slurm.logs import show

    show(arguments.folder, arguments.rank, arguments.attempt, follow=arguments.follow)


def _cancel(arguments: argparse.Namespace) -> None:
    from baton.slurm.status import cancel

    print(cancel(arguments.folder, now=arguments.now))


def _readmit(arguments: argparse.Namespace) -> None:
    from baton.slurm.status import readmit

    print(readmit(arguments.folder, arguments.nodes))


def _goodput(arguments: argparse.Namespace) -> None:
    import json

    from baton.training.monitoring.goodput import compute_goodput, plot_goodput

    found = compute_goodput(arguments.folder)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print("\n".join(found.lines()))
    print(plot_goodput(found, arguments.out or arguments.folder / "goodput.png"))
