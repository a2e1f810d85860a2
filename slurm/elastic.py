"""Fits the layout of an attempt to the number of nodes that a job got, by changing layout.data only.

The global batch stays the same, so the number of data ranks must divide it. Nodes that are left over are not used.
"""

from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.parallel.config import divisors


def nodes_for(config: RunConfig, ranks_per_node: int) -> int:
    """Number of nodes that the configuration's layout needs. Raises ConfigError if its ranks do not fill whole nodes."""
    world = config.layout.world_size
    if world <= ranks_per_node:
        return 1
    if world % ranks_per_node:
        raise ConfigError(
            f"the layout has {world} ranks, which do not fill nodes of {ranks_per_node}; set a layout whose sizes multiply to "
            f"{world // ranks_per_node * ranks_per_node} or {-(-world // ranks_per_node) * ranks_per_node}"
        )
    return world // ranks_per_node


def fitted(config: RunConfig, nodes: int, ranks_per_node: int) -> tuple[RunConfig, int]:
    """The configuration for a job of `nodes` nodes, and how many of them it uses. Raises ConfigError if no layout.data fits."""
    wanted = nodes_for(config, ranks_per_node)
    if nodes == wanted or (nodes > wanted and config.jobs.elastic == "none"):
        return config, wanted
    if config.jobs.elastic == "none":
        raise ConfigError(f"the layout needs {wanted} nodes, the job has {nodes}, and jobs.elastic=none; set jobs.elastic=data")
    layout, training = config.layout, config.training
    of_one_copy = layout.world_size // layout.data
    lanes = training.lane_count
    for data in sorted(divisors(lanes), reverse=True):
        world = data * of_one_copy
        if world > nodes * ranks_per_node or (world > ranks_per_node and world % ranks_per_node):
            continue
        for micro_batch_size in _micro_batches(config, data):
            changed = {
                "layout": layout.model_copy(update={"data": data}),
                "training": training.model_copy(update={"micro_batch_size": micro_batch_size}),
            }
            fitting = config.model_copy(update=changed)
            if fitting.is_legal():
                return fitting, nodes_for(fitting, ranks_per_node)
    raise ConfigError(
        f"no layout.data fits {nodes} nodes of {ranks_per_node} ranks with tensor x pipeline x context = {of_one_copy} and "
        f"{training.sequences_per_step} sequences a step; take more nodes"
    )


def _micro_batches(config: RunConfig, data: int) -> list[int]:
    """Micro-batch sizes to try: the configured one, then smaller ones. A larger one might not fit in memory."""
    own, of_rank = config.training.micro_batch_size, config.training.sequences_per_step // data
    return [own, *(n for n in reversed(divisors(of_rank)) if n < own)] if of_rank else []
