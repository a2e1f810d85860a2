"""Ways to make rank 1 of a real run hang at a known point, and the small run for them."""

import os
import re

from support.runs import wait_until

RUN = {
    "name": "small",
    "model": {
        "d_model": 64,
        "n_layers": 2,
        "pattern": ["mamba", "mamba+swiglu"],
        "pad_vocab_to": 8,
        "mixers": {"mamba": {"d_state": 8}},
    },
    "data": {"kind": "mqar", "length": 32, "pairs": 4, "vocab_size": 64},
    "training": {
        "steps": 1_000_000,
        "sequence_length": 64,
        "global_batch_tokens": 512,
        "micro_batch_size": 2,
        "log_every": 1,
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 10, "async_save": False},
        "evaluation": {"every": 10, "tokens": 512},
    },
}
"""It runs until it is ended, on two ranks of any layout."""

LAYOUTS = ("tensor", "data", "context", "pipeline")

_SITE = """
import os

if "BATON_START" in os.environ:
    import ctypes, math, signal, time

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def spin():
        while True:
            pass

    def block():
        # who calls vfork sleeps in the kernel, uninterruptibly, until the child calls exec or ends
        libc = ctypes.PyDLL(None)
        if libc.vfork() == 0:
            libc.prctl(1, signal.SIGKILL)
            libc.sleep(10_000)

    def sleep():
        time.sleep(SECONDS)

    calls = []

    def before(call, counts):
        def fateful(*words):
            if os.environ.get("RANK") == "1" and counts(*words):
                calls.append(None)
                if len(calls) == COUNT:
                    FATE()
            return call(*words)

        return fateful

    if PLACE == "save":
        os.fsync = before(os.fsync, lambda fd: os.readlink(f"/proc/self/fd/{fd}").endswith("rank-00001.safetensors"))
    else:
        math.isfinite = before(math.isfinite, lambda x: True)
"""
"""A sitecustomize. math.isfinite is called once by each rank in every step, before its update."""


def befall(folder, monkeypatch, fate, place, count, seconds=0):
    """From here on `fate` (stop, spin, block or sleep for `seconds`) befalls rank 1 of runs, in the count-th "save" or "step"."""
    site = folder / f"site-{fate}-{place}"
    site.mkdir()
    text = _SITE.replace("FATE", fate).replace("PLACE", repr(place)).replace("COUNT", str(count)).replace("SECONDS", str(seconds))
    (site / "sitecustomize.py").write_text(text)
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *([known] if known else [])]))


def wait_for_stop(running):
    """Wait until rank 1 has stopped itself."""
    wait_until(lambda: len(ranks := running.ranks()) == 2 and ranks[1].status() == "stopped", "rank 1 to stop itself")


SAID = re.compile(
    r"baton: rank 1 \((?P<why>[^)]+)\) gave no sign of life for (?P<seconds>\d+) s; (?P<doing>[^\n]*); "
    r"start the same command to resume\n"
)
"""The last line about rank 1."""
