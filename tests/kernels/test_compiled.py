"""The Triton kernels compile for GPUs that this machine does not have, without register spills, and fit their shared memory.

One configuration of each kernel for an H200 in the default suite, and the shared memory of those with matrix products on cards of
all sizes; all of them on all architectures in the long form. The default suite compiles those that are not what they were when
tests/support/compiled_kernels.json and compiled_shared.json were written, which
`python tests/support/compiled.py write` does again; the long form compiles all and compares.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # minutes of compiling where other things run, and one where nothing does

PROGRAM = Path(__file__).resolve().parent.parent / "support" / "compiled.py"


@pytest.fixture(scope="module", params=["each", pytest.param("all", marks=pytest.mark.long)])
def compiled(request, tmp_path_factory):
    """Registers, stack and shared memory of every listed kernel."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-P", str(PROGRAM), request.param]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return {"form": request.param, **json.loads(done.stdout)}


def test_no_kernel_spills(compiled):
    assert len(compiled["kernels"]) >= {"each": 40, "all": 240}[compiled["form"]]
    assert {name: found["stack"] for name, found in compiled["kernels"].items() if found["stack"]} == {}


def test_every_kernel_fits_where_it_runs(compiled):
    """On a card of every size that there is, with the launch configuration that it gets there: none has to be refused first."""
    found, limits = compiled["shared"], compiled["limits"]
    assert len(found) >= (600 if compiled["same"] else 20)
    assert limits == {"80": 166912, "89": 101376, "90": 232448, "100": 232448, "120": 101376}
    assert {name: size for name, size in found.items() if size > limits[name.rpartition("sm_")[2]]} == {}
    # what has no matrix products needs the same everywhere
    others = {name: of["shared"] for name, of in compiled["kernels"].items() if name not in found}
    assert len(others) >= 20
    assert {name: size for name, size in others.items() if size > min(limits.values())} == {}


@pytest.mark.parametrize("compiled", [pytest.param("all", marks=pytest.mark.long)], indirect=True)
def test_what_is_written_of_kernels_is_what_the_compiler_says(compiled):
    written = json.loads(PROGRAM.with_name("compiled_kernels.json").read_text())
    reports = list(compiled["kernels"].values())
    assert len(written) >= 40
    assert all(report in reports for report in written.values()), "write it again"
    shared = json.loads(PROGRAM.with_name("compiled_shared.json").read_text())
    assert sorted(shared["bytes"].values()) == sorted(compiled["shared"].values()), "write it again"


def test_a_kernel_that_was_changed_is_compiled(compiled):
    """Another kernel or architecture has another digest, and what is written is by digest."""
    written = json.loads(PROGRAM.with_name("compiled_kernels.json").read_text())
    assert len(set(compiled["digests"])) == 4
    assert set(compiled["digests"]) & set(written) <= set(compiled["digests"][1::2])


def test_walks_over_tokens_ask_for_what_they_load(compiled):
    """For what channels have of their own and, in scans, for what they share; for which lines of it the interpreter shows."""
    found = compiled["kernels"].items()
    walks = {name: of["asked"] for name, of in found if re.match(r"(mamba|longhorn|conv backward)\b", name)}
    assert len(walks) >= {"each": 5, "all": 21}[compiled["form"]]
    assert {name: asked for name, asked in walks.items() if asked < (1 if name.startswith("conv") else 2)} == {}


def test_the_update_reads_and_writes_16_bytes_at_once_where_it_may(compiled):
    found = compiled["wide"]
    assert found["adamw"] > 0
    assert found["adamw, unaligned"] == 0


def test_a_spill_would_be_seen(compiled):
    """With fewer registers than a kernel needs."""
    assert compiled["starved"]["stack"] > 0


@pytest.mark.parametrize("compiled", [pytest.param("all", marks=pytest.mark.long)], indirect=True)
def test_a_lane_has_a_channel_whatever_is_known_of_pointers_and_sizes(compiled):
    """Sums over channels by tensor cores rest on it: `sum_over_channels` does not ask where a block's elements lie. With a
    Triton that lays them otherwise the kernels sum plainly."""
    from baton.kernels.diagonal_scan.channel_reduce import LANE_OWNS_CHANNEL

    found = list(compiled["blocks"].values())
    assert len(found) == 2
    assert found == [[["1, 1, 1, 4", "32, 1, 1, 1"]]] * 2 or not LANE_OWNS_CHANNEL
