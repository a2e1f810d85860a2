"""Starts `baton train` and its ranks by forking a process that has imported everything, to save the time of imports in tests.

The code that runs is the command's and the worker's own; only the start of the interpreter is left out. The real command spends
three seconds of processor time on imports, which is more than most tests' training takes. tests/launcher/test_run.py starts the
real command, and so do jobs on SLURM.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parents[1]
_PATH = os.environ.get("PYTHONPATH")
"""By which this process has found the packages, where they are not those installed."""

NAMED = "rank-"
"""The name of a rank's process, with its number: its command line is that of the process it was forked from."""

IMPORTED = (
    *(f"baton.launcher.{name}" for name in ("cli", "inputs", "processes", "run_directory", "worker")),
    *(
        f"baton.training.{name}"
        for name in ("build", "evaluation.evaluate", "evaluation.generation", "loop", "monitoring.profiler")
    ),
    "baton.models.mixers.mamba",
    "baton.launcher.ahead",
    # what TensorBoard, torch's first backward pass and DeepSpeed import late
    "tensorboard.summary.writer.event_file_writer",
    "tensorboard.compat.tensorflow_stub",
    "numpy.random",
    "torch.fx.experimental.symbolic_shapes",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    # what files of tests import, which ranks of support/pool.py read
    *("pytest", "hypothesis", "setuptools", "support.pool", "support.grid", "support.pool_runs", "support.recurrences"),
    *("support.checkpoints", "support.long_form", "baton.data_pipeline.prepare", "baton.data_pipeline.tokenizer_training"),
    # what checkpoints need, and Dynamo, which a process imports that makes activations again
    *("pydantic.dataclasses", "torch.utils.serialization", "deepspeed.utils.pin_memory", "numpy.fft"),
    "torch._decomp.decompositions_for_rng",
)
"""Besides DeepSpeed itself, all mixers and Dynamo. A module that is missing here is imported by each process that needs it."""

_DIE_WITH_PARENT = 1  # of prctl


# ------------------------------------------------------------------------------------------------------ in the process of the tests


class Forked:
    """One forked process, with the interface of subprocess.Popen. pid: its own. returncode: None while it runs."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self._nursery, self.pid, self.returncode = nursery, pid, None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ended(self.pid, timeout)
        return self.returncode


class Nursery:
    """The process that has imported everything, started when it is first needed. It ends with this process."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._ended: dict[int, int] = {}

    def _start(self) -> Connection:
        if self._connection is None:
            import socket

            ours, theirs = socket.socketpair()
            with theirs:
                code = f"import sys; sys.path.append({str(TESTS)!r}); from support import forks; forks.serve({theirs.fileno()})"
                # DeepSpeed reads this when it is imported (parallel.compat)
                # no device is visible: what DeepSpeed imports late asks CUDA for them, and a rank that is forked then starts afresh
                environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                # a test's is for the processes that are forked for it
                environment.pop("PYTHONPATH", None)
                environment |= {"PYTHONPATH": _PATH} if _PATH else {}
                words = [sys.executable, "-P", "-c", code]
                subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
            self._connection = Connection(ours.detach())
        return self._connection

    def fork(self, what: str, words: list[Any], *, where: Path, out: str, err: str) -> Forked:
        """what: the name of a function of this module, which is called with the words, in the current directory `where`, in this
        process's environment; its result is the exit status. out, err: existing files."""
        connection = self._start()
        connection.send((what, words, str(where), dict(os.environ), out, err))
        while True:
            kind, pid, status = connection.recv()
            if kind == "started":
                return Forked(self, pid)
            self._ended[pid] = status

    def ended(self, pid: int, timeout: float | None) -> int | None:
        """The exit status of a forked process (negative: the signal that ended it); None: it still runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        assert self._connection is not None
        while pid not in self._ended:
            if not self._connection.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return None
            _, other, status = self._connection.recv()
            self._ended[other] = status
        return self._ended.pop(pid)


NURSERY = Nursery()


# -------------------------------------------------------------------------------------- in the process that has imported everything


def serve(number: int) -> None:
    """Fork until the other end of the connection is closed. number: of the connection's file."""
    import torch

    from baton.launcher.worker import import_for
    from baton.models.settings import kinds
    from baton.parallel import compat

    import_for("cpu")
    with compat.lazy_compile():
        for name in IMPORTED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for name in kinds():
            importlib.import_module(f"baton.models.mixers.{name}")
    importlib.import_module("torch._dynamo")  # a process that makes activations again does
    torch.set_num_threads(1)
    gc.freeze()  # the collector of a forked process does not touch, and so does not copy, this memory
    # ends where the other end is closed, also with messages that nobody has read
    with contextlib.suppress(EOFError, ConnectionError):
        _fork_on_request(number)
    os._exit(0)


def _fork_on_request(number: int) -> NoReturn:
    connection, running, poller = Connection(number), {}, select.poll()
    poller.register(number, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready != number:
                pid = running.pop(ready)
                poller.unregister(ready)
                os.close(ready)
                connection.send(("ended", pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            request = connection.recv()
            if (pid := os.fork()) == 0:
                _serve_one(number, *request)
            running[file := os.pidfd_open(pid)] = pid
            poller.register(file, select.POLLIN)
            connection.send(("started", pid, None))


def _serve_one(number: int, what: str, words: list[Any], where: str, environment: dict[str, str], out: str, err: str) -> NoReturn:
    def run() -> int:
        os.chdir(where)
        return globals()[what](words)

    os.close(number)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    files = [os.open(path, os.O_WRONLY | os.O_APPEND) for path in (out, err)]
    _become(run, environment, *files)


def _become(run: Callable[[], int], environment: dict[str, str], out: int, err: int, kept: tuple[int, ...] = ()) -> NoReturn:
    """The rest of a forked process: `run`, with these variables and files and no others, and the exit status it returns."""
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        last = 2
        for file in sorted(kept):
            os.closerange(last + 1, file)
            last = file
        os.closerange(last + 1, 1 << 16)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # TMPDIR is read anew
        folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sys.path[:0] = [folder for folder in folders if folder not in sys.path]
        for folder in folders:
            if (site := Path(folder) / "sitecustomize.py").is_file():  # as the interpreter does when it starts
                exec(compile(site.read_text(), str(site), "exec"), {"__name__": "sitecustomize"})
        status = run()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


class _Forked:
    """What launcher.ranks starts the process with that forks ranks, in place of subprocess.Popen."""

    def __init__(self, words: list[str], *, env: dict[str, str], stdout: Any, pass_fds: list[int], **settings: Any) -> None:
        import torch

        from baton.launcher import worker

        assert words[1:4] == ["-P", "-m", "baton.launcher.worker"], words

        def run() -> int:
            os.setsid()
            sys.argv = ["worker", *words[4:]]
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
            return worker.main()

        self.args, self.returncode = words, None
        self.pid = os.fork()
        if self.pid == 0:
            _become(run, env, stdout.fileno(), stdout.fileno(), tuple(pass_fds))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def command(words: list[str]) -> int:
    """`baton` with these words."""
    from baton.launcher import cli, ranks

    ranks.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _Forked})  # type: ignore[assignment]
    sys.argv = [cli.__file__, *words]
    return cli.main(words)


def ranks(words: list[str]) -> int:
    """The ranks of an attempt, started as the command starts them and then left alone. words: the attempt's folder, and how many.
    Prints, as JSON, the list of their process ids, and on another line the list of their exit statuses."""
    from baton.launcher import processes
    from baton.launcher import ranks as starting

    starting.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _Forked})  # type: ignore[assignment]
    attempt, count = Path(words[0]), int(words[1])
    with processes.listen("127.0.0.1", (0, 0)) as listener:
        environment = processes.rank_environment("127.0.0.1", listener.getsockname()[1], count, count)
        started = processes.start_of(attempt, range(count), environment, listener)
    while not all(rank.forked or rank.poll() for rank in started):
        time.sleep(0.005)
    print(json.dumps([rank.pid for rank in started]), flush=True)
    print(json.dumps([rank.wait(float("inf")) for rank in started]), flush=True)
    return 0


def call(words: list[Any]) -> int:
    """A function. words: its module, its name, and its arguments."""
    module, name, *arguments = words
    getattr(importlib.import_module(module), name)(*arguments)
    return 0


def commands(words: list[str]) -> int:
    """`baton` once for each of the words, which are lists of words as JSON. Prints for each, as JSON, the exit status and what it
    wrote to stdout and stderr."""
    from baton.launcher import cli

    for word in words:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(json.loads(word))
        print(json.dumps([status, out.getvalue(), err.getvalue()]))
    return 0
