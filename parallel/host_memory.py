"""Blocks of the host's memory for tensors of a device, page-locked where that is a GPU, which keep their memory from step to step.

Page-locking takes about as long as filling the memory, so a block that is given back is used again. PyTorch's allocator of
page-locked memory rounds sizes up to a power of two and keeps all that it ever had; what is offloaded is most of a host's memory.
Blocks are therefore mapped and registered here, in whole pages.
"""

import math
import mmap
import weakref
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from baton.parallel.control_groups import room_in_groups
from baton.parallel.errors import HostMemoryError

GIB = 1 << 30


class HostMemory:
    """Host memory for the tensors of one device. Copies between both with `non_blocking` are asynchronous on a GPU.

    nbytes: bytes of all blocks, of those that wait to be used again too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Tensor] = []
        self._used: dict[int, Tensor] = {}  # by address
        self._registered: set[int] = set()
        # a mapping that is gone must not stay registered: another one may get its address
        weakref.finalize(self, _unregister, self._registered).atexit = False

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in (*self._free, *self._used.values()))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of arbitrary values: in the smallest free block that holds it, or else in a new one, in the place of free blocks
        that are too small.

        Raises:
            HostMemoryError: the host has too little memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        large = [block for block in self._free if block.nbytes >= nbytes]
        block = min(large, key=lambda one: one.nbytes, default=None)
        if block is None:
            self._drop_free()
            block = self._map(nbytes)
        else:
            self._free = [one for one in self._free if one is not block]
        self._used[block.data_ptr()] = block
        return block[:nbytes].view(dtype).view(*shape)

    def give_back(self, x: Tensor) -> None:
        """Let a tensor from `empty` be used again, by what is submitted to the device's streams after all that reads this one."""
        self._free.append(self._used.pop(x.data_ptr()))

    def _map(self, nbytes: int) -> Tensor:
        free = free_bytes()
        if nbytes > free:
            raise HostMemoryError(_refusal(nbytes, f"{free / GIB:,.1f} GiB are free"))
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostMemoryError(_refusal(nbytes, error.strerror or str(error))) from None
        block = torch.frombuffer(pages, dtype=torch.uint8)
        if self.device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), nbytes, 0)
            if int(status):
                raise HostMemoryError(_refusal(nbytes, f"it cannot be page-locked: {status}"))
            self._registered.add(block.data_ptr())
        return block

    def _drop_free(self) -> None:
        """Give all free blocks back to the system: all are too small for what is needed."""
        _unregister(self._registered, [block.data_ptr() for block in self._free])
        self._free = []


def free_bytes() -> int:
    """Bytes that this process can still get: what the machine has available, within the limits of its control groups."""
    free, room = psutil.virtual_memory().available, room_in_groups()
    return free if room is None else min(free, room)


def _unregister(registered: set[int], which: Sequence[int] | None = None) -> None:
    """Undo the page-locking of blocks by their addresses; None: of all."""
    addresses = [address for address in (registered if which is None else which) if address in registered]
    if addresses:
        torch.cuda.synchronize()  # copies may be under way
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
        registered.discard(address)


def _refusal(nbytes: int, why: str) -> str:
    return (
        f"no room in the host's memory for another {nbytes / GIB:,.1f} GiB of keys and values of earlier segments ({why}); set "
        f"training.offload_kv=false, or layout.context to spread a sequence over more ranks, or use nodes with more memory"
    )
