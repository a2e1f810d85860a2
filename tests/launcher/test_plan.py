"""`baton plan`: its counts equal those of the modules themselves and of measurements on running models."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from support import measured_costs
from support.long_form import some
from support.measured_costs import (
    BATCH,
    EXCHANGED,
    FAMILIES,
    GATHERED,
    GATHERED_OFTEN,
    HANDED_ON,
    LIVING_WITH,
    ODD_SEQUENCE_LENGTH,
    RECOMPUTED,
    SAVED_WITH,
    SELECTIVELY,
    SENT_SEQUENCE_LENGTH,
    SENT_WITH,
    SEQUENCE_LENGTH,
    SHARED,
    SHARED_BY,
    SHARED_OFTEN,
    SHARED_WITH,
    SPANS,
    STAGED,
    STAGES,
    VARIANTS,
    ZERO,
    run_of,
    sent_with,
)
from support.presets import presets

from baton.launcher.config import RunConfig, load
from baton.launcher.errors import ConfigError
from baton.launcher.planner.comm_volume import exchanges, ring, tensor_volumes
from baton.launcher.planner.memory import Arithmetic, of_stages
from baton.launcher.planner.parameters import REDUCE_BUCKET
from baton.models.config import ModelConfig
from baton.models.settings import SMALL_WIDTH, cost_model, kinds

RUN = Path(str(files("baton.configs"))) / "runs" / "papers" / "mamba-1.4b-pile.yaml"


@pytest.fixture
def measured(request):
    return measured_costs.measured("long" if request.node.get_closest_marker("long") else "quick")


# ---------------------------------------------------------------------------------------------------------- against the modules


def on_meta(config, dtype="float32", stage=None):
    import torch

    from baton.models.lm import LanguageModel

    with torch.device("meta"):
        return LanguageModel(config, compute_dtype=getattr(torch, dtype), stage=stage)


def planned(model, stages=1):
    """The arithmetic of the stages of a run of this model."""
    training = {"steps": 1, "sequence_length": 64, "global_batch_tokens": 64, "optimizer": {"lr": 1e-3}}
    values = {"name": "x", "model": model.model_dump(), "training": training, "layout": {"pipeline": stages}}
    return of_stages(RunConfig.model_validate(values))


def assert_parameters(config, stages=1):
    from baton.parallel.cast_weights import CastWeightCache
    from baton.parallel.param_layout import named_layouts, parameter_count

    total = 0
    for one in planned(config, stages):
        model = on_meta(config, stage=one.stage)
        by_module = {
            name: (layout.shape, layout.split, bool(layout.partial_over), layout.tied_replica)
            for name, _, layout in named_layouts(model)
        }
        counted = {p.name: (p.shape, p.split, p.partial, p in one.tied_replicas) for p in (*one.parameters, *one.tied_replicas)}
        assert counted == by_module
        assert one.parameter_count == parameter_count(model)
        copied = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, CastWeightCache)}
        if not (config.tie_embeddings and one.stage.last):
            copied.discard("embedding.weight")  # looked up in float32
        assert {p.name for p in (*one.parameters, *one.tied_replicas) if p.uses} == copied
        total += one.parameter_count
    return total


@pytest.mark.parametrize(("variant", "tied"), [*((variant, True) for variant in VARIANTS), *((kind, False) for kind in kinds())])
def test_parameters_are_the_modules(variant, tied):
    assert_parameters(run_of(variant).model.model_copy(update={"tie_embeddings": tied}))


@pytest.mark.parametrize("name", presets())
def test_parameters_of_shipped_models_are_the_modules(name):
    """Of a layer more than the pattern has before it begins again; below some are whole."""
    config = presets()[name]
    few = config.model_copy(update={"n_layers": min(config.n_layers, len(config.period) + 1)})
    assert set(few.layers) == set(config.layers)
    assert_parameters(few)


@pytest.mark.parametrize("name", ["hybrid-130m", "bmojo-130m", "transformer-125m"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [2, 5])
def test_parameters_of_every_stage_are_the_modules(name, tied, stages):
    config = ModelConfig(**presets()[name].model_dump() | {"tie_embeddings": tied})
    assert assert_parameters(config, stages) == planned(config)[0].parameter_count


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            "mamba2, groups",
            r"layout\.tensor=4 does not divide model\.mixers\.mamba2\.n_groups=2; layout\.tensor that does: \[1, 2\]",
        ),
        (
            "gated_delta_net, grouped values",
            r"layout\.tensor=4 does not divide model\.mixers\.gated_delta_net\.heads=2; .*: \[1, 2\]",
        ),
        (
            "mamba2, larger norms",
            r"does not divide model\.mixers\.mamba2\.expand \* model\.d_model / norm_group_size=2; .*: \[1, 2\]",
        ),
    ],
)
def test_groups_that_tensor_ranks_do_not_divide_are_refused(variant, message, monkeypatch):
    monkeypatch.setitem(VARIANTS, "mamba2, larger norms", ("mamba2", {"n_groups": 4, "norm_group_size": SMALL_WIDTH // 2}))
    run_of(variant, tensor=2).check()
    with pytest.raises(ConfigError, match=message):
        run_of(variant, tensor=4).check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_are_the_modules(variant):
    config = run_of(variant)
    types = {"compute": "bfloat16", "float32": "float32", "int64": "int64", "bool": "bool"}
    (name,) = config.model.mixers
    model = on_meta(config.model, "bfloat16")
    by_module = {x.name: (x.shape, str(x.dtype), x.tp, x.grad, x.grows) for x in model.layers["0"].state_specs}
    states = [state for recurrence in config.model.mixers[name].costs(SMALL_WIDTH).recurrences for state in recurrence.state]
    counted = {f"{name}.{x.name}": (x.shape, f"torch.{types[x.dtype]}", x.tp, x.grad, x.grows) for x in states}
    assert counted == by_module


def test_chunks_and_buckets_are_the_kernels():
    from baton.kernels import state_message
    from baton.kernels.delta_rule import chunked as delta_rule
    from baton.kernels.delta_rule.triton_launch import LaunchConfig as DeltaRuleLaunchConfig
    from baton.kernels.diagonal_scan import chunked as diagonal_scan
    from baton.kernels.diagonal_scan.triton_launch import LaunchConfig
    from baton.kernels.eidetic_attention import chunked as eidetic_attention
    from baton.kernels.gated_linear_attention import chunked as linear_attention
    from baton.kernels.gated_linear_attention.launch_args import LaunchConfig as GLALaunchConfig
    from baton.kernels.gated_linear_attention.triton_launch import SCORES_SHARE
    from baton.kernels.gated_slot_attention import chunked as slot_attention
    from baton.kernels.generalized_delta_rule import chunked as generalized_delta_rule
    from baton.kernels.lattice import chunked as lattice
    from baton.kernels.lattice.triton_launch import LaunchConfig as LatticeLaunchConfig
    from baton.kernels.mamba3_mimo.triton_launch import MOST_INPUTS
    from baton.kernels.short_conv.triton_launch import fits_in_block
    from baton.kernels.window_attention import chunked as window_attention
    from baton.models.settings.delta_rule import UNIT_WIDTHS
    from baton.parallel.deepspeed_settings import deepspeed_config

    assert cost_model.LINEAR_ATTENTION_CHUNK == linear_attention.CHUNK == slot_attention.CHUNK
    assert delta_rule.CHUNK == cost_model.DELTA_RULE_CHUNK
    assert generalized_delta_rule.CHUNK == cost_model.GENERALIZED_DELTA_RULE_CHUNK
    assert GLALaunchConfig().chunk == cost_model.LINEAR_ATTENTION_CHUNK
    assert DeltaRuleLaunchConfig().chunk == cost_model.DELTA_RULE_CHUNK
    assert tuple(width for width in range(1, 1025) if fits_in_block(width)) == UNIT_WIDTHS
    assert MOST_INPUTS == cost_model.MAMBA3_MOST_INPUTS
    assert SCORES_SHARE == cost_model.SCORES_SHARE
    assert lattice._SEQUENTIAL_CHUNK == cost_model.LATTICE_SEQUENTIAL_CHUNK
    assert lattice._QR_CHUNK == cost_model.LATTICE_QR_CHUNK
    assert LatticeLaunchConfig().checkpoint_interval == LatticeLaunchConfig().chunk == cost_model.LATTICE_GPU_CHUNK
    assert window_attention._BLOCK == cost_model.WINDOW_BLOCK
    assert eidetic_attention._BLOCK == cost_model.EIDETIC_BLOCK
    assert state_message._ALIGNMENT_BYTES == cost_model.MESSAGE_ALIGNMENT
    for batch, channels, d_state in ((1, 64, 16), (1, 1024, 16), (4, 4096, 16), (1, 2048, 5), (2, 1024, 4)):
        carrier = cost_model.RecurrenceCosts("scan", (), chunk=1, scan_elements=channels * d_state)
        expected = diagonal_scan.chunk_length(batch, channels // 2, d_state)
        assert carrier.tokens_per_chunk(cost_model.Workload(batch, 1 << 20, tensor=2, gpu=False)) == expected
        assert carrier.tokens_per_chunk(cost_model.Workload(batch, 1 << 20, tensor=2)) == LaunchConfig().checkpoint_interval
    assert all(deepspeed_config(stage)["zero_optimization"]["reduce_bucket_size"] == REDUCE_BUCKET for stage in ZERO)


# ---------------------------------------------------------------------------------------------------- against running models

READ_NUMBERS = 8 + 4  # bytes per token of the tokens and positions that it has, and that are counted with the whole step's


@pytest.mark.parametrize(("variant", "compute_dtype"), SAVED_WITH)
def test_activations_are_what_autograd_keeps(measured, variant, compute_dtype):
    """To 3 %: seeds of a chunk and the like are not counted."""
    arithmetic = Arithmetic(run_of(variant, compute_dtype=compute_dtype))
    # the last norm's output has a gradient from the loss
    without = -READ_NUMBERS + {"float32": 4, "bfloat16": 2}[compute_dtype] * SMALL_WIDTH
    counted = arithmetic.activations(full_recompute=False) - BATCH * SEQUENCE_LENGTH * without
    assert counted == pytest.approx(measured["saved"][f"{variant} {compute_dtype}"], rel=0.03)


@pytest.mark.parametrize("variant", some(RECOMPUTED, SHARED_OFTEN))
@pytest.mark.parametrize(("recompute", "residual_dtype"), LIVING_WITH)
def test_what_lives_after_forward_is_activations_and_states(measured, variant, recompute, residual_dtype):
    arithmetic = Arithmetic(run_of(variant, compute_dtype="bfloat16", residual_dtype=residual_dtype))
    counted = arithmetic.activations(full_recompute=recompute == "full") + arithmetic.states
    assert counted == pytest.approx(measured["living"][f"{variant} {recompute} {residual_dtype}"], rel=0.1)


@pytest.mark.parametrize("variant", SELECTIVELY)
def test_what_is_made_again_does_not_live(measured, variant):
    """Of a layer with an MLP and one without: as many bytes fewer as are counted."""
    plain, less = measured["selective"][variant]
    runs = (Arithmetic(run_of(variant, compute_dtype="bfloat16", mlp=True, recompute=how)) for how in ("none", "selective"))
    counted = [run.activations(full_recompute=False) for run in runs]
    assert plain - less == counted[0] - counted[1] > 0


def test_a_gpu_keeps_less():
    on_cpu, on_gpu = (Arithmetic(run_of("gla", device=device)).activations(full_recompute=False) for device in ("cpu", "cuda"))
    assert 0.5 < on_gpu / on_cpu < 1


BY_KERNELS = """
from dataclasses import replace

import torch
from triton.runtime import JITFunction
from baton.kernels.common import selective_recompute
from baton.kernels.compile.aot import META, Target, compiling
from baton.kernels.delta_rule.triton_launch import delta_rule_triton
from baton.kernels.gated_linear_attention.triton_launch import gla_triton
from baton.kernels.gated_slot_attention.triton_launch import gsa_triton
from baton.kernels.mlstm import mlstm
from baton.models.library import mixer
from baton.models.settings import kinds
from baton.models.settings.cost_model import MAMBA3_MOST_INPUTS, Workload

JITFunction._do_compile = lambda self, key, *_: self  # nothing is compiled here
B, T, WIDTH = 2, 192, 1024


def x(*shape, dtype=torch.bfloat16):
    return torch.empty(B, T, *shape, dtype=dtype, device=META, requires_grad=True)


def gates(*shape):
    return x(*shape, dtype=torch.float32)


rest = {"pos": None, "initial_state": None}
calls = {
    "gla": (gla_triton, {"heads": 4}, [x(4, 128), x(4, 128), x(4, 256), gates(4, 128)], {"gate": "key", "scale": 1.0}),
    "retnet": (gla_triton, {}, [x(4, 256), x(4, 256), x(4, 512), gates(4)], {"gate": "scalar", "scale": 1.0}),
    "hgrn2": (gla_triton, {"d_key": 128}, [x(8, 128), x(8, 128), x(8, 128), gates(8, 128)], {"gate": "key", "scale": 1.0}),
    "mamba2": (gla_triton, {}, [x(1, 128), x(1, 128), x(32, 64), gates(32)], {"gate": "scalar", "scale": 1.0}),
    "mamba2 groups": (gla_triton, {"n_groups": 32, "d_state": 256}, [x(32, 256), x(32, 256), x(32, 64), gates(32)],
                      {"gate": "scalar", "scale": 1.0}),
    "gsa": (gsa_triton, {"head_dim": 256}, [*(x(4, 256) for _ in "qkv"), x(4, 64)],
            {"scale": 1.0, "slot_activation": "softmax", "gate_logit_normalizer": 8.0}),
    "delta_net": (delta_rule_triton, {"heads": 8, "d_key": 128, "d_value": 128}, [*(x(8, 128) for _ in "qkv"), gates(8), None],
                  {"scale": 1.0}),
    "mlstm": (mlstm, {}, [x(2, 256), x(2, 256), x(2, 512), gates(2), gates(2)], {"scale": 1.0}),
    "kda": (delta_rule_triton, {"heads": 8}, [*(x(8, 128) for _ in "qkv"), gates(8), gates(8, 128)], {"scale": 1.0}),
}
# keys of float32, as where beta may be 2
precise = x(8, 128, dtype=torch.float32), x(8, 128, dtype=torch.float32), x(8, 128), gates(8), None
of_delta_net = calls["delta_net"]
calls["delta_net precise"] = of_delta_net[0], {**of_delta_net[1], "beta_max": 2.0}, [*precise], of_delta_net[3]
for kind in ("gla", "hgrn2"):
    op, settings, given, options = calls[kind]
    wide = [x(*t.shape[2:], dtype=torch.float32) for t in given]
    calls[f"{kind} in float32"] = op, settings, wide, options
op, settings, given, options = calls["gsa"]
calls["gsa selectively"] = op, settings, given, {**options, "recompute_activations": True}
of_float32 = "gla in float32", "hgrn2 in float32", "delta_net precise"
for kind in ("gla", "retnet", "hgrn2", "mamba2", "gsa", "delta_net", "kda", *of_float32):
    op, settings, given, options = calls[kind]
    calls[f"{kind} with states"] = op, settings, given, {**options, "keep_states": True}
for kind, (op, settings, given, options) in calls.items():
    own = {t.untyped_storage()._cdata for t in given if t is not None}
    kept = {}

    def keep(t):
        if t.untyped_storage()._cdata not in own:
            kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with compiling(Target(90)), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        found = op(*given, **options, **rest)
    costs = kinds()[kind.split()[0]](**settings).costs(WIDTH)
    work = Workload(
        B,
        T,
        compute_bytes=4 if " in float32" in kind else 2,
        selective="recompute_activations" in options,
        keeps_states="keep_states" in options,
    )
    counted = sum(k.nbytes(work) for k in costs.saved if k.in_recurrence == "kernel")
    if work.keeps_states:
        counted += sum(r.saved_bytes(work) for r in costs.recurrences if r.chunk)
    print(kind, sum(kept.values()), counted, sep=",")

whole = {"retnet": {}, "gated_delta_net": {"d_key": 128, "d_value": 256}, "kda": {"heads": 8}, "mamba2": {},
         "mamba2 groups": {"n_groups": 4}, "mlstm": {"heads": 4}, "gla": {}, "hgrn2": {},
         "hgrn2 bounds": {"lower_bound": 0.3, "bounds": "learned"}, "gsa": {"head_dim": 256, "value_activation": None},
         "gsa fixed gates": {"head_dim": 64, "gate": "data_independent"}, "mamba2 wide heads": {"head_dim": 512},
         "mamba3": {}, "mamba3 groups norm": {"n_groups": 2, "output_norm": True}, "mamba3 mimo": {"mimo_rank": 4},
         "mamba3 mimo groups norm": {"mimo_rank": 2, "n_groups": 2, "output_norm": True},
         "mamba3 selectively": {}, "mamba3 mimo selectively": {"mimo_rank": 4},
         "mamba3 mimo without kernels": {"mimo_rank": MAMBA3_MOST_INPUTS + 1}}
hooks = torch.autograd.graph.saved_tensors_hooks
for kind, settings in whole.items():
    kept = {}
    with compiling(Target(90)):
        model = mixer(kind.split()[0], WIDTH, dtype=torch.bfloat16, device=META, **settings)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        rounded = {2 * p.numel() for p in model.parameters() if p.dim() == 2}

        def keep(t):
            of_weight = t.dim() == 2 and t.dtype == torch.bfloat16 and t.untyped_storage().nbytes() in rounded
            # Mamba-3 keeps the state that leaves, too, of which it turns a quarter: with the other States of a plan
            of_state = kind.startswith("mamba3") and t.dim() == 4 and len(t) == B and T not in t.shape and t.dtype == torch.float32
            if t.untyped_storage()._cdata not in weights and not of_weight and not of_state:
                kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        selective = kind.endswith("selectively")
        model.context = replace(model.context, selective_recompute=selective)
        # what is kept while it decides what is recomputed is seen too
        selective_recompute.saved_tensors_hooks = lambda pack, unpack: hooks(
            lambda t: keep(found) if isinstance(found := pack(t), torch.Tensor) else found, unpack
        )
        with hooks(keep, lambda t: t):
            found = model(x(WIDTH) * 1, torch.zeros(B, T, dtype=torch.int32, device=META), None)
    work = Workload(B, T, selective=selective)
    counted = sum(k.nbytes(work) for k in kinds()[kind.split()[0]](**settings).costs(WIDTH).saved)
    print(f"whole {kind}", sum(kept.values()), counted, sep=",")
"""


def test_what_a_gpus_kernels_keep_besides(monkeypatch):
    """On tensors without values."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-P", "-c", BY_KERNELS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {kind: (int(kept), int(counted)) for kind, kept, counted in (line.split(",") for line in done.stdout.splitlines())}
    # the positions, and constants, are not counted
    mixers = {kind: found.pop(kind) for kind in list(found) if kind.startswith("whole")}
    assert len(mixers) == 19
    assert all(mixers[f"{kind} selectively"] < mixers[kind] for kind in ("whole mamba3", "whole mamba3 mimo"))
    assert all(kept == pytest.approx(counted, rel=2e-3) for kept, counted in mixers.values()), mixers
    assert all(kept == counted for kept, counted in found.values()), found
    keepers = {
        "gla",
        "gla in float32",
        "retnet",
        "hgrn2",
        "hgrn2 in float32",
        "mamba2 groups",
        "gsa",
        "gsa selectively",
        "delta_net",
        "delta_net precise",
        "mlstm",
        "kda",
    }
    with_states = {kind for kind in found if kind.endswith(" with states")}
    assert {kind for kind, (kept, _) in found.items() if kept} == keepers | with_states
    assert all(found[kind] > found[kind.removesuffix(" with states")] for kind in with_states)
    assert found["gsa selectively"] < found["gsa"]


@pytest.mark.parametrize(
    ("variant", "compute_dtype", "recompute", "residual_dtype"),
    [
        pytest.param(variant, *settings, marks=[] if variant in FAMILIES else pytest.mark.long)
        for variant in EXCHANGED
        for settings in sent_with(variant)
    ],
)
def test_tensor_ranks_exchange_what_is_counted(measured, variant, compute_dtype, recompute, residual_dtype):
    assert_exchanged(measured, variant, compute_dtype, recompute, residual_dtype)


@pytest.mark.long
@pytest.mark.parametrize("variant", EXCHANGED)
@pytest.mark.parametrize(("compute_dtype", "recompute", "residual_dtype"), SENT_WITH)
def test_tensor_ranks_of_every_mixer_exchange_what_is_counted(measured, variant, compute_dtype, recompute, residual_dtype):
    assert_exchanged(measured, variant, compute_dtype, recompute, residual_dtype)


def assert_exchanged(measured, variant, compute_dtype, recompute, residual_dtype):
    types = {"compute_dtype": compute_dtype, "residual_dtype": residual_dtype}
    arithmetic = Arithmetic(run_of(variant, recompute=recompute, sequence_length=SENT_SEQUENCE_LENGTH, tensor=2, **types))
    per_micro_batch = sum(tensor_volumes(arithmetic).values()) // arithmetic.micro_batches
    assert per_micro_batch == measured["sent"][f"{variant} {compute_dtype} {recompute} {residual_dtype}"]


def shared(variant, **settings):
    return Arithmetic(run_of(variant, sequence_length=ODD_SEQUENCE_LENGTH, mlp=True, **SHARED_BY, **settings))


@pytest.mark.parametrize("variant", some(SHARED, SHARED_OFTEN))
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_activations_on_a_shared_residual_stream_are_what_autograd_keeps(measured, variant, compute_dtype):
    arithmetic = shared(variant, compute_dtype=compute_dtype)
    assert arithmetic.work.stream_tokens * SHARED_BY["tensor"] > arithmetic.work.tokens
    # the last norm's output is gathered in the compute type
    without = -READ_NUMBERS + arithmetic.work.compute_bytes * SMALL_WIDTH
    counted = arithmetic.activations(full_recompute=False) - BATCH * ODD_SEQUENCE_LENGTH * without
    assert counted == pytest.approx(measured["shared"][variant]["saved"][compute_dtype], rel=0.02)


@pytest.mark.parametrize("variant", some(RECOMPUTED, SHARED_OFTEN))
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_recomputation_on_a_shared_residual_stream_keeps_what_is_counted(measured, variant, compute_dtype):
    arithmetic = shared(variant, compute_dtype=compute_dtype)
    # of the batch its tokens and positions are seen
    without = -READ_NUMBERS
    counted = arithmetic.activations(full_recompute=True) + arithmetic.states - BATCH * ODD_SEQUENCE_LENGTH * without
    assert counted == pytest.approx(measured["shared"][variant]["living"][compute_dtype], rel=0.1)


@pytest.mark.parametrize("variant", some(SHARED, SHARED_OFTEN))
@pytest.mark.parametrize(("compute_dtype", "recompute"), SHARED_WITH)
def test_ranks_that_share_a_residual_stream_exchange_what_is_counted(measured, variant, compute_dtype, recompute):
    arithmetic = shared(variant, compute_dtype=compute_dtype, recompute=recompute)
    counted = dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), 0)
    for (_, collective), volume in tensor_volumes(arithmetic).items():
        counted[collective] += volume // arithmetic.micro_batches
    sent = measured["shared"][variant]["sent"][f"{compute_dtype} {recompute}"]
    names = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
    assert counted == {names[name]: nbytes for name, nbytes in sent.items()}


@pytest.mark.parametrize("variant", some(SHARED, SHARED_OFTEN))
def test_gradients_are_partial_where_the_layouts_of_a_shared_residual_stream_say_so(measured, variant):
    partial = {p.name: p.numel for p in shared(variant).parameters if p.partial}
    assert partial == measured["shared"][variant]["partial"]
    exchange = exchanges(shared(variant))["partial gradients: all-reduce over tensor"]
    assert (exchange.bytes, exchange.once) == (ring(2 * 4 * sum(partial.values()), SHARED_BY["tensor"]), True)


def test_stages_hand_on_parts_of_a_shared_residual_stream(measured):
    for one, given in zip(of_stages(run_of("gla", pipeline=STAGES, **SHARED_BY)), measured["shared stages"], strict=True):
        hidden = [sent.bytes for name, sent in exchanges(one).items() if "hidden vectors" in name]
        assert hidden == [given]
        assert one.hidden_bytes * SHARED_BY["tensor"] == 4 * SMALL_WIDTH * one.work.tokens


FEW = 48
"""Bytes of counts, norms and flags, and of partitions' padding."""


@pytest.mark.parametrize("zero", ZERO)
def test_zero_exchanges_what_is_counted(measured, zero):
    arithmetic = Arithmetic(run_of("gla", data=2, zero=zero))
    exchange, given = exchanges(arithmetic), measured["zero"][str(zero)]
    gradients, gathered = 4 * arithmetic.local_count, 4 * arithmetic.local_count * bool(zero)
    reduced = {0: given["allreduce_"], 1: given["allreduce_"], 2: given.get("reduce_", 0)}[zero]
    assert reduced == pytest.approx(gradients, abs=FEW)
    assert given["allreduce_"] - (0 if zero == 2 else gradients) == pytest.approx(0, abs=FEW)
    assert given.get("_allgather_base_", 0) == pytest.approx(gathered, abs=FEW)
    # what a ring of two sends of what it is given: all of it once to all-reduce, half of it to reduce or to gather
    assert {name: one.bytes for name, one in exchange.items()} == {
        **(
            {"gradients: reduce to owners over data": gradients // 2}
            if zero == 2
            else {"gradients: all-reduce over data": gradients}
        ),
        **({"parameters: all-gather over data": gathered // 2} if zero else {}),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_stages_exchange_what_is_counted(measured, tied):
    run = run_of("gla", pipeline=STAGES)
    run = run.model_copy(update={"model": run.model.model_copy(update={"tie_embeddings": tied})})
    for number, one in enumerate(of_stages(run)):
        given, exchange = measured["stages"][f"{number} {tied}"], {name: sent.bytes for name, sent in exchanges(one).items()}
        hidden = exchange[
            "hidden vectors: to the next stage" if number == 0 else "gradients of hidden vectors: to the stage before"
        ]
        assert hidden == given["send"]
        assert "hidden vectors: to the next stage" in exchange or number == 1
        # each of the two ends gives the collectives all of what one of them sends
        for collective, noun, end, others in (
            ("broadcast_", "values", "last", "other"),
            ("reduce_", "gradient", "first", "first"),
        ):
            counted = {
                f"tied embedding: {noun} to the {end} stage": 4 * one.head_count * tied,
                f"blocks that layers share: {noun} to the {others} stage{'s' * (others == 'other')}": 4 * one.shared_count,
            }
            assert given[collective] == sum(counted.values()) > 0
            for name, volume in counted.items():
                assert exchange.get(name, 0) == (volume if number == (collective == "reduce_") else 0)
        assert given["allreduce_"] <= FEW, "it is one data rank, so no gradients are summed"


@pytest.mark.parametrize("variant", STAGED)
def test_activations_of_a_stage_are_what_autograd_keeps(measured, variant):
    """To 4 %; what goes to the next stage is kept by who sends it."""
    for one, saved in zip(of_stages(run_of(variant, pipeline=STAGES)), measured["saved of a stage"][variant], strict=True):
        beside = -READ_NUMBERS + 4 * SMALL_WIDTH
        assert one.activations(full_recompute=False) - BATCH * SEQUENCE_LENGTH * beside == pytest.approx(saved, rel=0.04)


def test_stages_keep_as_many_micro_batches_as_their_schedule_has_ahead():
    from baton.parallel.pipeline import StepSchedule

    for micro_batches in (1, 3, 4, 9):
        words = [
            "layout.pipeline=4",
            "layout.data=1",
            "training.micro_batch_size=1",
            f"training.global_batch_tokens={2048 * micro_batches}",
        ]
        for one in of_stages(load(RUN, words)):
            kept = most = 0
            for operation in StepSchedule().operations(one.stage.index, 4, micro_batches):
                kept += 1 if operation.kind == "forward" else -1
                most = max(most, kept)
            assert one.in_flight == most


@pytest.mark.parametrize("variant", some(HANDED_ON, GATHERED_OFTEN))
def test_sequence_ranks_hand_on_what_is_counted(variant):
    """Of a mixer of each family; of all variants in the long form."""
    measured = measured_costs.measured("quick" if variant in GATHERED_OFTEN else "long")
    arithmetic = Arithmetic(run_of(variant, context=2))
    exchange = exchanges(arithmetic)
    names = {"right": "States: to the next rank", "left": "cotangents: to the rank before"}
    counted = {direction: exchange[name].bytes // 2 if name in exchange else 0 for direction, name in names.items()}
    assert counted == measured["handed on"][variant]
    kept = arithmetic.activations(full_recompute=False) - BATCH * SEQUENCE_LENGTH // 2 * (-READ_NUMBERS + 4 * SMALL_WIDTH)
    assert kept == pytest.approx(measured["saved of a segment"][variant], rel=0.03)


@pytest.mark.parametrize("variant", some(GATHERED, GATHERED_OFTEN))
def test_sequence_ranks_gather_what_is_counted(measured, variant):
    """Of a rank in the middle: what linear recurrences gather, and what the others hand on all the same."""
    exchange = exchanges(Arithmetic(run_of(variant, context=SPANS, context_comm="all_gather")))
    seen = measured["gathered"][variant]
    for direction, what in (("right", "States: "), ("left", "cotangents: ")):
        assert sum(sent.bytes for name, sent in exchange.items() if name.startswith(what)) == 2 * seen.get(f"{direction} bytes", 0)
    gathered = [sent for name, sent in exchange.items() if "all-gather over context" in name]
    assert all((sent.members, sent.pairs, sent.once) == (SPANS, False, False) for sent in gathered)
    assert bool(gathered) == (variant.split(",")[0] not in ("attention", "channel_mix", "lattice", "swiglu", "ttt"))
