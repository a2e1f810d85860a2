"""Kernels that run one token of recurrences with a matrix State and write it over the one before, against the definitions in
float64: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from support.compare import relative_error
from support.long_form import some
from support.recurrences import RECURRENCES, piece, seeded
from torch import Tensor

from baton.kernels.delta_rule.recurrence import DeltaRule
from baton.kernels.gated_linear_attention import triton_launch as gla_launch
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.gated_slot_attention.recurrence import GatedSlotAttention
from baton.kernels.generalized_delta_rule import triton_launch as generalized_launch
from baton.kernels.generalized_delta_rule.recurrence import GeneralizedDeltaRule
from baton.kernels.mamba3.recurrence import Mamba3
from baton.kernels.mamba3_mimo.recurrence import Mamba3MIMO
from baton.kernels.matrix_step import triton_launch
from baton.kernels.mlstm.recurrence import MLSTM
from baton.kernels.protocol import Recurrence
from baton.kernels.wkv6.recurrence import WKV6

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}  # bfloat16: outputs are rounded to it once
KINDS = (DeltaRule, GatedLinearAttention, GatedSlotAttention, GeneralizedDeltaRule, Mamba3, MLSTM, WKV6)
OF_MATRICES = tuple(r for r in RECURRENCES if isinstance(r, KINDS) and not isinstance(r, Mamba3MIMO))
POS = torch.tensor([[7], [0], [1], [0]])
over_recurrences = pytest.mark.parametrize("recurrence", OF_MATRICES, ids=str)
over_half = pytest.mark.parametrize("recurrence", some(OF_MATRICES, OF_MATRICES[::2]), ids=str)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    for module in (gla_launch, generalized_launch):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)


def amid_nan(x: Tensor, *, contiguous: bool = False) -> Tensor:
    """A copy with NaN around it: before and behind, and, unless it is contiguous, between its rows."""
    if contiguous:
        return torch.full((x.numel() + 32,), torch.nan, dtype=x.dtype, device=DEVICE)[16:-16].view(x.shape).copy_(x)
    around = torch.full((*x.shape[:-1], x.shape[-1] + 32), torch.nan, dtype=x.dtype, device=DEVICE)
    return around[..., 16:-16].copy_(x)


def memory(x: Tensor) -> Tensor:
    """Every bit of the memory that a tensor is in."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def example(recurrence: Recurrence, *, length=1, dtype=torch.float32, wide=True):
    """Inputs and State in float64, of which the dtypes that a step takes lose nothing."""
    inputs, state = recurrence.example(seeded(3), len(POS), length, torch.float64, wide)
    return tuple(x.to(dtype).double() for x in inputs), {name: x.float().double() for name, x in state.items()}


def projected(recurrence: Recurrence) -> bool:
    return isinstance(recurrence, GatedSlotAttention) and recurrence.gate_logit_normalizer is not None


def check(recurrence, inputs, state, pos, dtype):
    """A step's outputs and State are the definition's, in the given State's memory, and nothing else is written."""
    y, final = recurrence.reference(inputs, pos, state)
    own = [amid_nan(x.to(dtype)) for x in inputs]
    before = {name: amid_nan(x.float(), contiguous=True) for name, x in state.items()}
    own_pos = None if pos is None else pos.to(DEVICE, torch.int32)
    bits = [memory(x).clone() for x in (*own, *before.values())]
    with torch.no_grad():
        found, after = recurrence.step(tuple(own), own_pos, before)
    assert found.dtype == dtype
    assert found.shape == y.shape
    assert relative_error(found.double().cpu(), y) <= LIMITS[dtype]
    for name, x in after.items():
        assert x.data_ptr() == before[name].data_ptr()
        # bfloat16: keys that were multiplied by their gates in PyTorch are not rounded to it either
        assert relative_error(x.double().cpu(), final[name]) <= LIMITS[torch.float32], name
        x.zero_()
        given = bits[len(own) + list(before).index(name)]
        given.view(torch.float32)[16:-16] = 0
    assert all(torch.equal(memory(x), a) for x, a in zip((*own, *before.values()), bits, strict=True))


@over_recurrences
def test_a_step_is_the_definitions_and_writes_its_state_over_the_one_before(recurrence):
    check(recurrence, *example(recurrence), POS, torch.float32)
    check(recurrence, *example(recurrence, wide=False), None, torch.float32)
    if not projected(recurrence):  # whose activations are rounded as well
        check(recurrence, *example(recurrence, dtype=torch.bfloat16, wide=False), POS, torch.bfloat16)


@pytest.mark.parametrize(
    ("gate", "sizes", "heads"),
    [
        ("none", (1, 5), (1, 1, 2)),
        ("none", (5, 7), (6, 1, 2)),
        ("scalar", (40, 1), (1, 2, 4)),
        ("scalar", (3, 18), (2, 2, 4)),
        ("scalar", (8, 3), (1, 1, 3)),
        ("key", (16, 33), (6, 2, 2)),
        ("key", (5, 3), (2, 1, 2)),
        ("value", (3, 16), (3, 3, 3)),
        ("value", (4, 20), (4, 2, 2)),
    ],
)
def test_queries_and_keys_are_of_groups_of_heads(gate, sizes, heads):
    """Queries, keys and values have so many heads; one row, and one column. A head for all may be expanded."""
    (d_key, d_value), (queries, keys, values), g = sizes, heads, seeded(1)

    def randn(*shape):
        return torch.randn(4, 1, *shape, generator=g).double()

    channels = {"key": (d_key,), "value": (d_value,), "scalar": ()}
    gates = () if gate == "none" else (-randn(values, *channels[gate]).abs(),)
    inputs = (randn(queries, d_key), randn(keys, d_key), randn(values, d_value), *gates)
    state = {"S": randn(values, d_key, d_value)[:, 0]}
    check(GatedLinearAttention(gate, scale=0.3), inputs, state, POS, torch.float32)
    if queries == keys == 1 < values:
        q, k, *others = (x.float().to(DEVICE) for x in inputs)
        found = [
            GatedLinearAttention(gate).step((*qk, *others), None, {"S": state["S"].float().to(DEVICE)})
            for qk in ((q, k), (q.expand(-1, -1, values, -1), k.expand(-1, -1, values, -1)))
        ]
        assert torch.equal(found[0][0], found[1][0])


@over_half
def test_steps_are_one_run(recurrence):
    """Over a document's start in one of the sequences; a State that is not contiguous is left as it is."""
    inputs, state = example(recurrence, length=3)
    pos = torch.tensor([[5, 6, 7], [3, 0, 1], [0, 1, 2], [0, 0, 1]])
    y, final = recurrence.reference(inputs, pos, state)
    own = tuple(x.float().to(DEVICE) for x in inputs)
    given = {name: x.float().to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2) for name, x in state.items()}
    after, found = given, []
    with torch.no_grad():
        for t in range(3):
            y_t, after = recurrence.step(piece(recurrence, own, t, t + 1), pos[:, t : t + 1].to(DEVICE), after)
            found.append(y_t)
    assert relative_error(torch.cat(found, dim=1).double().cpu(), y) <= 1e-5
    for name, x in after.items():
        assert relative_error(x.double().cpu(), final[name]) <= 1e-5, name
        assert torch.equal(given[name].double().cpu(), state[name]), "it cannot be written over"


IN_BATCHES = [x for x in OF_MATRICES if DEVICE == "cuda" or not projected(x)]


@pytest.mark.parametrize("recurrence", some(IN_BATCHES, IN_BATCHES[1::2]), ids=str)
def test_a_sequence_has_the_same_bits_in_every_batch(recurrence):
    """Alone, and beside others that are not finite. PyTorch's activations on a CPU depend on where a number lies."""
    inputs, state = example(recurrence)
    rows, timed = (slice(2, 3), slice(None)), recurrence.num_time_inputs
    found = []
    for n, row in enumerate(rows):
        own = [x.float().to(DEVICE) for x in inputs]
        given = {name: x.float().to(DEVICE) for name, x in state.items()}
        if n:
            for x in (*own[:timed], *given.values()):
                x[[0, 3]] = torch.nan
        own = [x[row].contiguous() if i < timed else x for i, x in enumerate(own)]
        with torch.no_grad():
            y, after = recurrence.step(tuple(own), POS[row].to(DEVICE), {name: x[row].contiguous() for name, x in given.items()})
        found.append([x[2 * n] for x in (y, *after.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(torch.isfinite(x).all() for x in found[0])


def test_a_states_blocks_are_many_and_small():
    """A sequence of a 1.3B model fills 96 of an H200's 132 processors at least, and no lane has more than 32 numbers of a State."""
    for heads, d_key, d_value in ((24, 128, 64), (4, 256, 512), (16, 128, 128), (8, 256, 513), (4, 512, 512)):
        sizes = triton_launch.launch_sizes(d_key, d_value)
        assert heads * -(-d_value // sizes["BLOCK_V"]) >= 96
        assert sizes["BLOCK_K"] * sizes["BLOCK_V"] <= 32 * 32 * sizes["num_warps"]


# batch, heads, and what makes inputs and State: as in Mamba-2 at 130M, and RetNet, GLA, KDA, xLSTM and RWKV at 1.3B
REAL = {
    "mamba2": (GatedLinearAttention("scalar"), 64, 24, 128, 64),
    "retnet": (GatedLinearAttention("scalar", scale=0.06), 64, 8, 256, 512),
    "gla": (GatedLinearAttention("key", scale=0.06), 64, 4, 256, 512),
    "gsa": (GatedSlotAttention(), 32, 4, 512, 512),
    "delta_net": (DeltaRule(gated=False), 64, 16, 128, 128),
    "gated_delta_net": (DeltaRule(gated=True), 64, 6, 256, 512),
    "kda": (DeltaRule(gated=True, by_channel=True), 64, 16, 128, 128),
    "mlstm": (MLSTM(scale=0.06), 32, 8, 256, 512),
    "rwkv6": (WKV6(), 64, 32, 64, 64),
    "rwkv7": (GeneralizedDeltaRule(lower_bound=-0.6), 64, 32, 64, 64),
}


def real_example(kind: str, generator: torch.Generator):
    """Inputs in bfloat16, gates and State in float32."""
    recurrence, batch, heads, d_key, d_value = REAL[kind]

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    def logs(*channels: int) -> Tensor:
        return -0.5 * randn(batch, 1, heads, *channels, dtype=torch.float32).sigmoid()

    shared, slots = 1 if kind == "mamba2" else heads, 64
    q, k, v = randn(batch, 1, shared, d_key), randn(batch, 1, shared, d_key), randn(batch, 1, heads, d_value)
    unit = torch.nn.functional.normalize(k.float(), dim=-1)
    beta = randn(batch, 1, heads, dtype=torch.float32).sigmoid()
    gates = {"gla": logs(d_key), "kda": logs(d_key), "gsa": logs(slots)}.get(kind, logs())
    inputs = {
        "delta_net": (q, unit, v, beta),
        "gated_delta_net": (q, unit, v, beta, gates),
        "kda": (q, unit, v, beta, gates),
        "mlstm": (q, k, v, randn(batch, 1, heads), gates),
        "rwkv6": (q, k, v, logs(d_key), randn(heads, d_key)),
        "rwkv7": (q, k, v, -unit, unit * randn(batch, 1, heads, d_key).sigmoid(), logs(d_key)),
    }.get(kind, (q, k, v, gates))
    specs = recurrence.state_specs(inputs)
    return recurrence, inputs, {spec.name: randn(batch, *spec.shape, dtype=torch.float32) for spec in specs}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", REAL)
def test_recorded_steps_of_real_sizes_are_the_definitions(kind):
    """A graph's capture refuses whatever waits for the host, and a replay writes where the recorded step wrote; a sequence alone
    has the bits that it has in the batch."""
    recurrence, inputs, state = real_example(kind, torch.Generator(DEVICE).manual_seed(0))
    batch = len(inputs[0])
    pos = torch.arange(batch, dtype=torch.int32, device=DEVICE)[:, None]
    wide = tuple(x.double() for x in inputs)
    first = recurrence.reference(wide, pos, {name: x.double() for name, x in state.items()})
    second = recurrence.reference(wide, pos, first[1])
    given = {name: x.clone() for name, x in state.items()}
    with torch.no_grad():
        for own in (given, {name: x.clone() for name, x in state.items()}):  # one compiles the kernels
            y, _ = recurrence.step(inputs, pos, own)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded, after = recurrence.step(inputs, pos, given)
        graph.replay()
        row = [x[5:6] if n < recurrence.num_time_inputs else x for n, x in enumerate(inputs)]
        alone, after_alone = recurrence.step(tuple(row), pos[5:6], {name: x[5:6].clone() for name, x in state.items()})
    for found, expected in ((y, first[0]), (recorded, second[0])):
        assert relative_error(found.double(), expected) <= LIMITS[torch.bfloat16]
    for name, x in after.items():
        assert x.data_ptr() == given[name].data_ptr()
        assert relative_error(x.double(), second[1][name]) <= 1e-5
        assert torch.equal(own[name][5:6], after_alone[name])
    assert torch.equal(y[5:6], alone)
