"""The replica check: a single differing bit is detected and located on all ranks before a checkpoint is saved; equal replicas
pass."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from support.long_form import some
from support.models import MODEL, micro_batches, model_of, training
from support.runs import published

from baton.data_pipeline.task_config import MqarConfig
from baton.models.config import ModelConfig
from baton.models.settings import kinds
from baton.parallel.param_layout import layout_of
from baton.training import loop, run_setup
from baton.training.build import build
from baton.training.callbacks.replica_check import ReplicaCheckCallback
from baton.training.checkpoint.config import CheckpointConfig
from baton.training.checkpoint.interval import CheckpointSchedule
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.errors import RunError
from baton.training.evaluation.config import EvaluationConfig
from baton.training.lr_schedule import learning_rates
from baton.training.monitoring import replica_check
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepExecutor, StepResult

REPLICATED, SPLIT = "layers.1.mamba.norm.weight", "layers.1.mamba.mixer.out_proj.weight"
FIRST = "embedding.weight"


def oracle(values):
    """The fingerprint in integers without bound, taken modulo 2^64 at the end."""
    bits = values.flatten().view(torch.int32).tolist()
    total = 0
    for at in range(0, len(bits), replica_check.CHUNK):
        part = 0
        for i, word in enumerate(bits[at : at + replica_check.CHUNK]):
            x = (i + 1) * replica_check.GOLDEN % 2**64
            x = (x ^ signed(x) >> 30) * replica_check.MIX % 2**64
            part += word * ((x ^ signed(x) >> 31) | 1)
        total = (total * replica_check.GOLDEN + part) % 2**64
    return signed(total)


def signed(x):
    """Of a number modulo 2^64, the one in int64's range."""
    return (x + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_fingerprint_is_its_formula_whatever_the_chunks(monkeypatch, chunk):
    monkeypatch.setattr(replica_check, "CHUNK", chunk)
    values = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    values[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    assert replica_check.fingerprint(values).item() == oracle(values)
    assert replica_check.fingerprint(values.T).item() == oracle(values.T.contiguous()), (
        "positions are the tensor's, not the memory's"
    )


def test_every_single_bit_counts_and_so_do_places(monkeypatch):
    monkeypatch.setattr(replica_check, "CHUNK", 8)
    values = torch.randn(20, generator=torch.Generator().manual_seed(0))
    found = {replica_check.fingerprint(values).item()}
    for element in range(20):
        for bit in range(32):
            hurt = values.clone()
            flip(hurt, element, bit)
            found.add(replica_check.fingerprint(hurt).item())
    swapped = [values.index_select(0, order) for order in permutations_of_two(20)]
    found |= {replica_check.fingerprint(s).item() for s in swapped}
    assert len(found) == 1 + 20 * 32 + len(swapped)
    assert replica_check.fingerprint(torch.zeros(1)).item() != replica_check.fingerprint(-torch.zeros(1)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str)
def test_a_fingerprint_is_of_any_bits(dtype):
    """Of an odd number of elements, and wherever they begin in memory."""
    values = torch.randn(22, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    found = set()
    for element in range(1, 22):
        hurt = values.clone()
        hurt[element] = values[element] == 0 if dtype is torch.bool else values[element] + 1
        found.add(replica_check.fingerprint(hurt[1:]).item())
    assert len(found) == 21
    assert replica_check.fingerprint(values[1:].clone()).item() == replica_check.fingerprint(values[1:]).item() not in found


@pytest.mark.gpu
def test_a_fingerprint_is_the_same_on_a_gpu():
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    assert replica_check.fingerprint(values.cuda()).item() == replica_check.fingerprint(values).item()


def permutations_of_two(size):
    """Orders of `size` elements with two of them exchanged, all pairs."""
    for i in range(size):
        for j in range(i):
            order = torch.arange(size)
            order[i], order[j] = j, i
            yield order


def test_sides_are_named_by_majority():
    found = replica_check.find_mismatches(
        ["same", "one", "tie", "three ways", "parts"],
        [False, False, False, False, True],
        [0, 1, 0, 1],
        [[5, 7, 1, 1, 10], [5, 7, 2, 2, 20], [5, 8, 1, 3, 10], [5, 7, 2, 2, 21]],
    )
    assert [(d.name, str(d)) for d in found] == [
        ("one", "rank 2 disagrees with ranks 0, 1, 3"),
        ("tie", "ranks 0, 2 against ranks 1, 3, and no majority says which is right"),
        ("three ways", "ranks 0, 2 disagree with ranks 1, 3"),
        ("parts", "rank 1 against rank 3, and no majority says which is right"),
    ]


def flip(tensor, element=0, bit=0):
    """Flip one bit of one element of a float32 tensor, in place."""
    words = tensor.detach().view(-1).view(torch.int32)
    words[element] ^= signed_bit(bit)


def signed_bit(bit):
    return -(2**31) if bit == 31 else 1 << bit


def steps(mesh, count, config, mixer="mamba"):
    train_state = build(model_of(mixer), config, mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    for step in range(count):
        result = executor.step(micro_batches(step, mesh.data_rank, mesh.layout.data, 2), learning_rates(step, config))
        yield train_state, RunProgress(step + 1, 0, {}), result


def said(check, progress, result):
    """The sentence of the check, None when it is silent."""
    try:
        check.after_step(progress, result)
    except RunError as error:
        return str(error)
    return None


def check_of(train_state, config):
    return ReplicaCheckCallback(train_state, config, CheckpointSchedule(config.checkpoint, config.steps, train_state.mesh, 0))


def disturbed(mesh, hurt, every=1):
    """What the check says after a step of which a bit of each of `hurt`, (parameter, rank), is flipped."""
    config = training(replica_check_every=every)
    for train_state, progress, result in steps(mesh, 1, config):
        parameters = dict(train_state.model.named_parameters())
        for name, rank in hurt:
            if mesh.rank == rank:
                flip(parameters[name], parameters[name].numel() - 1)
        return (
            layout_of(parameters[REPLICATED]).split,
            layout_of(parameters[SPLIT]).split,
            said(check_of(train_state, config), progress, result),
        )


CASES = {
    "DP2": ({"data": 2}, SPLIT, 1, "rank 0 against rank 1, and no majority"),
    "DP4": ({"data": 4}, SPLIT, 2, "rank 2 disagrees with ranks 0, 1, 3"),
    "TP2, replicated": ({"tensor": 2}, REPLICATED, 1, "rank 0 against rank 1, and no majority"),
    "TP4, replicated": ({"tensor": 4}, REPLICATED, 0, "rank 0 disagrees with ranks 1, 2, 3"),
    "TP2 x DP2, replicated": ({"tensor": 2, "data": 2}, REPLICATED, 3, "rank 3 disagrees with ranks 0, 1, 2"),
    "TP2 x DP2, split": ({"tensor": 2, "data": 2}, SPLIT, 3, "rank 1 against rank 3, and no majority"),
}


OF_FOUR = ("DP4", "TP4, replicated")
"""As the two layouts with two by two, of more ranks in one group."""


@pytest.mark.parametrize("case", some(CASES, [case for case in CASES if case not in OF_FOUR]))
def test_a_flipped_bit_is_found_and_named_on_all_ranks(pool, case):
    layout, name, rank, who = CASES[case]
    for replicated, split, message in pool.run(disturbed, [(name, rank)], **layout):
        assert replicated is None
        assert split is not None
        assert message.startswith(f"after step 1: {name} differs between ranks that must hold the same bits: {who}")
        assert "tensors that differ: 1 of " in message


def test_what_is_lent_is_compared_with_the_owners_and_every_stage_hears_of_any(pool):
    """Rank 3 is the last stage's second data rank: the bit is in the copy of the embedding that it was lent."""
    for message in (m for *_, m in pool.run(disturbed_by_name, FIRST, 3, data=2, pipeline=2)):
        assert f"{FIRST} differs" in message
        assert "tensors that differ: 2 of " in message
    for message in (m for *_, m in pool.run(disturbed_by_name, "layers.2.mamba.norm.weight", 2, data=2, pipeline=2)):
        assert "layers.2.mamba.norm.weight differs between ranks that must hold the same bits: rank 2 against rank 3" in message


def disturbed_by_name(mesh, name, rank):
    """As `disturbed`, where only one stage has the parameter."""
    config = training(replica_check_every=1)
    for train_state, progress, result in steps(mesh, 1, config):
        if mesh.rank == rank:
            flip(dict(train_state.model.named_parameters())[name])
        return None, said(check_of(train_state, config), progress, result)


def test_the_first_of_several_is_named(pool):
    for *_, message in pool.run(disturbed, [(SPLIT, 0), (FIRST, 2), (REPLICATED, 2)], data=4):
        assert f"{FIRST} differs" in message
        assert "rank 2 disagrees" in message
        assert "tensors that differ: 3 of " in message


def test_parts_of_tensor_ranks_are_no_replicas_and_zero_is_never(pool):
    assert [message for *_, message in pool.run(disturbed, [(SPLIT, 1)], tensor=2)] == [None, None]
    assert [message for *_, message in pool.run(disturbed, [(SPLIT, 1)], every=0, data=2)] == [None, None]
    assert [message for *_, message in pool.run(disturbed, [(SPLIT, 1)], every=2, data=2)] == [None, None]


def another_count(mesh):
    config = training(replica_check_every=1)
    for train_state, progress, result in steps(mesh, 1, config):
        if mesh.rank == 1:
            state = train_state.engine._optimizer.state
            list(state.values())[-1]["step"].add_(1)
        return said(check_of(train_state, config), progress, result)


def test_another_count_of_updates_is_found_and_named(pool):
    for message in pool.run(another_count, tensor=2, data=2):
        assert "AdamW's count of updates (group no_decay) differs" in message
        assert "rank 1 disagrees with ranks 0, 2, 3" in message


def drifting(mesh):
    """A bit of tensor rank 1's master copy flips after the first step: what the check says after each of three steps."""
    config, found = training(replica_check_every=1), []
    for train_state, progress, result in steps(mesh, 3, config):
        found.append(said(check_of(train_state, config), progress, result))
        if progress.step == 1 and mesh.tensor_rank == 1:
            boxes = optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=False)
            for box in boxes.get(f"master.{REPLICATED}", [])[:1]:
                flip(box.data, 0, 12)
    return found


def test_a_master_copy_that_differs_between_tensor_ranks_stays_different(pool):
    for before, *after in pool.run(drifting, tensor=2, data=2):
        assert before is None
        for message in after:
            assert "ranks 0, 2 against ranks 1, 3" in message
        assert f"{REPLICATED} differs" in after[0]


def sound(mesh, mixer, compute_dtype="float32"):
    config = training(replica_check_every=1, compute_dtype=compute_dtype)
    return [
        said(check_of(train_state, config), progress, result) for train_state, progress, result in steps(mesh, 2, config, mixer)
    ]


OFTEN = ("lattice", "hybrid")
"""Mixers with parameters of which every tensor rank has a whole copy, a selective scan and softmax attention among them."""


@pytest.mark.parametrize("mixer", [*OFTEN, *(pytest.param(kind, marks=pytest.mark.long) for kind in kinds() if kind not in OFTEN)])
def test_replicas_of_every_mixer_stay_equal_and_the_check_silent(pool, mixer):
    """In bfloat16: what a replicated parameter's gradient is made of is rounded most there."""
    for found in pool.run(sound, mixer, compute_dtype="bfloat16", tensor=2, data=2):
        assert found == [None, None]


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"data": 1}, {"data": 4}, {"tensor": 4}], ids=str)
def test_replicas_on_every_layout_stay_equal_and_the_check_silent(pool, layout):
    for found in pool.run(sound, "hybrid", **layout):
        assert found == [None, None]


def run(mesh, folder, flip_after=None, flip_loaded=False, **changes):
    """The real loop on a synthetic task, with a bit flipped on rank 1 after a step or after loading; what ended it."""
    settings = RunSettings(
        folder=Path(folder),
        model=ModelConfig(d_model=16, n_layers=2, pad_vocab_to=8, mixers=MODEL.mixers),
        data=MqarConfig(length=12, pairs=2, vocab_size=36),
        training=training(
            steps=6,
            replica_check_every=3,
            checkpoint=CheckpointConfig(every=2, keep_last=4),
            evaluation=EvaluationConfig(every=0),
        ).model_copy(update=changes),
        config_text="name: test",
    )
    step, resume, done = StepExecutor.step, run_setup.resume, []

    def stepped(executor, *args) -> StepResult:
        result = step(executor, *args)
        done.append(result)
        if len(done) == flip_after and mesh.rank == 1:
            flip(dict(executor.model.named_parameters())[REPLICATED])
        return result

    def resumed(train_state, *args) -> RunProgress:
        progress = resume(train_state, *args)
        if flip_loaded and mesh.rank == 1:
            flip(dict(train_state.model.named_parameters())[REPLICATED])
        return progress

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with mock.patch.object(StepExecutor, "step", stepped), mock.patch.object(run_setup, "resume", resumed):
            loop.train(settings, mesh)
    except RunError as error:
        return f"{error.exit_status}: {error}", len(done)
    finally:
        torch.set_deterministic_debug_mode("error" if deterministic else "default")
    return None, len(done)


@pytest.mark.parametrize("at", some([3, 4], [4]), ids=["a step that is compared", "a step that is saved"])
def test_the_loop_stops_before_it_saves_and_resumes_sound(pool, tmp_path, at):
    for message, done in pool.run(run, str(tmp_path), flip_after=at, tensor=2):
        assert message.startswith(f"2: after step {at}: {REPLICATED} differs"), "exit status and sentence"
        assert done == at
    assert published(tmp_path) == [2]
    for message, done in pool.run(run, str(tmp_path), tensor=2):
        assert message is None
        assert done == 4
    assert published(tmp_path) == [2, 4, 6]


def test_a_difference_after_a_resume_stops_before_the_first_step(pool, tmp_path):
    pool.run(run, str(tmp_path), flip_after=4, tensor=2)
    for message, done in pool.run(run, str(tmp_path), flip_loaded=True, tensor=2):
        assert f"after step 2: {REPLICATED} differs" in message
        assert done == 0
    assert published(tmp_path) == [2]


def test_a_difference_nobody_looks_for_is_not_found(pool, tmp_path):
    """With 0 the same run ends well: what the tests above see is the comparison's doing."""
    for message, done in pool.run(run, str(tmp_path), flip_after=4, flip_loaded=True, replica_check_every=0, tensor=2):
        assert message is None
        assert done == 6
