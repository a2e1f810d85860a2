"""`baton submit`: hands a run to SLURM."""

import argparse
import sys

from baton.launcher.cli.arguments import CHANGE_HELP, Subparsers, add_command, add_run_file, load_run
from baton.launcher.cli.evaluate import check_evaluations


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "submit", _run, "hand a run to SLURM, which keeps it going over jobs, failures and nodes")
    add_run_file(parser, "training.steps=20000")
    parser.add_argument(
        "--cluster", metavar="FILE", required=True, help="a cluster's .yaml file with a section slurm, or a shipped one"
    )
    parser.add_argument(
        "--nodes", metavar="N[-M]", help="nodes, or a range: layout.data follows what is free (default: the layout's)"
    )
    parser.add_argument("--change", action="store_true", help=CHANGE_HELP)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and the script, write and submit nothing")


def _run(arguments: argparse.Namespace) -> int:
    from baton.launcher.cluster import load_cluster
    from baton.launcher.inputs import check_inputs, missing_inputs, with_known_vocabulary
    from baton.launcher.planner.plan import make_plan
    from baton.slurm import command, submit

    config, cluster = load_run(arguments), load_cluster(arguments.cluster)
    check_evaluations(config.jobs.evaluations if config.jobs.evaluate else ())
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
