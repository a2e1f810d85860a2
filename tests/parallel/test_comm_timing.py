"""The time that a rank waits for others is measured for all callers and counted once.

The ranks share a clock that stands still until rank 1, which is late, moves it on: no figure depends on the machine's speed.
"""

from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.runs import wait_until

LATE_S = 0.5


class Clock:
    """Seconds that one rank writes into a file and all ranks read. mark: a file that the next reading makes, once it has read."""

    def __init__(self, path):
        self.path, self.mark = path, None

    def __call__(self):
        seconds = float(self.path.read_text())
        if self.mark is not None:
            self.mark.touch()
            self.mark = None
        return seconds

    def advance(self, seconds):
        aside = self.path.with_suffix(".new")
        aside.write_text(str(self() + seconds))
        aside.replace(self.path)


def late(mesh, folder):
    """Rank 1 comes late to each kind of call; seconds waited, and seconds gone by."""
    from baton.parallel import comm_timing

    comm_timing.install()
    clock, found = Clock(folder / "clock"), {}
    if mesh.rank == 0:
        clock.path.write_text("0.0")
    dist.barrier()
    with patch.object(comm_timing, "time", SimpleNamespace(perf_counter=clock)):
        for name, call in {
            "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
            "all_gather_object": lambda: dist.all_gather_object([None] * mesh.world_size, mesh.rank),
            "nothing": lambda: None,
        }.items():
            dist.barrier()
            comm_timing.take_wait_seconds()
            began, inside = clock(), folder / f"{name}-inside"
            if mesh.rank == 0:
                clock.mark = inside
            else:
                if name != "nothing":
                    wait_until(inside.exists, "rank 0 to be in the call")
                clock.advance(LATE_S)
            call()
            clock.mark = None
            found[name] = comm_timing.take_wait_seconds(), clock() - began
        work = dist.all_reduce(torch.ones(3), async_op=True)
        found["asynchronous"] = comm_timing.take_wait_seconds(), 1.0
        work.wait()
    return found


def test_the_rank_that_waits_is_the_one_that_is_early(pool, tmp_path):
    early, other = pool.run(late, tmp_path, data=2)
    for call in ("all_reduce", "all_gather_object"):
        assert early[call] == (LATE_S, LATE_S), "nested calls are counted once"
        assert other[call] == (0.0, LATE_S)
    assert other["nothing"] == (0.0, LATE_S)
    for found in (early, other):
        assert found["nothing"][0] == 0
        assert found["asynchronous"][0] == 0, "it has not waited yet"


def reported(mesh):
    """What is reported of some calls of one rank."""
    from baton.parallel import comm_timing

    told = []
    comm_timing.install()
    comm_timing.set_wait_reporter(told.append)
    try:
        dist.all_reduce(torch.ones(3), group=mesh.tensor_group)
        dist.broadcast(torch.ones(3), 0)
        with comm_timing.reported_wait(comm_timing.describe_collective("all_reduce", mesh.tensor_group)):
            pass
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    finally:
        comm_timing.set_wait_reporter(lambda what: None)
    return told


def test_a_wait_is_reported_with_the_call_and_the_ranks_that_take_part(pool):
    for rank, told in enumerate(pool.run(reported, tensor=2, data=2)):
        own = "0, 1" if rank < 2 else "2, 3"
        expected = [f"all_reduce over ranks {own}", "broadcast over ranks 0, 1, 2, 3", f"all_reduce over ranks {own}"]
        assert told == [text for what in expected for text in (what, "")]
