"""The first call of an elementary function gives the same values as later calls, also if several threads call it at once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.kernels.common.mkl_warmup import FUNCTIONS


def test_every_function_that_torch_hands_on_is_known():
    header = (Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h").read_text()
    handed_on = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", header, re.MULTILINE)
    assert "exp" in handed_on
    assert set(FUNCTIONS) == set(handed_on)


def test_importing_anything_that_computes_calls_each_on_one_thread():
    code = """
import sys, threading, torch
from baton.kernels.common import mkl_warmup
called = {"now": set()}
def watch(name, function):
    def call(x, *args, **kwargs):
        if not args and not kwargs:
            called["now"].add((name, x.dtype, x.device.type, threading.current_thread() is threading.main_thread()))
        return function(x, *args, **kwargs)
    return call
for name in mkl_warmup.FUNCTIONS:
    setattr(torch, name, watch(name, getattr(torch, name)))
for name in [name for name in sys.modules if name.startswith("baton")]:
    del sys.modules[name]
import baton.models.lm
wanted = {(name, dtype, "cpu", True) for name in mkl_warmup.FUNCTIONS for dtype in (torch.float32, torch.float64)}
print(len(wanted - called["now"]), len(wanted))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", str(2 * len(FUNCTIONS))], done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "tanh"])
def test_first_calls_on_four_threads_are_right(name):
    """Without `warm_up` one process in several hundred has a quarter of its elements wrong by 1e-4."""
    code = f"""
import os, torch
import baton.kernels
wrong = 0
for _ in range(4000):
    if os.fork() == 0:
        torch.set_num_threads(4)
        x = torch.linspace(0.5, 1.5, 4 * 32768)
        os._exit(not torch.equal(torch.{name}(x), torch.{name}(x)))
    wrong += os.waitstatus_to_exitcode(os.wait()[1])
print(wrong)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
