"""A model's recurrences are compared with their references before the first step, and by `baton doctor`."""

import pytest
import torch
from support.long_form import some
from support.models import micro_batches, model_of, training

from baton.kernels.common.kernel_check import check
from baton.kernels.selective_scan.recurrence import SelectiveScan
from baton.launcher.cli import main
from baton.models.config import ModelConfig
from baton.models.forward_context import ForwardContext
from baton.models.mixer import recurrences_of
from baton.models.settings import kinds
from baton.training.build import build
from baton.training.errors import KernelCheckError
from baton.training.kernel_tools.doctor import check_kernels
from baton.training.step.executor import StepExecutor


def checked(mesh, mixer):
    """Names of what a model's mixers carry, as found and as they then do; and the check itself."""
    train_state = build(model_of(mixer), training(), mesh)
    found = recurrences_of(train_state.model, train_state.model.config.d_model, train_state.model.compute_dtype)
    check_kernels(train_state, training())
    seen = set()
    tokens = torch.randint(32, (2, 32), generator=torch.Generator().manual_seed(0))
    train_state.model(tokens, torch.arange(32).repeat(2, 1), None, ForwardContext(mesh.link, recorded=seen))
    return [str(r) for r in found], sorted(str(r) for r in seen)


MIXERS = (*kinds(), "hybrid")


@pytest.mark.parametrize("mixer", some(MIXERS, MIXERS[1::4]))
def test_what_a_model_carries_is_found_and_checked(pool, mixer):
    for found, used in pool.run(checked, mixer=mixer, data=1):
        assert found == used
        assert found or mixer == "swiglu"


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"context": 2}, {"tensor": 2, "sequence_parallel": True}], ids=str)
def test_ranks_find_the_same(pool, layout):
    names = [found for found, _ in pool.run(found_by, **layout)]
    assert names[0]
    assert all(found == names[0] for found in names)


def stepped_in_bfloat16(mesh, mixer):
    train_state = build(model_of(mixer), training(compute_dtype="bfloat16"), mesh)
    check_kernels(train_state, training(compute_dtype="bfloat16"))
    return StepExecutor(train_state.model, train_state.engine, mesh).step(micro_batches(0, 0, 1, 2), 1e-3).loss


@pytest.mark.parametrize("mixer", some(MIXERS, MIXERS[::4]))
def test_a_model_is_checked_and_takes_a_step_in_bfloat16(pool, mixer):
    """As on a GPU, with activations in bfloat16 beside gates in float32."""
    assert pool.run(stepped_in_bfloat16, mixer=mixer, data=1)


def found_by(mesh):
    train_state = build(model_of("hybrid"), training(), mesh)
    return [
        str(r) for r in recurrences_of(train_state.model, train_state.model.config.d_model, train_state.model.compute_dtype)
    ], None


def found_without_kernels(mesh):
    """What a model carries, found while its scan cannot run."""
    train_state, right = build(ModelConfig(**model_of("mamba").model_dump()), training(), mesh), SelectiveScan.run
    SelectiveScan.run = None
    try:
        return [
            str(r) for r in recurrences_of(train_state.model, train_state.model.config.d_model, train_state.model.compute_dtype)
        ]
    finally:
        SelectiveScan.run = right


def test_looking_for_what_is_carried_runs_no_kernel(pool):
    ((found),) = pool.run(found_without_kernels, data=1)
    assert any("selective" in name for name in found), found


def wrong_scan(mesh):
    """The message when a scan's state is off by a thousandth, and what a check of the right one says."""
    config = ModelConfig(**model_of("mamba").model_dump())
    train_state, right = build(config, training(), mesh), SelectiveScan.run

    def wrong(self, inputs, pos, state):
        y, leaving = right(self, inputs, pos, state)
        return y, {name: 1.001 * x for name, x in leaving.items()}

    SelectiveScan.run = wrong
    try:
        check_kernels(train_state, training(compute_dtype="float32"))
    except KernelCheckError as error:
        return str(error), str(check(SelectiveScan("zoh"), mesh.device, torch.float32))
    finally:
        SelectiveScan.run = right
    return None


def test_a_wrong_kernel_is_named_before_the_first_step(pool):
    ((message, elsewhere),) = pool.run(wrong_scan, data=1)
    assert message.startswith("rank 0: on cpu a kernel does not compute what its definition says: selective_scan-euler-gated")
    assert "leaving h" in message
    assert "FAILED" in message
    assert "FAILED" in elsewhere


def test_the_doctor_looks_at_every_recurrence(capsys, monkeypatch):
    both = (SelectiveScan("euler"), SelectiveScan("zoh"))
    monkeypatch.setattr("baton.training.kernel_tools.doctor.recurrences", lambda: both)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 of 4 checks on cpu passed"
    monkeypatch.setattr(SelectiveScan, "reference", lambda self, inputs, pos, state: (2 * inputs[0], state))
    assert main(["doctor", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all("FAILED" in line for line in lines[:-1])
    assert lines[-1] == "0 of 4 checks on cpu passed"
