"""Compiles the Triton kernels for GPUs that this machine does not have, and prints registers, stack and shared memory as JSON.

The launch configurations are those that runs use. A process of its own, because Triton decides when a kernel is imported whether
it interprets it.
"""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

REPORTS = Path(__file__).with_name("compiled_kernels.json")
"""What `write` has written: reports by digest of what they depend on. A kernel that is changed is not in it, and is compiled."""
SHARED = Path(__file__).with_name("compiled_shared.json")
"""The same, of bytes of shared memory on all architectures in `FITTED`, with the version of Triton that says so."""

CHANNELS = 4096
ARCHITECTURES = (80, 90, 100)
# those whose shared memory is compared, too: 8.9 and 12.0 stand for all cards with 99 KiB
FITTED = (80, 89, 90, 100, 120)
# those that are not held to have no spills: few use such attention, and float32 is for comparisons; of the delta rule's walk back
# over chunks two programs share a processor and keep the rest of its registers in memory
MAY_SPILL = re.compile(r"in float32|of 256 with memories|in a window|^preset|walk back")
# on MAIN alone, whose launches were timed to be faster though they spill
FASTER = re.compile(r"of 256(, capped,)? rows|(eidetic, 128|heads of (160|192),) rows|(gla|gsa) chunk_dqk backward")
MAIN = 90  # the only one for what is a variant of another kernel, "NAME, VARIANT"
# which of a kernel's configurations is compiled where one is enough; else its first
CHEAP = {
    "longhorn summarize",
    "longhorn scan",
    "longhorn summarize backward",
    "longhorn backward",
    "mamba2 prepare",
    "mamba2 scores",
    "mamba2 states",
    "mamba2 chunk_o write",
    "mamba2 chunk_dqk backward",
}
# of tensors: what is in the activations' dtype; the others are float32, positions int32, and what is no pointer a size
ACTIVATIONS = {"x", "dt", "B", "C", "z", "y", "dx", "ddt", "dz", "dy", "tail", "dtail", "dtail_out", "dbc_partial"}
COUNTS = {
    "first_checkpoint",
    "N",
    "T",
    "chunks",
    "share",
    "count",
    "piece",
    "pieces",
    "memories",
    "blocks",
    "copies",
    "known",
    "skipped",
    "rows",
    "row",
    "first_column",
    "tokens",
    "vocabulary",
}
SIZES = {"T", "first_checkpoint", "dstate", "split_len", "span", "size", "num_splits", "B_row", "C_row"}


def names(arch):
    """As the table of launch configurations may call a GPU of the architecture."""
    from baton.kernels.compile.aot import Target

    return Target(arch, "NVIDIA H200" if arch == MAIN else "").names


def signature(kernel, constants, dtype):
    """dtype: of activations; or, by name, of what is not of bfloat16 ("=fp32": a number, no pointer)."""
    if isinstance(dtype, dict):
        sizes = {name: "i32" for name in kernel.arg_names if name.endswith(("_batch", "_row", "_head")) or name in COUNTS}
        known = (
            {"pos": "*i32", "scale": "fp32", "eps": "fp32", "divisor": "fp32"}
            | sizes
            | {name: other if other.startswith("=") else f"*{other}" for name, other in dtype.items()}
        )
        return {name: known.get(name, "*bf16").removeprefix("=") for name in kernel.arg_names if name not in constants}

    def of(name):
        if name in SIZES or name.endswith("_batch"):
            return "i32"
        return {"pos": "*i32", "eps": "fp32"}.get(name, f"*{dtype}" if name in ACTIVATIONS else "*fp32")

    return {name: of(name) for name in kernel.arg_names if name not in constants}


def kernels(arch):
    """(name, kernel, constants, warps, dtype) of every configuration that is held to have no spills on an architecture."""
    for name, kernel, constants, warps, dtype in _kernels(arch):
        rows = {p.name: CHANNELS for p in kernel.params if p.is_constexpr and p.name.endswith("_row")}
        yield name, kernel, {**constants, **rows}, warps, dtype
    yield from _without_spills(_matrix_kernels(arch), arch)
    yield from _lattice_kernels()
    yield from _generalized_delta_kernels()
    yield from _step_kernels()
    yield from _without_spills(_eidetic_kernels(arch), arch)
    yield from _norm_kernels()
    yield from _gate_kernels()
    yield from _gated_norm_kernels()
    yield from _scale_kernels()
    yield from _rotary_kernels()
    yield from _mamba3_kernels()
    yield from _mimo_kernels()
    yield from _loss_kernels()
    yield from _embedding_kernels()
    yield from _adamw_kernels()


def _without_spills(found, arch):
    """Those that are held to have none."""
    return (kernel for kernel in found if not MAY_SPILL.search(kernel[0]) and not (arch == MAIN and FASTER.search(kernel[0])))


def fitted(arch):
    """As `kernels`, of those whose need of shared memory is compared with what the architecture has: all with matrix products,
    whose operands lie there, and attention with the sizes of all presets. Of the others the report for MAIN says it."""
    yield from _matrix_kernels(arch)
    yield from _eidetic_kernels(arch)
    yield from _preset_kernels(arch)


@cache
def attention_sizes():
    """(head_dim, query heads to a key head, whether there is a window) in the presets, with the first preset that has them."""
    from importlib.resources import files

    import yaml

    from baton.models.config import ModelConfig

    found = {}
    for path in sorted((files("baton.configs") / "models").iterdir(), key=lambda path: path.name):
        model = ModelConfig(**yaml.safe_load(path.read_text()))
        for mixer in model.mixers.values():
            if {"head_dim", "window"} <= type(mixer).model_fields.keys():
                heads, groups = mixer.head_counts(model.d_model)
                found.setdefault((mixer.head_dim, heads // groups, mixer.window is not None), path.name.removesuffix(".yaml"))
    return found


def _preset_kernels(arch):
    for (dim, group, windowed), preset in attention_sizes().items():
        config, types = attention_config(arch, dim, whole=not windowed), attention_types()
        yield from _history_kernels(f"preset {preset}, attention", dim, 4 * group, 4, config, types, reach=4095 if windowed else -1)


def _matrix_kernels(arch):
    """Of gated linear attention and the delta rule, with the sizes of GLA, GSA, Mamba-2 and DeltaNet at 1.3B."""
    import triton.language as tl

    from baton.kernels.channel_delta_rule import triton_kernels as channel
    from baton.kernels.compile import launch_configs
    from baton.kernels.delta_rule import triton_launch as delta_rule
    from baton.kernels.delta_rule import wy_backward_kernels, wy_forward_kernels
    from baton.kernels.gated_linear_attention import shared_kernels, triton_kernels
    from baton.kernels.gated_linear_attention import triton_launch as gated_linear_attention
    from baton.kernels.gated_linear_attention.triton_common import CHANNEL, NONE, SCALAR
    from baton.kernels.generalized_delta_rule import pair_kernels

    float32 = (
        "sums",
        "whole",
        "first",
        "last",
        "out_g",
        "g",
        "beta",
        "inverse",
        "dbeta",
        "dg",
        "arriving",
        "dfirst",
        "decay",
        "add",
        "adds",
        "transitions",
    )
    types = dict.fromkeys(float32, "fp32")
    low = {"DOT_DTYPE": tl.bfloat16}

    def of_sum(name, gate, X, Y, config):
        common = {"X": X, "G": 1, "GATE": gate.value, "HAS_POS": True, "C": config.chunk}
        headed = {**common, "H": 64 if name == "mamba2" else 4}
        levels, stages = {"NEAR": 3, "LEVELS": config.chunk.bit_length() - 1}, {"num_stages": config.stages}
        BX, BY = {"BX": min(X, config.x)}, {"BY": min(Y, config.y)}
        per_channel = gate.value == CHANNEL.value
        # strengths and what is made of scores
        of_slots = {**types, "w": "fp32", "wx": "fp32", "out_r": "fp32"} if name == "gsa" else types
        of_scores = {**types, "scores": "fp32"} if name == "mamba2" else types
        if gate.value != NONE.value:
            prepare = {**headed, "READ": per_channel, "WRITE": per_channel, "BX": min(X, config.x_prepared)}
            yield f"{name} prepare", triton_kernels.gla_prepare_kernel, prepare, 4 if per_channel else 1, of_slots
        scores = {"BX": min(X, config.x_scores), "num_stages": 1} if per_channel else {**BX, **stages}
        if name == "mamba2":
            # once for all heads
            scores, of_slots = {**scores, "H": 1, "GATE": NONE.value}, {**types, "out": "fp32"}
        warps = config.warps_scores if per_channel else config.warps
        yield f"{name} scores", triton_kernels.gla_scores_kernel, {**headed, **low, **levels, **scores}, warps, of_slots
        for backwards in (False, True):
            states = {**common, **low, **stages, **BX, **BY, "Y": Y, "HAS_FIRST": True, "KEEP": True, "BACKWARDS": backwards}
            states |= {"DECAY": False}
            yield f"{name} states{' backward' * backwards}", triton_kernels.chunk_h_kernel, states, config.warps, types
        states |= {"HAS_FIRST": False, "KEEP": False, "DECAY": True}
        yield f"{name} states of pieces", triton_kernels.chunk_h_kernel, states, config.warps, types
        for read in (False, True):
            plain = {**headed, **low, **stages, **BX, **BY, "Y": Y, "READ": read, "WRITE": not read, "SILU": False}
            plain |= {"SHARED": name == "mamba2"}
            yield f"{name} chunk_o {'read' if read else 'write'}", triton_kernels.gla_chunk_o_kernel, plain, config.warps, of_scores
            if name == "gsa":
                # of values, and of queries and keys
                silu = {**plain, "READ": read, "WRITE": True, "SILU": True}
                yield (
                    f"gsa chunk_o, silu of {'two' if read else 'one'}",
                    triton_kernels.gla_chunk_o_kernel,
                    silu,
                    config.warps,
                    types,
                )
        for write in (False, True):
            size, warps = (config.x_gated, config.warps_gated) if write else (config.x_read, config.warps_read)
            sizes = {"BX": min(X, size), "BY": min(Y, config.y_gated if size > 32 else 32), "Y": Y}
            gated = {**headed, **low, **levels, **stages, **sizes, "PRECISE": name == "gsa"}
            gated |= {"READ": True, "WRITE": write, "DECAYS": write}
            yield f"{name} chunk_dqk{' backward' * write}", triton_kernels.gla_chunk_dqk_kernel, gated, warps, of_slots
        if name == "mamba2":
            headed = {name: n for name, n in headed.items() if name != "G"}
            sizes = {"Y": Y, "BX": min(X, config.x_shared), "BY": BY["BY"], "ry_row": 64 * Y, "wy_row": 64 * Y + 2 * X}
            shared = {**headed, **low, **sizes, "num_stages": config.stages_shared}
            types_shared = {**types, "flow_to": "fp32", "flows": "fp32"}
            few = {**shared, "maxnreg": config.registers_scores_shared}
            yield "mamba2 shared scores", shared_kernels.gla_shared_scores_kernel, few, config.warps_scores_shared, types_shared
            few = {**shared, "maxnreg": config.registers_shared}
            yield "mamba2 shared dqk", shared_kernels.gla_shared_dqk_kernel, few, config.warps_shared, types_shared
            of_gates = {"H": headed["H"], "C": config.chunk, "BH": 32}
            yield "mamba2 shared dg", shared_kernels.gla_shared_dg_kernel, of_gates, 4, {**types_shared, "out": "fp32"}

    def launch_config_of(kernel, shape):
        return replace(kernel.LaunchConfig(), **launch_configs.for_device_names(kernel.KERNEL, names(arch), shape))

    for name, decay, gate, X, Y in (
        ("gla", CHANNEL, "key", 256, 512),
        ("gsa", CHANNEL, "key", 64, 512),
        ("mamba2", SCALAR, "scalar", 128, 64),
    ):
        yield from of_sum(name, decay, X, Y, launch_config_of(gated_linear_attention, gated_linear_attention.shape_of(gate, X, Y)))
    X = 128
    config = launch_config_of(delta_rule, delta_rule.shape_of("none", X, X))
    read = ("delta scores", "delta chunk_o read")
    yield from (kernel for kernel in of_sum("delta", NONE, X, X, config) if kernel[0] in read)
    strides = {f"{name}_row": 16 * X for name in ("q", "k", "v", "dy")} | {"beta_row": 16}

    def of_rule(name, kernel, config, warps, gate=SCALAR, **own):
        common = {"X": X, "H": 16, "GATE": gate.value, "HAS_POS": True, "C": config.chunk, "num_stages": config.stages, **low}
        common["ALTERNATE"] = False
        taken = (*kernel.arg_names, "num_stages")
        constants = {name: n for name, n in {**common, **strides, "Y": X, **own}.items() if name in taken}
        return name, kernel, constants, warps, {**types, "inverse": "bf16", "out": "bf16"}

    blocks = {"BX": config.x_chunk, "BY": config.y_chunk}
    yield of_rule("delta, gradients", wy_backward_kernels.wy_gradients_kernel, config, config.warps_chunk, NONE, **blocks)
    config, small = launch_config_of(delta_rule, delta_rule.shape_of("scalar", X, X)), delta_rule.SMALL
    blocks = {"BX": config.x_chunk, "BY": config.y_chunk}
    yield of_rule("gated delta, gradients", wy_backward_kernels.wy_gradients_kernel, config, config.warps_chunk, **blocks)
    yield of_rule("gated delta, inverse", wy_forward_kernels.wy_inverse_kernel, config, config.warps_inverse, BX=config.x_products)
    yield of_rule("gated delta, strengths of 0", wy_backward_kernels.wy_dbeta_zero_kernel, config, 4, BX=small, BY=small)
    for name, first, keep in (("writes", True, True), ("what pieces do", False, False)):
        walk = {"BX": X, "BY": config.values, "HAS_FIRST": first, "KEEP": keep}
        yield of_rule(f"gated delta, {name}", wy_forward_kernels.wy_u_kernel, config, config.warps_walk, **walk)
    back = {"BX": X, "BY": config.values_backward, "KEEP": True, "num_stages": config.stages_backward}
    yield of_rule("gated delta, walk back", wy_backward_kernels.wy_u_backward_kernel, config, config.warps_backward, **back)
    for backwards in (False, True):
        name, fold = f"gated delta, fold{' backward' * backwards}", {"WIDTH": X if backwards else 2 * X, "HAS_FIRST": True}
        yield of_rule(name, wy_forward_kernels.wy_fold_kernel, config, 4, BX=64, BY=16, BACKWARDS=backwards, **fold)
    config = launch_config_of(delta_rule, delta_rule.shape_of("key", X, X))
    levels = {"NEAR": 3, "LEVELS": config.chunk.bit_length() - 1}

    def of_channels(name, kernel, warps, **own):
        name, kernel, constants, warps, found = of_rule(f"channel delta, {name}", kernel, config, warps, **levels, **own)
        return name, kernel, constants, warps, {**found, **({"out": "fp32"} if "out" in kernel.arg_names else {})}

    yield of_channels("prepare", channel.channel_prepare_kernel, 4, BX=config.x_prepared, num_stages=1)
    scores = {"GATE": CHANNEL.value, "BX": config.x_scores, "G": 1, "num_stages": 1}
    yield of_channels("scores", triton_kernels.gla_scores_kernel, config.warps_scores, **scores)
    yield of_channels("inverse", channel.channel_inverse_kernel, config.warps_inverse, num_stages=1)
    for name, first, keep in (("writes", True, True), ("what pieces do", False, False)):
        walk = {"BX": X, "BY": config.values, "HAS_FIRST": first, "KEEP": keep}
        yield of_channels(name, channel.channel_u_kernel, config.warps_walk, **walk)
    back = {"BX": X, "BY": config.values_backward, "KEEP": True, "num_stages": config.stages_backward}
    yield of_channels("walk back", channel.channel_u_backward_kernel, config.warps_backward, **back)
    yield of_channels("pairs", channel.channel_pairs_kernel, config.warps, BY=config.y_chunk)
    yield of_channels("strengths of 0", channel.channel_dbeta_zero_kernel, 4, BX=16, BY=small, num_stages=1)
    sizes = {"BX": config.x_gated, "BY": config.y_gated if config.x_gated > 32 else 32, "G": 2, "num_stages": 1}
    gate = {"GATE": CHANNEL.value, "READ": True, "WRITE": True, "DECAYS": True, "PRECISE": False}
    name, *kernel, _ = of_channels("gradients", triton_kernels.gla_chunk_dqk_kernel, config.warps_gated, **sizes, **gate)
    yield name, *kernel, {**types, "out_w": "fp32"}
    # RWKV-7's, where tokens take turns and what they read with is float32
    X = 64
    config = launch_config_of(delta_rule, delta_rule.shape_of("key", X, X))
    levels["NEAR"] = levels["LEVELS"]
    for name, kernel, of_reader, warps, own in (
        ("scores", triton_kernels.gla_scores_kernel, "r", config.warps_scores, scores),
        ("inverse", channel.channel_inverse_kernel, "", config.warps_inverse, {"num_stages": 1}),
        (
            "writes",
            channel.channel_u_kernel,
            "",
            config.warps_walk,
            {"BX": X, "BY": config.values, "HAS_FIRST": True, "KEEP": True},
        ),
        ("walk back", channel.channel_u_backward_kernel, "", config.warps_backward, {**back, "BX": X}),
    ):
        _, *found, of = of_channels(name, kernel, warps, ALTERNATE=True, **own)
        yield f"generalized delta rule in chunks, {name}", *found, {**of, of_reader: "fp32"}
    of = {**types, "readers": "fp32"}
    constants = {"X": X, "H": 32, "HAS_POS": True, "C": config.chunk // 2, "BX": config.x_prepared}
    yield "generalized delta rule in chunks, prepare", pair_kernels.pair_prepare_kernel, constants, 4, of
    constants = {"X": X, "Y": X, "H": 32, "HAS_POS": True, "C": config.chunk, "BX": 32, "BY": 32, **low}
    yield "generalized delta rule in chunks, gradients", pair_kernels.pair_gradients_kernel, constants, 4, of


def _lattice_kernels():
    """With the sizes of 340M and 1.3B."""
    from baton.kernels.lattice import triton_backward, triton_forward
    from baton.kernels.lattice.triton_launch import LaunchConfig, scratch_size

    config, d, m = LaunchConfig(), 64, 64
    float32 = (
        "gamma",
        "mu",
        "S_initial",
        "S0",
        "checkpoints",
        "S_final",
        "dS_final",
        "scratch",
        "dgamma",
        "dmu",
        "dS_initial",
        "dS0",
    )
    types = dict.fromkeys(float32, "fp32")
    for variant, project in itertools.product(("dec", "enc", "sim"), (True, False)):
        decoding, name = variant == "dec", f"lattice, {variant}{'' if project else ' without projection'}"
        common = {
            "D": d,
            "M": m,
            "H": 32,
            "VARIANT": getattr(triton_forward, variant.upper()).value,
            "FORGET": False,
            "HAS_POS": True,
        }
        common |= {"EVEN_T": True, "CHECKPOINT_INTERVAL": config.checkpoint_interval, "BLOCK_D": d}
        slots, slots_backward = (m, m) if decoding else (config.slots, config.slots_backward)
        parts, parts_backward = (config.parts_dec, config.parts_dec_backward) if decoding else (config.parts, config.parts_backward)
        warps, warps_backward = (config.warps_dec, config.warps_dec_backward) if decoding else (config.warps, config.warps_backward)
        ahead = {**common, "BLOCK_T": config.block_t, "PROJECT": project}
        ahead |= {"BLOCK_M": slots, "PARTS": parts, "WARPS": warps}
        yield name, triton_forward.lattice_forward_kernel, ahead, warps, types | ({"y": "fp32"} if slots < m else {})
        back = {
            **common,
            "BLOCK_T": config.block_t_backward,
            "BLOCK_M": slots_backward,
            "PARTS": parts_backward,
            "WARPS": warps_backward,
            "PROJECT": project,
        }
        back["SCRATCH"] = scratch_size(config.checkpoint_interval, config.block_t_backward, slots_backward, d, variant)
        yield (
            f"{name} backward",
            triton_backward.lattice_backward_kernel,
            back,
            warps_backward,
            types | ({"dv": "fp32"} if slots_backward < m else {}),
        )
        if not decoding and project and config.chunk:
            yield from _lattice_chunks(variant, config, common, types)


def _lattice_chunks(variant, config, common, types):
    """Not the walk back over chunks, where some of what says where tiles lie is not kept in registers."""
    from baton.kernels.lattice import triton_chunk_backward, triton_chunk_forward
    from baton.kernels.lattice.triton_launch import chunk_scratch_size

    common = {**common, "CHECKPOINT_INTERVAL": config.chunk}
    types |= dict.fromkeys(("scratch", "gram", "rows", "scales", "dlasts"), "fp32") | {"unsafe": "i32"}
    beside, walk = {**common, "BLOCK_M": config.slots_chunk}, {"GROUP_T": config.group_t}
    ahead = {**beside, **walk, "WARPS": config.warps_chunk, "PARTS": config.parts, "BLOCK_T": config.block_t}
    ahead["SCRATCH"] = chunk_scratch_size(config.chunk, config.slots_chunk, common["D"])
    name = f"lattice, {variant} chunks"
    yield name, triton_chunk_forward.lattice_chunk_forward_kernel, ahead, config.warps_chunk, types
    before = {n: x for n, x in (beside | walk).items() if n in triton_chunk_backward.lattice_backward_pre_kernel.arg_names}
    yield f"{name} before", triton_chunk_backward.lattice_backward_pre_kernel, before, config.warps_parallel, types
    if variant == "sim":  # the others are the same in both
        for of, kernel, warps in (
            ("gram of", triton_chunk_forward.lattice_chunk_gram_kernel, 1),
            ("outputs of", triton_chunk_forward.lattice_chunk_output_kernel, config.warps_parallel),
            ("behind", triton_chunk_backward.lattice_backward_post_kernel, config.warps_parallel),
        ):
            yield f"lattice, {of} chunks", kernel, {n: x for n, x in beside.items() if n in kernel.arg_names}, warps, types


def _generalized_delta_kernels():
    """With RWKV-7's heads, and with wider ones."""
    from baton.kernels.generalized_delta_rule import triton_kernels
    from baton.kernels.generalized_delta_rule.triton_launch import STEP, LaunchConfig

    of_g = {
        "g": "fp32",
        "scale": "=fp32",
        **dict.fromkeys(("initial", "final", "checkpoints", "dfinal", "scratch", "dinitial"), "fp32"),
    }
    config = LaunchConfig()
    for width in (64, 128):
        for name, numbers in (("", config.state_block), (", few heads", config.state_block_few), (", a step", STEP.state_block)):
            block = {"BLOCK_K": width, "BLOCK_V": numbers // width, "INTERVAL": config.checkpoint_interval, "HAS_POS": True}
            options, warps = {"K": width, "V": width, "H": 32, **block}, numbers // config.values_per_warp
            label = f"generalized delta rule of {width}{name}"
            yield f"{label} forward", triton_kernels.generalized_delta_rule_forward_kernel, options, warps, of_g
            if "step" in name:
                continue
            parts = {} if numbers >= width * width else dict.fromkeys(("dr", "dk", "da", "db"), "fp32")
            types, options = {**of_g, "dg": "fp32", **parts}, {**options, "GROUP": config.group_t}
            yield f"{label} backward", triton_kernels.generalized_delta_rule_backward_kernel, options, warps, types


def _step_kernels():
    """With heads as in GLA, Mamba-2, RetNet, xLSTM, GSA, DeltaNet, its gated forms and RWKV-6, and as large as there are."""
    from baton.kernels.matrix_step import triton_kernels
    from baton.kernels.matrix_step.triton_launch import launch_sizes

    types = {**dict.fromkeys(("g", "beta", "bonus", "state"), "fp32"), "scale": "=fp32"}
    plain = {"G": 1, "Q_SHARE": 1, "K_SHARE": 1, "GATE": triton_kernels.NONE.value, "DELTA": False, "BONUS": False, "HAS_POS": True}
    scalar, key, value = ({"GATE": gate.value} for gate in (triton_kernels.SCALAR, triton_kernels.KEY, triton_kernels.VALUE))
    forms = {
        "step of gla": (4, 256, 512, key),
        "step of mamba2": (24, 128, 64, {**scalar, "Q_SHARE": 24, "K_SHARE": 24}),
        "step of mlstm": (8, 256, 513, scalar),
        "step of gsa": (4, 512, 64, {**value, "G": 4}),
        "step of linear attention": (4, 512, 512, {"G": 8}),
        "step of delta_net": (16, 128, 128, {"DELTA": True}),
        "step of gated_delta_net": (8, 256, 512, {**scalar, "DELTA": True, "Q_SHARE": 2, "K_SHARE": 2}),
        "step of kda": (16, 128, 128, {**key, "DELTA": True}),
        "step of rwkv6": (32, 64, 64, {**key, "BONUS": True}),
        "step of 512": (4, 512, 512, {**key, "DELTA": True}),
    }
    for name, (heads, d_key, d_value, options) in forms.items():
        sizes = {"K": d_key, "V": d_value, "H": heads, **plain, **options, **launch_sizes(d_key, d_value)}
        yield name, triton_kernels.matrix_step_kernel, sizes, sizes.pop("num_warps"), types


def _eidetic_kernels(arch):
    """With B'MOJO's sizes at 1.3B, and heads two and four times as wide; attention alone with other heads, too."""
    import triton.language as tl

    from baton.kernels.eidetic_attention import (
        innovation_kernels,
        joint_attention_kernels,
        memory_copy_kernels,
        topk_memory_kernels,
    )

    config_of, types = partial(attention_config, arch), attention_types()
    for dim in (64, 128, 256):
        config = config_of(dim, whole=False)
        common = {
            "H": 2048 // dim,
            "G": 2048 // dim,
            "K": dim,
            "BLOCK_D": dim,
            "M": 80,
            "DOT_DTYPE": tl.bfloat16,
            "num_stages": config.stages_backward,
        }
        queries = {
            **common,
            "num_stages": config.stages,
            "FAR": 0,
            "BLOCK_Q": config.queries,
            "BLOCK_K": config.keys,
            "BLOCK_M": config.memory,
            "ROW": 2048,
            "CAP": 0.0,
        }
        back = {**common, "BLOCK_Q": config.queries_backward}
        name = {64: "eidetic", 128: "eidetic, 128", 256: "eidetic of 256 with memories,"}[dim]
        yield (
            f"{name} forward",
            joint_attention_kernels.joint_attention_forward_kernel,
            {**queries, "maxnreg": config.registers},
            config.warps,
            types,
        )
        dq = {**queries, "BLOCK_K": config.keys_dq or config.keys}
        yield f"{name} queries backward", joint_attention_kernels.joint_attention_backward_dq_kernel, dq, config.warps, types
        rows = {
            **back,
            "MIN_DISTANCE": 0,
            "BLOCK_K": config.keys_backward,
            "REACH": 0,
            "ROW": 4096,
            "DK_ROW": 4096,
            "DV_ROW": 4096,
            "E": 64,
            "CAP": 0.0,
            "ROWS_FIRST": config.rows_first,
        }
        yield (
            f"{name} rows backward",
            joint_attention_kernels.joint_attention_backward_dkv_kernel,
            rows,
            config.warps_backward,
            types,
        )
        memories = {**back, "WINDOW": 512, "BLOCK_M": config.memory, "ROWS_FIRST": config.rows_first}
        yield (
            f"{name} memories backward",
            joint_attention_kernels.joint_attention_backward_dmemory_kernel,
            memories,
            config.warps_backward,
            types,
        )
        spread = {"G": 2048 // dim, "K": dim, "BLOCK_D": dim, "BLOCK_K": min(config.keys_backward, 8192 // dim)}
        spread |= {"DK_ROW": 4096, "DV_ROW": 4096}
        yield f"{name} copies backward", memory_copy_kernels.memory_copy_backward_kernel, spread, 4, types
    # all of a document, and no memories
    for dim, heads, groups in ((64, 32, 32), (128, 16, 16), (256, 16, 2)):
        config = config_of(dim, whole=True)
        yield from _history_kernels(f"attention of {dim}", dim, heads, groups, config, types)
        yield from _history_kernels(f"attention of {dim}, capped,", dim, heads, groups, config, types, cap=50.0)
        yield from _history_kernels(f"attention of {dim} in float32", dim, heads, groups, config.for_float32(), types)
    for dim, heads, groups in ((80, 32, 32), (96, 16, 16), (160, 16, 4), (192, 12, 4)):
        yield from _history_kernels(f"attention, heads of {dim},", dim, heads, groups, config_of(dim, whole=True), types)
    for dim, groups in ((128, 4), (256, 2)):
        config = config_of(dim, whole=False)
        yield from _history_kernels(f"attention of {dim} in a window", dim, 16, groups, config, types, reach=4095)
    sizes = {"WINDOW": 512, "EIDETIC": 64, "FADING": 16, "HAS_STATE": 1}
    gathered = {**sizes, "C": 2048, "ROW": 4096, "FADING_ROW": 4096, "N": 511, "BLOCK_M": 16, "BLOCK_E": 64, "BLOCK_C": 512}
    yield "eidetic, copies", memory_copy_kernels.memory_copy_kernel, gathered, 4, types
    chosen = {**sizes, "FAR": 0, "BLOCK_M": 64, "BLOCK_F": 16, "BLOCK_T": 128}
    types |= {"seen": "i64", "score": "fp32", "entry_score": "fp32", "entry_where": "i64", "frozen": "i8"}
    yield "eidetic, choice", topk_memory_kernels.topk_memory_kernel, chosen, 1, types
    for norm in ("l2", "l1", "max"):
        score = {"C": 2048, "N": 4, "NORM": norm, "BLOCK_T": 16, "BLOCK_C": 256}
        named = f"eidetic, innovation by {norm}"
        yield named, innovation_kernels.innovation_kernel, score, 4, {"weights": "fp32", "score": "fp32", "y": "bf16"}


def attention_config(arch, dim, *, whole):
    """As runs choose it."""
    from baton.kernels.compile import launch_configs
    from baton.kernels.eidetic_attention.launch_config import KERNEL, default_launch_config, shape_of

    own = launch_configs.for_device_names(KERNEL, names(arch), shape_of(dim, whole=whole))
    return replace(default_launch_config(dim, whole=whole), **own)


def attention_types():
    integers = dict.fromkeys(("slot", "limit", "ends", "far_limit", "row", "first", "fading_first", "later", "last"), "i32")
    return {**integers, **dict.fromkeys(("lse", "delta", "dmemory_k", "dmemory_v"), "fp32"), "begin": "i32"}


def _history_kernels(name, dim, heads, groups, config, types, reach=-1, cap=0.0):
    """Attention alone. config: of float32 where its steps have that size. reach: tokens of a window, without this one; -1: none.
    cap: of scores; 0: none."""
    import triton.language as tl

    from baton.kernels.common.launch_utils import next_power_of_2
    from baton.kernels.eidetic_attention import joint_attention_kernels as kernels

    low = "float32" not in name
    if not low:
        types = {
            **types,
            **dict.fromkeys(("q", "k", "v", "far_k", "far_v", "memory_k", "memory_v", "y", "dy", "dq", "dk", "dv"), "fp32"),
        }
    sizes = {"H": heads, "G": groups, "K": dim, "BLOCK_D": next_power_of_2(dim), "ROW": groups * dim, "M": 0, "CAP": cap}
    sizes["DOT_DTYPE"] = tl.bfloat16 if low else None
    queries = {**sizes, "FAR": 0, "BLOCK_Q": config.queries, "BLOCK_K": config.keys, "BLOCK_M": 16}
    forward = {**queries, "num_stages": config.stages, "maxnreg": config.registers}
    yield f"{name} forward", kernels.joint_attention_forward_kernel, forward, config.warps, types
    dq = {**queries, "BLOCK_K": config.keys_dq or config.keys}
    yield f"{name} queries backward", kernels.joint_attention_backward_dq_kernel, dq, config.warps, types
    rows = {**sizes, "BLOCK_Q": config.queries_backward, "BLOCK_K": config.keys_backward, "num_stages": config.stages_backward}
    rows |= {"MIN_DISTANCE": 0, "REACH": reach, "DK_ROW": groups * dim, "DV_ROW": groups * dim, "E": 0}
    rows |= {"ROWS_FIRST": config.rows_first}
    yield f"{name} rows backward", kernels.joint_attention_backward_dkv_kernel, rows, config.warps_backward, types


def _without_warps(sizes):
    return {name: size for name, size in sizes.items() if name != "num_warps"}


def _norm_kernels():
    """Of the residual stream, and of heads."""
    from baton.kernels.rms_norm import triton_kernels
    from baton.kernels.rms_norm.triton_launch import backward_launch_sizes, launch_sizes

    for name, width in (("norm", 2048), ("norm, of heads", 128)):
        sizes = {**launch_sizes(width)}
        stream = width == 2048
        types = dict.fromkeys(("x", "stream", "weight", "scale", "dstream", "dx", "dweight"), "fp32")
        warps, sizes = sizes.pop("num_warps"), {**sizes, "ADD": stream, "SILU": False, "FROM_Y": stream}
        yield f"{name} forward", triton_kernels.rms_norm_forward_kernel, sizes, warps, types
        back = types if not stream else {name: dtype for name, dtype in types.items() if name != "x"}
        back_sizes = {**sizes, **_without_warps(backward_launch_sizes(width)), "BLOCKS": 32, "HAS_DSTREAM": stream}
        yield f"{name} backward", triton_kernels.rms_norm_backward_kernel, back_sizes, warps, back
    silu = {**launch_sizes(2048), "ADD": False, "SILU": True, "FROM_Y": False}
    warps, types = silu.pop("num_warps"), dict.fromkeys(("weight", "scale", "dweight"), "fp32")
    yield "norm, of silu, forward", triton_kernels.rms_norm_forward_kernel, silu, warps, types
    back_sizes = {**silu, **_without_warps(backward_launch_sizes(2048)), "BLOCKS": 32, "HAS_DSTREAM": False}
    yield "norm, of silu, backward", triton_kernels.rms_norm_backward_kernel, back_sizes, warps, types
    split = {**launch_sizes(1024), "SILU": True}
    warps, types = split.pop("num_warps"), {**dict.fromkeys(("weight", "squares", "along", "dweight"), "fp32"), "width": "=fp32"}
    for part in ("squares", "forward", "backward"):
        yield f"norm, split, {part}", getattr(triton_kernels, f"rms_norm_split_{part}_kernel"), split, warps, types
    back_sizes = {**split, **_without_warps(backward_launch_sizes(1024)), "BLOCKS": 32}
    yield "norm, split, along", triton_kernels.rms_norm_split_along_kernel, back_sizes, warps, types


def _gate_kernels():
    """With an MLP's width at 1.3B, whose two halves lie in one tensor; and with the forget gates of HGRN2 and GLA."""
    from baton.kernels.gate import triton_kernels
    from baton.kernels.gate.triton_launch import launch_sizes, tile_sizes

    for kind in ("silu", "gelu", "sigmoid"):
        sizes = {**launch_sizes(5632), "KIND": getattr(triton_kernels, kind.upper()).value}
        warps = sizes.pop("num_warps")
        yield f"gate {kind}, forward", triton_kernels.gate_forward_kernel, sizes, warps, {}
        yield f"gate {kind}, backward", triton_kernels.gate_backward_kernel, sizes, warps, {}
    for name, width in (("silu", 6144), ("gates", 256)):
        sizes = {**launch_sizes(width), "LOGS": name == "gates"}
        warps, types = sizes.pop("num_warps"), {"y": "fp32"} if name == "gates" else {}
        yield f"activated {name}", triton_kernels.gate_activation_kernel, sizes, warps, types
    float32 = dict.fromkeys(("factor", "g", "dg", "dfactor"), "fp32")
    for name, variant in (("PER_CHANNEL", ""), ("NUMBER", ", a number"), ("NONE", ", no bound")):
        sizes = {**tile_sizes(2048), "FACTOR": getattr(triton_kernels, name).value}
        warps = sizes.pop("num_warps")
        yield f"forget gate forward{variant}", triton_kernels.gate_forget_forward_kernel, sizes, warps, float32
        yield f"forget gate backward{variant}", triton_kernels.gate_forget_backward_kernel, sizes, warps, float32
    float32 = dict.fromkeys(("bias", "dbias"), "fp32")
    for biased in (True, False):
        sizes = {**tile_sizes(1024), "BIASED": biased}
        warps, variant = sizes.pop("num_warps"), "" if biased else ", no bias"
        forward, backward = triton_kernels.gate_log_sigmoid_forward_kernel, triton_kernels.gate_log_sigmoid_backward_kernel
        yield f"log sigmoid forward{variant}", forward, sizes, warps, {**float32, "y": "fp32"}
        yield f"log sigmoid backward{variant}", backward, sizes, warps, {**float32, "dy": "fp32"}


def _gated_norm_kernels():
    """With heads as in KDA and GLA, and with a row and a skip as in Mamba-2 at 1.3B."""
    from baton.kernels.gate.triton_kernels import SIGMOID, SILU
    from baton.kernels.gated_norm import triton_kernels
    from baton.kernels.gated_norm.triton_launch import backward_launch_sizes, launch_sizes

    of_heads = {"GATE_FIRST": False, "PER_ROW": False, "CHANNEL": 0}
    forms = {
        "of 128": (128, {**of_heads, "KIND": SILU.value, "CENTER": False}),
        "of 512, centred": (512, {**of_heads, "KIND": SIGMOID.value, "CENTER": True, "PER_ROW": True}),
        "gate and skip first": (4096, {"KIND": SILU.value, "GATE_FIRST": True, "CENTER": False, "PER_ROW": False, "CHANNEL": 64}),
    }
    types = {**dict.fromkeys(("weight", "skip", "scale", "mean", "dweight", "dskip"), "fp32"), "H": "=i32", "blocks": "=i32"}
    for name, (width, options) in forms.items():
        sizes = {**launch_sizes(width), **options}
        warps = sizes.pop("num_warps")
        yield f"gated norm {name}, forward", triton_kernels.gated_norm_forward_kernel, sizes, warps, types
        sizes = {**_without_warps(backward_launch_sizes(width)), **options}
        yield f"gated norm {name}, backward", triton_kernels.gated_norm_backward_kernel, sizes, warps, types


def _scale_kernels():
    """With heads as in Mamba-2."""
    from baton.kernels.head_scale import triton_kernels
    from baton.kernels.head_scale.triton_launch import launch_sizes

    sizes = {**launch_sizes(64), "H": 64}
    warps, types = sizes.pop("num_warps"), dict.fromkeys(("scale", "dscale"), "fp32")
    yield "head scale, forward", triton_kernels.head_scale_forward_kernel, sizes, warps, types
    yield "head scale, backward", triton_kernels.head_scale_backward_kernel, sizes, warps, types


def _rotary_kernels():
    """With heads as in Transformer++, and one alone, wider and of no power of two."""
    from baton.kernels.rotary import triton_kernels
    from baton.kernels.rotary.triton_launch import _ANGLES, launch_sizes

    for name, heads, dim, pairs in (("rotary", 32, 64, 32), ("rotary, one head", 1, 160, 80), ("rotary, a quarter", 16, 256, 32)):
        sizes = {**launch_sizes(heads, dim, pairs)}
        warps, types = sizes.pop("num_warps"), dict.fromkeys(("cos", "sin"), "fp32")
        yield f"{name} forward", triton_kernels.rotary_kernel, {**sizes, "BACK": False}, warps, types
        yield f"{name} backward", triton_kernels.rotary_kernel, {**sizes, "BACK": True}, warps, types
    types = {"quarters": "fp64", "cos": "fp32", "sin": "fp32", "magnitude": "=fp32"}
    for kind in ("i32", "i64"):
        sizes = {"P": 64, "BT": _ANGLES // 64, "BP": 64}
        yield f"rotary angles, {kind}", triton_kernels.rotary_angles_kernel, sizes, 4, {**types, "pos": kind}


def _mamba3_kernels():
    """With the heads and states of Mamba-3 at 1.5B, of which half turn."""
    from baton.kernels.mamba3 import product_kernels, triton_kernels
    from baton.kernels.mamba3.rotation import CHUNK
    from baton.kernels.mamba3.triton_launch import WARPS, block_pairs, output_sizes

    low = ("B", "C", "k", "next_q", "dnext", "dk", "dB", "dC", "read", "x", "y", "dy", "dread", "dx")
    sizes = {"R": 32, "H": 64, "HAS_POS": True, "L": CHUNK, "P": block_pairs(128)}
    turned = {**sizes, "N": 128, "S": 64, "J": 1, "EARLIER": True}
    several = {**turned, "J": 4, "P": block_pairs(128, 4)}
    products = {name: size for name, size in several.items() if name != "EARLIER"}
    forms = {
        "angles": (triton_kernels.mamba3_angle_edges_kernel, sizes),
        "rotation": (triton_kernels.mamba3_rotate_kernel, turned),
        "rotation, backward": (triton_kernels.mamba3_rotate_backward_kernel, turned),
        "products of four inputs": (product_kernels.mimo_products_kernel, products),
        "products of four inputs, backward": (product_kernels.mimo_products_backward_kernel, products),
        "rotation of four inputs": (triton_kernels.mamba3_rotate_kernel, several | {"P": block_pairs(128)}),
        "rotation of four inputs, backward": (triton_kernels.mamba3_rotate_backward_kernel, several),
    }
    output = output_sizes(64, 64) | {"HAS_FIRST": True}
    forms["output"] = (triton_kernels.mamba3_output_kernel, output)
    forms["output, backward"] = (triton_kernels.mamba3_output_backward_kernel, output)
    step = {"N": 128, "H": 64, "S": 64, "WIDTH": 64, "HAS_POS": True, "P": 64, "BD": 16, "num_warps": 4}
    forms["step"] = (triton_kernels.mamba3_step_kernel, step)
    for name, (kernel, constants) in forms.items():
        types = dict.fromkeys(set(kernel.arg_names) - {*low, "pos", "T"}, "fp32") | {"edges": "fp32", "arriving": "fp64"}
        types |= {"dB": "fp32", "dC": "fp32"} if "products" in name else {}
        types |= {"edges": "fp64"} if name == "angles" else {}
        types |= {arg: "=i32" for arg in kernel.arg_names if arg.endswith(("_batch", "_row", "_head")) or arg in ("rows", "R")}
        yield f"mamba3 {name}", kernel, _without_warps(constants), constants.get("num_warps", WARPS), types


def _mimo_kernels():
    """With the heads, states and inputs of Mamba-3 at 1.5B in its MIMO form."""
    from baton.kernels.mamba3_mimo import triton_kernels
    from baton.kernels.mamba3_mimo.triton_launch import launch_sizes

    low = ("x", "v", "dv", "dx", "read", "dread", "y", "dy", "z", "dz", "total", "dtotal")
    for name, first in (("inputs", {}), ("output", {"HAS_FIRST": True}), ("gated sum", {})):
        for backward in ("", "_backward"):
            kernel = getattr(triton_kernels, f"{'' if name == 'gated sum' else 'mimo_'}{name.replace(' ', '_')}{backward}_kernel")
            sizes = launch_sizes(64, 4, 64, over_runs=bool(backward)) | first
            types = dict.fromkeys(set(kernel.arg_names) - {*low, "T"}, "fp32")
            types |= {arg: "=i32" for arg in kernel.arg_names if arg.endswith("_row")}
            yield f"mamba3 mimo {name}{backward}".replace("_", ", "), kernel, _without_warps(sizes), sizes["num_warps"], types


def _loss_kernels():
    """With a vocabulary of the usual size."""
    from baton.kernels.cross_entropy import triton_kernels
    from baton.kernels.cross_entropy.triton_launch import COLUMNS

    types = {"logits": "bf16", "labels": "i64", **dict.fromkeys(("largest", "total", "own"), "fp32")}
    yield "loss, sums", triton_kernels.cross_entropy_sums_kernel, {"V": 50280, "BV": COLUMNS}, 8, types
    yield "loss, gradient", triton_kernels.cross_entropy_gradient_kernel, {"V": 50280, "BV": COLUMNS}, 8, types


def _embedding_kernels():
    """With gradients in either type."""
    from baton.kernels.embedding import triton_kernels
    from baton.kernels.embedding import triton_launch as embedding

    common = {"C": embedding._CHUNK}
    types = {"ids": "i32", "order": "i64", "into": "fp32", "parts": "fp32"}
    for name, dtype in (("float32", "fp32"), ("bfloat16", "bf16")):
        sizes = {**embedding.launch_sizes(2048, embedding._COLUMNS), **common, "STEPS": embedding._STEPS}
        yield (
            f"embedding runs of {name}",
            triton_kernels.embedding_sum_runs_kernel,
            sizes,
            sizes.pop("num_warps"),
            {**types, "rows": dtype},
        )
    sizes = {**embedding.launch_sizes(2048, embedding._BORDER_COLUMNS), **common, "BP": embedding._PARTS}
    yield "embedding borders", triton_kernels.embedding_sum_borders_kernel, sizes, sizes.pop("num_warps"), types


def _adamw_kernels():
    """With addresses for loads of 16 bytes, and without; with moments in bfloat16; each with copies and without."""
    import triton.language as tl

    from baton.kernels.adamw import triton_kernels, triton_launch

    types = dict.fromkeys(("parameters", "exp_avg", "exp_avg_sq"), "fp32") | dict.fromkeys(("owners", "firsts"), "i32")
    types |= dict.fromkeys(("grads", "copies", "starts", "lengths"), "i64")
    types |= dict.fromkeys(("shrink", "b1", "b1_rest", "b2", "b2_rest", "root", "rate"), "=fp32")
    halved = types | dict.fromkeys(("exp_avg", "exp_avg_sq"), "bf16")
    forms = (("adamw", True, types), ("adamw, unaligned", False, types), ("adamw, bfloat16", True, halved))
    for (name, aligned, of), copied in itertools.product(forms, (None, tl.bfloat16)):
        sizes = {"COPIED": copied, "ALIGNED": aligned, "BE": triton_launch._BLOCK}
        yield name + (", copied" if copied else ""), triton_kernels.adamw_kernel, sizes, 8, of


def _kernels(arch):
    """As `kernels`, without the lengths of rows and the matrix states'."""
    from baton.kernels.compile import launch_configs
    from baton.kernels.diagonal_scan import triton_backward, triton_forward
    from baton.kernels.diagonal_scan.channel_reduce import LANE_OWNS_CHANNEL
    from baton.kernels.diagonal_scan.triton_common import LONGHORN, MAMBA, MAMBA_ZOH
    from baton.kernels.diagonal_scan.triton_launch import KERNEL, default_launch_config, shape_of
    from baton.kernels.short_conv import triton_kernels
    from baton.kernels.short_conv.triton_launch import _STEP_CHANNELS, _with_room, warps_of
    from baton.kernels.short_conv.triton_launch import LaunchConfig as ConvLaunchConfig

    conv_config = ConvLaunchConfig()
    # every kind with the usual d_state, Mamba with the largest
    for label, kind, d_state in (
        ("mamba", MAMBA.value, 16),
        ("longhorn", LONGHORN.value, 16),
        ("mamba zoh", MAMBA_ZOH.value, 16),
        ("mamba, d_state 64,", MAMBA.value, 64),
        ("mamba zoh, d_state 64,", MAMBA_ZOH.value, 64),
    ):
        own = launch_configs.for_device_names(KERNEL, names(arch), shape_of(label.split(",")[0], d_state, 8, CHANNELS))
        config = replace(default_launch_config(d_state, kind == MAMBA_ZOH.value), **own)
        common = {"RECURRENCE": kind, "ACTIVATE": True, "HAS_POS": True, "EVEN_T": True, "EVEN_D": True}
        common |= {"DIM": CHANNELS, "DSTATE": d_state, "BLOCK_D": config.block_d, "BLOCK_N": d_state}
        ahead, summary, back = (
            {**common, "BLOCK_T": n} for n in (config.block_t, config.block_t_transition, config.block_t_backward)
        )
        ahead, summary = {**ahead, "PREFETCH_T": config.prefetch_t}, {**summary, "PREFETCH_T": config.prefetch_t_transition}
        whole = {
            "HAS_Z": True,
            "HAS_INITIAL_STATES": True,
            "CHECKPOINT_INTERVAL": config.checkpoint_interval,
            "UNROLL": config.unroll,
        }
        yield f"{label} summarize", triton_forward.diagonal_scan_transition_kernel, summary, config.warps, "bf16"
        yield f"{label} scan", triton_forward.diagonal_scan_forward_kernel, {**ahead, **whole}, config.warps, "bf16"
        one = {"BLOCK_T": 1, "PREFETCH_T": 1}
        yield f"{label} step", triton_forward.diagonal_scan_forward_kernel, {**ahead, **whole, **one}, config.warps, "bf16"
        yield (
            f"{label} summarize backward",
            triton_backward.diagonal_scan_transition_backward_kernel,
            {**summary, "HAS_Z": True},
            config.warps,
            "bf16",
        )
        yield (
            f"{label} backward",
            triton_backward.diagonal_scan_backward_kernel,
            {
                **back,
                "HAS_Z": True,
                "CHECKPOINT_INTERVAL": config.checkpoint_interval,
                "BLOCK_D": config.block_d_backward,
                "WARP_SUMS": LANE_OWNS_CHANNEL and d_state == 16 and config.block_d_backward == 32,
            },
            config.warps,
            "bf16",
        )
    conv = {"HAS_TAIL": True, "HAS_POS": True, "SILU": True, "UNIT": 0, "EVEN_D": True, "DIM": CHANNELS, "W": 4}
    conv |= {"BLOCK_D": conv_config.block_d, "BLOCK_T": conv_config.block_t}
    back = {**conv, "EVEN_T": True, "HAS_DTAIL_OUT": False, "BLOCK_T": conv_config.block_t_backward}
    step = {name: conv[name] for name in ("HAS_POS", "SILU", "UNIT", "EVEN_D", "DIM", "W")} | {"BLOCK_D": _STEP_CHANNELS}
    yield "conv step", triton_kernels.short_conv_step_kernel, step, 4, "bf16"
    for unit in (0, 64, 128, 256):
        for width in (4, 8):
            config, heads = _with_room(conv_config, width, unit), (unit, 0.0) if unit else None
            named = f"{f', heads of {unit}' * bool(unit)}{f', of {width} tokens' * (width != 4)}"
            sizes = {**conv, "W": width, "UNIT": unit, "EVEN_T": True, "BLOCK_D": config.block_d, "BLOCK_T": config.block_t}
            warps = warps_of(heads, width, backward=False)
            yield f"conv{named}", triton_kernels.short_conv_forward_kernel, sizes, warps, "bf16"
            sizes = {**sizes, "BLOCK_T": config.block_t_backward, "HAS_DTAIL_OUT": False}
            warps = warps_of(heads, width, backward=True)
            yield f"conv backward{named}", triton_kernels.short_conv_backward_kernel, sizes, warps, "bf16"
        if unit:
            yield f"conv step, heads of {unit}", triton_kernels.short_conv_step_kernel, {**step, "UNIT": unit}, 4, "bf16"
    yield (
        "conv backward, tail taken",
        triton_kernels.short_conv_backward_kernel,
        {**back, "HAS_DTAIL_OUT": True},
        1,
        "bf16",
    )
    combine = {"HAS_INITIAL": True, "REVERSE": False, "BLOCK": 256}
    yield "combine", triton_forward.diagonal_scan_combine_kernel, combine, 4, "bf16"
    yield (
        "pack",
        triton_forward.diagonal_scan_pack_bc_kernel,
        {"RECURRENCE": LONGHORN.value, "BLOCK_T": 8, "BLOCK_N": 16},
        4,
        "bf16",
    )


def binary_of(kernel, known, constants, arch, warps, *, aligned=True):
    """The kernel for an architecture; aligned: pointers and sizes are known to be multiples of 16, as they mostly are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from baton.kernels.compile.assembler import use_sound_assembler

    use_sound_assembler()
    types = {name: known.get(name, "constexpr") for name in kernel.arg_names}
    constants = dict(constants)
    options = {"num_warps": warps, **{name: constants.pop(name) for name in ("num_stages", "maxnreg") if name in constants}}
    special = [
        aligned and not (p.do_not_specialize or p.do_not_specialize_on_alignment) and known.get(p.name) != "fp32"
        for p in kernel.params
    ]
    divisible = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if name in known and special[n]}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_stages": 1, **options})


def blocks(binary):
    """How blocks of four dimensions lie in a warp: elements of a lane side by side, and lanes, along each."""
    return re.findall(r"sizePerThread = \[(\d+, \d+, \d+, \d+)\], threadsPerWarp = \[(\d+, \d+, \d+, \d+)\]", binary.asm["ttgir"])


def report(kernel, known, constants, arch, warps):
    """Registers, stack (bytes; more than 0 are spills) and shared memory (bytes) of a kernel, and in how many places it asks for
    memory ahead of time; pointers, sizes: multiples of 16."""
    import triton

    binary = binary_of(kernel, known, constants, arch, warps)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))
    asked = binary.asm["ptx"].count("prefetch.global.L2")
    return {"registers": registers, "stack": stack, "shared": binary.metadata.shared, "asked": asked}


def one(number, arch):
    """The report of the number-th configuration of an architecture, which are not the same on all."""
    name, kernel, constants, warps, dtype = list(kernels(arch))[number]
    return f"{name}, sm_{arch}", report(kernel, signature(kernel, constants, dtype), constants, arch, warps)


class _SharedIsKnownError(Exception):
    pass


def shared(named, arch):
    """Bytes of shared memory of one of `fitted`, without compiling it to the end."""
    from triton import knobs

    def stop(backend, stages, *_):
        def ptx(src, metadata):
            raise _SharedIsKnownError(metadata["shared"])

        stages["ptx"] = ptx

    name, kernel, constants, warps, dtype = next(configuration for configuration in fitted(arch) if configuration[0] == named)
    knobs.runtime.add_stages_inspection_hook, knobs.compilation.always_compile = stop, True
    try:
        binary_of(kernel, signature(kernel, constants, dtype), constants, arch, warps)
    except _SharedIsKnownError as found:
        return f"{name}, sm_{arch}", found.args[0]
    finally:
        knobs.runtime.add_stages_inspection_hook, knobs.compilation.always_compile = None, False
    raise AssertionError("a kernel was compiled without the stage that writes PTX")


def limits():
    """Bytes of shared memory that a program can have, by architecture."""
    from baton.kernels.compile.aot import Target

    return {arch: 1024 * Target(arch).shared_kib for arch in FITTED}


def digest(number, arch):
    """Of all that the report of the number-th configuration depends on."""
    return digest_of(list(kernels(arch))[number], arch)


def digest_of(configuration, arch):
    """Of sources, constants, types, and the compiler."""
    import triton

    name, kernel, constants, warps, dtype = configuration
    what = name, kernel.cache_key, sorted(constants.items(), key=str), signature(kernel, constants, dtype), warps, arch
    return hashlib.sha256(f"{triton.__version__} {what}".encode()).hexdigest()


def known():
    """Reports of what was compiled before, by digest."""
    return json.loads(REPORTS.read_text(encoding="utf-8"))


def known_shared():
    """Bytes by digest, and whether this Triton says so."""
    import triton

    written = json.loads(SHARED.read_text(encoding="utf-8"))
    return written["bytes"], written["triton"] == triton.__version__


def of_each_kernel():
    """Numbers of configurations of which every kernel has one: a cheap one where they differ."""
    chosen = {}
    for number, (name, kernel, *_) in enumerate(kernels(MAIN)):
        if kernel not in chosen or name in CHEAP:
            chosen[kernel] = number
    return list(chosen.values())


def starved():
    """The report of a kernel that is allowed fewer registers than it needs."""
    _, kernel, constants, warps, dtype = next(x for x in kernels(MAIN) if x[0] == "longhorn summarize")
    constants = {**constants, "maxnreg": 32}
    return report(kernel, signature(kernel, constants, dtype), constants, MAIN, warps)


def wide(name):
    """In how many places a kernel reads or writes 16 bytes of a lane at once."""
    _, kernel, constants, warps, dtype = next(x for x in kernels(MAIN) if x[0] == name)
    return len(re.findall(r"\.v4\.", binary_of(kernel, signature(kernel, constants, dtype), constants, MAIN, warps).asm["ptx"]))


def blocks_of(name):
    """`blocks` of a scan's backward pass when nothing is known of pointers and sizes."""
    _, kernel, constants, warps, dtype = next(x for x in kernels(MAIN) if x[0] == name)
    constants = {**constants, "DIM": 4099, "EVEN_D": False, "EVEN_T": False}
    return blocks(binary_of(kernel, signature(kernel, constants, dtype), constants, MAIN, warps, aligned=False))


def main():
    """Argument: `all` for every configuration on every architecture; `each` for one of each kernel, and what is compared with the
    shared memory of all architectures, of which those are compiled that are not among the reports; `write` writes the reports of
    those."""
    import triton

    every = sys.argv[1] == "all"
    listed = list(kernels(MAIN))  # before processes are forked: they share what is imported
    numbers = range(len(listed)) if every else of_each_kernel()
    digests = {number: digest(number, MAIN) for number in of_each_kernel()}
    reports = {} if every else known()
    before = {f"{listed[n][0]}, sm_{MAIN}": reports[key] for n, key in digests.items() if key in reports}
    numbers = [number for number in numbers if digests.get(number) not in reports]
    sizes, same = known_shared()
    sizes = {} if every else sizes
    # with another Triton all would be compiled, which takes ten minutes: then only what presets need where there is least
    to_fit = [
        (f"{configuration[0]}, sm_{arch}", configuration[0], arch, digest_of(configuration, arch))
        for arch in (FITTED if same or sys.argv[1] != "each" else FITTED[1:2])
        for configuration in (fitted(arch) if same or sys.argv[1] != "each" else _preset_kernels(arch))
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        few, updates = pool.submit(starved), {name: pool.submit(wide, name) for name in ("adamw", "adamw, unaligned")}
        walks = {name: pool.submit(blocks_of, name) for name in ("longhorn backward", "mamba backward") if every}
        jobs = [pool.submit(one, number, MAIN) for number in numbers]
        for arch in (other for other in ARCHITECTURES if every and other != MAIN):
            there = [configuration[0] for configuration in kernels(arch)]
            jobs += [pool.submit(one, number, arch) for number, name in enumerate(there) if ", " not in name]
        fitting = [pool.submit(shared, name, arch) for _, name, arch, key in to_fit if key not in sizes]
        measured = dict(job.result() for job in fitting)
        found = {"kernels": before | dict(job.result() for job in jobs), "starved": few.result()}
        if sys.argv[1] == "write":
            rows = {key: found["kernels"][f"{listed[number][0]}, sm_{MAIN}"] for number, key in digests.items()}
            REPORTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")
            sizes = {key: measured[name] if name in measured else sizes[key] for name, *_, key in to_fit}
            written = {"triton": triton.__version__, "bytes": dict(sorted(sizes.items()))}
            SHARED.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
            return
        found["wide"] = {name: job.result() for name, job in updates.items()}
        found["shared"] = {name: measured[name] if name in measured else sizes[key] for name, *_, key in to_fit}
        found |= {"limits": limits(), "same": same}
        found["digests"] = [digest(number, arch) for number in of_each_kernel()[:2] for arch in (80, MAIN)]
        json.dump({**found, "blocks": {name: job.result() for name, job in walks.items()}}, sys.stdout)


if __name__ == "__main__":
    main()
