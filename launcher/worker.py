"""The process of a rank. launcher.ranks starts `python -m baton.launcher.worker CONFIG`, which imports modules and forks the ranks.

If the environment has the usual variables of a rank instead of BATON_START, the process itself becomes that rank.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from baton.launcher import ranks
from baton.training import preemption
from baton.training.monitoring import heartbeat
from baton.training.monitoring.time_ledger import PROCESS_START_VARIABLE, process_start_time

PATIENCE = 10
"""Factor from the maximum time without a heartbeat to the timeout of collectives, if the process that started the ranks reads their
heartbeats. That process detects a hang first and names the rank; a rank that is only slow must not cause a timeout."""


IMPORTED = "BATON_IMPORTED_FOR"
"""Environment variable with the kind of device for which modules were imported, since DeepSpeed supports one kind per process."""


class _Log:
    """This rank's log as standard output. On a full disk lines are lost, but the run continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> int:
    _die_with_launcher()
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    path = Path(sys.argv[1])
    sys.stdout, sys.stderr = _Log(sys.stdout), _Log(sys.stderr)
    try:
        if (start := os.environ.pop(ranks.START, None)) is not None:
            _import_and_fork(path, json.loads(start))
        ranks.name_process(f"rank-{os.environ['RANK']}")
        _stacks_into(os.environ.get("BATON_STACKS"))
        preemption.install_handlers()
        heartbeat.own_heartbeat().beat(0, "imports")
        _run(path)
    except Exception as error:
        from baton.launcher.errors import explained, is_out_of_memory

        status, text = explained(error)
        if is_out_of_memory(error):
            from baton.launcher.run_directory import say_out_of_memory

            said = " ".join(str(error).split())[:200]
            say_out_of_memory(path.parent, int(os.environ.get("RANK", "0")), said)
            status, text = 1, f"out of memory ({said}); {_remedy(path)}"
        if status is None:
            raise
        if not hasattr(error, "exit_status"):
            traceback.print_exc()  # into this rank's log: its place in the program may matter
            text = f"rank {os.environ.get('RANK', '0')}: {text}"
        print(f"baton: {text}", flush=True)
        return status
    return 0


def _remedy(path: Path) -> str:
    """Settings with which the run needs less memory, for the message about out of memory."""
    from baton.launcher.inputs import with_known_vocabulary
    from baton.launcher.planner.automatic import host_has_room
    from baton.launcher.planner.host_memory import Node
    from baton.launcher.run_directory import read_config
    from baton.parallel.control_groups import host_memory

    config = read_config(path)
    training, room = config.training, False
    if config.keeps_kv and training.offload_kv is not True:
        offloading = config.model_copy(update={"training": training.model_copy(update={"offload_kv": True})})
        room = True
        with contextlib.suppress(Exception):  # the tokenizer, say, cannot be read any more: the message about memory matters more
            node = Node(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), host_memory())
            room = host_has_room(with_known_vocabulary(offloading), node)
    offload = "training.offload_kv=true, " if room else ""
    again = "" if training.recompute == "full" else "training.recompute=full, "
    smaller = f"training.micro_batch_size={training.micro_batch_size // 2}, " if training.micro_batch_size > 1 else ""
    return f"set {offload}{again}{smaller}training.bptt, or see what `baton plan` suggests"


def _stacks_into(path: str | None) -> None:
    """Writes each thread's stack trace on request of the parent process. It executes no bytecode, so it works wherever this
    hangs."""
    if path is not None:
        with contextlib.suppress(OSError):  # no room
            faulthandler.register(signal.SIGUSR2, file=open(path, "a"), all_threads=True)  # noqa: SIM115 (open as long as the rank)


def _import_and_fork(path: Path, start: dict[str, Any]) -> None:
    """Imports what ranks need and forks them. Returns in each rank."""
    first, count = start["ranks"]
    _stacks_into(str(Path(start["stacks"]) / f"rank-{first}"))
    if folder := os.environ.get(heartbeat.HEARTBEAT_DIR):
        for rank in range(first, first + count):
            heartbeat.Heartbeat(heartbeat.heartbeat_path(Path(folder), rank)).beat(0, "imports")
    os.environ[PROCESS_START_VARIABLE] = str(process_start_time())
    os.environ[IMPORTED] = _import_for(path)
    gc.collect()
    gc.freeze()  # so that a rank's garbage collector does not write to, and thereby copy, shared memory pages
    ranks.fork(start)
    _die_with_launcher()
    import torch

    if torch.cuda._is_in_bad_fork():  # what was imported has touched the GPU after all
        _start_afresh(path)
    # PyTorch replaces its pool of threads when it is first asked for it after a fork; threads that then ask at once find none
    torch.set_num_threads(torch.get_num_threads())


def _start_afresh(path: Path) -> NoReturn:
    """Becomes this rank in a process that imports for itself."""
    os.environ.pop(IMPORTED, None)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "baton.launcher.worker", str(path)])


def _import_for(path: Path) -> str:
    """Imports the modules for training this run without initializing a GPU. Returns the kind of device."""
    from baton.launcher.run_directory import read_config

    config = read_config(path)
    # checked before the rendezvous, where too few ranks would wait for the others without a message
    config.check_ranks(int(os.environ["WORLD_SIZE"]))
    from baton.parallel import comm_timing

    comm_timing.install()
    kind = import_for(config.device)
    from baton.models.mixer import import_mixer

    for mixer in config.model.mixers.values():
        import_mixer(mixer)
    return kind


def import_for(device: str) -> str:
    """Imports the modules for training, for "cpu", "cuda" or "auto". Returns the kind of device."""
    import torch

    import baton.training.loop  # noqa: F401
    from baton.parallel import compat

    # counting devices asks NVML alone, where there is one
    kind = "cuda" if device != "cpu" and torch.cuda.device_count() else "cpu"
    compat.import_deepspeed(kind)
    return kind


def _run(path: Path) -> None:
    from baton.launcher import ahead
    from baton.launcher.run_directory import changed_since_last_start, read_config, run_settings

    config = read_config(path)
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # checked before the rendezvous, where too few ranks would wait for the others without a message
    config.check_ranks(world_size)
    # before this process has to do with CUDA: what compiles is forked from it
    compiler = ahead.start(config) if local_rank == 0 else None
    import torch

    from baton.parallel import comm_timing

    comm_timing.install()
    comm_timing.set_wait_reporter(heartbeat.own_heartbeat().set_waiting)
    from baton.parallel import mesh as meshes
    from baton.training.loop import train

    device = meshes.local_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]), config.device)
    if os.environ.get(IMPORTED, device.type) != device.type:  # a driver that has GPUs, and a CUDA that does not run
        _start_afresh(path)
    listening = os.environ.get("BATON_LISTEN_FD")
    heartbeat.own_heartbeat().beat(0, "meeting the other ranks")
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timedelta(minutes=10),
        # the launcher has bound the port and hands it over: no other program can take it in between
        master_listen_fd=int(listening) if listening else None,
    )
    flops_per_token = None
    notices: tuple[str, ...] = ()
    if config.profile is not None or (device.type != "cpu" and rank == 0):
        from baton.launcher.inputs import with_known_vocabulary
        from baton.launcher.planner import memory
        from baton.launcher.planner.slow_paths import slow_paths

        known = with_known_vocabulary(config)
        flops_per_token = partial(memory.flops_per_token, known)
        notices = tuple(map(str, slow_paths(known, device.type)))
    watched = heartbeat.HEARTBEAT_DIR in os.environ
    if watched and device.type == "cuda":
        heartbeat.own_heartbeat().watch_gpu(comm_timing.current_gpu_wait)
    if device.type == "cuda":
        _hear_of_kernels()
    patience_s = PATIENCE * max(config.layout.timeout_s, config.jobs.startup_timeout_s) if watched else None
    mesh = meshes.initialize(config.layout, device=device, rank=rank, store=store, patience_s=patience_s)
    changed = changed_since_last_start(path.parent, config) if rank == 0 and path.parent.name.isdigit() else {}
    settings = run_settings(
        config,
        path.parent,
        changed,
        profile=config.profile,
        flops_per_token=flops_per_token,
        notices=notices,
        await_kernels=partial(ahead.await_node, compiler, store, rank, local_rank, _say_of_kernels),
    )
    train(settings, mesh)
    heartbeat.own_heartbeat().beat(config.training.steps, "the end of the run")
    heartbeat.own_heartbeat().set_waiting("the other ranks")
    meshes.await_all(mesh, store)


def _say_of_kernels(line: str) -> None:
    """Prints a line about kernels that are being compiled ahead, which also counts as a heartbeat."""
    print(line, flush=True)
    heartbeat.own_heartbeat().set_location(line)


def _hear_of_kernels() -> None:
    """Makes each kernel compilation in this process a heartbeat and logs it, because the kernel was not compiled ahead."""
    from triton import knobs

    def heard(*, src: Any, times: Any, cache_hit: bool, **of: Any) -> None:
        name = getattr(src, "name", "a kernel")
        heartbeat.own_heartbeat().set_location(f"compiled {name}")
        if not cache_hit:
            seconds = (times.ir_initialization + sum(took for _, took in times.lowering_stages)) / 1e6
            print(f"compiled {name} in {seconds:.1f} s as it was launched: it was not compiled ahead", flush=True)

    knobs.compilation.listener = heard


def die_with_parent(parent: int) -> None:
    """Makes this process end when the one that started it dies, also by SIGKILL (PR_SET_PDEATHSIG = 1, Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_launcher() -> None:
    die_with_parent(int(os.environ.get("BATON_PARENT", os.getppid())))


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed by now. The interpreter's own end, with all that torch has imported, takes 1.5 s more, in which the
    # launcher would not know that a rank has failed, while the others already miss it.
    os._exit(status)
