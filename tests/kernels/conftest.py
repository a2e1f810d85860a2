"""Fixtures for all tests of this folder: memory of torch.empty is filled with NaN, interpreted kernels are checked for
out-of-bounds accesses, and the interpreter's bfloat16 arithmetic is that of a GPU."""

import os
from collections.abc import Iterator

import pytest
import torch
from support.bfloat16 import bfloat16_is_rounded
from support.bounds import bounds_checked
from support.interpreter import errors_corrected, interpreted_quickly


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_deterministic_debug_mode(mode)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with bounds_checked(), bfloat16_is_rounded(), errors_corrected(), interpreted_quickly():
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back, for tests that change it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
