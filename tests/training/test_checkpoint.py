"""Checkpoints: any layout reads any other's, bit for bit; damage is found and named; nothing unsafe is unpickled."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import MODEL, micro_batches, training

from baton.training.build import build
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.rectangles import (
    KINDS,
    flat_range_boxes,
    optimizer_rectangles,
)
from baton.training.checkpoint.store import CheckpointStore
from baton.training.errors import CheckpointError
from baton.training.executor import StepExecutor


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    whole = torch.arange(torch.Size(shape).numel())
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    boxes = list(flat_range_boxes(tuple(shape), start, stop))
    index = [tuple(slice(o, o + e) for o, e in zip(*box)) for box in boxes]
    found = [whole.view(shape)[i].flatten() for i in index]
    assert len(boxes) <= 2 * len(shape) - 1
    assert torch.equal(torch.cat(found) if found else whole[:0], whole[start:stop])


def manifest(step, built=None):
    return Manifest(
        step=step,
        tokens=step * 100,
        adam_steps=built.engine.updates if built else step,
        cursors={"0": [1, 2, 3]},
        fingerprints={"model": "m"},
        layout={},
        versions={},
    )


def trained(mesh, steps=2):
    built = build(MODEL, training(), mesh)
    executor = StepExecutor(built.model, built.engine, mesh)
    for step in range(steps):
        executor.step(micro_batches(step, mesh.data_rank, mesh.layout.data, 2), 1e-3)
    return built, executor


def whole_state(mesh, built):
    """Every tensor of the optimizer state, put together from all ranks' rectangles: an independent gather."""
    mine = [
        (key, r.whole, r.offset, r.data.clone())
        for key, rectangles in optimizer_rectangles(built.model, built.engine, mesh, for_save=False).items()
        for r in rectangles
    ]
    parts = [None] * mesh.world_size
    torch.distributed.all_gather_object(parts, mine)
    state, filled = {}, {}
    for key, shape, offset, data in (item for part in parts for item in part):
        index = tuple(slice(o, o + n) for o, n in zip(offset, data.shape))
        state.setdefault(key, torch.full(shape, float("nan")))[index] = data
        filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))[index] = True
    assert all(bool(f.all()) for f in filled.values()), "the rectangles do not cover the model"
    return state


def save(mesh, folder, steps=(2,)):
    store = CheckpointStore(Path(folder), mesh, keep_last=3)
    built, executor = trained(mesh, 0)
    for step in range(max(steps)):
        executor.step(micro_batches(step, mesh.data_rank, mesh.layout.data, 2), 1e-3)
        if step + 1 in steps:
            rectangles = optimizer_rectangles(built.model, built.engine, mesh, for_save=True)
            assert store.save(rectangles, manifest(step + 1, built))
    state = whole_state(mesh, built)
    after = executor.step(micro_batches(7, mesh.data_rank, mesh.layout.data, 2), 1e-3)
    return state, after.loss, after.grad_norm


def load(mesh, folder):
    """From a freshly initialised, differently trained engine, so that nothing can be right by chance."""
    built, executor = trained(mesh, 1)
    said = []
    store = CheckpointStore(Path(folder), mesh, keep_last=3, say=said.append)
    path, found = store.load_newest(lambda m: None)
    store.read(path, optimizer_rectangles(built.model, built.engine, mesh, for_save=False))
    built.engine.updates = found.adam_steps
    built.engine.masters_changed()
    state = whole_state(mesh, built)
    after = executor.step(micro_batches(7, mesh.data_rank, mesh.layout.data, 2), 1e-3)
    return path.name, found, state, after.loss, after.grad_norm, said


LAYOUTS = [
    {"data": 1},
    {"data": 4},
    {"tensor": 2, "data": 2},
    {"tensor": 4},
    {"pipeline": 2, "tensor": 2, "data": 2},
    {"pipeline": 3, "zero": 0},
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 2},
]


# two of them always, the others in the long form
OFTEN = ({"tensor": 2, "data": 2}, {"pipeline": 3, "zero": 0})


@pytest.mark.parametrize("writer", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.long) for x in LAYOUTS], ids=str)
def test_any_layout_reads_any_other_bit_for_bit(pool, tmp_path, writer):
    state, loss, norm = pool.run(save, str(tmp_path), **writer)[0]
    assert {key.partition(".")[0] for key in state} == set(KINDS)
    for reader in LAYOUTS:
        _, found, loaded, loss2, norm2, _ = pool.run(load, str(tmp_path), **reader)[0]
        assert found.step == found.adam_steps == 2
        assert found.cursors == {"0": [1, 2, 3]}
        assert loaded.keys() == state.keys()
        for key in state:
            assert torch.equal(loaded[key], state[key]), (writer, reader, key)
        if reader == writer:
            assert (loss2, norm2) == (loss, norm)
        assert loss2 == pytest.approx(loss, rel=1e-5)
        assert norm2 == pytest.approx(norm, rel=1e-5)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save, str(folder), steps=(1, 2), data=2)
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped byte in a tensor": (lambda d: flip(d / "__1_0.distcp"), "__1_0.distcp does not match its checksum"),
    "truncated tensor file": (lambda d: os.truncate(d / "__0_0.distcp", 1000), "__0_0.distcp has 1000 bytes instead of"),
    "missing tensor file": (lambda d: (d / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "flipped byte in the metadata": (lambda d: flip(d / ".metadata"), ".metadata does not match its checksum"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json: missing"),
    "edited manifest": (
        lambda d: (d / "manifest.json").write_text((d / "manifest.json").read_text().replace('"tokens": 200', '"tokens": 300')),
        "manifest.json: its checksum does not match",
    ),
    "half a manifest": (lambda d: os.truncate(d / "manifest.json", 300), "manifest.json: not readable"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_falls_back_to_the_one_before_and_says_so(pool, saved, tmp_path, damage):
    shutil.copytree(saved, tmp_path / "c")
    hurt, sentence = damage
    hurt(tmp_path / "c" / "step-00000002")
    name, found, _, _, _, said = pool.run(load, str(tmp_path / "c"), data=2)[0]
    assert (name, found.step) == ("step-00000001", 1)
    assert len(said) == 1
    assert sentence in said[0]
    assert "step-00000002 is damaged" in said[0]
    assert (tmp_path / "c" / "step-00000002.damaged").is_dir(), "evidence is set aside, not deleted"


def load_all_damaged(mesh, folder):
    try:
        CheckpointStore(Path(folder), mesh, keep_last=3).load_newest(lambda m: None)
    except CheckpointError as error:
        return str(error)


def test_only_damaged_checkpoints_is_an_error_not_a_fresh_start(pool, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "c")
    for step in (1, 2):
        flip(tmp_path / "c" / f"step-0000000{step}" / "__0_0.distcp")
    for _ in range(2):  # a second start must not find an empty folder and begin anew
        for message in pool.run(load_all_damaged, str(tmp_path / "c"), data=2):
            assert "every checkpoint is damaged" in message


def test_a_pickle_that_runs_code_is_not_loaded(pool, saved, tmp_path):
    """Even with a manifest that vouches for it."""
    shutil.copytree(saved, tmp_path / "c")
    folder, proof = tmp_path / "c" / "step-00000002", tmp_path / "ran"

    class Exploit:
        def __reduce__(self):
            return os.system, (f"touch {proof}",)

    (folder / ".metadata").write_bytes(pickle.dumps(Exploit()))
    document = json.loads((folder / "manifest.json").read_text())["manifest"]
    from baton.training.checkpoint.manifest import checksum

    document["files"][".metadata"] = checksum(folder / ".metadata")
    Manifest(**document).write(folder)
    with pytest.raises(AssertionError, match=r"asks for posix.system"):
        pool.run(load, str(tmp_path / "c"), data=1)
    assert not proof.exists()


def save_into_a_small_disk(mesh, folder):
    """Two saves; before the second, the disk is filled up to a few KiB."""
    built, executor = trained(mesh, 1)
    said = []
    store = CheckpointStore(Path(folder), mesh, keep_last=3, say=said.append)
    first = store.save(optimizer_rectangles(built.model, built.engine, mesh, for_save=True), manifest(1, built))
    if mesh.is_main:
        free = shutil.disk_usage(folder).free
        (Path(folder) / "ballast").write_bytes(b"x" * (free - 8192))
    torch.distributed.barrier()
    second = store.save(optimizer_rectangles(built.model, built.engine, mesh, for_save=True), manifest(2, built))
    loss = executor.step(micro_batches(3, mesh.data_rank, mesh.layout.data, 2), 1e-3).loss
    return first, second, said, sorted(os.listdir(folder)), loss


def test_a_full_disk_costs_only_that_checkpoint(pool, small_disk):
    for rank, (first, second, said, left, loss) in enumerate(pool.run(save_into_a_small_disk, str(small_disk), data=2)):
        assert first > 0
        assert second is None
        assert left == ["ballast", "step-00000001"], "the old checkpoint stays, nothing half-written does"
        assert loss == loss
        if rank == 0:
            assert len(said) == 1
            assert "No space left on device" in said[0]
    assert pool.run(load, str(small_disk), data=2)[0][1].step == 1


def prune(mesh, folder):
    built, _ = trained(mesh, 0)
    store = CheckpointStore(Path(folder), mesh, keep_last=2)
    (Path(folder) / ".saving-step-00000009").mkdir(parents=True)  # what a kill in a save leaves behind
    for step in (1, 2, 3):
        store.save(optimizer_rectangles(built.model, built.engine, mesh, for_save=True), manifest(step, built))
    kept = sorted(os.listdir(folder))
    store.load_newest(lambda m: None)
    return kept, sorted(os.listdir(folder))


def test_old_checkpoints_are_pruned_and_leftovers_removed_on_resume(pool, tmp_path):
    kept, after = pool.run(prune, str(tmp_path / "c"), data=1)[0]
    assert kept == [".saving-step-00000009", "step-00000002", "step-00000003"]
    assert after == ["step-00000002", "step-00000003"]
