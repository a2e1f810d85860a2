"""Checkpoints: every layout loads those of every other one bit-exactly, damage is detected and located, and nothing is
unpickled."""

import contextlib
import json
import math
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import tensors
from support.models import MODEL, micro_batches, training

from baton.data_pipeline import file_io
from baton.data_pipeline.errors import StorageError
from baton.data_pipeline.lane_order import Cursor
from baton.training.build import build
from baton.training.checkpoint import manifest as manifests
from baton.training.checkpoint.files import CheckpointFiles, Staging, describe, write_file
from baton.training.checkpoint.manifest import Manifest, check_file
from baton.training.checkpoint.resume import resume
from baton.training.checkpoint.retention import Retention
from baton.training.checkpoint.shard_boxes import (
    KINDS,
    ShardBox,
    flat_range_boxes,
    optimizer_boxes,
)
from baton.training.checkpoint.store import CheckpointStore, published
from baton.training.errors import CheckpointError
from baton.training.step.executor import StepExecutor


@settings(derandomize=True, max_examples=200)
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


def manifest(step, train_state=None):
    return Manifest(
        step=step,
        tokens=step * 100,
        adam_steps=train_state.engine.updates if train_state else step,
        cursors={"0": [1, 2, 3]},
        fingerprints={"model": "m"},
        layout={},
        versions={},
    )


def batches(mesh, step):
    """This rank's part of a step's batch."""
    return micro_batches(step, mesh.data_rank, mesh.layout.data, 2, mesh.context_rank, mesh.layout.context)


def trained(mesh, steps=2):
    train_state = build(MODEL, training(), mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    for step in range(steps):
        executor.step(batches(mesh, step), 1e-3)
    return train_state, executor


def whole_state(mesh, train_state):
    """Every tensor of the optimizer state, put together from all ranks' rectangles: an independent gather."""
    mine = [
        (key, r.whole, r.offset, r.data.clone())
        for key, boxes in optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=False).items()
        for r in boxes
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
    train_state, executor = trained(mesh, 0)
    for step in range(max(steps)):
        executor.step(batches(mesh, step), 1e-3)
        if step + 1 in steps:
            boxes = optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True)
            assert store.save(boxes, manifest(step + 1, train_state))
    state = whole_state(mesh, train_state)
    after = executor.step(batches(mesh, 7), 1e-3)
    return state, after.loss, after.grad_norm


def load(mesh, folder, again=None):
    """From a freshly initialised, differently trained engine, so that nothing can be right by chance. again: where to save what was
    loaded."""
    train_state, executor = trained(mesh, 1)
    said = []
    store = CheckpointStore(Path(folder), mesh, keep_last=3, say=said.append)
    path, found = store.load_newest(lambda m: None)
    store.read(path, optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=False))
    train_state.engine.updates = found.adam_steps
    train_state.engine.masters_changed()
    state = whole_state(mesh, train_state)
    checksums = None
    if again is not None:
        store = CheckpointStore(Path(again), mesh, keep_last=1)
        assert store.save(optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True), found)
        checksums = checksums_of(Path(again) / path.name)
    after = executor.step(batches(mesh, 7), 1e-3)
    return path.name, found, state, after.loss, after.grad_norm, said, checksums


def checksums_of(folder):
    return {key: of["checksum"] for key, of in Manifest.read(folder).tensors.items()}


def through_moments(mesh, folder, written, read):
    """State of a run with moments of one type, and as another one reads it."""
    found = []
    for dtype in (written, read):
        config = training()
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"moments_dtype": dtype})})
        train_state = build(MODEL, config, mesh)
        executor, store = (
            StepExecutor(train_state.model, train_state.engine, mesh),
            CheckpointStore(Path(folder), mesh, keep_last=1),
        )
        executor.step(batches(mesh, 0), 1e-3)
        boxes = optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=not found)
        if found:
            store.read(store.load_newest(lambda m: None)[0], boxes)
        else:
            executor.step(batches(mesh, 1), 1e-3)
            assert store.save(boxes, manifest(2, train_state))
        found.append({key: [box.data.clone() for box in of] for key, of in boxes.items()})
    return found


@pytest.mark.parametrize(("written", "read"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_may_change_the_type_of_its_moments(single_mesh, tmp_path, written, read):
    before, after = through_moments(single_mesh, str(tmp_path), written, read)
    assert before.keys() == after.keys()
    for key, boxes in before.items():
        moments = not key.startswith("master.")
        for own, found in zip(boxes, after[key], strict=True):
            assert own.dtype == (getattr(torch, written) if moments else torch.float32)
            assert found.dtype == (getattr(torch, read) if moments else torch.float32)
            assert bool(own.any()) or not moments
            assert torch.equal(own.to(found.dtype), found), key


LAYOUTS = [
    {"data": 1},
    {"data": 4},
    {"tensor": 2, "data": 2},
    {"tensor": 4},
    {"pipeline": 2, "tensor": 2, "data": 2},
    {"pipeline": 2, "data": 2},
    {"context": 2, "data": 2},
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 3, "zero": 0},
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 2},
]


# one of them always, read by itself and by two others, so that every factor and every stage of ZeRO is read; every layout saves
# what it has read. The long form has all
TENSOR, STAGES = {"tensor": 2, "data": 2}, {"pipeline": 3, "zero": 0}
OFTEN = [pytest.param(TENSOR, [TENSOR, STAGES, {"context": 2, "data": 2, "zero": 2}], id=f"some, {TENSOR}")]
MORE = [
    pytest.param(STAGES, [STAGES, {"tensor": 4}, {"context": 2, "data": 2}], id=f"some, {STAGES}", marks=pytest.mark.long),
    *(pytest.param(x, LAYOUTS, id=str(x), marks=pytest.mark.long) for x in LAYOUTS),
]


@pytest.mark.parametrize(("writer", "readers"), [*OFTEN, *MORE])
def test_any_layout_reads_any_other_bit_for_bit(pool, tmp_path, writer, readers):
    assert writer in readers
    state, loss, norm = pool.run(save, str(tmp_path), **writer)[0]
    assert {key.partition(".")[0] for key in state} == set(KINDS)
    for reader in readers:
        name, found, loaded, loss2, norm2, _, checksums = pool.run(load, str(tmp_path), str(tmp_path / "again"), **reader)[0]
        assert checksums == checksums_of(tmp_path / name), "the same, whatever cuts the tensors"
        assert found.step == found.adam_steps == 2
        assert found.cursors == {"0": [1, 2, 3]}
        assert loaded.keys() == state.keys()
        for key in state:
            assert torch.equal(loaded[key], state[key]), (writer, reader, key)
        if reader == writer:
            assert (loss2, norm2) == (loss, norm)
        assert loss2 == pytest.approx(loss, rel=1e-5)
        assert norm2 == pytest.approx(norm, rel=1e-5)


def test_parts_that_do_not_cover_a_box_are_refused(tmp_path):
    """A hole would keep what was in memory before, as a fresh model's weights."""
    whole = torch.arange(24.0).view(6, 4)
    halves = [ShardBox((6, 4), (first, 0), whole[first : first + 3]) for first in (0, 3)]
    parts, memory = Staging(torch.device("cpu")).copy({"x": halves})
    write_file(tmp_path / "file", parts, memory)
    tensor = describe(parts)["x"]
    both = [["file", *part] for part in tensor["parts"]]
    box = ShardBox((6, 4), (1, 1), torch.zeros(4, 2))
    CheckpointFiles(tmp_path, {"x": {**tensor, "parts": both}}).fill("x", box)
    assert torch.equal(box.data, whole[1:5, 1:3])
    with pytest.raises(CheckpointError, match=r"the checkpoint holds 4 of 8 elements of x at \(1, 1\)"):
        CheckpointFiles(tmp_path, {"x": {**tensor, "parts": both[:1]}}).fill("x", box)


def test_going_back_after_a_refused_step_computes_with_the_checkpoints_weights(single_mesh, tmp_path):
    """In bfloat16 a refused step leaves copies of its weights, which have to go with them."""
    train_state = build(MODEL, training(compute_dtype="bfloat16"), single_mesh)
    executor, store = (
        StepExecutor(train_state.model, train_state.engine, single_mesh),
        CheckpointStore(tmp_path, single_mesh, keep_last=1),
    )
    executor.step(batches(single_mesh, 0), 1e-2)
    kept = manifest(1, train_state)
    kept.cursors.clear()
    store.save(optimizer_boxes(train_state.model, train_state.engine, single_mesh, for_save=True), kept)
    expected = executor.step(batches(single_mesh, 1), 1e-2)
    executor.anomaly_detector = SimpleNamespace(check_loss=lambda loss: "refused")
    assert executor.step(batches(single_mesh, 2), 1e-2).anomaly == "refused"
    executor.anomaly_detector = None
    resume(train_state, None, store, {}, Cursor.from_json)
    again = executor.step(batches(single_mesh, 1), 1e-2)
    assert (again.loss, again.grad_norm) == (expected.loss, expected.grad_norm)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save, str(folder), steps=(1, 2), data=2)
    return folder


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


MAIN, OTHER = "rank-00000.safetensors", "rank-00001.safetensors"

DAMAGE = {
    "flipped byte in a tensor": (lambda d: flip(d / OTHER), f"{OTHER} does not match its checksum"),
    "truncated tensor file": (lambda d: os.truncate(d / MAIN, 1000), f"{MAIN} has 1000 bytes instead of"),
    "missing tensor file": (lambda d: (d / MAIN).unlink(), f"{MAIN} is missing"),
    "flipped byte in a header": (lambda d: flip(d / OTHER, 40), f"{OTHER} does not match its checksum"),
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
    name, said = pool.run(search, str(tmp_path / "c"), data=2)[0]
    assert name == "step-00000001"
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
        flip(tmp_path / "c" / f"step-0000000{step}" / "rank-00000.safetensors")
    for _ in range(2):  # a second start must not find an empty folder and begin anew
        for message in pool.run(load_all_damaged, str(tmp_path / "c"), data=2):
            assert "every checkpoint is damaged" in message


FAILING = "/proc/self/mem"
"""A file whose first byte cannot be read: the system answers EIO, as a disk or a file server does."""


def search(mesh, folder, mends=False, vanished=()):
    """What `load_newest` finds or raises, and says, without pauses between tries. mends: files that cannot be read can be in the
    first pause; vanished: checkpoints that are listed, and gone when they are looked at."""
    said = []

    def pause(seconds):
        for kept in Path(folder).rglob("*.kept") if mends else ():
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                kept.replace(kept.with_suffix(""))

    store = CheckpointStore(Path(folder), mesh, keep_last=3, say=said.append)
    if vanished:
        store._listed = lambda: [*published(Path(folder)), *(Path(folder) / name for name in vanished)]
    file_io.time = SimpleNamespace(sleep=pause)
    try:
        found = store.load_newest(lambda m: None)
        return found and found[0].name, said
    except (StorageError, CheckpointError) as error:
        return (type(error).__name__, str(error)), said
    finally:
        file_io.time = time


def make_unreadable(path):
    path.rename(path.with_name(f"{path.name}.kept"))
    path.symlink_to(FAILING)


@pytest.mark.parametrize("name", ["manifest.json", MAIN, OTHER])
def test_a_read_error_is_not_damage(pool, saved, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "c")
    make_unreadable(folder / "step-00000002" / name)
    before = sorted(os.listdir(folder))
    for (kind, text), said in pool.run(search, str(folder), data=2):
        assert (kind, said) == ("StorageError", []), "and the checkpoint before is not taken, whose steps would be done again"
        assert text.startswith(f"{folder / 'step-00000002' / name}: cannot be read at present (Input/output error)")
    assert sorted(os.listdir(folder)) == before, "nothing is set aside"
    assert pool.run(search, str(folder), mends=True, data=2) == [("step-00000002", [])] * 2, "read again"


def test_damage_that_one_rank_has_read_counts_though_another_could_not_read(pool, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "c")
    flip(folder / "step-00000002" / OTHER)
    make_unreadable(folder / "step-00000002" / MAIN)
    (name, said), _ = pool.run(search, str(folder), data=2)
    assert name == "step-00000001"
    assert f"step-00000002 is damaged: {OTHER} does not match its checksum; falling back" in said[0]


def test_a_file_that_is_still_being_replicated_is_not_damaged(saved, tmp_path, monkeypatch):
    """At the first look it is short, or not there; a little later it is whole."""
    for number, hurt in enumerate((lambda path: os.truncate(path, 100), Path.unlink)):
        for name in ("manifest.json", MAIN):
            path = shutil.copytree(saved / "step-00000002", tmp_path / f"{number}-{name}") / name
            content = path.read_bytes()
            hurt(path)
            monkeypatch.setattr(manifests.time, "sleep", lambda seconds, path=path, content=content: path.write_bytes(content))
            found = Manifest.read(path.parent)
            assert [check_file(path.parent, file, entry) for file, entry in found.files.items()] == [None, None]


def test_a_checkpoint_that_is_pruned_meanwhile_is_passed_over(pool, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "c")
    found = pool.run(search, str(folder), vanished=("step-00000003", "step-00000004"), data=2)
    assert found == [("step-00000002", [])] * 2


def test_nobody_falls_back_to_a_checkpoint_that_is_not_there(pool, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "c")
    for step in (1, 2):
        flip(folder / f"step-0000000{step}" / MAIN)
    (_, said), _ = pool.run(search, str(folder), data=2)
    assert [text.endswith("; falling back to the one before it") for text in said] == [True, False]


def test_nothing_of_a_checkpoint_is_a_pickle(saved):
    """JSON, and safetensors that the library itself reads; so nothing of it can run."""
    for folder in saved.iterdir():
        names = {path.name for path in folder.iterdir()}
        assert names == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
        json.loads((folder / "manifest.json").read_text())
        assert all(x.isfinite().all() for x in tensors(folder).values()), "every element was written"


def save_into_a_small_disk(mesh, folder):
    """Two saves; before the second, the disk is filled up to a few KiB."""
    train_state, executor = trained(mesh, 1)
    said = []
    store = CheckpointStore(Path(folder), mesh, keep_last=3, say=said.append)
    first = store.save(optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True), manifest(1, train_state))
    if mesh.is_main:
        free = shutil.disk_usage(folder).free
        (Path(folder) / "ballast").write_bytes(b"x" * (free - 8192))
    torch.distributed.barrier()
    second = store.save(optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True), manifest(2, train_state))
    loss = executor.step(batches(mesh, 3), 1e-3).loss
    return first, second, said, sorted(os.listdir(folder)), loss


def test_a_full_disk_costs_only_that_checkpoint(pool, small_disk):
    for rank, (first, second, said, left, loss) in enumerate(pool.run(save_into_a_small_disk, str(small_disk), data=2)):
        assert first.bytes > 0
        assert second is None
        assert left == ["ballast", "step-00000001"], "the old checkpoint stays, nothing half-written does"
        assert loss == loss
        if rank == 0:
            assert len(said) == 1
            assert "No space left on device" in said[0]
    assert pool.run(load, str(small_disk), data=2)[0][1].step == 1


def save_while_training(mesh, folder):
    """A save under way while everything it saves is changed; then one that cannot be written."""
    train_state, _ = trained(mesh, 1)
    said = []
    store = CheckpointStore(Path(folder), mesh, keep_last=9, say=said.append, async_save=True)
    boxes = optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True)
    before = whole_state(mesh, train_state)
    assert store.save(boxes, manifest(1, train_state)) is None, "it is not published yet"
    early = sorted(os.listdir(folder))
    for box in (box for boxes in boxes.values() for box in boxes):
        box.data.add_(1.0)
    published = None
    while published is None:
        published = store.poll()
    assert store.poll() is store.finish() is None
    store.save(boxes, manifest(2, train_state))
    # a file that a rank makes meanwhile would keep the folder
    while mesh.is_main and (unfinished := Path(folder) / ".saving-step-00000002").exists():
        shutil.rmtree(unfinished, ignore_errors=True)
    store.finish()
    problems = [store.problem]
    store.save(boxes, manifest(3, train_state))
    store.save(boxes, manifest(4, train_state))  # waits for the one before
    last = store.finish()
    return before, early, published, said, last, [*problems, store.problem]


def test_training_goes_on_while_a_checkpoint_is_written(pool, tmp_path):
    results = pool.run(save_while_training, str(tmp_path), data=2)
    before, early, published, said, last, _ = results[0]
    for *_, (failed, later) in results:
        assert failed.startswith("FileNotFoundError"), "known on every rank"
        assert later is None, "a later save has succeeded"
    assert "step-00000001" not in early
    assert (published.name, last.name) == ("step-00000001", "step-00000004")
    assert len(said) == 1
    assert "checkpoint step-00000002 could not be saved: FileNotFoundError" in said[0]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003", "step-00000004"]
    stored = tensors(tmp_path / "step-00000001")
    assert all(torch.equal(stored[key], before[key]) for key in before), "what was saved is what there was at the call"
    later = tensors(tmp_path / "step-00000004")
    assert all(torch.equal(later[key], before[key] + 1.0) for key in before)


def test_retention_keeps_the_last_the_nth_and_the_best():
    losses = {10: 5.0, 20: 4.0, 30: None, 40: 3.0, 50: 3.5, 60: None, 70: 3.0}
    assert Retention(2).kept(losses) == {60, 70}
    assert Retention(1, every=20).kept(losses) == {20, 40, 60, 70}
    assert Retention(1, best=3).kept(losses) == {40, 50, 70}, "of equal ones the later"
    assert Retention(1, best=1).kept(losses) == {70}
    assert Retention(9).kept(losses) == set(losses)
    assert Retention(1, best=1).kept({10: 3.0, 20: math.nan, 30: 2.0, 40: math.nan, 50: 4.0}) == {30, 50}, "nan is not the least"
    assert Retention(1, best=2).kept({10: math.nan, 20: 3.0, 30: math.inf, 40: None}) == {20, 40}


def prune(mesh, folder):
    train_state, _ = trained(mesh, 0)
    store = CheckpointStore(Path(folder), mesh, keep_last=2)
    (Path(folder) / ".saving-step-00000009").mkdir(parents=True)  # what a kill in a save leaves behind
    for step in (1, 2, 3):
        store.save(optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True), manifest(step, train_state))
    kept = sorted(os.listdir(folder))
    store.load_newest(lambda m: None)
    return kept, sorted(os.listdir(folder))


def test_old_checkpoints_are_pruned_and_leftovers_removed_on_resume(pool, tmp_path):
    kept, after = pool.run(prune, str(tmp_path / "c"), data=1)[0]
    assert kept == [".saving-step-00000009", "step-00000002", "step-00000003"]
    assert after == ["step-00000002", "step-00000003"]
