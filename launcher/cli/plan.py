"""`baton plan`: memory, communication and time of a run, computed without a GPU."""

import argparse
import sys

from baton.launcher.cli.arguments import Subparsers, add_command, add_run_file, load_run, positive_float


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "plan", _run, "what a run takes, without a GPU: memory, bytes exchanged, time, what to change")
    add_run_file(parser, "layout.data=512")
    parser.add_argument("--cluster", metavar="FILE", help="a cluster's .yaml file, or a100, h100, h200: adds times and a verdict")
    parser.add_argument("--memory-gib", type=positive_float, metavar="N", help="GiB that a rank may fill (default: the cluster's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    import json

    from baton.launcher.cluster import load_cluster
    from baton.launcher.inputs import missing_inputs, with_known_vocabulary
    from baton.launcher.planner.plan import make_plan
    from baton.launcher.run_directory import settled

    config = with_known_vocabulary(load_run(arguments))
    cluster = None if arguments.cluster is None else load_cluster(arguments.cluster)
    # without a cluster it is a GPU's memory that is planned
    config = settled(config, "cpu" if config.device == "cpu" else cluster.kind if cluster is not None else "cuda")
    plan = make_plan(config, cluster, arguments.memory_gib)
    missing = missing_inputs(config)
    if arguments.json:
        print(json.dumps(plan.to_json() | {"missing": missing}, indent=2))
    else:
        print("\n".join(plan.lines()))
        print("".join(f"{line}\n" for line in missing), end="", file=sys.stderr)
    return 2 if plan.fits is False else 0
