"""`baton plan`: memory, communication and time of a run, computed without a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from baton.launcher.cli.arguments import Subparsers, add_command, add_run_file, load_run, positive_float, positive_int

if TYPE_CHECKING:
    from baton.launcher.cluster import Cluster


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "plan", _run, "what a run takes, without a GPU: memory, bytes exchanged, time, what to change")
    add_run_file(parser, "layout.data=512")
    parser.add_argument("--cluster", metavar="FILE", help="a cluster's .yaml file, or a100, h100, h200: adds times and a verdict")
    parser.add_argument(
        "--nodes", type=positive_int, metavar="N", help="nodes of the cluster: sets layout.data so that the run fills them"
    )
    parser.add_argument(
        "--gpus-per-node", type=positive_int, metavar="N", help="GPUs of a node, each with a rank (default: the cluster's)"
    )
    parser.add_argument("--memory-gib", type=positive_float, metavar="N", help="GiB that a rank may fill (default: the cluster's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    import json

    from baton.launcher.cluster import load_cluster
    from baton.launcher.inputs import missing_inputs, with_known_vocabulary
    from baton.launcher.planner.plan import make_plan
    from baton.launcher.run_directory import settled

    cluster = None if arguments.cluster is None else load_cluster(arguments.cluster)
    if arguments.gpus_per_node is not None:
        cluster = _with_nodes_of(arguments.gpus_per_node, cluster)
    if arguments.nodes is not None:
        arguments.overrides.append(_data_ranks(arguments, cluster))
    config = with_known_vocabulary(load_run(arguments))
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


def _with_nodes_of(gpus: int, cluster: Cluster | None) -> Cluster:
    """The cluster with nodes of so many GPUs, a rank on each. Raises ConfigError."""
    from baton.launcher.errors import ConfigError

    if cluster is None:
        raise ConfigError("--gpus-per-node needs --cluster, which says how fast GPUs and networks are")
    slurm = None if cluster.slurm is None else cluster.slurm.model_copy(update={"ranks_per_node": gpus})
    return cluster.model_copy(update={"gpus_per_node": gpus, "slurm": slurm})


def _data_ranks(arguments: argparse.Namespace, cluster: Cluster | None) -> str:
    """The word that has the run fill `--nodes` nodes. Raises ConfigError."""
    from baton.launcher.errors import ConfigError

    if cluster is None:
        raise ConfigError("--nodes needs --cluster, which says how many GPUs a node has")
    if given := [word for word in arguments.overrides if word.startswith("layout.data=")]:
        raise ConfigError(f"--nodes sets layout.data, and so does {given[0]}: give one of them")
    layout, ranks = load_run(arguments).layout, arguments.nodes * cluster.ranks_per_node
    others = layout.tensor * layout.pipeline * layout.context
    if ranks % others:
        raise ConfigError(
            f"--nodes {arguments.nodes}: {ranks} ranks are no multiple of the {others} that layout.tensor={layout.tensor}, "
            f"layout.pipeline={layout.pipeline} and layout.context={layout.context} need; take other nodes or another layout"
        )
    return f"layout.data={ranks // others}"
