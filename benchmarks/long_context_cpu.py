"""Exact backpropagation through time on a CPU: memory and time per token from 64k to 1M tokens, for every mixer.

Memory may grow with the sequence length only by what is stored at segment boundaries: a State per boundary, and per token its id,
label, position and B'MOJO's score. Each measurement runs in its own process and is the peak resident memory of one step, after a
warm-up step with few segments. The gate requires that the longest sequence's peak is at most the shortest one's plus 5 % plus those
boundaries. Times are measured one process after the other.

    python benchmarks/long_context_cpu.py [--mixers mamba,lattice] [--tokens 65536,262144,1048576]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Report

SEGMENT, WIDTH, LAYERS, WARM_UP, ALLOWED = 4096, 32, 1, 3, 1.05
# others are as the tests' small ones
SETTINGS = {
    "mamba2": {"head_dim": 8, "d_state": 8},
    "bmojo": {"heads": 4, "kv_heads": 4, "head_dim": 8, "window": 128, "fading_tokens": 16, "eidetic": 16},
}


def measure(mixer: str, tokens: int) -> dict[str, float]:
    """In this process: peak resident bytes of a step, seconds per token, bytes of a border's States and of what a token leaves."""
    import torch

    from baton.data_pipeline.packing import Batch
    from baton.models.config import ModelConfig
    from baton.models.settings import kinds
    from baton.parallel import mesh as meshes
    from baton.parallel.config import LayoutConfig
    from baton.parallel.pipeline import StepSchedule
    from baton.training.build import build
    from baton.training.config import TrainingConfig
    from baton.training.optimizer_config import OptimizerConfig
    from baton.training.step.executor import StepExecutor

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        mesh = meshes.initialize(LayoutConfig(), device=torch.device("cpu"), rank=0, store=store)
    settings = kinds()[mixer](**SETTINGS[mixer]) if mixer in SETTINGS else kinds()[mixer].small()
    model = ModelConfig(d_model=WIDTH, n_layers=LAYERS, vocab_size=64, pattern=[mixer], mixers={mixer: settings})
    training = TrainingConfig(
        steps=1,
        sequence_length=tokens,
        global_batch_tokens=tokens,
        compute_dtype="float32",
        bptt={"mode": "exact", "segment": SEGMENT},
        optimizer=OptimizerConfig(lr=1e-3),
    )
    train_state = build(model, training, mesh)

    def step(count: int) -> float:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(64, (1, count), generator=generator)
        # documents of a quarter of a segment to the whole context, one after the other
        pos = torch.arange(count, dtype=torch.int32)[None] % max(count // 2 + 1, SEGMENT)
        segments = count // SEGMENT
        executor = StepExecutor(train_state.model, train_state.engine, mesh, schedule=StepSchedule(segments, segments))
        begin = time.perf_counter()
        executor.step([Batch(ids, ids.roll(-1, 1), pos)], 1e-3)
        return time.perf_counter() - begin

    step(WARM_UP * SEGMENT)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    seconds = step(tokens)
    peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    border = sum(leaf.nbytes(1) for leaves in train_state.model.state_specs.values() for leaf in leaves)
    scores = 4 * LAYERS if mixer == "bmojo" else 0
    meshes.shutdown()
    return {"peak": peak * 1024, "seconds": seconds / tokens, "border": border, "token": 8 + 8 + 8 + 4 + scores}


def main() -> None:
    from baton.models.settings import kinds

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixers", default=",".join(k for k, settings in kinds().items() if not settings.small().state_grows))
    parser.add_argument("--tokens", default="65536,262144,1048576")
    parser.add_argument("--measure", nargs=2, metavar=("MIXER", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure[0], int(arguments.measure[1]))))
        return
    report = Report("long_context_cpu")
    contexts = [int(n) for n in arguments.tokens.split(",")]
    report.say(f"{LAYERS} layers of width {WIDTH}, float32, one thread, segments of {SEGMENT} tokens; contexts {contexts}")
    ratios = []
    for mixer in arguments.mixers.split(","):
        found = {}
        for tokens in contexts:
            command = [sys.executable, __file__, "--measure", mixer, str(tokens)]
            # glibc raises its threshold as it goes, and what is kept between large tensors on its heap then keeps their memory
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MALLOC_MMAP_THRESHOLD_": "65536",
                "MALLOC_TRIM_THRESHOLD_": "65536",
            }
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            found[tokens] = json.loads(done.stdout.splitlines()[-1])
            one = found[tokens]
            report.say(f"{mixer} {tokens}: {one['peak'] / 2**20:.1f} MiB, {one['seconds'] * 1e6:.1f} us per token")
        short, long = found[contexts[0]], found[contexts[-1]]
        grown = (contexts[-1] - contexts[0]) * (long["token"] + long["border"] / SEGMENT)
        detail = (
            f"peak {long['peak'] / 2**20:.1f} MiB <= {ALLOWED} x {short['peak'] / 2**20:.1f} + {grown / 2**20:.1f} kept at borders"
        )
        report.gate(mixer, long["peak"] <= ALLOWED * short["peak"] + grown, detail)
        name = f"{contexts[0]} tokens"
        metric = f"MiB, {contexts[-1]} tokens"
        report.row(mixer, metric, long["peak"] / 2**20, name, short["peak"] / 2**20, gate=mixer, higher_is_better=False)
        report.row(
            mixer,
            f"us per token, {contexts[-1]} tokens",
            long["seconds"] * 1e6,
            name,
            short["seconds"] * 1e6,
            gate=mixer,
            higher_is_better=False,
        )
        ratios.append(long["seconds"] / short["seconds"])
    report.say(f"time per token, longest over shortest context: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")
    report.save()


if __name__ == "__main__":
    main()
