"""The Triton kernels compile for GPUs that are not here, and keep everything in registers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # minutes of compiling where other things run, and one where nothing does

PROGRAM = Path(__file__).resolve().parent.parent / "support" / "compiled.py"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Registers, stack and shared memory of every listed kernel on every architecture; compiled anew, nothing from a cache."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, "-P", str(PROGRAM)], capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_no_kernel_spills(compiled):
    assert {name: found["stack"] for name, found in compiled.items() if found["stack"]} == {}


def test_walks_over_tokens_ask_for_what_they_load(compiled):
    """For what channels have of their own and, in scans, for what they share; for which lines of it the interpreter shows."""
    walks = {name: found["asked"] for name, found in compiled.items() if re.match(r"(mamba|longhorn|conv backward)\b", name)}
    assert len(walks) > 20
    assert {name: asked for name, asked in walks.items() if asked < (1 if name.startswith("conv") else 2)} == {}


def test_a_spill_would_be_seen():
    """More states at once than there are registers for."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "import compiled;"
        "name, kernel, constants, warps, dtype = next(x for x in compiled.kernels(90) if x[0] == 'lattice, sim backward');"
        "constants = {**constants, 'STEPS': 4};"
        "print(compiled.report(kernel, compiled.signature(kernel, constants, dtype), constants, 90, warps)['stack'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=settings, cwd=PROGRAM.parent
    )
    assert int(done.stdout) > 0


def test_a_lane_has_a_channel_whatever_is_known_of_pointers_and_sizes():
    """Sums over channels by tensor cores rest on it: `over_channels` does not ask where a block's elements lie."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "import compiled\n"
        "for name, kernel, constants, warps, dtype in compiled.kernels(90):\n"
        "    if name in ('mamba backward', 'longhorn backward'):\n"
        "        constants = {**constants, 'D': 4099, 'FULL': False, 'EVEN': False}\n"
        "        known = compiled.signature(kernel, constants, dtype)\n"
        "        print(compiled.blocks(compiled.binary_of(kernel, known, constants, 90, warps, aligned=False)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=settings, cwd=PROGRAM.parent
    )
    assert done.stdout.splitlines() == ["[('1, 1, 1, 4', '32, 1, 1, 1')]"] * 2
