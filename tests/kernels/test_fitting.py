"""A launch that needs more shared memory than the GPU has is replaced by a smaller one, in a run as when it is compiled ahead."""

import pytest
import torch
from support.compare import relative_error, worst
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

from baton.kernels.compile import fitting
from baton.kernels.compile.aot import Target, launching_nothing
from baton.kernels.eidetic_attention.joint_attention_launch import history_attention, history_attention_backward
from baton.kernels.eidetic_attention.launch_config import LaunchConfig
from baton.kernels.errors import KernelError
from baton.kernels.generalized_delta_rule.triton_launch import generalized_delta_rule_triton

LENGTH, DIM = 70, 24
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="makes the interpreter's launches fail; a GPU has its own limit")


def attention():
    """Output and gradients of full attention, two heads to one. Blocks are of 64, in one stage."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(1, LENGTH, heads, DIM, generator=g) for heads in (2, 1, 1, 2))
    limit, config = torch.arange(LENGTH, dtype=torch.int32)[None], LaunchConfig(float32=64)
    y, lse = history_attention(q, k, v, limit, scale=0.2, config=config)
    return y, *history_attention_backward(q, k, v, limit, y, lse, dy, scale=0.2, config=config)


@pytest.fixture
def gpu_with(monkeypatch):
    """Refuses launches as Triton does on a GPU where a kernel's two blocks and stages may have so many rows. Returns the others."""
    monkeypatch.setattr(fitting, "_said", set())

    def with_rows(limit):
        launched = []

        def getitem(kernel, grid):
            def launch(*args, **options):
                rows = (options["BLOCK_Q"] + options["BLOCK_K"]) * options["num_stages"]
                if rows > limit:
                    raise OutOfResources(rows, limit, "shared memory")
                launched.append((options["BLOCK_Q"], options["BLOCK_K"], options["num_stages"]))
                return kernel.run(*args, grid=grid, warmup=False, **options)

            return launch

        monkeypatch.setattr(KernelInterface, "__getitem__", getitem)
        return launched

    return with_rows


def test_blocks_are_halved_until_they_fit_and_results_stay(gpu_with, capsys):
    whole = gpu_with(128)
    expected = attention()
    assert whole == [(64, 64, 1)] * 3
    assert capsys.readouterr().err == ""
    halved = gpu_with(64)
    found, again = attention(), attention()
    assert halved == [(32, 32, 1)] * 6
    assert worst(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3  # each kernel once
    assert said[0] == (
        "baton: joint_attention_forward_kernel needs 128 of shared memory, of which this GPU has 64: "
        "launched with BLOCK_Q 32, BLOCK_K 32, BLOCK_M 16; `baton tune` may find faster sizes"
    )


def test_stages_are_fewer_before_blocks_are_smaller(gpu_with, capsys, monkeypatch):
    monkeypatch.setattr(LaunchConfig, "for_float32", lambda self: self)
    q, limit = torch.randn(1, LENGTH, 1, DIM), torch.arange(LENGTH, dtype=torch.int32)[None]
    config = LaunchConfig(queries=32, keys=32, stages=3)
    launched = gpu_with(130)
    history_attention(q, q, q, limit, scale=0.2, config=config)
    assert launched == [(32, 32, 2)]
    assert "launched with num_stages 2;" in capsys.readouterr().err
    launched = gpu_with(48)
    history_attention(q, q, q, limit, scale=0.2, config=config)
    assert launched == [(32, 16, 1)]


def test_a_launch_that_never_fits_and_one_of_a_search_are_refused(gpu_with):
    gpu_with(31)
    with pytest.raises(OutOfResources, match="Required: 128, Hardware limit: 31"):
        attention()
    launched = gpu_with(64)
    with fitting.exactly(), pytest.raises(OutOfResources):
        attention()
    assert launched == []


def test_of_several_ranks_one_says_it(gpu_with, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    gpu_with(64)
    attention()
    assert capsys.readouterr().err == ""


def test_more_programs_than_an_axis_of_a_grid_has_are_refused():
    def launch(sequences):
        q, limit = torch.empty(sequences, 1, 1, 1), torch.empty(sequences, 1, dtype=torch.int32)
        history_attention(q, q, q, limit, scale=0.2, config=LaunchConfig())

    with launching_nothing(Target(90)):
        launch(65535)
        with pytest.raises(KernelError, match=r"^joint_attention_forward_kernel: a grid of 1 x 1 x 65536 programs"):
            launch(65536)
        # RWKV-7's programs are along the first axis
        x = torch.empty(1024, 1, 64, 1).requires_grad_()
        o, S = generalized_delta_rule_triton(x, x, x, x, x, x, scale=1.0, pos=None, initial_state=None)
        torch.autograd.backward((o.sum(), S.sum()))
