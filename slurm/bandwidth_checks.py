"""Preflight measurements with torch: matmuls, copies, and all-reduces within a node and between nodes.

GPUs must reach a share of the cluster file's rates. CPU nodes are only measured, because other processes may be using them.
"""

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from baton.launcher.cluster import Cluster
from baton.launcher.processes import listen
from baton.launcher.run_directory import write_whole
from baton.slurm.errors import UnfitNode


def of_node(cluster: Cluster, measured: dict[str, Any]) -> None:
    """Measures each GPU's matmuls and copies and the node's all-reduce; on a CPU node, a matmul. Raises UnfitNode below the
    limits."""
    torch.set_num_threads(1)
    slurm = cluster.slurm
    assert slurm is not None
    if not slurm.gpus:
        measured["matmul_tflops"] = matmul_tflops(torch.device("cpu"), torch.float32, 384, repeats=3)
        return
    if not torch.cuda.is_available() or torch.cuda.device_count() < cluster.gpus_per_node:
        raise UnfitNode(f"torch sees {torch.cuda.device_count()} GPUs, and gpus_per_node={cluster.gpus_per_node}")
    limits = slurm.preflight
    devices = [torch.device("cuda", number) for number in range(cluster.gpus_per_node)]
    measured["matmul_tflops"] = rates = [matmul_tflops(device, torch.bfloat16, 8192, repeats=10) for device in devices]
    wanted = limits.matmul_share * cluster.matmul_tflops.bfloat16
    for number, rate in enumerate(rates):
        if rate < wanted:
            raise UnfitNode(f"GPU {number} reaches {rate:.0f} TFLOP/s in matrix products, and should {wanted:.0f}")
    measured["copy_gb_s"] = copies = [copy_gb_s(device) for device in devices]
    for number, rate in enumerate(copies):
        if rate < limits.copy_gb_s:
            raise UnfitNode(f"GPU {number} copies {rate:.1f} GB/s from and to the host, and should {limits.copy_gb_s:g}")
    if len(devices) > 1:
        measured["in_node_gb_s"] = rate = in_node_gb_s(devices)
        if rate < (wanted := limits.all_reduce_share * cluster.bandwidth_gb_s.in_node):
            raise UnfitNode(f"its GPUs all-reduce at {rate:.0f} GB/s, and should at {wanted:.0f}")


def _best(work: Callable[[], object], device: torch.device | None, repeats: int) -> float:
    """Minimum time of `repeats` calls in seconds, after one warm-up call."""

    def finish() -> None:
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(repeats + 1):
        finish()
        began = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int, *, repeats: int) -> float:
    """Rate of a matmul of two [size, size] matrices in TFLOP/s."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: torch.mm(a, b), device, repeats) / 1e12


def copy_gb_s(device: torch.device) -> float:
    """Rate of copies of 256 MiB between pinned host memory and the device in GB/s; the slower direction."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    ways = (lambda: there.copy_(host, non_blocking=True), lambda: host.copy_(there, non_blocking=True))
    return min(host.numel() / _best(way, device, 3) / 1e9 for way in ways)


def in_node_gb_s(devices: list[torch.device]) -> float:
    """Bandwidth per GPU of an all-reduce of 256 MiB over n GPUs in GB/s, where each sends 2 (n - 1) / n of the bytes, as in a
    ring."""
    tensors = [torch.zeros(64 << 20, device=device) for device in devices]

    def work() -> None:
        torch.cuda.nccl.all_reduce(tensors)
        for device in devices:
            torch.cuda.synchronize(device)

    return _sent(tensors[0], len(devices)) / _best(work, None, 5) / 1e9


def _sent(tensor: torch.Tensor, members: int) -> float:
    return tensor.numel() * tensor.element_size() * 2 * (members - 1) / members


class Meeting:
    """The nodes that passed their own checks, which they announce by files in the attempt's folder.

    attempt: the attempt's folder.
    nodes: the job's nodes.
    own: this node.
    patience: seconds to wait for nodes that have not announced themselves.
    """

    def __init__(self, attempt: Path, nodes: list[str], own: str, patience: float) -> None:
        self.folder, self.own, self.patience = attempt / "preflight", own, patience
        self.folder.mkdir(exist_ok=True)
        write_whole(self.folder / f"{own}.here", own)
        self.members = self._agree(nodes, own)

    def _agree(self, nodes: list[str], own: str) -> list[str]:
        """The first node that has announced itself writes the list of members; the others wait for it, twice as long, because it
        may have announced itself later than they have."""
        list_file, began = self.folder / "members.json", time.monotonic()
        while not list_file.exists():
            here = [node for node in nodes if (self.folder / f"{node}.here").exists()]
            waited = time.monotonic() - began
            if here[0] == own and (len(here) == len(nodes) or waited > self.patience):
                write_whole(list_file, json.dumps(here))
            elif waited > 2 * self.patience:
                raise UnfitNode(f"{here[0]} passed its own checks, and then did not respond")
            time.sleep(0.1)
        members: list[str] = json.loads(list_file.read_text(encoding="utf-8"))
        if own not in members:
            raise UnfitNode("was too late for the checks between nodes")
        return members


def between_nodes(cluster: Cluster, met: Meeting, measured: dict[str, Any]) -> None:
    """Compares the nodes' clocks and measures the all-reduce between nodes, with one process and one GPU per node."""
    slurm, own, members = cluster.slurm, met.members.index(met.own), met.members
    assert slurm is not None
    if len(members) == 1:
        return
    where = met.folder / "rendezvous.json"
    listener = None
    if own == 0:
        listener = listen("", slurm.ports)
        write_whole(where, json.dumps(listener.getsockname()[1]))
    deadline = time.monotonic() + met.patience
    while not where.exists():
        if time.monotonic() > deadline:
            raise UnfitNode(f"{members[0]} did not publish its rendezvous port")
        time.sleep(0.1)
    port, timeout = json.loads(where.read_text(encoding="utf-8")), datetime.timedelta(seconds=met.patience)
    store = dist.TCPStore(members[0], port, len(members), is_master=own == 0, timeout=timeout,
                          master_listen_fd=listener.fileno() if listener is not None else None)  # fmt: skip
    device = torch.device("cuda", 0) if slurm.gpus else torch.device("cpu")
    backend = "nccl" if slurm.gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=own, world_size=len(members), timeout=timeout)
    tensor = torch.zeros((64 << 20) if slurm.gpus else (1 << 20), device=device)
    dist.all_reduce(tensor)  # connects all nodes, and synchronizes them up to a message's latency
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clocks: list[Any] = [None] * len(members)
    dist.barrier()
    dist.all_gather_object(clocks, time.time())
    measured["clock_s"] = clocks[own] - clocks[0]
    seconds = _best(lambda: dist.all_reduce(tensor), device, 3)
    measured["between_nodes_gb_s"] = rate = _sent(tensor, len(members)) / seconds / 1e9
    wanted = slurm.preflight.all_reduce_share * cluster.bandwidth_gb_s.between_nodes
    # reported only: in a ring all nodes are as slow as the slowest link, so the slow node is not known
    if slurm.gpus and rate < wanted:
        measured["slow"] = f"the nodes all-reduce at {rate:.1f} GB/s, and should at {wanted:.1f}"
    dist.barrier()
