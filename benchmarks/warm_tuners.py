"""Compiles what the autotuners of matrix_gpu.py's peers will try, in many processes at once.

A tuner compiles its configurations one after the other, minutes for flash-linear-attention's gated rules. Here every process calls
the same operators, tries the configurations in an order of its own, and finds in Triton's cache what another has compiled. Nothing
is measured, and no choice is kept: matrix_gpu.py's own tuning, which follows, only measures.

    python benchmarks/warm_tuners.py --only kda,rwkv7 [--processes 12]
"""

import argparse
import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import matrix_gpu
import torch
from triton.runtime import autotuner


def once(call: Callable[[], Any], quantiles: tuple[float, ...] | None = None) -> list[float]:
    """In place of a tuner's benchmark: it has to compile."""
    call()
    return [1.0] * 3


def warm(seed: int, kinds: tuple[str, ...]) -> None:
    """Calls the peers of all cases of these kinds in both directions."""
    shuffle, begin, prune = random.Random(seed).sample, autotuner.Autotuner.__init__, autotuner.Autotuner.prune_configs

    def without_measuring(self: autotuner.Autotuner, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.do_bench = once

    def in_another_order(self: autotuner.Autotuner, arguments: dict[str, Any]) -> list[Any]:
        configs = list(prune(self, arguments))
        return shuffle(configs, len(configs))

    autotuner.Autotuner.__init__, autotuner.Autotuner.prune_configs = without_measuring, in_another_order
    # of a length and a batch that compile as the case's do, but small
    cases = dict.fromkeys(
        replace(case, batch=min(case.batch, 2), length=min(case.length, 2048))
        for case in matrix_gpu.CASES
        if case.kind.startswith(kinds)
    )
    for case in cases:
        _, peer, back = matrix_gpu.peer_of(case)
        if peer is None:
            continue
        leaves = {name: x.detach().requires_grad_() for name, x in matrix_gpu.inputs_of(case, torch.bfloat16).items()}
        y = peer(**leaves)
        if back:
            torch.autograd.grad(y, list(leaves.values()), torch.randn_like(y), allow_unused=True)
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", required=True, help="kinds of matrix_gpu.py, or their beginnings, separated by commas")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    os.environ["FLA_CACHE_RESULTS"] = "0"  # what is chosen without measuring is not to be kept
    spawn = multiprocessing.get_context("spawn")
    kinds = tuple(arguments.only.split(","))
    processes = [spawn.Process(target=warm, args=(seed, kinds)) for seed in range(arguments.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = sum(process.exitcode != 0 for process in processes)
    print(f"{arguments.processes - failed} of {arguments.processes} processes have compiled what tuners try for {arguments.only}")


if __name__ == "__main__":
    main()
