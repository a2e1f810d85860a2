"""The States that lanes carry from step to step, in memory and in checkpoints."""

import itertools
import zlib

import pytest
import torch
from support.models import MODEL, model_of, training

from baton.data_pipeline.lane_order import Cursor
from baton.models.settings import kinds
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import build
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.resume import resume
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore
from baton.training.errors import CheckpointError

TRUNCATED = {"mode": "truncated", "segment": 8}
WHAT = "set of carried States"


def lanes_with_values(train_state, config, mesh):
    """Lanes whose States are all different."""
    lanes, g = LaneStates(train_state.model, config, mesh), torch.Generator().manual_seed(0)
    own = range(mesh.data_rank, config.lane_count, mesh.layout.data)
    for lane in own if mesh.context_rank == 0 else ():
        states = lanes.read([lane])
        for state in states.values():
            for name, x in state.items():
                state[name] = torch.randint(0, 2, x.shape, generator=g).bool() if x.dtype == torch.bool else torch.randn(
                    x.shape, generator=g
                ).mul(9).to(x.dtype)  # fmt: skip
        lanes.write([lane], states)
    return lanes


def values_of(key, rectangle):
    """What a rectangle of a whole tensor holds, if that is made of its name alone."""
    g = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    whole = torch.randn(rectangle.whole, generator=g).mul(9).to(rectangle.data.dtype)
    return whole[tuple(slice(o, o + n) for o, n in zip(rectangle.offset, rectangle.data.shape, strict=True))]


def save_by_name(mesh, kind, folder):
    config = training(bptt=TRUNCATED)
    train_state = build(model_of(kind), config, mesh)
    lanes = LaneStates(train_state.model, config, mesh)
    for key, boxes in lanes.boxes(for_save=False).items():
        for box in boxes:
            box.data.copy_(values_of(key, box))
    save(train_state, lanes, CheckpointStore(folder, mesh, 2), {})


def load_by_name(mesh, kind, folder):
    """What is in its place, and what is not, by key."""
    config = training(bptt=TRUNCATED)
    train_state = build(model_of(kind), config, mesh)
    lanes = LaneStates(train_state.model, config, mesh)
    resume(train_state, lanes, CheckpointStore(folder, mesh, 2), {}, Cursor.from_json)
    boxes = [(key, box) for key, boxes in lanes.boxes(for_save=False).items() for box in boxes]
    return [(key, box.offset, torch.equal(box.data, values_of(key, box))) for key, box in boxes]


@pytest.mark.parametrize("kind", ["bmojo", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mamba", "gsa", "lattice"))])
def test_lanes_move_to_any_other_layout(pool, single_mesh, tmp_path, kind):
    """Tensor, pipeline, sequence and data ranks on either side."""
    layouts = [{"tensor": 2, "context": 2}, {"pipeline": 2, "data": 2}]
    if kind != "bmojo":
        layouts += [{"data": 4}, {"tensor": 2, "pipeline": 2, "data": 2}]
    for n, (before, after) in enumerate(itertools.pairwise((*layouts, layouts[0]))):
        pool.run(save_by_name, kind, tmp_path / str(n), **before)
        found = [item for rank in pool.run(load_by_name, kind, tmp_path / str(n), **after) for item in rank]
        assert all(right for _, _, right in found), (before, after, [item for item in found if not item[2]][:3])
        layers = {key.split(".")[2] for key, _, _ in found}
        assert layers == set(map(str, range(model_of(kind).n_layers)))
        assert {offset[0] for _, offset, _ in found} == set(range(8)), "lanes"


def save(train_state, lanes, store, fingerprints):
    manifest = Manifest(
        step=3, tokens=9, adam_steps=0, cursors={}, fingerprints=fingerprints, layout=train_state.mesh.layout.sizes(), versions={}
    )
    boxes = optimizer_boxes(train_state.model, train_state.engine, train_state.mesh, for_save=True)
    assert store.save(boxes | ({} if lanes is None else lanes.boxes(for_save=True)), manifest) is not None


@pytest.mark.parametrize("kind", [kind for kind, settings in kinds().items() if not settings.small().state_grows])
def test_what_is_carried_comes_back_from_a_checkpoint_bit_for_bit(single_mesh, tmp_path, kind):
    """Every leaf of every mixer, of any type."""
    config = training(bptt=TRUNCATED)
    train_state = build(model_of(kind), config, single_mesh)
    lanes, store = lanes_with_values(train_state, config, single_mesh), CheckpointStore(tmp_path, single_mesh, 2)
    save(train_state, lanes, store, {WHAT: "8 lanes"})
    loaded = LaneStates(train_state.model, config, single_mesh)
    resume(train_state, loaded, store, {WHAT: "8 lanes"}, Cursor.from_json)
    every = range(config.lane_count)
    for number, state in lanes.read(every).items():
        for name, x in state.items():
            assert torch.equal(loaded.read(every)[number][name], x), (number, name)
            assert kind == "swiglu" or len(x) == config.lane_count


@pytest.mark.parametrize(
    ("saved", "wanted", "message"),
    [
        (None, 8, "was made with another set of carried States"),
        (16, 8, "was made with another set of carried States"),
    ],
    ids=["not truncated", "other lanes"],
)
def test_a_checkpoint_of_other_lanes_is_refused_before_the_first_step(single_mesh, tmp_path, saved, wanted, message):
    config = training(bptt=TRUNCATED, lanes=wanted)
    train_state = build(MODEL, config, single_mesh)
    store = CheckpointStore(tmp_path, single_mesh, 2)
    before = None if saved is None else lanes_with_values(train_state, training(bptt=TRUNCATED, lanes=saved), single_mesh)
    save(train_state, before, store, {} if saved is None else {WHAT: f"{saved} lanes"})
    with pytest.raises(CheckpointError, match=message):
        resume(train_state, LaneStates(train_state.model, config, single_mesh), store, {WHAT: f"{wanted} lanes"}, Cursor.from_json)


def test_a_checkpoint_of_another_model_is_refused_with_the_leaf_that_differs(single_mesh, tmp_path):
    """Where fingerprints do not tell: a State of another shape, or none."""
    config = training(bptt=TRUNCATED)
    train_state = build(MODEL, config, single_mesh)
    wide = MODEL.model_copy(update={"mixers": {"mamba": kinds()["mamba"](d_state=8)}})
    store = CheckpointStore(tmp_path, single_mesh, 2)
    save(train_state, LaneStates(build(wide, config, single_mesh).model, config, single_mesh), store, {})
    with pytest.raises(CheckpointError, match=r"carried\.layers\.0\.mamba\.h has shape \(8, 64, 8\), the model's \(8, 64, 4\)"):
        resume(train_state, LaneStates(train_state.model, config, single_mesh), store, {}, Cursor.from_json)


def test_a_step_is_taken_back_to_its_beginning_though_lanes_were_written_several_times(single_mesh):
    """As a step does whose sequences have several groups of segments. Lanes that were not written stay as they are."""
    config = training(bptt=TRUNCATED)
    lanes = lanes_with_values(build(MODEL, config, single_mesh), config, single_mesh)
    every = range(config.lane_count)
    before = lanes.read(every)
    lanes.begin_step()
    for factor in (2, 3):
        for group in ((0, 3), (5, 1)):
            states = {n: {name: factor * x for name, x in state.items()} for n, state in lanes.read(group).items()}
            lanes.write(group, states)
    changed = [not torch.equal(x, y) for x, y in zip(before["0"]["mamba.h"], lanes.read(every)["0"]["mamba.h"], strict=True)]
    assert changed == [lane in (0, 1, 3, 5) for lane in every]
    lanes.restore()
    for number, state in lanes.read(every).items():
        for name, x in state.items():
            assert torch.equal(x, before[number][name]), (number, name)
