"""A persistent pool of processes for distributed tests: imports are paid once for all ranks, every test gets a fresh world.

A test hands over a module-level function `fn(mesh, *args)`; it runs on every rank of the asked layout, in its own world (new
rendezvous, new groups), and its return values come back in rank order. On GPUs, where a world's communicators take seconds to make
and seconds to end, a world serves until another layout is asked for. A rank that raises or hangs fails the test, and the pool is
started again for the next one.
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

from baton.parallel.config import LayoutConfig
from support.forks import NURSERY

_modules: dict[str, object] = {}
_STARTING_S = 120.0
_ENDING_S = 10.0  # that all processes of a pool may take together


def _load(path: str, name: str):
    """A function by file and name: test modules cannot be imported by name under pytest's importlib mode; the support package can,
    so that what its functions return can be unpickled."""
    if Path(path).parent.name == "support":
        return getattr(importlib.import_module(f"support.{Path(path).stem}"), name)
    if path not in _modules:
        spec = importlib.util.spec_from_file_location(f"pool_{Path(path).stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _modules[path] = module
    return getattr(_modules[path], name)


def serve(address: str, key: bytes, rank: int, device: str) -> None:
    """A rank's process: run what comes from the pool, which listens at this address, until it says that nothing more comes. key: by
    which the pool's process takes the memory of tensors."""
    multiprocessing.current_process().authkey = key
    connection = Client(address)
    connection.send(rank)
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.freeze()  # what is imported stays; the collections after each job need not look at it
    import torch

    torch.set_num_threads(1)
    from baton.parallel import linear
    from baton.parallel import mesh as meshes

    if device == "cpu":
        _share_gloo_device()
        linear._PIECE = 4  # so that sums of tests' sizes are made in pieces too
    mesh, world, frozen = None, None, False
    while True:
        job = connection.recv()
        if job is None:
            faulthandler.dump_traceback_later(_ENDING_S / 2)  # who is late to end says where
            if mesh is not None:
                _leave()
            os._exit(0)  # as a rank of a run: the interpreter's own end takes seconds
        path, name, layout, store, args, kwargs = job
        try:
            if mesh is not None and layout != world:
                mesh = _leave()
            config, result = LayoutConfig(**layout), None
            if rank < config.world_size:
                try:
                    if mesh is None:
                        own = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
                        shared = torch.distributed.FileStore(store, config.world_size)
                        mesh, world = meshes.initialize(config, device=own, rank=rank, store=shared), layout
                    result = _load(path, name)(mesh, *args, **kwargs)
                finally:
                    # what a job sets ends with it: this one would have ZeRO-2 fill its 2 GB of buckets
                    torch.set_deterministic_debug_mode("default")
                    mesh = _leave() if device == "cpu" else mesh
            connection.send(("ok", result))
            if not frozen and mesh is None:
                frozen = True
                gc.freeze()  # and what the first job has imported
        except BaseException:
            connection.send(("error", traceback.format_exc()))


def _share_gloo_device() -> None:
    """One gloo device for all groups of this process. Each has a thread that wakes a hundred times a second, and a world has 18
    groups: idle ranks would take a tenth of a core from those that work."""
    from torch.distributed import ProcessGroupGloo

    theirs, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def make(group, store, rank, size, timeout, **newer):
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = [device], timeout, 2
        for name, value in newer.items():  # torch 2.15 has one more
            setattr(options, name, value)
        theirs(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make


def _leave() -> None:
    from baton.parallel import mesh as meshes

    meshes.shutdown()
    # engines are reference cycles and hold their groups, each with three threads
    gc.collect()


class Pool:
    """Up to `size` ranks, on the CPU or one per GPU. Use the fixtures of tests/conftest.py."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        self.device = device
        self._said = tempfile.NamedTemporaryFile()  # noqa: SIM115 (as long as the pool)
        """What ranks on a CPU write."""
        self._workers: list = []

    def _start(self) -> None:
        """On a CPU ranks are forked from the process that has imported everything. One that has used CUDA cannot be forked, and an
        import may ask the driver how many GPUs there are."""
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/pool", backlog=self.size) as listener:
            made = [self._process(listener.address, rank) for rank in range(self.size)]
            listener._listener._socket.settimeout(_STARTING_S)
            connections = [listener.accept() for _ in made]
        self._workers = list(zip(made, (here for _, here in sorted((here.recv(), here) for here in connections)), strict=True))

    def _process(self, address: str, rank: int):
        arguments = address, bytes(multiprocessing.current_process().authkey), rank, self.device
        if self.device == "cpu":
            said = self._said.name
            return NURSERY.fork("call", ["support.pool", "serve", *arguments], where=Path.cwd(), out=said, err=said)
        process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        process.start()
        return process

    def run(self, fn, *args, timeout_s: float = 280, **layout_and_kwargs) -> list:
        """fn(mesh, *args, **kwargs) on every rank; keywords tensor, data, … are the layout, the rest goes to fn."""
        layout = {k: layout_and_kwargs.pop(k) for k in LayoutConfig.model_fields if k in layout_and_kwargs}
        layout.setdefault("timeout_s", 120)
        world = LayoutConfig(**layout).world_size
        assert world <= self.size, f"{world} ranks asked of a pool of {self.size}"
        if not self._workers:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            job = (fn.__code__.co_filename, fn.__qualname__, layout, f"{folder}/store", args, layout_and_kwargs)
            # on GPUs also those without work: they may have to leave a world together with the others
            active = self._workers[:world] if self.device == "cpu" else self._workers
            for _, connection in active:
                connection.send(job)
            replies = []
            for rank, (_, connection) in enumerate(active):
                if not connection.poll(timeout_s):
                    self.close(kill=True)
                    raise TimeoutError(f"rank {rank} of {len(active)} did not answer within {timeout_s} s")
                try:
                    replies.append(connection.recv())
                except EOFError:
                    replies.append(("error", f"the process has ended\n{Path(self._said.name).read_text()[-2000:]}"))
        errors = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(replies) if kind == "error"]
        if errors:
            self.close(kill=True)  # a world that broke half-way may leave groups behind
            raise AssertionError("\n".join(errors))
        return [result for _, result in replies[:world]]

    def close(self, kill: bool = False) -> None:
        for process, connection in self._workers:
            if kill:
                process.kill()
            else:
                connection.send(None)
        last = time.monotonic() + _ENDING_S
        for _, connection in self._workers:
            with contextlib.suppress(EOFError, ConnectionError):
                while connection.poll(max(0.0, last - time.monotonic())):
                    connection.recv()  # until its end is closed
        self._workers = []
