"""On GPUs: how long a save stops training, loads by another layout, and what deterministic kernels cost.

    python benchmarks/checkpoint_gpu.py stall --model mamba-1.4b                                      # one GPU
    torchrun --nproc-per-node 4 benchmarks/checkpoint_gpu.py layouts --model mamba-130m --folder DIR  # every layout of 4
    python benchmarks/checkpoint_gpu.py deterministic --model mamba-130m                              # one GPU

With fewer GPUs than ranks the ranks share them in turns, and NCCL sends through sockets: then times are not those of four GPUs.
Steps are of random tokens. Gates: what is loaded has the checksums of what was saved, in any layout; the same step twice has the
same bits with deterministic kernels.
"""

import argparse
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from report import Report

from baton.data_pipeline.packing import Batch
from baton.models.config import ModelConfig
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.training.build import TrainState, build, make_deterministic
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore
from baton.training.config import OptimizerConfig, TrainingConfig
from baton.training.step.executor import StepExecutor

SEQUENCE_LENGTH = 2048
RANKS = 4  # of the layouts
LAYOUTS = tuple(
    LayoutConfig(**sizes)
    for sizes in (
        *({"tensor": 2, "pipeline": 2}, {"data": 4}, {"context": 4}, {"tensor": 4}, {"pipeline": 4}, {"tensor": 2, "context": 2}),
        *({"tensor": 2, "data": 2}, {"pipeline": 2, "context": 2}, {"pipeline": 2, "data": 2}, {"context": 2, "data": 2}),
    )
)
MODELS = Path(__file__).resolve().parent.parent / "configs" / "models"


def settings(model: str, rows: int, *, deterministic: bool) -> tuple[ModelConfig, TrainingConfig]:
    config = ModelConfig.model_validate({"vocab_size": 50280, **yaml.safe_load((MODELS / f"{model}.yaml").read_text())})
    training = TrainingConfig(
        steps=1,
        sequence_length=SEQUENCE_LENGTH,
        global_batch_tokens=rows * SEQUENCE_LENGTH,
        micro_batch_size=rows,
        deterministic=deterministic,
        optimizer=OptimizerConfig(lr=1e-4),
    )
    return config, training


def batch(config: ModelConfig, rows: int, device: torch.device) -> Batch[torch.Tensor]:
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (rows, SEQUENCE_LENGTH + 1), generator=generator).to(device)
    pos = torch.arange(SEQUENCE_LENGTH, dtype=torch.int32, device=device).expand(rows, -1).contiguous()
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), pos)


def manifest(step: int) -> Manifest:
    return Manifest(step=step, tokens=0, adam_steps=step, cursors={}, fingerprints={}, layout={}, versions={})


def timed(work: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def boxes(train_state: TrainState, *, for_save: bool) -> dict[str, Any]:
    return optimizer_boxes(train_state.model, train_state.engine, train_state.mesh, for_save=for_save)


def stall(model: str, folder: Path, rows: int, repeat: int) -> None:
    report = Report("checkpoint_gpu", torch.cuda.get_device_name())
    mesh = meshes.initialize(LayoutConfig(), device=torch.device("cuda", 0), rank=0, store=dist.HashStore())
    config, training = settings(model, rows, deterministic=False)
    train_state = build(config, training, mesh)
    executor, data = StepExecutor(train_state.model, train_state.engine, mesh), batch(config, rows, mesh.device)
    store = CheckpointStore(folder / "stall", mesh, keep_last=1, async_save=True)
    state = boxes(train_state, for_save=True)
    size = sum(box.data.nbytes for boxes in state.values() for box in boxes)
    for _ in range(3):
        executor.step([data], 1e-4)
    alone = [timed(lambda: executor.step([data], 1e-4)) for _ in range(repeat)]
    stalls, beside, whole = [], [], []
    for step in range(repeat + 1):
        stalls.append(timed(lambda step=step: store.save(state, manifest(step))))
        saved = None
        while saved is None:
            beside.append(timed(lambda: executor.step([data], 1e-4)))
            saved = store.poll()
        whole.append(saved.seconds)
        report.say(f"save {step}: it stopped training for {stalls[-1]:.3f} s and was done {saved.seconds:.2f} s after it began")
    report.gate("stall", len(whole) == repeat + 1, "every save was published")
    report.say(f"{size / 1e9:.2f} GB; seconds of a whole save, median {statistics.median(whole):.2f}")
    report.row("a save's stall", "seconds", statistics.median(stalls[1:]), "the limit", 0.5, gate="stall", higher_is_better=False)
    report.row(
        "a step beside a save",
        "seconds",
        statistics.median(beside),
        "a step alone",
        statistics.median(alone),
        gate="stall",
        higher_is_better=False,
    )
    report.save()
    meshes.shutdown()


def layouts(model: str, folder: Path, rows: int) -> None:
    """TP2 x PP2 makes a step and writes; every other layout reads what the one before has written, and writes it again: the
    checksums are the same."""
    rank, gpus, checksums, report = int(os.environ["RANK"]), torch.cuda.device_count(), [], None
    torch.cuda.set_device(rank % gpus)
    if gpus < RANKS:  # NCCL refuses two ranks of a host on one GPU
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    if not rank:
        here = f"{RANKS} ranks on {min(gpus, RANKS)} x {torch.cuda.get_device_name()}"
        report = Report("checkpoint_gpu", here)
    for number, layout in enumerate(LAYOUTS):
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]) + 1 + number,
            RANKS,
            is_master=rank == 0,
            timeout=timedelta(minutes=5),
        )
        mesh = meshes.initialize(layout, device=torch.device("cuda", rank % gpus), rank=rank, store=store)
        config, training = settings(model, rows, deterministic=True)
        train_state = build(config, training, mesh)
        place = CheckpointStore(folder / str(number), mesh, keep_last=1)
        seconds = 0.0
        if number:
            found = CheckpointStore(folder / str(number - 1), mesh, keep_last=1).load_newest(lambda m: None)
            assert found is not None
            wanted = boxes(train_state, for_save=False)
            seconds = timed(lambda place=place, path=found[0], wanted=wanted: place.read(path, wanted))
            train_state.engine.updates = found[1].adam_steps
            train_state.engine.masters_changed()
        else:
            StepExecutor(train_state.model, train_state.engine, mesh).step([batch(config, rows, mesh.device)], 1e-4)
        saved = place.save(boxes(train_state, for_save=True), manifest(1))
        assert saved is not None
        written = Manifest.read(folder / str(number) / saved.name)
        checksums.append({key: of["checksum"] for key, of in written.tensors.items()})
        if report is not None:
            report.say(f"{layout.sizes()}: {saved.bytes / 1e9:.2f} GB saved in {saved.seconds:.2f} s, loaded in {seconds:.2f} s")
        meshes.shutdown()
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < RANKS:  # the store is this process's
            time.sleep(0.1)
    if report is not None:
        report.gate(
            "layouts",
            all(x == checksums[0] for x in checksums) and len(checksums) == len(LAYOUTS),
            f"checksums of all {len(checksums[0])} tensors are the same in {len(checksums)} layouts, each read from the one before",
        )
        report.save()


def deterministic(model: str, rows: int, repeat: int) -> None:
    """In one process, one after the other: cuBLAS reads its workspace once, so this measures everything but that."""
    report = Report("checkpoint_gpu", torch.cuda.get_device_name())
    mesh = meshes.initialize(LayoutConfig(), device=torch.device("cuda", 0), rank=0, store=dist.HashStore())
    seconds, losses = {}, {}
    for on in (True, False):
        config, training = settings(model, rows, deterministic=on)
        make_deterministic(training)
        torch.use_deterministic_algorithms(on)
        runs = []
        for _ in range(2):
            train_state = build(config, training, mesh)
            executor, data = StepExecutor(train_state.model, train_state.engine, mesh), batch(config, rows, mesh.device)
            runs.append([executor.step([data], 1e-4).loss for _ in range(4)])
            taken = [timed(lambda executor=executor, data=data: executor.step([data], 1e-4)) for _ in range(repeat)]
        seconds[on], losses[on] = statistics.median(taken), runs
    report.gate("deterministic", losses[True][0] == losses[True][1], "four steps twice have the same losses, bit for bit")
    report.row(
        "a step", "seconds", seconds[True], "not deterministic", seconds[False], gate="deterministic", higher_is_better=False
    )
    report.save()
    meshes.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stall", "layouts", "deterministic"))
    parser.add_argument("--model", default="mamba-130m", help="a file of configs/models, without .yaml")
    parser.add_argument("--rows", type=int, default=4, help=f"sequences of {SEQUENCE_LENGTH} tokens per step (default 4)")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--folder", help="where to write (default: a temporary folder; with several processes it must be given)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.folder or scratch)
        if arguments.what == "stall":
            stall(arguments.model, folder, arguments.rows, arguments.repeat)
        elif arguments.what == "layouts":
            layouts(arguments.model, folder, arguments.rows)
        else:
            deterministic(arguments.model, arguments.rows, arguments.repeat)


if __name__ == "__main__":
    main()
