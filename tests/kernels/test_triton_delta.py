"""The delta rule's Triton kernels against the definition: interpreted on a CPU, compiled on a GPU."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from support.bfloat16 import products_of_bfloat16
from support.compare import relative_error
from support.long_form import some
from support.recurrences import positions, seeded

from baton.kernels.delta_rule import op, triton_launch
from baton.kernels.delta_rule.chunked import delta_rule_transition
from baton.kernels.delta_rule.reference import delta_rule_reference
from baton.kernels.delta_rule.triton_launch import DeltaRuleLaunch, LaunchConfig, delta_rule_transition_triton, delta_rule_triton

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in matmul")  # of pairs that a mask takes away

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LaunchConfig(chunk=16, x=16, y=16, values=16, values_backward=16, x_chunk=16, y_chunk=16)
GATES = ("none", "scalar", "key")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
WIDTHS = (16, 32, 64, 128)


def compare(sizes, config, *, gate, starts, dtype=torch.float32, limit=None, key_heads=None, op=delta_rule_triton):
    """Keys that are much alike, strengths from 0 to 2, and gates some of which forget everything. key_heads: of q and k; None: as
    many as v's."""
    batch, tokens, heads, d_key, d_value = sizes
    g = seeded(0)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double()

    along, of_keys = (batch, tokens, heads), (batch, tokens, key_heads or heads)
    q, v = randn(*of_keys, d_key), randn(*along, d_value)
    k = F.normalize(randn(*of_keys, d_key) + 2 * randn(1, 1, of_keys[2], d_key), dim=-1).to(dtype).double()
    beta = (2 * torch.sigmoid(randn(*along))).to(dtype).double()
    beta[:, 1::7] = 0.0
    gated, channels = gate != "none", (d_key,) if gate == "key" else ()
    gates = (F.logsigmoid(randn(*along, *channels)) * 10 * randn(*along, *channels) ** 2).to(dtype).double() if gated else None
    state = randn(batch, heads, d_key, d_value, dtype=torch.float32)
    cotangents = randn(*along, d_value), randn(batch, heads, d_key, d_value, dtype=torch.float32)
    pos = positions(seeded(1), batch, tokens, 0.1) if starts else None
    names = ("q", "k", "v", "beta", *(("g",) if gated else ()), "initial_state")
    given = dict(zip(names, (q, k, v, beta, *((gates,) if gated else ()), state), strict=True))

    def run(op, place, kind, **options):
        leaves = {
            name: x.to(place, torch.float32 if name == "initial_state" and kind == torch.bfloat16 else kind).requires_grad_()
            for name, x in given.items()
        }
        own_pos = None if pos is None else pos.to(place)
        y, leaving = op(**{"g": None, **leaves}, scale=0.3, pos=own_pos, **options)
        grads = torch.autograd.grad(
            [y, leaving], list(leaves.values()), [d.to(place, o.dtype) for d, o in zip(cotangents, (y, leaving))]
        )
        return {"y": y, "leaving": leaving, **dict(zip(leaves, grads, strict=True))}

    expected = run(delta_rule_reference, "cpu", torch.float64)
    for name, x in run(op, DEVICE, dtype, **({} if config is None else {"config": config})).items():
        assert x.shape == expected[name].shape
        assert relative_error(x.double().cpu(), expected[name]) <= (limit or LIMITS[dtype]), name


# each gate the other way round in one of the two tests below
@pytest.mark.parametrize(("gate", "starts"), [("none", True), ("scalar", False), ("key", True)])
def test_outputs_and_gradients_are_the_definitions(gate, starts):
    compare((2, 18, 1, 12, 9) if gate == "none" else (1, 21, 2, 19, 20), SMALL, gate=gate, starts=starts)


@pytest.mark.parametrize("tokens", [1, 10, 37])
def test_sequences_shorter_than_a_chunk_or_with_a_short_last_one(tokens):
    compare((1, tokens, 2, 12, 20), SMALL, gate="scalar", starts=False)


def test_heads_share_queries_and_keys(monkeypatch):
    """All of them one; or, as the public function has it, those of each of two groups, which are sequences of their own."""
    compare((2, 21, 3, 19, 8), SMALL, gate="scalar", starts=True, key_heads=1)
    monkeypatch.setattr(op, "use_triton", lambda *_: True)
    monkeypatch.setattr(triton_launch, "_DEFAULT", SMALL)
    compare((2, 18, 4, 9, 8), None, gate="none", starts=True, key_heads=2, op=op.delta_rule)


class AsTheyAre(LaunchConfig):
    """In float32 too, which takes smaller ones on a GPU."""

    @property
    def for_float32(self):
        return self


@pytest.mark.parametrize("chunk", [32, 64])
def test_inverses_are_made_block_by_block(chunk):
    config = AsTheyAre(**{**asdict(SMALL), "chunk": chunk})
    compare((1, 70, 1, 9, 5), config, gate="scalar" if chunk == 64 else "key", starts=chunk == 64)


@pytest.mark.parametrize("gate", some(GATES, ("key",)))
def test_a_sequence_is_walked_in_pieces(gate):
    """Two pieces of five chunks and one of three, of what is written in columns of two programs; documents start in some."""
    config = replace(SMALL, target_programs=8)
    sizes = (1, 196, 1, 18, 19)
    assert (
        DeltaRuleLaunch(
            *(torch.empty(*sizes[:3], n) for n in (18, 18, 19)), torch.empty(sizes[:3]), None, 1.0, None, config
        ).chunks_per_piece(2)
        == 5
    )
    compare(sizes, config, gate=gate, starts=gate != "none")


@pytest.mark.parametrize(("gate", "programs"), [("none", 1), *((gate, 100) for gate in GATES)])
def test_what_a_span_does_to_the_state_is_the_chunked_forms(gate, programs):
    g = seeded(2)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    along, channels = (1, 200, 2) if gate == "scalar" else (2, 200, 1), (9,) if gate == "key" else ()
    k, v, beta = F.normalize(randn(*along, 9), dim=-1), randn(*along, 18), 2 * torch.rand(along, generator=g)
    gates = None if gate == "none" else 0.1 * F.logsigmoid(randn(*along, *channels))
    pos = positions(seeded(3), *along[:2], 0.01)
    given = [x if x is None else x.to(DEVICE) for x in (k, v, beta, gates)]
    found = delta_rule_transition_triton(*given, pos=pos.to(DEVICE), config=replace(SMALL, target_programs=programs))
    exact = delta_rule_transition(*(x if x is None else x.double() for x in (k, v, beta, gates)), pos=pos)
    for ours, expected in zip(found, exact, strict=True):
        assert relative_error(ours.double().cpu(), expected) <= 1e-5


@pytest.mark.parametrize("gate", GATES)
def test_products_of_bfloat16(gate, monkeypatch):
    """Of more than a chunk."""
    products_of_bfloat16(monkeypatch)
    compare((1, 37, 1, 19, 20), SMALL, gate=gate, starts=True, dtype=torch.bfloat16, limit=8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 1500, 3, 96, 160), (1, 4100, 2, 64, 64), (1, 3000, 1, 200, 40)])
def test_long_sequences_of_few_heads(gate, dtype, sizes):
    compare(sizes, LaunchConfig(), gate=gate, starts=True, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_launch_configs_of_runs(gate, dtype):
    compare((2, 300, 3, 96, 160), LaunchConfig(), gate=gate, starts=True, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("d_key", WIDTHS)
@pytest.mark.parametrize("d_value", WIDTHS)
def test_tiles_of_all_sizes(gate, d_key, d_value):
    """See `test_triton_gla`; few values leave more of bfloat16's rounding."""
    compare((2, 150, 2, d_key, d_value), None, gate=gate, starts=True, dtype=torch.bfloat16, limit=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("heads", [(33, 5), (35, 5), (33, 7), (33, 20)])
def test_rows_that_begin_anywhere(gate, heads):
    """Sizes of which ptxas 12.8 made kernels that ended the process, see `triton.ODD_WARPS`. So few values leave more of bfloat16's
    rounding in dbeta: 5.7e-3 where the same kernels are interpreted."""
    compare((2, 90, 4, *heads), LaunchConfig(), gate=gate, starts=True, dtype=torch.bfloat16, limit=8e-3)
