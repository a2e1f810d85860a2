"""Full attention over context ranks, compared with one GPU that attends alone, and with torch's context parallelism.

A pass is forward and backward of one layer's attention, timed from a barrier until the slowest rank has finished. Torch's
(`torch.distributed.tensor.experimental.context_parallel`, which torchtitan uses) balances the load by the same cut of the sequence,
and hands keys and values around a ring or gathers them. Its attention is torch's own (`scaled_dot_product_attention`), so between
its two forms only the exchange differs. Its tokens lie in its balanced order from the beginning; ours lie in contiguous spans and
queries are dealt out within the pass.

    python benchmarks/full_attention.py [--tokens 65536] [--repetitions 5] [--warm-up 2]
    python benchmarks/full_attention.py --tiny [--ranks 2]     # on a CPU, without torch's; writes nothing

Every visible GPU is a context rank. The gate: outputs and gradients of all ranks against one rank's, which attends to the whole
sequence with the same kernels in bfloat16, and torch's against the same.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Report
from torch import Tensor

from baton.kernels.window_attention.recurrence import FullAttention
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.context_parallel import ContextLink, add_gather
from baton.parallel.state_passing import run_recurrence

SIZES = ((16, 16, 128), (32, 32, 64), (16, 4, 128))
"""Heads, key heads and channels of a head. Torch's exchange takes no grouped heads."""
TINY = ((4, 2, 8),)
LIMIT = 1e-2
"""Of ||a - b|| / ||b||, bfloat16: a key's gradient is a sum of two ranks' rounded parts."""
TORCH = {"ring": "alltoall", "gather": "allgather"}
NAMES = ("y", "dq", "dk", "dv")


class Ranked:
    """One size on this rank: its span of the sequence, and the forms of a pass. Shapes: [1, tokens, heads, channels]."""

    def __init__(self, mesh: meshes.Mesh, heads: int, groups: int, dim: int, tokens: int) -> None:
        assert mesh.link is not None
        self.mesh, self.link, self.ranks, self.tokens = mesh, mesh.link, mesh.layout.context, tokens
        g = torch.Generator(mesh.device).manual_seed(1)
        shapes = [(1, self.ranks * tokens, n, dim) for n in (heads, groups, groups, heads)]
        *self.whole, self.dy = [torch.randn(shape, generator=g, device=mesh.device).to(torch.bfloat16) for shape in shapes]
        self.pos = torch.arange(self.ranks * tokens, device=mesh.device, dtype=torch.int32)[None]
        self.itself = ContextLink(0, [mesh.rank], mesh.device)

    def pass_over(self, link: ContextLink | None, at: slice) -> list[Tensor]:
        """y, dq, dk, dv of the tokens of a slice."""
        inputs = tuple(x[:, at].detach().requires_grad_() for x in self.whole)
        y, _ = run_recurrence(link, FullAttention(), inputs, self.pos[:, at], None, "attention", need_final_state=False)
        return [y.detach(), *torch.autograd.grad(y, inputs, self.dy[:, at])]

    def ours(self) -> list[Tensor]:
        return self.pass_over(self.link, slice(self.link.rank * self.tokens, (self.link.rank + 1) * self.tokens))

    def alone(self) -> list[Tensor]:
        """The whole sequence on every rank, each for itself."""
        return self.pass_over(None, slice(None))

    def of_torch(self, form: str, expected: list[Tensor], warm_up: int, repetitions: int) -> tuple[dict[str, float], list[float]]:
        """Errors and times of torch's context parallelism."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(TORCH[form])
        ranks = init_device_mesh(self.mesh.device.type, (self.ranks,))
        # transposed: torch's attention has heads before tokens
        own = [x.transpose(1, 2).contiguous() for x in (*self.whole, self.dy)]
        with context_parallel(ranks, buffers=own, buffer_seq_dims=[2] * 4, no_restore_buffers=set(own)):

            def run() -> list[Tensor]:
                q, k, v = (x.detach().requires_grad_() for x in own[:3])
                y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                return [y.detach(), *torch.autograd.grad(y, (q, k, v), own[3])]

            errors = self.errors(expected, [x.transpose(1, 2) for x in run()], self.order())
            return errors, self.timed(run, warm_up, repetitions)

    def order(self) -> Tensor:
        """Tokens of this rank in torch's balanced order: the pieces r and 2 P - 1 - r of 2 P."""
        half, r = self.tokens // 2, self.link.rank
        pieces = torch.arange(self.ranks * self.tokens, device=self.mesh.device).view(2 * self.ranks, half)
        return torch.cat([pieces[r], pieces[2 * self.ranks - 1 - r]])

    def errors(self, expected: list[Tensor], found: list[Tensor], at: Any) -> dict[str, float]:
        """Of all ranks' rows together."""
        result = {}
        for name, x, y in zip(NAMES, found, expected, strict=True):
            squares = torch.stack([norm(x - y[:, at]), norm(y[:, at])]).square()
            dist.all_reduce(squares)
            result[name] = float((squares[0] / squares[1]).sqrt())
        return result

    def timed(self, run: Callable[[], Any], warm_up: int, repetitions: int) -> list[float]:
        """Milliseconds from a barrier to the slowest rank's end, of each repetition."""
        ms = []
        for number in range(warm_up + repetitions):
            dist.barrier()
            synchronize(self.mesh)
            began = time.perf_counter()
            run()
            synchronize(self.mesh)
            took = torch.tensor([1e3 * (time.perf_counter() - began)], device=self.mesh.device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= warm_up:
                ms.append(float(took))
        return ms


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def synchronize(mesh: meshes.Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()


def rank_main(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    """One rank, all sizes; the first one writes what was found of each as soon as it is known."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", rank)
    mesh = meshes.initialize(LayoutConfig(context=ranks), device=device, rank=rank, store=dist.FileStore(f"{folder}/store", ranks))
    assert mesh.link is not None
    add_gather(mesh.link, mesh.layout)
    for number, (heads, groups, dim) in enumerate(TINY if arguments.tiny else SIZES):
        ranked, steps = Ranked(mesh, heads, groups, dim, arguments.tokens), (arguments.warm_up, arguments.repetitions)
        expected, own = ranked.alone(), slice(rank * arguments.tokens, (rank + 1) * arguments.tokens)
        errors = {"ours": ranked.errors(expected, ranked.ours(), own)}
        ms = dict[str, list[float]]()
        for name, run in (("ours", ranked.ours), ("alone", ranked.alone)):
            ms[name] = ranked.timed(run, *steps)
        if heads == groups and not arguments.tiny:
            for form in TORCH:
                errors[form], ms[form] = ranked.of_torch(form, expected, *steps)
        if rank == 0:
            torch.save({"errors": errors, "ms": ms}, Path(folder, f"{number}.pt"))
        del ranked, expected
        if not arguments.tiny:
            torch.cuda.empty_cache()
    meshes.shutdown()


def show(report: Report, size: tuple[int, int, int], ranks: int, found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Gates, then rows."""
    heads, groups, dim = size
    case = f"full_attention {ranks} x {arguments.tokens}, {heads} heads of {dim}" + (f", {groups} key heads" * (groups != heads))
    for name, errors in found["errors"].items():
        said = ", ".join(f"{key} {value:.1e}" for key, value in errors.items())
        who = "all ranks'" if name == "ours" else f"torch's ({name})"
        report.gate(
            f"{case} {name}", all(error <= LIMIT for error in errors.values()), f"{who} y and gradients, one rank's: {said}"
        )
    ms = {name: statistics.median(times) for name, times in found["ms"].items()}
    for name, times in found["ms"].items():
        report.say(f"  {name:<8} {ms[name]:9.2f} ms ({min(times):.2f} to {max(times):.2f})")
    row = lambda peer, of, gate: report.row(case, "pass ms", ms["ours"], peer, of, gate=gate, higher_is_better=False)  # noqa: E731
    row(f"one GPU's time / {ranks}", ms["alone"] / ranks, f"{case} ours")
    for form in TORCH:
        if form in ms:
            row(f"torch's context_parallel, {form}", ms[form], f"{case} {form}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, help="of a rank (default: 65536)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="with --tiny; else all GPUs")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or (48 if arguments.tiny else 65536)
    ranks = arguments.ranks if arguments.tiny else torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"{ranks} GPU is visible, and an exchange takes 2; --tiny runs on a CPU")
    os.environ.setdefault("OMP_NUM_THREADS", "1" if arguments.tiny else "2")
    device = None if arguments.tiny else f"{ranks} x {torch.cuda.get_device_name()}"
    report = Report("full_attention", device, keep=not arguments.tiny)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(rank_main, (ranks, folder, arguments), nprocs=ranks)
        finally:  # what is known is kept, should a later size fail
            for number, size in enumerate(TINY if arguments.tiny else SIZES):
                if (path := Path(folder, f"{number}.pt")).exists():
                    show(report, size, ranks, torch.load(path), arguments)
    report.save()


if __name__ == "__main__":
    main()
