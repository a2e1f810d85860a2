"""Parameters that several ranks of one model have: gradients are summed before an update, and values handed on behind it.

Of parameters that tensor ranks all have, each rank's gradient may be a part of the sum; of those that are tied over pipeline stages
the first stage that has them is the owner, whose optimizer updates them.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from baton.parallel.mesh import Mesh
from baton.parallel.param_layout import layout_of, named_layouts


def finalize_model_grads(module: nn.Module, mesh: Mesh) -> None:
    """Add up gradients that are partial sums over the tensor group, one coalesced all-reduce per group, before the engine's step;
    and add gradients of tied replicas to their owners'.

    Raises RuntimeError for a trainable parameter without a gradient: ZeRO-1 skips it silently, and ranks that skip different
    parameters exchange buckets that do not match.
    """
    partial: dict[str, list[torch.Tensor]] = {"tensor": []}
    for name, parameter, layout in named_layouts(module):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None and layout.tied_over == "pipeline":
            parameter.grad = torch.zeros_like(parameter)  # none of this stage's layers uses the block
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient after backward: every trainable parameter must take part in the loss")
        for over in layout.partial_over:
            partial[over].append(parameter.grad)
    _all_reduce_coalesced(partial["tensor"], mesh.tensor_group)
    for _, parameter, group in tied_parameters(module, mesh):
        assert parameter.grad is not None
        dist.reduce(parameter.grad, dst=dist.get_global_rank(group, 0), group=group)
        if layout_of(parameter).tied_replica:
            parameter.grad = None


@torch.no_grad()
def broadcast_tied(module: nn.Module, mesh: Mesh) -> None:
    """Copy the values of tied parameters from the owner to the stages with replicas, after they changed."""
    for _, parameter, group in tied_parameters(module, mesh):
        dist.broadcast(parameter, src=dist.get_global_rank(group, 0), group=group)


def tied_parameters(module: nn.Module, mesh: Mesh) -> list[tuple[str, nn.Parameter, dist.ProcessGroup]]:
    """What several stages have, with the group of the ranks that have it, whose first one owns it: the tied embedding on the first
    and the last stage, blocks that layers share on all."""
    if mesh.pipeline is None:
        return []
    groups = {"embedding": mesh.embedding_group, "pipeline": mesh.pipeline.group}
    tied = ((name, p, layout) for name, p, layout in named_layouts(module) if layout.tied_replica or layout.tied_owner)
    found = ((name, p, groups[layout.tied_over]) for name, p, layout in tied)
    return [(name, p, group) for name, p, group in found if group is not None]


def _all_reduce_coalesced(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    tensors = list(tensors)
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))
