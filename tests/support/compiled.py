"""Registers, stack and shared memory of the Triton kernels, compiled for GPUs that are not here: printed as JSON by this program.

The tiles are those that runs use. A process of its own, because Triton decides when a kernel is imported whether it interprets it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

CHANNELS = 4096
ARCHITECTURES = (80, 90, 100)
MAIN = 90  # the only one for what is a variant of another kernel, "NAME, VARIANT"
# of tensors: what is in the activations' dtype; the others are float32, positions int32, and what is no pointer a size
ACTIVATIONS = {
    "x",
    "step",
    "z",
    "y",
    "dx",
    "dstep",
    "dz",
    "dy",
    "tail",
    "dtail",
    "dtail_out",
    "into",
    "query",
    "parts",
}
SIZES = {"T", "N", "piece", "span", "size", "pieces", "into_row", "query_row"}


def signature(kernel, constants, dtype):
    def of(name):
        if name in SIZES or name.endswith("_batch"):
            return "i32"
        return {"pos": "*i32"}.get(name, f"*{dtype}" if name in ACTIVATIONS else "*fp32")

    return {name: of(name) for name in kernel.arg_names if name not in constants}


def kernels(arch):
    """(name, kernel, constants, warps, dtype) of every configuration that is held to have no spills on an architecture."""
    for name, kernel, constants, warps, dtype in _kernels(arch):
        rows = {p.name: CHANNELS for p in kernel.params if p.is_constexpr and p.name.endswith("_row")}
        yield name, kernel, {**constants, **rows}, warps, dtype


def _kernels(arch):
    """As `kernels`, without the lengths of rows."""
    from baton.kernels import tiles as table
    from baton.kernels.diagonal_scan import backward, forward
    from baton.kernels.diagonal_scan.per_token import LONGHORN, MAMBA
    from baton.kernels.diagonal_scan.triton import KERNEL, default_tiles, shape_of
    from baton.kernels.short_conv import taps
    from baton.kernels.short_conv.triton import Tiles as ConvTiles

    conv_tiles = ConvTiles()
    # every kind with the usual d_state, Mamba with the largest
    for label, kind, d_state in (
        ("mamba", MAMBA.value, 16),
        ("longhorn", LONGHORN.value, 16),
        ("mamba, d_state 64,", MAMBA.value, 64),
    ):
        own = table.of_device(KERNEL, (f"sm_{arch}",), shape_of(label.split(",")[0], d_state, 8, CHANNELS))
        tiles = replace(default_tiles(d_state), **own)
        common = {"KIND": kind, "ACTIVATE": True, "HAS_POS": True, "EVEN": True, "FULL": True}
        common |= {"D": CHANNELS, "N": d_state, "BD": tiles.channels, "BN": d_state}
        ahead, summary, back = ({**common, "STEPS": n} for n in (tiles.steps, tiles.steps_summary, tiles.steps_back))
        ahead, summary = {**ahead, "AHEAD": tiles.ahead}, {**summary, "AHEAD": tiles.ahead_summary}
        whole = {"GATED": True, "HAS_ENTERING": True, "KEEP_BORDERS": True, "BORDER": tiles.border, "UNROLL": tiles.unroll}
        yield f"{label} summarize", forward.summarize_kernel, summary, tiles.warps, "bf16"
        yield f"{label} scan", forward.scan_kernel, {**ahead, **whole}, tiles.warps, "bf16"
        yield f"{label} summarize backward", backward.summarize_backward_kernel, {**summary, "GATED": True}, tiles.warps, "bf16"
        yield (
            f"{label} backward",
            backward.scan_backward_kernel,
            {
                **back,
                "GATED": True,
                "BORDER": tiles.border,
                "BD": tiles.channels_back,
                "WARP_SUMS": d_state == 16 and tiles.channels_back == 32,
            },
            tiles.warps,
            "bf16",
        )
    conv = {"HAS_TAIL": True, "HAS_POS": True, "SILU": True, "FULL": True, "D": CHANNELS, "W": 4}
    conv |= {"BD": conv_tiles.channels, "STEPS": conv_tiles.steps}
    yield "conv", taps.conv_kernel, {**conv, "EVEN": True}, 1, "bf16"
    yield "conv backward", taps.conv_backward_kernel, {**conv, "EVEN": True}, 1, "bf16"
    yield "fold", forward.fold_kernel, {"HAS_FIRST": True, "BACKWARDS": False, "BLOCK": 256}, 4, "bf16"
    yield "pack", forward.pack_kernel, {"KIND": LONGHORN.value, "BT": 8, "BN": 16}, 4, "bf16"


def binary_of(kernel, known, constants, arch, warps, *, aligned=True):
    """The kernel for an architecture; aligned: pointers and sizes are known to be multiples of 16, as they mostly are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: known.get(name, "constexpr") for name in kernel.arg_names}
    special = [aligned and not parameter.do_not_specialize for parameter in kernel.params]
    divisible = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if name in known and special[n]}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": 1})


def blocks(binary):
    """How blocks of four dimensions lie in a warp: elements of a lane side by side, and lanes, along each."""
    return re.findall(r"sizePerThread = \[(\d+, \d+, \d+, \d+)\], threadsPerWarp = \[(\d+, \d+, \d+, \d+)\]", binary.asm["ttgir"])


def report(kernel, known, constants, arch, warps):
    """Registers, stack (bytes; more than 0 are spills) and shared memory (bytes) of a kernel; pointers, sizes: multiples of 16."""
    import triton

    binary = binary_of(kernel, known, constants, arch, warps)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))
    return {"registers": registers, "stack": stack, "shared": binary.metadata.shared}


def one(number, arch):
    """The report of the number-th configuration."""
    name, kernel, constants, warps, dtype = list(kernels(arch))[number]
    return f"{name}, sm_{arch}", report(kernel, signature(kernel, constants, dtype), constants, arch, warps)


def main():
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [
            pool.submit(one, number, arch)
            for number, (name, *_) in enumerate(kernels(MAIN))
            for arch in ((MAIN,) if ", " in name else ARCHITECTURES)
        ]
        json.dump(dict(job.result() for job in jobs), sys.stdout)


if __name__ == "__main__":
    main()
