"""An archive of compiled kernels works for an installation of Triton with other cache keys and at another path."""

import shutil
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

PROGRAM = """
import os, sys
from pathlib import Path
import torch
import triton.runtime.cache as cache
sys.path.insert(0, {benchmarks!r})
act, build, archive = sys.argv[1:]
cache.triton_key = lambda: build  # what another build of Triton has
from archive import record_cache_keys, pack, unpack
from baton.kernels.compile.aot import META, Target, compiling
from baton.kernels.rms_norm import rms_norm
folder = Path(os.environ["TRITON_CACHE_DIR"])
if act == "unpack":
    unpack(Path(archive), folder)
with record_cache_keys() as keys, compiling(Target(90)) as compiled:
    rms_norm(torch.empty(4, 64, device=META), torch.empty(64, device=META), 1e-5)
if act == "pack":
    assert pack(keys, folder, Path(archive)) == len(keys) > 0
print(len(compiled.kernels), len(compiled.new))
"""


@pytest.fixture
def run(programs):
    """A function: kernels that were launched, and those that had to be compiled for it."""

    def program(cache, act, build, archive):
        found = programs.run(PROGRAM.format(benchmarks=str(BENCHMARKS)), act, build, str(archive), TRITON_CACHE_DIR=str(cache))
        return tuple(map(int, found.split()))

    return program


@pytest.mark.timeout(300)
def test_what_is_packed_here_is_compiled_there_and_a_copied_cache_is_not(run, tmp_path):
    archive, copied = tmp_path / "kernels.tar.xz", tmp_path / "copied"
    launched, new = run(tmp_path / "here", "pack", "this build", archive)
    assert launched == new > 0
    assert run(tmp_path / "there", "unpack", "another build", archive) == (launched, 0)
    shutil.move(tmp_path / "here", copied)
    assert run(copied, "", "this build", archive) == (launched, launched), "at another path it is not found"
    assert run(tmp_path / "there", "", "a third build", archive) == (launched, launched)
