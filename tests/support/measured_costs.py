"""Measures what models save and send on one rank of a fake process group, to compare plans with.

Run as a program, this file prints it as JSON. Collectives of such a world do nothing, but they are called.
"""

import itertools
import json
import subprocess
import sys
from collections import Counter
from functools import cache

from baton.launcher.config import RunConfig
from baton.models.settings import SMALL_WIDTH, kinds

BATCH, SEQUENCE_LENGTH = 2, 96
SENT_SEQUENCE_LENGTH = 24
"""Of what tensor ranks exchange, all of which is proportional to it."""

# settings that change what is kept, beside each kind's small ones
VARIANTS = {
    **{kind: (kind, {}) for kind in kinds()},
    "attention, whole documents": ("attention", {"window": None}),
    "attention without positions": ("attention", {"rope_theta": None}),
    "attention, biases, capped": ("attention", {"qkv_bias": True, "score_soft_cap": 2.0}),
    "attention, norms": ("attention", {"qk_norm": True}),
    "attention, gated, partly rotated": ("attention", {"output_gate": True, "rope_fraction": 0.7}),
    "attention, gated, biases, norms": ("attention", {"output_gate": True, "qkv_bias": True, "qk_norm": True}),
    "attention, sinks": ("attention", {"sinks": True, "window": None}),
    "attention, both, without positions": ("attention", {"qkv_bias": True, "qk_norm": True, "rope_theta": None}),
    "mamba, no skip, no gate": ("mamba", {"skip": False, "block": "no_gate"}),
    "mamba, static steps": ("mamba", {"selective": ("B", "C")}),
    "mamba, static B, h3": ("mamba", {"selective": ("dt", "C"), "block": "h3"}),
    "mamba, time-invariant": ("mamba", {"selective": (), "skip": False}),
    "mamba, h3": ("mamba", {"block": "h3"}),
    "s4d, no gate": ("s4d", {"block": "no_gate"}),
    "s4d, h3": ("s4d", {"block": "h3"}),
    "mamba, normalised projections": ("mamba", {"projection_norm_eps": 1e-6, "projection_norm_weights": True}),
    "longhorn, as printed": ("longhorn", {"skip": False, "beta_bias": False}),
    "bmojo, sliding": ("bmojo", {"fading": "sliding"}),
    "bmojo-f": ("bmojo", {"eidetic": 0}),
    "mamba2, groups": ("mamba2", {"n_groups": 2}),
    "mamba3, groups, norm": ("mamba3", {"n_groups": 2, "output_norm": True}),
    "mamba3, mimo": ("mamba3", {"mimo_rank": 4}),
    "mamba3, mimo, groups, norm": ("mamba3", {"mimo_rank": 2, "n_groups": 2, "output_norm": True}),
    "mamba2, groups, one norm": ("mamba2", {"n_groups": 4, "norm_group_size": SMALL_WIDTH}),
    "gated_delta_net, grouped values": ("gated_delta_net", {"heads": 2, "v_heads": 4}),
    "kda, bias, grouped values": ("kda", {"gate_bias": True, "heads": 2, "v_heads": 4}),
    "gsa, converted": ("gsa", {"feature_map": "identity", "value_activation": None, "output_activation": None}),
    "gsa, fixed gates": ("gsa", {"gate": "data_independent"}),
    "gsa, abc": ("gsa", {"gate": "abc"}),
    "linear_attention, rms": ("linear_attention", {"normalization": "rms", "feature_map": "identity"}),
    "gsa, relu": ("gsa", {"feature_map": "relu"}),
    "gla, identity": ("gla", {"feature_map": "identity"}),
    "retnet, relu": ("retnet", {"feature_map": "relu"}),
    "gla, no gate": ("gla", {"feature_map": "relu", "output_gate": False}),
    "retnet, no gate": ("retnet", {"output_gate": False}),
    "channel_mix, gated": ("channel_mix", {"receptance": True}),
    "ttt, mlp": ("ttt", {"model": "mlp"}),
    "hgrn2 without a bound": ("hgrn2", {"lower_bound": 0.0}),
    "hgrn2, learned bounds": ("hgrn2", {"bounds": "learned", "scale_queries": True}),
    "lattice, spans": ("lattice", {"variant": "enc", "initial_slots": "learned", "unit_queries": True}),
    "lattice, everything": (
        "lattice",
        {"forget": True, "sparsity": 0.01, "unit_keys": False, "output_norm": False, "conv_bias": True},
    ),
    "lattice without projection": ("lattice", {"project": False, "forget": True, "initial_slots": "learned"}),
}
HANDED_ON = [variant for variant, (_, changes) in VARIANTS.items() if changes.get("window", 1) is not None]
# what is saved in each of two precisions; in float32 a segment's is measured too, of what is handed on (see GATHERED)
SAVED_WITH = [
    (variant, precision)
    for variant in VARIANTS
    for precision in ("float32", "bfloat16")
    if precision == "bfloat16" or variant in kinds() or variant not in HANDED_ON
]
RECOMPUTED = ("mamba", "gla", "bmojo")
SELECTIVELY = ("mamba", "mamba, h3", "longhorn")
EXCHANGED = (*kinds(), "lattice, everything")
# whether layers are run again, and what the residual stream is in: of what lives after a pass
LIVING_WITH = [("none", "float32"), ("full", "bfloat16")]
# precision, whether layers are run again, and what the residual stream is in
SENT_WITH = [("float32", "none", "float32"), ("bfloat16", "full", "float32"), ("bfloat16", "none", "bfloat16")]


FAMILIES = ("mamba", "gla", "gated_delta_net", "lattice", "attention", "swiglu")
"""A mixer of each family of recurrences, and what has none: over tensor ranks the others are in the long form alone."""


def sent_with(variant):
    """All of them for some mixers, one for the others, which the long form measures with all as well."""
    return SENT_WITH if variant in RECOMPUTED[:2] else SENT_WITH[1:2]


STAGES = 2
STAGED = ("mamba", "gla", "bmojo", "lattice")
ZERO = (0, 1, 2)
SPANS = 4
# ranks that share a residual stream, whose number does not divide the tokens, in layers of two sub-blocks and of one
SHARED = ("mamba2", "gla", "bmojo", "mamba", "lattice")
SHARED_OFTEN = RECOMPUTED[:2]
"""Those that are not in the long form alone."""
PARALLEL = ("gla", "bmojo")
"""Mixers that share a sub-block with the MLP, where there is one."""
SHARED_BY = {"tensor": 4, "sequence_parallel": True}
# precision, and whether layers are run again: of what ranks that share it exchange
SHARED_WITH = [("float32", "none"), ("bfloat16", "full")]
ODD_SEQUENCE_LENGTH = 95
# gradients through all segments, through some of them, and through none but their own
SEGMENTED = ("mamba", "gla", "bmojo", "lattice")
CUT_SEQUENCE_LENGTH = 48
BPTT = {
    "exact": {"mode": "exact", "segment": 12},
    "truncated": {"mode": "truncated", "segment": 6, "gradient_segments": 4},
    "cut": {"mode": "truncated", "segment": 12, "gradient_segments": 1},
}
LANES = 6
ONE_BLOCK = ("mamba2", "gla")
"""Mixers of which both layers have one set of weights, where one layer has an MLP, and where there are stages."""
KEYS = "attention, whole documents"
OFFLOADED = [(offload_kv, recompute) for offload_kv in (False, True) for recompute in ("none", "full")]
"""Whether keys and values of KEYS are offloaded, and whether layers are run again."""
OFFLOADED_OFTEN = OFFLOADED[::3]


def _with_recurrences_of_their_own():
    """Of the variants that are handed on those whose mixer declares other recurrences than those before it. The long form measures
    what all of them hand on; tests/launcher/test_plan.py compares the States of all with those that are declared."""
    declared = {}
    for variant in HANDED_ON:
        kind, changes = VARIANTS[variant]
        costs = kinds()[kind].small().model_copy(update=changes).costs(SMALL_WIDTH)
        declared.setdefault(f"{kind} {costs.recurrences}", variant)
    return list(declared.values())


GATHERED = _with_recurrences_of_their_own()
GATHERED_OFTEN = [variant for variant in GATHERED if variant in (*FAMILIES, "bmojo", "ttt")]
"""Those that are not in the long form alone: a mixer of each family, and the two with several recurrences."""
SEGMENTED_OVER_RANKS = [(variant, bptt) for variant in SEGMENTED for bptt in BPTT if bptt == "truncated" or variant == "gla"]
LONG_OVER_RANKS = [("bmojo", "truncated"), ("lattice", "truncated")]
"""Those that take longest are in the long form."""
OVER_RANKS_OFTEN = [("mamba", "truncated"), ("gla", "exact")]
"""Those over ranks that are not in the long form alone."""
OTHERWISE_OFTEN = ("truncated",)
"""Of BPTT, with which layers are run again, or are a later stage's, not in the long form alone."""
SEGMENTED_OFTEN = [("mamba", "exact"), ("gla", "truncated"), ("mamba", "cut")]
"""Those on one rank that are not in the long form alone."""

# every two values of the three meet
SEGMENTED_OVER_TENSOR = [
    (bptt, how, ("none", "full")[(how == "shared") ^ (bptt == "truncated")]) for bptt in BPTT for how in ("tensor", "shared")
]
SEGMENTED_OVER_TENSOR_OFTEN = [SEGMENTED_OVER_TENSOR[n] for n in (0, 3, 5)]


def run_of(
    variant, *, compute_dtype="float32", recompute="none", residual_dtype="float32", device="cpu",
    sequence_length=SEQUENCE_LENGTH, mlp=False,
    bptt=None, offload_kv="auto", **layout,
):  # fmt: skip
    """A run of two layers of the variant's small mixer. mlp: the first has an MLP behind it, or beside it. bptt: a name of BPTT."""
    kind, changes = VARIANTS[variant]
    mixers = {kind: kinds()[kind].small().model_copy(update=changes).model_dump()}
    model = {"d_model": SMALL_WIDTH, "n_layers": 2, "vocab_size": 64, "pattern": [kind], "mixers": mixers, "loss_chunk": 32}
    if mlp:
        mixers["swiglu"] = kinds()["swiglu"].small().model_dump()
        model["pattern"] = [f"swiglu|{kind}" if variant in PARALLEL else f"{kind}+swiglu", kind]
    training = {
        "steps": 1,
        "sequence_length": sequence_length,
        "global_batch_tokens": 2 * BATCH * sequence_length,
        "micro_batch_size": BATCH,
    }
    training |= {"compute_dtype": compute_dtype, "recompute": recompute, "optimizer": {"lr": 1e-3}}
    training |= {"residual_dtype": residual_dtype, "offload_kv": offload_kv}
    if variant in ONE_BLOCK and (layout.get("pipeline", 1) > 1 or (mlp and variant not in PARALLEL)):
        model["shared"] = [kind]
    if bptt is not None:
        training |= {"bptt": BPTT[bptt], "lanes": LANES}
    return RunConfig.model_validate({"name": "small", "device": device, "model": model, "training": training, "layout": layout})


@cache
def measured(form):
    """What `measure` prints, once for all tests: in a process of its own, because it changes what torch.distributed is."""
    done = subprocess.run([sys.executable, "-P", __file__, form], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def measure(form):
    """Print, as JSON, what the variants' models keep and send on one rank, and what a step sends of ZeRO and of stages. form:
    "quick", or "long", in which all of RECOMPUTED live, all mixers send with each of SENT_WITH, all of HANDED_ON hand on, all of
    GATHERED are gathered, all of SHARED share a residual stream, and all of SEGMENTED are measured with each of BPTT, over ranks,
    and with keys that are offloaded in each form."""
    import gc

    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from baton.data_pipeline.packing import Batch
    from baton.models import stages
    from baton.models.lm import LanguageModel
    from baton.parallel import earlier_keys
    from baton.parallel import mesh as meshes
    from baton.parallel.context_parallel import ContextLink
    from baton.parallel.param_layout import initialize_parameters, named_layouts
    from baton.parallel.pipeline import PipelineLink, StepSchedule
    from baton.training.bptt.lane_states import LaneStates
    from baton.training.build import DTYPES, build, build_model
    from baton.training.step.cuda_graphs import CudaGraphs
    from baton.training.step.executor import StepExecutor
    from baton.training.step.microbatch_runner import MicrobatchRunner

    torch.set_num_threads(1)
    gc.freeze()  # what is there already is not looked at again and again
    join = dist.init_process_group

    def join_nobody(backend, rank, world_size, **settings):
        join("fake", store=FakeStore(), rank=rank, world_size=world_size)

    dist.init_process_group = join_nobody

    @cache
    def collective(func):
        """Asked of every operator that runs: its namespace is cut out of its schema each time."""
        return func.namespace == "c10d"

    class Sent(TorchDispatchMode):
        """Counts the bytes that collectives are given: of whole tensors, whichever end has those."""

        def __init__(self):
            super().__init__()
            self.bytes = Counter()

        @classmethod
        def _should_skip_dynamo(cls):
            """Nothing is compiled here, and to tell Dynamo so at every operator takes longer than the operator."""
            return False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if collective(func):
                name = func.__name__.split(".")[0]
                tensors = [x for x in tree_leaves(args[name == "_reduce_scatter_base_"]) if isinstance(x, torch.Tensor)]
                self.bytes[name] += sum(x.nbytes for x in tensors)
            return func(*args, **(kwargs or {}))

    class Living(Sent):
        """Also knows which tensors made within it still live, as long as it watches."""

        def __init__(self):
            super().__init__()
            self.made, self.watches = {}, True
            gc.freeze()  # what there is was not made within it, and need not be looked at when it is asked

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if not self.watches:
                return result
            for x in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return result

        def nbytes(self, known):
            gc.collect()
            return sum(n for address, (storage, n) in self.made.items() if address not in known and not storage.expired())

    def batch(sequence_length=SEQUENCE_LENGTH):
        tokens = torch.randint(64, (BATCH, sequence_length))
        return Batch(tokens, tokens.roll(-1, 1), torch.arange(sequence_length, dtype=torch.int32).repeat(BATCH, 1))

    def model_of(variant, compute_dtype, recompute, tensor, *, mlp=False, sequence_parallel=False, residual_dtype="float32"):
        """A model that has made its compute copies, and the storages of those and of its parameters."""
        config = run_of(variant, tensor=tensor, mlp=mlp)
        model = LanguageModel(
            config.model,
            tensor_size=tensor,
            compute_dtype=DTYPES[compute_dtype],
            residual_dtype=DTYPES[residual_dtype],
            recompute=recompute,
            sequence_parallel=sequence_parallel,
        )
        initialize_parameters(model, 0, 0, tensor)
        if compute_dtype != "float32":
            model.logits(model(read.tokens[:, :8], read.pos[:, :8])[0])
        copies = [copy for module in model.modules() if (copy := getattr(module, "_cast_weight_cache", None)) is not None]
        return model, {x.untyped_storage()._cdata for x in (*model.parameters(), *copies)}

    def saved(model, known, read, *, backwards=False):
        """Bytes of what autograd saves of the stack. backwards: then it goes backwards as well."""
        x = read.tokens if model.stage.first else torch.randn(*read.tokens.shape, SMALL_WIDTH, requires_grad=True)
        found = {}

        def pack(x):
            storage = x.untyped_storage()
            found[storage._cdata] = storage
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kept = model(x, read.pos)
        if backwards:
            kept[0].sum().backward()
        del kept
        return sum(storage.nbytes() for address, storage in found.items() if address not in known)

    read, results = batch(), {}
    mesh = meshes.initialize(run_of("mamba").layout, device=torch.device("cpu"), rank=0, store=None)
    results["saved"] = {f"{v} {p}": saved(*model_of(v, p, "none", 1), read) for v, p in SAVED_WITH}
    results["living"] = {}
    for variant, (recompute, residual_dtype) in itertools.product(RECOMPUTED if form == "long" else SHARED_OFTEN, LIVING_WITH):
        model, known = model_of(variant, "bfloat16", recompute, 1, residual_dtype=residual_dtype)
        with Living() as living:
            kept = model(read.tokens, read.pos)
        results["living"][f"{variant} {recompute} {residual_dtype}"] = living.nbytes(known)
        del kept
    results["selective"] = {}
    for variant in SELECTIVELY:
        found = results["selective"][variant] = []
        for recompute in ("none", "selective"):
            model, known = model_of(variant, "bfloat16", recompute, 1, mlp=True)
            with Living() as living:
                kept = model(read.tokens, read.pos)
            found.append(living.nbytes(known))
            del kept
    meshes.shutdown()

    mesh = meshes.initialize(run_of("mamba", tensor=2).layout, device=torch.device("cpu"), rank=0, store=None)
    results["sent"], read = {}, batch(SENT_SEQUENCE_LENGTH)
    for variant in EXCHANGED if form == "long" else FAMILIES:
        for compute_dtype, recompute, residual_dtype in SENT_WITH if form == "long" else sent_with(variant):
            model, _ = model_of(variant, compute_dtype, recompute, 2, residual_dtype=residual_dtype)
            with Sent() as sent:
                model.loss(model(read.tokens, read.pos)[0], read.labels).backward()
            results["sent"][f"{variant} {compute_dtype} {recompute} {residual_dtype}"] = sent.bytes.total()
    meshes.shutdown()

    mesh = meshes.initialize(run_of("mamba", **SHARED_BY).layout, device=torch.device("cpu"), rank=0, store=None)
    results["shared"], read = {}, batch(ODD_SEQUENCE_LENGTH)
    for variant in SHARED if form == "long" else SHARED_OFTEN:
        found = results["shared"][variant] = {"saved": {}, "living": {}, "sent": {}}
        for compute_dtype in DTYPES:
            found["saved"][compute_dtype] = saved(*model_of(variant, compute_dtype, "none", mlp=True, **SHARED_BY), read)
            model, known = model_of(variant, compute_dtype, "full", mlp=True, **SHARED_BY)
            with Living() as living:
                kept = model(read.tokens, read.pos)
            found["living"][compute_dtype] = living.nbytes(known)
            del kept
        for compute_dtype, recompute in SHARED_WITH:
            model, _ = model_of(variant, compute_dtype, recompute, mlp=True, **SHARED_BY)
            with Sent() as sent:
                model.loss(model(read.tokens, read.pos)[0], read.labels).backward()
            found["sent"][f"{compute_dtype} {recompute}"] = sent.bytes
        found["partial"] = {name: p.numel() for name, p, layout in named_layouts(model) if layout.partial_over}
    meshes.shutdown()
    read = batch()

    from_here = ContextLink.irecv

    def receive(link, direction, carrier, leaves, batch):
        """An arbitrary State instead of a received one: States are only counted here."""
        if link.size == 1:
            return from_here(link, direction, carrier, leaves, batch)
        return lambda: {leaf.name: torch.ones(batch, *leaf.shape, dtype=leaf.dtype) for leaf in leaves}

    ContextLink.irecv = receive
    results["handed on"] = {variant: {} for variant in HANDED_ON}
    for rank, direction in ((0, "right"), (1, "left")):
        mesh = meshes.initialize(run_of("mamba", context=2).layout, device=torch.device("cpu"), rank=rank, store=None)
        results["saved of a segment"] = {}
        span = slice(rank * SEQUENCE_LENGTH // 2, (rank + 1) * SEQUENCE_LENGTH // 2)
        for variant in HANDED_ON if form == "long" else GATHERED_OFTEN:
            mesh.link.sent.clear()
            model = LanguageModel(run_of(variant).model, link=mesh.link)
            initialize_parameters(model, 0, 0, 1)
            part = Batch(read.tokens[:, span], read.labels[:, span], read.pos[:, span])
            known = {x.untyped_storage()._cdata for x in model.parameters()}
            results["saved of a segment"][variant] = saved(model, known, part, backwards=True)
            sent = sum(n for (what, _), n in mesh.link.sent.items() if what == f"{direction} bytes")
            results["handed on"][variant][direction] = sent
        meshes.shutdown()

    layout = run_of("mamba", context=SPANS, context_comm="all_gather").layout
    mesh = meshes.initialize(layout, device=torch.device("cpu"), rank=1, store=None)
    results["gathered"], span = {}, slice(SEQUENCE_LENGTH // SPANS, 2 * SEQUENCE_LENGTH // SPANS)
    for variant in GATHERED if form == "long" else GATHERED_OFTEN:
        mesh.link.sent.clear()
        model = LanguageModel(run_of(variant).model, link=mesh.link)
        initialize_parameters(model, 0, 0, 1)
        model(read.tokens[:, span], read.pos[:, span])[0].sum().backward()
        found = results["gathered"][variant] = Counter()
        for (what, _), n in mesh.link.sent.items():
            found[what] += n
    meshes.shutdown()

    results["saved of a stage"] = {v: [] for v in STAGED}
    mesh = meshes.initialize(run_of("mamba").layout, device=torch.device("cpu"), rank=0, store=None)
    for variant in STAGED:
        config = run_of(variant).model
        for stage in stages.partition_layers(config, STAGES, SEQUENCE_LENGTH):
            model = LanguageModel(config, stage=stage)
            initialize_parameters(model, 0, 0, 1)
            results["saved of a stage"][variant].append(
                saved(model, {x.untyped_storage()._cdata for x in model.parameters()}, read)
            )
    meshes.shutdown()

    class Came:
        """Hidden states between stages, which are not really sent."""

        def __init__(self, shape):
            self.shape = shape

        def wait(self):
            return torch.ones(self.shape)

    PipelineLink.irecv = lambda link, kind, shape, dtype: Came(shape)

    def step_of(rank, tied=True, **layout):
        """Bytes by collective of a rank's step of two micro-batches."""
        config = run_of("gla", **layout)
        mesh = meshes.initialize(config.layout, device=torch.device("cpu"), rank=rank, store=None)
        train_state = build(config.model.model_copy(update={"tie_embeddings": tied}), config.training, mesh)
        with Sent() as sent:
            StepExecutor(train_state.model, train_state.engine, mesh).step([batch() for _ in range(2)], 0.0)
        meshes.shutdown()
        return sent.bytes

    results["zero"] = {stage: step_of(0, data=2, zero=stage) for stage in ZERO}
    results["stages"] = {f"{rank} {tied}": step_of(rank, tied, pipeline=STAGES) for rank in range(STAGES) for tied in (True, False)}
    results["shared stages"] = [step_of(rank, pipeline=STAGES, **SHARED_BY)["send"] for rank in (0, SHARED_BY["tensor"])]

    ContextLink.recv_wraparound = lambda link, leaves, batch: {x.name: torch.ones(batch, *x.shape, dtype=x.dtype) for x in leaves}

    def passes_of(variant, bptt, rank=0, recompute="none", *, offload_kv="auto", **layout):
        """Of a micro-batch on a rank: bytes that live after the first group's surveys, and at most after the first passes forwards;
        bytes of its lanes, and of what these carried before; what its links and its collectives were given in all; of keys and
        values that are offloaded bytes of the host's memory, which does not count as living, and bytes that came from there."""
        settings = {"bptt": bptt, "recompute": recompute, "offload_kv": offload_kv}
        run = run_of(variant, sequence_length=CUT_SEQUENCE_LENGTH, **settings, **layout)
        training, mesh = run.training, meshes.initialize(run.layout, device=torch.device("cpu"), rank=rank, store=None)
        model = build_model(run.model, training, mesh.device, mesh)
        initialize_parameters(model, 0, mesh.tensor_rank, mesh.layout.tensor)
        lanes = LaneStates(model, training, mesh) if training.carries_lane_states else None
        whole, together = batch(CUT_SEQUENCE_LENGTH // run.layout.context), training.gradient_segments
        read = Batch(whole.tokens, whole.labels, whole.pos, (0, 1))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        carried = [] if lanes is None else [x for state in lanes._states.values() for x in state.values()]
        counted = [whole.tokens, whole.labels, whole.pos, *carried, *(x for p in model.parameters() for x in (p, p.grad))]
        known = {x.untyped_storage()._cdata for x in counted}
        found = {"forward_no_grad": 0, "forward": 0, "fetched": 0}
        host, copy = None if model.link is None else model.link.key_store.host, earlier_keys._copy

        def on_the_host():
            blocks = [] if host is None else [*host._used.values(), *host._free]
            return {block.untyped_storage()._cdata for block in blocks}

        def counted_copy(to, rows):
            if to.untyped_storage()._cdata not in on_the_host():
                found["fetched"] += to.nbytes
            copy(to, rows)

        earlier_keys._copy = counted_copy

        def taken_back():
            """Storages of what lanes carried before; they are counted for themselves."""
            before = () if lanes is None else lanes._backup.values()
            return {x.untyped_storage()._cdata for _, states in before for state in states.values() for x in state.values()}

        if lanes is not None:
            lanes.begin_step()
        with Living() as living:
            schedule = StepSchedule(training.segments, together)
            runner = MicrobatchRunner(model, [read], 1.0, schedule, lanes, model.forward_context)
            for n, operation in enumerate(schedule.operations(mesh.pipeline_rank, run.layout.pipeline, 1)):
                living.watches = n <= together + 1  # later ones are only asked what they send
                runner.run_operation(operation)
                for channel in model.link.channels.values() if model.link is not None else ():
                    channel.flush()  # a thread lets go of what has left, some time later
                # the last survey, and the two that run forwards after it
                if together - 2 <= n <= together + 1 and operation.kind != "backward":
                    found[operation.kind] = max(found[operation.kind], living.nbytes(known | taken_back() | on_the_host()))
            runner.finish()
        earlier_keys._copy = copy
        found["host"] = 0 if host is None else host.nbytes
        found["sent"], found["handed on"] = living.bytes, Counter()
        for (what, name), n in model.link.sent.items():
            if "bytes" in what:
                found["handed on"]["around" if name == "all recurrences" else what.removesuffix(" bytes")] += n
        found["lanes"] = sum(x.nbytes for x in carried)
        found["before"] = 0 if lanes is None else lanes.backup_bytes
        if run.layout.world_size == 1 and not run.keeps_kv:  # full attention in segments is not recorded
            found["fixed"] = fixed_of(model, read, schedule, lanes)
        meshes.shutdown()
        return found

    def fixed_of(model, read, schedule, lanes):
        """Bytes of States, scores and their copies that recorded passes read and write in place."""
        graphs = CudaGraphs(model, RunsOnce)
        graphs.runner([read], 1.0, schedule, lanes)
        passes, saved = graphs._recorded.passes, graphs._recorded.saved
        memories = [x and x.memory for x in (passes.entering, passes.gradients)] + [passes.results]
        entering, gradients, scores = (sum(x.nbytes for x in memory.tensors) if memory else 0 for memory in memories)
        rows = [0 if x is None else len(x) for x in (saved.states, saved.results)]
        carried = [x for state in (passes.lane_states or {}).values() for x in state.values()]
        return gradients + (1 + rows[0]) * entering + (1 + rows[1]) * scores + sum(x.nbytes for x in carried)

    class RunsOnce:
        """A recorder of passes that are not replayed."""

        def __init__(self, device):
            pass

        def warm_up(self, run):
            run()

        def record(self, run):
            return run

        def release(self):
            pass

    found = results["segments"] = {}
    for bptt in BPTT:
        for variant in SEGMENTED:
            if form == "long" or (variant, bptt) in SEGMENTED_OFTEN:
                found[f"{variant} {bptt}"] = passes_of(variant, bptt)
            for rank in (0, 1) if (variant, bptt) in (SEGMENTED_OVER_RANKS if form == "long" else OVER_RANKS_OFTEN) else ():
                found[f"{variant} {bptt} rank {rank}"] = passes_of(variant, bptt, rank, context=2)
        if form == "long" or bptt in OTHERWISE_OFTEN:
            found[f"gla {bptt} again"] = passes_of("gla", bptt, recompute="full")
            found[f"gla {bptt} stage"] = passes_of("gla", bptt, 1, pipeline=STAGES)
    for bptt, how, recompute in SEGMENTED_OVER_TENSOR if form == "long" else SEGMENTED_OVER_TENSOR_OFTEN:
        layout = {"tensor": 2} if how == "tensor" else SHARED_BY
        found[f"mamba {bptt} {how} {recompute}"] = passes_of("mamba", bptt, recompute=recompute, **layout)
    for offload_kv, recompute in OFFLOADED if form == "long" else OFFLOADED_OFTEN:
        found[f"keys {offload_kv} {recompute}"] = passes_of(KEYS, "exact", recompute=recompute, offload_kv=offload_kv)
    print(json.dumps(results))


if __name__ == "__main__":
    measure(*sys.argv[1:])
