"""A layer with sequence parallelism equals the layer of one process, and each rank saves only its part of the residual stream.

In float64, so that a gradient which is counted twice or lost on some path cannot hide behind rounding.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support.compare import relative_error
from support.models import model_of
from support.recurrences import positions, seeded
from torch.utils._python_dispatch import TorchDispatchMode

from baton.models.block import Layer
from baton.models.forward_context import LOCAL
from baton.models.lm import LanguageModel
from baton.models.mixer_context import MixerContext
from baton.models.settings import kinds
from baton.parallel.param_layout import gather_parameters, initialize_parameters, named_layouts
from baton.parallel.replicated_parameters import finalize_model_grads
from baton.parallel.tensor import megatron_config
from baton.parallel.tensor_group import gather_tokens, tokens_per_rank

MODELS = [*kinds(), "hybrid"]


def layer_of(mixer, tensor_rank=0, tensor_size=1):
    """A layer in float64 with the values that (seed, name) give."""
    config = model_of(mixer)
    context = MixerContext(config.d_model, 3, 1e-5, megatron_config(tensor_size), torch.float64, sequence_parallel=tensor_size > 1)
    layer = Layer(config.sub_blocks[0], config, context)
    initialize_parameters(layer, 7, tensor_rank, tensor_size)
    return layer.double()


def example(mixer, batch, length):
    """x, pos, an entering State that tokens have left behind, and cotangents of all that leaves."""
    generator, layer = seeded(5), layer_of(mixer)
    before, x, dy = (
        torch.randn(batch, n, model_of(mixer).d_model, generator=generator, dtype=torch.float64) for n in (9, length, length)
    )
    pos = positions(generator, batch, 9 + length, 0.15)
    with torch.no_grad():
        _, entering = layer.forward_summed(before, pos[:, :9], None, LOCAL)
    names = [leaf.name for leaf in layer.state_specs if leaf.grad]
    moving = {name: torch.randn(entering[name].shape, generator=generator, dtype=entering[name].dtype) for name in names}
    return x, pos[:, 9:], entering, dy, moving


def on_one(mixer, x, pos, entering, dy, moving):
    """y, the leaving State and all gradients, by name."""
    layer, x = layer_of(mixer), x.clone().requires_grad_()
    given = {name: leaf.clone().requires_grad_(name in moving) for name, leaf in entering.items()}
    y, leaving = layer.forward_summed(x, pos, given, LOCAL)
    torch.autograd.backward([y, *(leaving[name] for name in moving)], [dy, *moving.values()])
    found = {"y": y, "dx": x.grad, **{f"leaving {name}": leaf for name, leaf in leaving.items()}}
    found |= {f"d entering {name}": given[name].grad for name in moving}
    for name, parameter, layout in named_layouts(layer):
        for block in layout.shard_boxes(name, 0, 1):
            found[f"d {block.name}"] = parameter.grad[block.local_row : block.local_row + block.extent[0]]
    return found


def on_ranks(mesh, mixer, x, pos, entering, dy, moving):
    """The same from ranks that have a part of x each."""
    rank, size = mesh.tensor_rank, mesh.layout.tensor
    layer = layer_of(mixer, rank, size)
    places = {leaf.name: leaf.tp for leaf in layer.state_specs}
    rows = tokens_per_rank(pos.numel(), size)

    def part(whole):
        # whatever stands in the rows that are no token
        padded = torch.full((rows * size, whole.shape[-1]), 7.0, dtype=whole.dtype)
        padded[: pos.numel()] = whole.flatten(0, 1)
        return padded[rank * rows : (rank + 1) * rows].clone()

    def own(name, leaf):
        return leaf if places[name] is None else leaf.chunk(size, dim=places[name] + 1)[rank].contiguous()

    def whole(name, leaf, combine):
        shares = [torch.empty_like(leaf) for _ in range(size)]
        dist.all_gather(shares, leaf.detach().contiguous(), group=mesh.tensor_group)
        return combine(shares) if places[name] is None else torch.cat(shares, dim=places[name] + 1)

    def same(shares):
        assert all(torch.equal(share, shares[0]) for share in shares)
        return shares[0]

    here = part(x).requires_grad_()
    given = {name: own(name, leaf).clone().requires_grad_(name in moving) for name, leaf in entering.items()}
    y, leaving = layer.forward_summed(here, pos, given, LOCAL)
    # of what all ranks carry alike, each has a part of the cotangent
    cotangents = [own(name, leaf) * (places[name] is not None or rank == 0) for name, leaf in moving.items()]
    torch.autograd.backward([y, *(leaving[name] for name in moving)], [part(dy), *cotangents])
    finalize_model_grads(layer, mesh)
    found = {"y": gather_tokens(y.detach(), pos.shape), "dx": gather_tokens(here.grad, pos.shape)}
    found |= {f"leaving {name}": whole(name, leaf, same) for name, leaf in leaving.items()}
    found |= {f"d entering {name}": whole(name, given[name].grad, sum) for name in moving}
    gradients = gather_parameters(layer, mesh.tensor_group, of=lambda p: p.grad)
    return found | {f"d {name}": grad for name, grad in gradients.items()}


def all_on_ranks(mesh, examples):
    return {mixer: on_ranks(mesh, mixer, *given) for mixer, given in examples.items()}


@pytest.mark.parametrize(
    ("tensor", "models"),
    [
        (2, [*MODELS, "qwen", "groups", "added", "falcon"]),
        (4, ["bmojo", "gsa", "hybrid"]),
        pytest.param(4, MODELS, marks=pytest.mark.long),
    ],
)
def test_every_layer_on_a_shared_residual_stream_is_the_layer(pool, single_mesh, tensor, models):
    """3 x 7 tokens, which no number of ranks divides; packed; States enter, and what leaves has cotangents."""
    examples = {mixer: example(mixer, 3, 7) for mixer in models}
    expected = {mixer: on_one(mixer, *given) for mixer, given in examples.items()}
    for found in pool.run(all_on_ranks, examples, tensor=tensor):
        for mixer in models:
            assert found[mixer].keys() == expected[mixer].keys()
            for name, value in found[mixer].items():
                assert relative_error(value, expected[mixer][name]) <= 1e-10, f"{mixer}: {name}"


def model_on(mesh, mixer, compute_dtype, recompute="none"):
    config = model_of(mixer)
    model = LanguageModel(
        config,
        tensor_size=mesh.layout.tensor,
        compute_dtype=compute_dtype,
        recompute=recompute,
        sequence_parallel=mesh.layout.sequence_parallel,
    )
    initialize_parameters(model, 0, mesh.tensor_rank, mesh.layout.tensor)
    tokens, labels = torch.randint(61, (2, 2, 24), generator=seeded(1)).unbind()
    return model, tokens, labels, positions(seeded(2), 2, 24, 0.1)


def kept(mesh, mixer, recompute):
    """How many numbers of each type autograd keeps of a forward pass in bfloat16; parameters and their copies are not counted."""
    model, tokens, _, pos = model_on(mesh, mixer, torch.bfloat16, recompute)
    model(tokens, pos)  # casts the weights
    weights = [
        *model.parameters(),
        *(m._cast_weight_cache for m in model.modules() if getattr(m, "_cast_weight_cache", None) is not None),
    ]
    theirs = {x.untyped_storage().data_ptr() for x in weights}
    storages = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in theirs:
            storages[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden, _ = model(tokens, pos)
    assert hidden.shape == (2, 24, model.config.d_model)
    found = Counter()
    for x in storages.values():
        found[x.dtype] += x.untyped_storage().nbytes() // x.element_size()
    return found


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.long)])
def test_recomputation_keeps_a_part_of_each_layers_input(pool, tensor):
    """What is kept in float32 are the layers' inputs, and what the final norm needs: with a shared stream a rank has its part."""
    whole = pool.run(kept, "mamba", "full", tensor=tensor)[0]
    assert whole[torch.float32] > (model_of("mamba").n_layers + 1) * 48 * model_of("mamba").d_model
    for part in pool.run(kept, "mamba", "full", tensor=tensor, sequence_parallel=True):
        assert part[torch.float32] * tensor == whole[torch.float32]
        assert part[torch.bfloat16] == whole[torch.bfloat16] == 0


def test_without_recomputation_norms_keep_a_part(pool):
    """The gathered input of a projection is whole in either case, in the compute type."""
    whole = pool.run(kept, "mamba", "none", tensor=2)[0]
    part = pool.run(kept, "mamba", "none", tensor=2, sequence_parallel=True)[0]
    assert part[torch.bfloat16] == whole[torch.bfloat16]
    # per norm on a CPU: the residual stream, that normalised, and a number per token
    width, norms = model_of("mamba").d_model, model_of("mamba").n_layers + 1
    assert whole[torch.float32] - part[torch.float32] == norms * 24 * (2 * width + 1)


def test_one_rank_shares_nothing(single_mesh):
    """The same bits as without."""
    found = []
    for shared in (False, True):
        model = LanguageModel(model_of("mamba2"), sequence_parallel=shared)
        initialize_parameters(model, 0, 0, 1)
        tokens, pos = torch.randint(61, (1, 5), generator=seeded(1)), positions(seeded(2), 1, 5, 0.1)
        model.loss(model(tokens, pos)[0], tokens).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Sent(TorchDispatchMode):
    """Bytes that a rank sends over rings within this context, by collective."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.bytes = ranks, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            passes, whole = {"allreduce_": (2, args[0]), "_allgather_base_": (1, args[0]), "_reduce_scatter_base_": (1, args[1])}[
                name
            ]
            nbytes = sum(x.nbytes for x in (whole if isinstance(whole, list) else [whole]))
            self.bytes[name] += passes * nbytes * (self.ranks - 1) // self.ranks
        return func(*args, **(kwargs or {}))


def sent(mesh, mixers):
    found = {}
    for mixer in mixers:
        model, tokens, labels, pos = model_on(mesh, mixer, torch.bfloat16)
        with Sent(mesh.layout.tensor) as counted:
            model.loss(model(tokens, pos)[0], labels).backward()
        found[mixer] = counted.bytes
    return found


FEWER = ("bmojo", "gla", "hybrid", "kda", "mamba2", "mamba3", "mlstm", "rwkv6", "rwkv7")


@pytest.mark.parametrize(
    "models", [["mamba", "mamba2", "gsa", "bmojo", "attention", "hybrid"], pytest.param(MODELS, marks=pytest.mark.long)]
)
def test_a_shared_residual_stream_sends_no_more_bytes(pool, models):
    """Forward and backward, loss and embedding included, without the few numbers of partial gradients."""
    whole = pool.run(sent, models, tensor=2)[0]
    part = pool.run(sent, models, tensor=2, sequence_parallel=True)[0]
    for mixer in models:
        assert not whole[mixer].keys() & {"_allgather_base_", "_reduce_scatter_base_"}
        assert part[mixer]["_allgather_base_"] == part[mixer]["_reduce_scatter_base_"] > 0
        # fewer where several projections or mixers read x, whose gradients are summed before they are sent, or a code is shared
        same = mixer not in FEWER
        assert (part[mixer].total() == whole[mixer].total()) if same else (part[mixer].total() < whole[mixer].total()), mixer
