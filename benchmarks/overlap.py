"""Messages of sequence ranks beside their computation: a trace of one forward and backward pass on GPUs, and what overlaps in it.

The one thing to know: a receive is a kernel that spins until its message is there, on a stream of its own. Where it runs while
kernels of the model run, the message costs nothing; where it runs alone, the rank waits. Times are of the second rank, which has
neighbours on both sides (of the last one, with two). The beginning of the wavefront, where a rank waits for its first State, is
part of what is exposed.

    python benchmarks/overlap.py [--trace FOLDER]
"""

import argparse
import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from report import Report

from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.layout import initialize_parameters

MIXERS: dict[str, dict[str, Any]] = {"gla": {}, "mamba": {}, "gsa": {"head_dim": 256}, "bmojo": {"window": 128, "eidetic": 16}}
WIDTH, LAYERS, TOKENS, PASSES = 1024, 4, 1024, 3
NCCL = "nccl"

Span = tuple[float, float]


def rank_main(rank: int, ranks: int, folder: str, mixers: list[str]) -> None:
    """A pass of every mixer, profiled after others that warm up."""
    device = torch.device("cuda", rank)
    store = torch.distributed.FileStore(f"{folder}/store", ranks)
    mesh = meshes.initialize(LayoutConfig(sequence=ranks), device=device, rank=rank, store=store)
    for mixer in mixers:
        config = ModelConfig(
            d_model=WIDTH, n_layers=LAYERS, pattern=(f"{mixer}+swiglu",), mixers={mixer: MIXERS[mixer]}, vocab_size=1024
        )
        with device:
            model = LanguageModel(config, compute_dtype=torch.bfloat16, link=mesh.link)
            tokens = torch.randint(1024, (1, TOKENS), generator=torch.Generator(device).manual_seed(rank))
            pos = torch.arange(rank * TOKENS, (rank + 1) * TOKENS, dtype=torch.int32)[None]
        initialize_parameters(model, 0, 0, 1)

        def run(model: LanguageModel = model, tokens: torch.Tensor = tokens, pos: torch.Tensor = pos) -> None:
            hidden, _ = model(tokens, pos)
            model.loss(hidden, tokens).backward()
            mesh.link.wait()

        for _ in range(PASSES):
            run()
        torch.cuda.synchronize()
        torch.distributed.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        profile.export_chrome_trace(f"{folder}/{mixer}-{rank}.json")
    meshes.shutdown()


def union(spans: list[Span]) -> list[Span]:
    """The same time in spans that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def common(ours: list[Span], others: list[Span]) -> float:
    """Time in both."""
    total, n = 0.0, 0
    for begin, end in ours:
        while n and others[n - 1][1] > begin:
            n -= 1
        while n < len(others) and others[n][0] < end:
            total += max(0.0, min(end, others[n][1]) - max(begin, others[n][0]))
            n += 1
    return total


def length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--trace", help="folder for the traces, as Chrome and Perfetto read them")
    arguments = parser.parse_args()
    ranks, mixers = torch.cuda.device_count(), arguments.mixers.split(",")
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    report = Report("overlap", device=f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    report.say(
        f"{LAYERS} layers of width {WIDTH}, {TOKENS} tokens on each of {ranks} sequence ranks, bfloat16, forward and backward"
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, folder, mixers), nprocs=ranks)
        for mixer in mixers:
            path = Path(folder, f"{mixer}-1.json")
            kernels = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
            spans = {
                kind: [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in kernels if (NCCL in e["name"].lower()) == kind]
                for kind in (True, False)
            }
            streams = {
                kind: {e["args"]["stream"] for e in kernels if (NCCL in e["name"].lower()) == kind} for kind in (True, False)
            }
            messages, work = union(spans[True]), union(spans[False])
            beside, whole = common(messages, work), length(union(spans[True] + spans[False]))
            report.gate(
                mixer,
                not streams[True] & streams[False] and beside > 0,
                f"{len(spans[True])} message kernels on streams of their own, some while the model's run",
            )
            exposed = length(messages) - beside
            report.row(
                mixer, "ms of a pass, messages alone", exposed / 1e3, "the pass", whole / 1e3, gate=mixer, higher_is_better=False
            )
            report.say(
                f"  {length(work) / 1e3:.1f} ms of computation; messages {length(messages) / 1e3:.1f} ms, of which "
                f"{beside / 1e3:.1f} ms beside it"
            )
            if arguments.trace:
                Path(arguments.trace).mkdir(parents=True, exist_ok=True)
                with path.open("rb") as source, gzip.open(Path(arguments.trace, f"{path.name}.gz"), "wb") as target:
                    shutil.copyfileobj(source, target)
    report.save()


if __name__ == "__main__":
    main()
