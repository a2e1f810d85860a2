"""What a rank waits for others is known, whoever makes the call, and counted once."""

import time

import torch
import torch.distributed as dist

LATE_S = 0.6


def late(mesh):
    """Rank 1 comes late to each kind of call; seconds waited, and seconds gone by."""
    from baton.parallel import waiting

    waiting.install()
    dist.barrier()
    found = {}
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "all_gather_object": lambda: dist.all_gather_object([None] * mesh.world_size, mesh.rank),
        "nothing": lambda: None,
    }.items():
        dist.barrier()
        waiting.seconds()
        began = time.perf_counter()
        if mesh.rank == 1:
            time.sleep(LATE_S)
        call()
        found[name] = waiting.seconds(), time.perf_counter() - began
    work = dist.all_reduce(torch.ones(3), async_op=True)
    found["asynchronous"] = waiting.seconds(), 1.0
    work.wait()
    return found


def test_the_rank_that_waits_is_the_one_that_is_early(pool):
    early, other = pool.run(late, data=2)
    for call in ("all_reduce", "all_gather_object"):
        waited, gone = early[call]
        assert LATE_S / 2 < waited <= gone, "nested calls are counted once"
        waited, gone = other[call]
        assert waited < LATE_S / 2 < gone
    for found in (early, other):
        assert found["nothing"][0] == 0
        assert found["asynchronous"][0] == 0, "it has not waited yet"
