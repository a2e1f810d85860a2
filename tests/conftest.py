"""Fixtures that several tests share."""

import gc
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from support import first_worker

# Threads of one process that wait for each other spin: where four workers share two cores, a run of one rank would take four times
# the processor time. Also of what the tests start, and before NumPy and torch are imported, which read it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings
from support.pool import Pool
from support.programs import Programs

pytest_plugins = ["support.costs"]

gc.disable()  # until the tests are collected: a quarter of what that takes would go into looking at what stays

if not torch.cuda.is_available():
    # where there is no GPU Triton's kernels run in its interpreter; it looks when they are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# on a machine that does other things as well an example may take any time
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

COMPARED_WITH_A_RUN = ("run", "chaos", "automatic", "eval", "export", "finished_run", "load", "segmented_run")

TOGETHER = {
    # there is one SLURM on the machine
    "tests/slurm/": "slurm",
    # what models keep and send is measured once for all of them
    "tests/launcher/test_plan": "plan",
    # fla's models take seconds to import
    **dict.fromkeys((f"tests/models/test_{name}.py" for name in ("interchange_fla", "mamba3", "rwkv6", "rwkv7")), "fla"),
    # they compare with one run
    **dict.fromkeys((f"tests/launcher/test_{name}.py" for name in COMPARED_WITH_A_RUN), "runs"),
}
"""The start of a test's name to its group, for tests that one worker has to run; all others are grouped by file."""

FIRST = (
    "slurm",
    "runs",
    "tests/kernels/test_compiled.py",
    "plan",
    "tests/training/test_long_context.py",
    "tests/training/test_grid.py",
    "tests/kernels/test_law.py",
    "tests/training/test_cuda_graphs.py",
    "tests/training/test_aot_compile.py",
    "tests/training/test_segments.py",
    "tests/training/test_anomalies.py",
    "tests/models/test_remote_code.py",
    "tests/parallel/test_context_parallel.py",
    "tests/kernels/test_triton_gla.py",
    "tests/kernels/test_triton_eidetic.py",
    "tests/test_architecture.py",
    "tests/training/test_replica_check.py",
    "tests/training/test_generation.py",
    "tests/training/test_checkpoint.py",
    "tests/training/test_sequence_parallel.py",
    "tests/launcher/test_profile.py",
)
"""Groups in the order in which they are begun: those that take longest, which `make test` names at its end, so that the workers
finish together. All others come after them."""


def _group(nodeid):
    """Of a test: one worker runs all tests of a group."""
    file = nodeid.partition("::")[0]
    return next((name for start, name in TOGETHER.items() if file.startswith(start)), file)


def _place(item):
    """Of a test in the order in which workers take groups."""
    group = _group(item.nodeid)
    return FIRST.index(group) if group in FIRST else len(FIRST)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """What has been imported and collected stays, and is not looked at again."""
    first_worker.wait()
    try:
        return (yield)
    finally:
        first_worker.done()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadgroup --no-loadscope-reorder`."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="session")
def pool():
    """Eight CPU ranks; see support/pool.py."""
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def programs():
    """Programs whose Triton compiles; see support/programs.py."""
    programs = Programs()
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def remote_code(tmp_path_factory):
    """transformers copies the code of a folder to a place of its own, of which a process can have one only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture
def small_disk():
    """A folder on a file system of 2 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("a small disk is a tmpfs, and mounting one needs root")
    folder = tempfile.mkdtemp()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    yield Path(folder)
    subprocess.run(["umount", folder], check=True)
    os.rmdir(folder)


@pytest.fixture(scope="session")
def gpu_pool():
    """A rank per GPU, at most four."""
    pool = Pool(min(4, torch.cuda.device_count()), device="cuda")
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _one_thread():
    """Two cores serve several ranks: more threads only fight each other."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    if config.getoption("loadgroup", False):  # in a worker
        items.sort(key=_place)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def single_mesh():
    """This process as a world of one, for tests of models without other ranks. Until a file's end: others make their own."""
    from baton.parallel import mesh as meshes
    from baton.parallel.config import LayoutConfig

    store = torch.distributed.HashStore()
    yield meshes.initialize(LayoutConfig(), device=torch.device("cpu"), rank=0, store=store)
    meshes.shutdown()
