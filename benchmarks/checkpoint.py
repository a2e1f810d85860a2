"""Checkpoint bandwidth: a save (write, sync, checksums, publish), how long one stops training, and a verified load, beside plain
file writing and reading; and resident memory over many saves.

One process, fp32 masters and two moments of a Mamba of `--parameters` million. MB are 10^6 bytes of tensors. The gate: what was
loaded equals what was saved, bit for bit, and a flipped byte is refused.
"""

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from report import Report

from baton.models.config import ModelConfig
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.param_layout import parameter_count
from baton.training.build import build
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore
from baton.training.config import OptimizerConfig, TrainingConfig
from baton.training.errors import CheckpointError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where to write (default: a temporary folder in the current directory)")
    parser.add_argument("--layers", type=int, default=24, help="blocks of width 512, 1.7 million parameters each (default 24)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--saves", type=int, default=100, help="for resident memory (default 100)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.folder or "."))
    try:
        measure(folder, arguments.layers, arguments.repeat, arguments.saves)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, layers: int, repeat: int, saves: int) -> None:
    report = Report("checkpoint")
    mesh = meshes.initialize(LayoutConfig(), device=torch.device("cpu"), rank=0, store=torch.distributed.HashStore())
    training = TrainingConfig(
        steps=1, sequence_length=1, global_batch_tokens=1, compute_dtype="float32", optimizer=OptimizerConfig(lr=1e-3)
    )
    train_state = build(ModelConfig(d_model=512, n_layers=layers, vocab_size=8192), training, mesh)
    state = optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True)
    generator = torch.Generator().manual_seed(0)
    for rectangle in (r for rectangles in state.values() for r in rectangles):
        rectangle.data.normal_(generator=generator)  # moments of zeros would be cheap on a disk that compresses
    kept = {key: [r.data.clone() for r in rectangles] for key, rectangles in state.items()}
    size = sum(t.numel() * 4 for tensors in kept.values() for t in tensors)
    report.say(f"{parameter_count(train_state.model):,} parameters, {size / 1e6:,.0f} MB of tensors, {repeat} repetitions, medians")

    store = CheckpointStore(folder / "checkpoints", mesh, keep_last=1)
    manifest = Manifest(step=1, tokens=0, adam_steps=0, cursors={}, fingerprints={}, layout={}, versions={})

    def save() -> None:
        assert store.save(state, manifest)

    def load() -> None:
        found = store.load_newest(lambda m: None)
        assert found is not None
        store.read(found[0], state)

    save()
    for rectangle in (r for rectangles in state.values() for r in rectangles):
        rectangle.data.fill_(float("nan"))
    load()
    equal = all(torch.equal(a, r.data) for key, rs in state.items() for a, r in zip(kept[key], rs))
    report.gate("checkpoint", equal and refuses_damage(folder, mesh), "loaded bits equal saved bits, a flipped byte is refused")

    # the peer: the same bytes from memory into one file, synced; and back into memory
    whole = torch.cat([t.reshape(-1) for tensors in kept.values() for t in tensors]).numpy()
    plain = folder / "plain"

    def write_plain() -> None:
        with open(plain, "wb") as f:
            f.write(memoryview(whole).cast("B"))
            f.flush()
            os.fsync(f.fileno())

    def read_plain() -> None:
        with open(plain, "rb") as f:
            f.readinto(memoryview(whole).cast("B"))

    for case, ours, peer_name, peer in [
        ("save", save, "plain write and fsync", write_plain),
        ("verified load", load, "plain read", read_plain),
    ]:
        ours_s, peer_s = [], []
        for _ in range(repeat):  # taken in turns, so that a slow moment of the disk meets both
            peer_s.append(timed(peer))
            ours_s.append(timed(ours))
        report.row(
            case,
            "MB/s",
            size / 1e6 / statistics.median(ours_s),
            peer_name,
            size / 1e6 / statistics.median(peer_s),
            gate="checkpoint",
        )
    # what training waits for: the copy to host memory, beside copying the same bytes plainly
    background = CheckpointStore(folder / "background", mesh, keep_last=1, async_save=True)
    tensors = [r.data for rectangles in state.values() for r in rectangles]
    space = [torch.empty_like(t) for t in tensors]

    def copy_plain() -> None:
        for here, there in zip(tensors, space):
            there.copy_(here)

    stalls, copies = [], []
    for _ in range(repeat + 1):
        stalls.append(timed(lambda: background.save(state, manifest)))
        assert background.finish()
        copies.append(timed(copy_plain))
    report.row(
        "stall of a save",
        "MB/s",
        size / 1e6 / statistics.median(stalls[1:]),
        "plain copy in memory",
        size / 1e6 / statistics.median(copies[1:]),
        gate="checkpoint",
    )
    process, resident = psutil.Process(), []
    for number in range(saves):
        background.save(state, dataclasses.replace(manifest, step=number))
        resident.append(process.memory_info().rss / 1e6)
    background.finish()
    after = statistics.median(resident[5 : 5 + max(1, saves // 10)])
    last = statistics.median(resident[-max(1, saves // 10) :])
    report.say(f"resident after a save, MB: first {resident[0]:,.0f}, early {after:,.0f}, last of {saves} {last:,.0f}")
    report.row("resident memory, last saves", "MB", last, "early saves", after, gate="checkpoint", higher_is_better=False)
    report.save()
    meshes.shutdown()


def refuses_damage(folder: Path, mesh: meshes.Mesh) -> bool:
    """Whether a copy of the checkpoint with one flipped byte is refused."""
    shutil.copytree(folder / "checkpoints", folder / "damaged")
    victim = next((folder / "damaged").glob("*/rank-00000.safetensors"))
    with open(victim, "r+b") as f:
        f.seek(victim.stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    try:
        CheckpointStore(folder / "damaged", mesh, keep_last=1, say=lambda text: None).load_newest(lambda m: None)
    except CheckpointError:
        return True
    finally:
        shutil.rmtree(folder / "damaged")
    return False


def timed(work) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
