"""Every test of this folder runs on poisoned memory: whatever torch.empty and its relatives return is full of NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    deterministic, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back, for tests that change it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
