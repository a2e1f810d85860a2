"""Compiles a run's kernels while its ranks start, in one process per node, which the node's first rank forks and waits for.

The process is forked before the rank initializes CUDA, and forks one process per kernel (kernels/compile/pool.py). The compiled
kernels are listed in a file in Triton's cache. A later start of the same run finds the list and starts no process. Torch-free until
the process is forked.
"""

import ctypes
import hashlib
import json
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from multiprocessing import connection
from pathlib import Path
from typing import Any

from baton.launcher.config import RunConfig
from baton.launcher.devices import kind_here
from baton.training.monitoring import heartbeat

PACKAGES = ("kernels", "models", "parallel", "training")
"""Packages whose sources determine a run's kernels."""

SETTINGS = ("TRITON_", "LLVM_", "MLIR_", "DISABLE_", "NVPTX_")
"""Prefixes of the environment variables that Triton's compiler reads."""
PTXAS, ASSEMBLER = "TRITON_PTXAS_PATH", "nvidia-cuda-nvcc"
"""Names of `kernels.compile.assembler`, which the launcher does not import."""
NOT_SETTINGS = ("TRITON_CACHE_DIR", PTXAS)

LATER = "kernels are compiled when they are first launched, one after the other, which takes minutes"

Say = Callable[[str], None]


class Ahead:
    """The compiling process. compile: compiles in that process and reports progress."""

    def __init__(self, compile: Callable[[Say], None]) -> None:
        context = mp.get_context("fork")
        self._lines, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(compile, sender, os.getpid()), name="kernels")
        self._process.start()
        sender.close()

    def wait(self, say: Say) -> None:
        """Waits until all kernels are compiled. say: called with progress lines, and with one line if the process failed, in which
        case the run continues without it."""
        try:
            while True:
                say(self._lines.recv())
        except EOFError:
            pass
        self._process.join()
        if self._process.exitcode:
            say(f"the process that compiles kernels ahead ended with status {self._process.exitcode}: {LATER}")


def start(config: RunConfig) -> Ahead | None:
    """Starts compiling a run's kernels for this node's GPUs. None: there are no GPUs, or all kernels are in the cache."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0") or kind_here(config.device) == "cpu" or is_compiled(config):
        return None
    return Ahead(lambda say: compile_run(config, say))


def compile_run(config: RunConfig, say: Say) -> None:
    """Compiles the run's kernels for this machine's GPU and writes the list of them."""
    from baton.launcher.inputs import with_known_vocabulary
    from baton.training.kernel_tools.aot_compile import Target, compile_run_kernels

    wanted = Target.asked()
    if wanted is None:
        return
    known = with_known_vocabulary(config)
    compiled = compile_run_kernels(known.model, known.training, known.layout, wanted, say=say)
    for failure in compiled.failures:
        say(f"{failure}; it is compiled when it is first launched")
    if not compiled.failures:
        _write(listing(config), sorted(compiled.files))


def is_compiled(config: RunConfig) -> bool:
    """Whether all of the run's kernels were compiled before and are still in the cache."""
    path = listing(config)
    try:
        files: list[str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all((path.parent / file).exists() for file in files)


def listing(config: RunConfig) -> Path:
    """Path of the list of the run's kernels: a file in Triton's cache whose name is a hash of everything that determines them."""
    made_from: list[Any] = [getattr(config, name).model_dump(mode="json") for name in ("model", "data", "training", "layout")]
    # the cache holds whole paths, so one that was moved is none
    made_from += [version("triton"), version("torch"), sorted(_gpus()), str(_cache())]
    made_from += sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS) and item[0] not in NOT_SETTINGS)
    made_from.append(_assembler())
    digest = hashlib.sha256(json.dumps(made_from).encode())
    root = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        for path in sorted((*(root / package).rglob("*.py"), *(root / package).rglob("*.json"))):
            digest.update(path.read_bytes())
    return _cache() / f"baton-run-{digest.hexdigest()[:32]}.json"


def _assembler() -> str:
    """The ptxas that the user has named, or the version of the package from which kernels take one; a process that has taken it has
    named it in the environment."""
    try:
        package = distribution(ASSEMBLER)
    except PackageNotFoundError:
        return os.environ.get(PTXAS, "")
    named = os.environ.get(PTXAS, "")
    return package.version if named in ("", *(str(file.locate()) for file in package.files or ())) else named


def _cache() -> Path:
    """Triton's cache folder, as triton.knobs.cache.dir."""
    own = os.environ.get("TRITON_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _gpus() -> Iterator[str]:
    """The driver's description of this machine's GPUs, without initializing CUDA, since different nodes may share a cache."""
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        try:
            yield from (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("Model:"))
        except OSError:
            continue


def _write(path: Path, files: list[str]) -> None:
    new = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(files), encoding="utf-8")
        new.replace(path)
    except OSError:  # the next start looks for itself
        new.unlink(missing_ok=True)


def _run(compile: Callable[[Say], None], sender: connection.Connection, parent: int) -> None:
    """Runs in the compiling process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its rank
    if os.getppid() != parent:
        os._exit(1)
    # a rank's signals ask for a save, and its signs of life are its own
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.environ.pop(heartbeat.HEARTBEAT_DIR, None)
    heartbeat.reset()
    try:
        compile(sender.send)
    except Exception as error:
        sender.send(f"kernels cannot be compiled ahead ({' '.join(str(error).split())[:300] or type(error).__name__}): {LATER}")


def await_node(ahead: Ahead | None, store: Any, rank: int, local_rank: int, say: Say) -> None:
    """Waits until the node's kernels are compiled: the node's first rank waits for the process, the others for that rank.

    store: the ranks' rendezvous store. say: called with the first rank's progress lines.
    """
    from baton.parallel import comm_timing

    first = rank - local_rank
    key = f"kernels of the node of rank {first}"
    if local_rank == 0:
        if ahead is not None:
            ahead.wait(say)
        store.set(key, "compiled")
        return
    with comm_timing.reported_wait(f"kernels, which rank {first} compiles"):
        while not store.check([key]):
            time.sleep(0.1)
