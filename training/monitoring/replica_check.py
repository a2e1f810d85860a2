"""Checks that ranks which hold replicas of a tensor hold the same bits, by comparing fingerprints.

ZeRO gathers a parameter from its owner after every update, so data ranks cannot drift apart. But each tensor rank owns its
copy of a replicated parameter: copies that differ once go on drifting apart under a loss that looks healthy, and a
checkpoint, which stores tensor rank 0's copy, would hide it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from baton.parallel.mesh import Mesh
from baton.parallel.param_layout import named_layouts
from baton.parallel.replicated_parameters import tied_parameters
from baton.training.build import TrainState
from baton.training.errors import RunError

CHUNK = 1 << 20
"""Elements fingerprinted at a time: what a fingerprint takes in memory is 24 bytes for each of them."""

# odd 64-bit constants (as int64) of splitmix64: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


@dataclass(frozen=True)
class ReplicaMismatch:
    """A tensor whose replicas differ. rank_groups: ranks that agree with each other, largest group first, then by lowest rank."""

    name: str
    rank_groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        first, *others = self.rank_groups
        if len(first) > len(others[0]):
            odd = sorted(rank for side in others for rank in side)
            return f"{_ranks(odd)} {'disagrees' if len(odd) == 1 else 'disagree'} with {_ranks(first)}"
        return f"{' against '.join(_ranks(side) for side in self.rank_groups)}, and no majority says which is right"


def fingerprint(tensor: Tensor) -> Tensor:
    """The bits of a tensor of any shape and dtype as one int64 [] on its device; equal bits have equal fingerprints.

    Modulo 2^64, the sum over a chunk's elements of bits * multiplier(position), combined over chunks by Horner's rule. All
    multipliers are odd, so a change of one element, in any number of bits, always changes the fingerprint; other changes go
    unnoticed with probability of about 2^-32 or less. Integer sums do not depend on the order, so the fingerprint does not
    vary from run to run.
    """
    bits = tensor.detach().reshape(-1)
    if bits.numel() * bits.element_size() % 4:
        bits = bits.view(torch.uint8)
    else:
        aligned = bits.storage_offset() * bits.element_size() % 4 == 0
        bits = (bits if aligned else bits.clone()).view(torch.int32)
    multipliers = _multipliers(min(CHUNK, bits.numel()), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        total = total * GOLDEN + (chunk * multipliers[: chunk.numel()]).sum()
    return total


def find_mismatches(
    names: Sequence[str], split: Sequence[bool], tensor_ranks: Sequence[int], prints: Sequence[Sequence[int]], first: int = 0
) -> list[ReplicaMismatch]:
    """Mismatches in the order of the names.

    Args:
        names, split: of each tensor; split: tensor ranks hold shards of it, not replicas.
        tensor_ranks: tensor rank of each rank.
        prints: fingerprints `[rank][tensor]`.
        first: global rank of the first row.
    """
    found = []
    for column, (name, is_split) in enumerate(zip(names, split)):
        for place in sorted(set(tensor_ranks)) if is_split else [None]:
            rank_groups: dict[int, list[int]] = {}
            for rank, (own, row) in enumerate(zip(tensor_ranks, prints, strict=True), start=first):
                if place is None or own == place:
                    rank_groups.setdefault(row[column], []).append(rank)
            if len(rank_groups) > 1:
                found.append(ReplicaMismatch(name, _largest_first(rank_groups.values())))
    return found


@torch.no_grad()
def check_replicas(train_state: TrainState, step: int) -> None:
    """Compare all parameters, and AdamW's update counts, over the ranks that must agree. Collective.

    A parameter must agree over the data ranks, and over the tensor ranks unless its layout splits it; an update count over
    all ranks of a stage; a tied replica with its owner. One all-gather of 8 bytes per tensor. step: optimizer steps done,
    for the message.

    Raises:
        RunError: on every rank, naming the first parameter that differs and the ranks outside the majority.
    """
    mesh = train_state.mesh
    if mesh.world_size == 1:
        return
    names, split, prints = [], [], []
    for name, parameter, layout in named_layouts(train_state.model):
        names.append(name)
        split.append(layout.split is not None)
        prints.append(fingerprint(parameter))
    for what, count in train_state.engine.update_counts().items():
        names.append(f"AdamW's count of updates ({what})")
        split.append(False)
        prints.append(fingerprint(count).to(mesh.device))
    mine = torch.stack([torch.tensor(mesh.tensor_rank, device=mesh.device), *prints])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(mesh.stage_group))]
    dist.all_gather(rows, mine, group=mesh.stage_group)
    table: list[list[int]] = torch.stack(rows).tolist()
    found = find_mismatches(names, split, [row[0] for row in table], [row[1:] for row in table], mesh.pipeline_rank * len(table))
    count = torch.tensor(len(names), device=mesh.device)
    if mesh.pipeline is not None:
        mesh.pipeline.sum(count)
        found = _gather_mismatches(mesh, found + _tied_mismatches(train_state))
    if found:
        raise RunError(
            f"after step {step}: {found[0].name} differs between ranks that must hold the same bits: {found[0]}; tensors that "
            f"differ: {len(found)} of {int(count)}. The difference was not saved: start the run again and it "
            f"resumes from its last checkpoint. If the same rank differs again, suspect its memory or its device"
        )


def _tied_mismatches(train_state: TrainState) -> list[ReplicaMismatch]:
    """Mismatches between the owner of a tied parameter and its replicas on other stages."""
    found = []
    for name, parameter, group in tied_parameters(train_state.model, train_state.mesh):
        ranks = dist.get_process_group_ranks(group)
        prints = [torch.empty((), dtype=torch.int64, device=parameter.device) for _ in ranks]
        dist.all_gather(prints, fingerprint(parameter), group=group)
        by_print: dict[int, list[int]] = {}
        for rank, value in zip(ranks, torch.stack(prints).tolist(), strict=True):
            by_print.setdefault(value, []).append(rank)
        if len(by_print) > 1:
            found.append(ReplicaMismatch(name, _largest_first(by_print.values())))
    return found


def _gather_mismatches(mesh: Mesh, found: list[ReplicaMismatch]) -> list[ReplicaMismatch]:
    """The mismatches that any rank has found, on all ranks, without duplicates, in the order of the ranks."""
    any_found = torch.tensor(len(found), device=mesh.device)
    dist.all_reduce(any_found)
    if not int(any_found):
        return []
    of_ranks: list[list[ReplicaMismatch]] = [[]] * mesh.world_size
    dist.all_gather_object(of_ranks, found)
    return list(dict.fromkeys(difference for rank in of_ranks for difference in rank))


def _largest_first(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(map(tuple, groups), key=lambda side: (-len(side), side)))


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random int64 numbers [count] that depend on the position alone, on any device."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * GOLDEN
    x = (x ^ (x >> 30)) * MIX
    return (x ^ (x >> 31)) | 1


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
