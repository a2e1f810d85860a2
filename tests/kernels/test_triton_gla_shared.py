"""Gated linear attention's Triton kernels where all heads share the query and the key, as in Mamba-2 with one group."""

from dataclasses import replace

import pytest
import torch
from support.bfloat16 import products_of_bfloat16
from support.compare import relative_error
from support.gla import LIMITS, SMALL, compare, example, rounded, with_gradients
from support.long_form import alternating

from baton.kernels.gated_linear_attention import launch_args
from baton.kernels.gated_linear_attention.launch_args import LaunchConfig
from baton.kernels.gated_linear_attention.reference import gla_reference
from baton.kernels.gated_linear_attention.triton_launch import gla_triton


@pytest.mark.parametrize(("gate", "heads"), alternating(["none", "scalar", "key"], [2, 4]))
def test_what_all_heads_share_has_its_derivatives_summed(gate, heads):
    compare(gate, (2, 21, 1, 1, 4, 9, 8), replace(SMALL, heads=heads), starts=heads == 2)


@pytest.fixture
def empty_is_nan(monkeypatch):
    """Memory that a launch leaves as it is is seen."""
    new = launch_args.Launch.new
    monkeypatch.setattr(launch_args.Launch, "new", lambda *a, **k: new(*a, **k).fill_(torch.nan))


@pytest.mark.parametrize(
    ("gate", "heads", "share", "d_key", "d_value", "starts"),
    [
        ("scalar", 5, 2, 40, 9, True),  # three blocks of d_key, and a last part of one head
        ("scalar", 3, 8, 17, 37, True),  # all heads in one part, three blocks of d_value
        pytest.param("scalar", 2, 1, 16, 33, False, marks=pytest.mark.long),
        pytest.param("none", 5, 3, 33, 18, True, marks=pytest.mark.long),
        pytest.param("none", 3, 4, 9, 40, False, marks=pytest.mark.long),
    ],
)
def test_shared_queries_and_keys_of_odd_sizes(gate, heads, share, d_key, d_value, starts, empty_is_nan):
    """With documents that begin inside chunks, and a last chunk that is not full."""
    compare(
        gate, (2, 37, 1, 1, heads, d_key, d_value), replace(SMALL, heads=share), starts=starts, strength=20.0 if starts else 1.0
    )


def test_products_of_bfloat16_of_what_all_heads_share(monkeypatch, empty_is_nan):
    products_of_bfloat16(monkeypatch)
    compare("scalar", (2, 37, 1, 1, 3, 19, 20), SMALL, starts=True, dtype=torch.bfloat16)


def test_shared_heads_are_split_where_programs_are_few():
    """Parts of heads, and a chunk is a program for each."""
    compare("scalar", (1, 21, 1, 1, 5, 9, 8), replace(SMALL, target_programs=6), starts=True)


def test_an_expanded_query_has_a_derivative_for_every_head():
    """What reaches the kernels with a head stride of 0 but came with as many heads as values is not one head."""
    given, cotangents = example("scalar", (1, 21, 1, 1, 3, 9, 8))
    given |= {name: given[name].expand(-1, -1, 3, -1) for name in "qk"}
    options = {"gate": "scalar", "scale": 0.3, "pos": None}

    def as_views(q, k, **rest):
        return gla_triton(*(x[:, :, :1].expand(-1, -1, 3, -1) for x in (q, k)), **rest, config=SMALL)

    expected = with_gradients(gla_reference, given, cotangents, **options)
    found = with_gradients(as_views, rounded(given, torch.float32), cotangents, **options)
    for name in "qk":
        found[name], expected[name] = found[name][:, :, 0], expected[name].sum(2)
    for name, value in expected.items():
        assert relative_error(found[name].double().cpu(), value) <= LIMITS[torch.float32], name


# what `LaunchConfig` may be of shared heads: two, three and one program on a multiprocessor
SHARED = (
    LaunchConfig(),
    LaunchConfig(x_shared=32, registers_shared=168),
    LaunchConfig(warps_shared=8, heads=5),
    LaunchConfig(x_shared=128, warps_shared=8, stages_shared=2),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", ["none", "scalar"])
@pytest.mark.parametrize("config", SHARED)
def test_launch_configs_of_shared_heads(gate, dtype, config):
    for heads, d_key, d_value in ((16, 96, 64), (3, 128, 160), (7, 64, 128)):
        for starts in (False, True):
            compare(gate, (2, 210, 1, 1, heads, d_key, d_value), config, starts=starts, dtype=dtype)
