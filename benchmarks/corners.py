"""The corners of the equality grid on GPUs: a model of 100M parameters in bfloat16, 20 steps with each layout, compared with one
GPU.

Rounding makes two runs diverge, so losses cannot be equal. A control run on one GPU, which differs only in the micro-batch size,
shows how much: a layout passes if its first loss equals the one GPU's to 1e-3 and its later losses stay within a few times the
control's difference.

    python benchmarks/corners.py [--mixers mamba,lattice] [--steps 20] [--ranks 4] [--folder FOLDER]

With more ranks than GPUs the ranks share them in turns. NCCL then counts every rank as a host of its own and sends through sockets;
the communicators, the collectives and their order are those of as many GPUs. A FOLDER keeps each run's losses: what is there
already is not run again.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from report import Report

from baton.data_pipeline.packing import Batch
from baton.launcher.config import RunConfig
from baton.launcher.planner.memory import Arithmetic
from baton.models.config import ModelConfig
from baton.models.settings import kinds
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.training.build import build, make_deterministic
from baton.training.config import OptimizerConfig, ScheduleConfig, TrainingConfig
from baton.training.lr_schedule import learning_rates
from baton.training.step.executor import StepExecutor

FIRST, DRIFT, FLOOR = 1e-3, 4.0, 1e-3  # of the first loss; times the control's distance, or this distance
PARAMETERS, WIDTH, VOCABULARY, SEQUENCE_LENGTH, SEQUENCES = 100e6, 1536, 8192, 256, 2
CORNERS = (
    {"context": 4}, {"tensor": 4}, {"tensor": 2, "context": 2}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, "context": 2},
)  # fmt: skip
# widths that four tensor ranks share, windows that fit a quarter of the context
SETTINGS: dict[str, dict[str, Any]] = {
    "attention": {"window": 64},
    "bmojo": {"window": 64, "eidetic": 16},
    "gsa": {"head_dim": 384},
    "retnet": {"d_key": 192},
    "gated_delta_net": {"heads": 4, "d_key": 256, "d_value": 512},
}


def run_of(mixer: str, layout: dict[str, int], micro_batch_size: int = 1) -> RunConfig:
    """A model of about PARAMETERS: layers of the mixer and an MLP."""
    names = {"swiglu": {}} if mixer == "swiglu" else {mixer: SETTINGS.get(mixer, {}), "swiglu": {}}
    steps = TrainingConfig(
        steps=1000,
        sequence_length=SEQUENCE_LENGTH,
        global_batch_tokens=SEQUENCES * SEQUENCE_LENGTH,
        micro_batch_size=micro_batch_size,
        compute_dtype="bfloat16",
        optimizer=OptimizerConfig(lr=3e-4, clip_norm=1.0),
        schedule=ScheduleConfig(kind="constant", warmup_steps=10),
    )

    def of(layers: int) -> RunConfig:
        model = ModelConfig(d_model=WIDTH, n_layers=layers, pattern=("+".join(names),), mixers=names, vocab_size=VOCABULARY)
        return RunConfig(name="corners", model=model, training=steps)

    nearest = min(map(of, range(2, 16)), key=lambda run: abs(Arithmetic(run).parameter_count - PARAMETERS))
    return nearest.model_copy(update={"layout": LayoutConfig(**layout)})


PAIRS = ({"context": 2}, {"tensor": 2}, {"pipeline": 2})


def layouts_of(mixer: str, ranks: int) -> Iterator[dict[str, int]]:
    """The corners, with two tensor ranks where four do not divide; with two ranks what two can do."""
    for corner in CORNERS if ranks >= 4 else PAIRS:
        layout = corner
        while True:
            try:
                run_of(mixer, layout).check()
            except Exception as error:
                if getattr(error, "exit_status", None) != 2 or layout.get("tensor", 1) < 4:
                    raise
                layout = {**layout, "tensor": layout["tensor"] // 2}
                continue
            yield layout
            break


def batches(step: int, run: RunConfig, mesh: meshes.Mesh) -> list[Batch[torch.Tensor]]:
    """Sequences whose next token is mostly a function of the last, in packed documents; this rank's span of each."""
    g = torch.Generator().manual_seed(step)
    noise = torch.randint(VOCABULARY, (SEQUENCES, SEQUENCE_LENGTH + 1), generator=g)
    keep = torch.rand(SEQUENCES, SEQUENCE_LENGTH + 1, generator=g) < 0.9
    tokens = noise.clone()
    for t in range(1, SEQUENCE_LENGTH + 1):
        tokens[:, t] = torch.where(keep[:, t], (5 * tokens[:, t - 1] + 7) % 97, noise[:, t])
    starts = torch.rand(SEQUENCES, SEQUENCE_LENGTH, generator=g) < 0.01
    at = torch.arange(SEQUENCE_LENGTH).expand(SEQUENCES, -1)
    pos = at - torch.where(starts, at, 0).cummax(dim=1).values
    size = SEQUENCE_LENGTH // mesh.layout.context
    span = slice(mesh.context_rank * size, (mesh.context_rank + 1) * size)
    parts = (tokens[:, :-1][:, span], tokens[:, 1:][:, span], pos.to(torch.int32)[:, span])
    rows = torch.arange(SEQUENCES).split(run.training.micro_batch_size)
    return [Batch(*(x[r].contiguous().to(mesh.device) for x in parts)) for r in rows]


def losses(run: RunConfig, mesh: meshes.Mesh, steps: int) -> list[float]:
    train_state = build(run.model, run.training, mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    return [executor.step(batches(n, run, mesh), learning_rates(n, run.training)).loss for n in range(steps)]


def rank_main(rank: int, ranks: int, folder: str, mixers: list[str], steps: int) -> None:
    """One rank's part: the one-GPU runs of some mixers, then every layout with the others."""
    gpus = torch.cuda.device_count()
    if ranks > gpus:  # NCCL refuses two ranks of a host on one GPU
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    make_deterministic(run_of(mixers[0], {}).training)

    def world(name: str, layout: LayoutConfig, own_rank: int) -> meshes.Mesh:
        store = torch.distributed.FileStore(f"{folder}/{name}.{os.getppid()}.store", layout.world_size)
        return meshes.initialize(layout, device=device, rank=own_rank, store=store)

    def path(name: str, mixer: str) -> Path:
        return Path(folder, f"{mixer}--{name}.json")

    def write(name: str, mixer: str, values: list[float]) -> None:
        path(name, mixer).write_text(json.dumps(values))
        print(f"{mixer} on {name}: {values[0]:.5f} .. {values[-1]:.5f}", flush=True)

    mesh = world(f"alone-{rank}", LayoutConfig(), 0)
    layouts = all_layouts(mixers, ranks)
    missing = {title(layout): [mixer for mixer in mixers if not path(title(layout), mixer).exists()] for layout in layouts}
    references = [(mixer, *one) for mixer in mixers for one in (("one GPU", 1), ("control", SEQUENCES))]
    for mixer, name, micro_batch_size in references[rank::ranks]:
        if not path(name, mixer).exists():
            write(name, mixer, losses(run_of(mixer, {}, micro_batch_size), mesh, steps))
    meshes.shutdown()
    for layout in layouts:
        config = LayoutConfig(**layout)
        if rank >= config.world_size:
            continue
        mesh = world(title(layout), config, rank)
        for mixer in mixers:
            if layout in layouts_of(mixer, ranks) and mixer in missing[title(layout)]:
                found = losses(run_of(mixer, layout), mesh, steps)
                if rank == 0:
                    write(title(layout), mixer, found)
        meshes.shutdown()


def all_layouts(mixers: list[str], ranks: int) -> list[dict[str, int]]:
    """The layouts of all mixers without repetition, in the order of the corners."""
    found: list[dict[str, int]] = []
    for layout in (layout for mixer in mixers for layout in layouts_of(mixer, ranks)):
        if layout not in found:
            found.append(layout)
    return found


def title(layout: dict[str, int]) -> str:
    return " x ".join(f"{name} {n}" for name, n in layout.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixers", default=",".join(kinds()))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--folder", help="an existing one that keeps each run's losses")
    arguments = parser.parse_args()
    mixers, gpus, ranks = arguments.mixers.split(","), torch.cuda.device_count(), arguments.ranks
    report = Report("corners", device=f"{ranks} ranks on {gpus} x {torch.cuda.get_device_name()}")
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        mp.spawn(rank_main, (ranks, folder, mixers, arguments.steps), nprocs=ranks)
        found = {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}
    failed = []
    for mixer in mixers:
        count = Arithmetic(run_of(mixer, {})).parameter_count
        alone, control = found[f"{mixer}--one GPU"], found[f"{mixer}--control"]
        allowed = max(DRIFT * distance(control, alone), FLOOR)
        report.say(f"{mixer}: {count:,} parameters, loss {alone[0]:.4f} to {alone[-1]:.4f}; control {distance(control, alone):.1e}")
        for layout in layouts_of(mixer, ranks):
            values = found[f"{mixer}--{title(layout)}"]
            first, later = abs(values[0] - alone[0]) / alone[0], distance(values, alone)
            case = f"{mixer}, {title(layout)}"
            detail = f"first loss to {first:.1e} <= {FIRST:g}, {len(values)} losses to {later:.1e} <= {allowed:.1e}"
            if first <= FIRST and later <= allowed:
                report.gate(case, True, detail)
                report.row(case, "last loss", values[-1], "one GPU", alone[-1], gate=case, higher_is_better=False)
            else:
                failed.append(case)
                report.say(f"gate {case}: {detail}: FAILED")
    report.say(f"beyond the limits: {failed or 'none'}")
    report.save()
    if failed:
        raise SystemExit(1)


def distance(values: list[float], others: list[float]) -> float:
    """Largest relative difference between two runs' losses."""
    return max(abs(a - b) / b for a, b in zip(values, others, strict=True))


if __name__ == "__main__":
    main()
