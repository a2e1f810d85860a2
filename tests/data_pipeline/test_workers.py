"""Rows that workers write to shared memory: equal to those without workers, blocks are reused only when they are free, and nothing
is left behind when any process is killed."""

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.long_form import alternating
from support.runs import DEADLINE_S

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.shards import token_payload
from baton.data_pipeline.steps import PhaseSpec, StepPlan

LANES, UNIT_DOCUMENTS = 12, 5
PLAN = StepPlan(
    lanes=LANES,
    phases=(PhaseSpec(0, 16, 12, 4), PhaseSpec(9, 61, 6, 2), PhaseSpec(20, 5, 12, 12)),
    data_rank=0,
    data_size=1,
    start_step=0,
    prefetch=2,
)


def open_stream(dataset, tokenizer, workers, plan=PLAN):
    return BatchStream(dataset, tokenizer, plan, seed=11, unit_documents=UNIT_DOCUMENTS, workers=workers)


def copied(step):
    """A step's batches in memory of their own."""
    return [(batch.tokens.copy(), batch.labels.copy(), batch.pos.copy(), batch.lanes) for batch in step.micro_batches]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for (*arrays, lanes), (*others, other_lanes) in zip(found, expected):
        assert lanes == other_lanes
        for array, other in zip(arrays, others, strict=True):
            assert array.dtype == other.dtype
            assert array.flags["C_CONTIGUOUS"]
            assert array.flags["WRITEABLE"]
            np.testing.assert_array_equal(array, other)


def shared(pid):
    """Blocks that a process has mapped or open, and how many other things it has so of /dev/shm."""
    links = [Path(f"/proc/{pid}/maps").read_text()]
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            links.append(os.readlink(descriptor))
    return tuple(sum(link.count(name) for link in links) for name in ("memfd:baton-rows", "/dev/shm/"))


@pytest.fixture
def tokens(token_folder):
    return Dataset.open(token_folder)


@pytest.fixture
def clean():
    """Nothing is left of a stream that is gone."""
    gc.collect()
    before = shared(os.getpid())
    yield
    gc.collect()
    assert shared(os.getpid()) == before


@pytest.mark.parametrize(("workers", "content"), alternating([1, 2, 3, 4], ["text", "tokens"]))
def test_rows_and_cursors_are_those_without_workers(content, workers, dataset, tokens, tokenizer, clean):
    data = dataset if content == "text" else tokens
    with open_stream(data, tokenizer, 0) as plain, open_stream(data, tokenizer, workers) as stream:
        for expected, found in islice(zip(plain, stream), 40):
            assert found.step == expected.step
            assert found.cursors == expected.cursors == stream.cursors
            assert_equal(copied(found), copied(expected))


def test_batches_that_are_kept_stay_what_they_were(tokens, tokenizer, clean):
    """Many more than there are blocks, whole, or only a slice of one: its memory is not used again while that is there."""
    with open_stream(tokens, tokenizer, 0) as plain:
        expected = [copied(step) for step in islice(plain, 60)]
    with open_stream(tokens, tokenizer, 2) as stream:
        kept = list(islice(stream, 30))
        part = kept[3].micro_batches[0].labels[1:2, 3:]
        del kept[3]
        kept += islice(stream, 30)
    for step in kept:
        assert_equal([(b.tokens, b.labels, b.pos, b.lanes) for b in step.micro_batches], expected[step.step])
    np.testing.assert_array_equal(part, expected[3][0][1][1:2, 3:])


def test_blocks_are_used_again_and_memory_is_flat(tokens, tokenizer, clean):
    plan = replace(PLAN, phases=(PhaseSpec(0, 2048, 12, 12),))
    places, pages = set(), []
    with open_stream(tokens, tokenizer, 2, plan) as stream:
        for step in islice(stream, 400):
            places.add(step.micro_batches[0].tokens.ctypes.data)
            if step.step in (50, 399):
                every = [psutil.Process(), *psutil.Process().children(recursive=True)]
                pages.append(sum(process.memory_info().shared for process in every))
    assert len(places) <= plan.prefetch + 7, "all are blocks, and there are no more"
    assert pages[1] - pages[0] < 1 << 20


def test_a_consumer_that_writes_into_a_batch_changes_nothing_else(tokens, tokenizer, clean):
    with open_stream(tokens, tokenizer, 0) as plain, open_stream(tokens, tokenizer, 3) as stream:
        for expected, found in islice(zip(plain, stream), 40):
            assert_equal(copied(found), copied(expected))
            for batch in found.micro_batches:
                batch.tokens[:], batch.labels[:], batch.pos[:] = -7, -8, -9


def workers_of(stream):
    """Processes of this stream; the forkserver is their parent."""
    return [worker.pid for worker in stream._steps._stop.__self__._workers]


def test_what_is_shared_has_no_name_that_could_be_left(tokens, tokenizer, clean):
    """Memory without a name is gone with the last process that has it, however they end."""
    blocks, named = shared(os.getpid())
    with open_stream(tokens, tokenizer, 2) as stream:
        kept = next(stream)
        assert [shared(worker)[1] for worker in workers_of(stream)] == [0, 0]
        assert all(shared(pid)[0] >= 1 for pid in workers_of(stream))
        assert shared(os.getpid()) == (blocks + 3, named), "mapped once, with its descriptor and the mapping's own"
        del kept


def test_a_killed_worker_is_missed_and_leaves_nothing(tokens, tokenizer, clean):
    plan = replace(PLAN, prefetch=1)
    with open_stream(tokens, tokenizer, 2, plan) as stream:
        kept = next(stream)
        before = copied(kept)
        os.kill(workers_of(stream)[1], signal.SIGKILL)
        with pytest.raises(DataError, match=r"data worker 1 ended by itself \(exit status -9; out of memory\?\)"):
            list(islice(stream, 5000))
        with pytest.raises(DataError, match="data worker 1 ended by itself"):  # and stays so
            next(stream)
    assert_equal(copied(kept), before)
    with pytest.raises(DataError, match="closed"):
        next(stream)


def test_what_interrupts_a_wait_for_workers_ends_the_stream(tokens, tokenizer, clean):
    """A signal's handler may raise while rows are waited for; what comes next is not silence."""

    def interrupt(*_):
        raise InterruptedError("enough")

    with open_stream(tokens, tokenizer, 1) as stream:
        next(stream)
        (worker,) = workers_of(stream)
        os.kill(worker, signal.SIGSTOP)
        handler = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(InterruptedError, match="enough"):
                list(islice(stream, 5000))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            os.kill(worker, signal.SIGCONT)
        with pytest.raises(InterruptedError, match="enough"):
            next(stream)


def test_a_stream_closed_while_its_rows_are_waited_for_says_so(tokens, tokenizer, clean):
    with open_stream(tokens, tokenizer, 1) as stream:
        next(stream)
        (worker,) = workers_of(stream)
        os.kill(worker, signal.SIGSTOP)
        closer = threading.Timer(0.3, lambda: (os.kill(worker, signal.SIGCONT), stream.close()))
        closer.start()
        with pytest.raises(DataError, match="closed"):
            for _ in stream:
                pass
        closer.join()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_ready_is_given_at_once(workers, tokens, tokenizer, clean):
    """`is_ready` becomes true for every step, also where shapes change, and for the error of a worker that is killed."""

    def wait_until_ready(stream):
        deadline = time.monotonic() + DEADLINE_S
        while not stream.is_ready():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    with open_stream(tokens, tokenizer, 0) as plain, open_stream(tokens, tokenizer, workers) as stream:
        for expected in islice(plain, 24):
            wait_until_ready(stream)
            assert_equal(copied(next(stream)), copied(expected))
        if workers:
            for worker in stream._steps._stop.__self__._workers:
                os.kill(worker.pid, signal.SIGKILL)
            with contextlib.suppress(DataError):
                for _ in range(20):  # those that were written before
                    wait_until_ready(stream)
                    next(stream)
            assert stream.is_ready()
            with pytest.raises(DataError, match="ended by itself"):
                next(stream)
    assert stream.is_ready()
    with pytest.raises(DataError, match="closed"):
        next(stream)


KILLED = """
import json, sys, time
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.tokenizer import load_tokenizer

if __name__ == "__main__":
    plan = StepPlan.constant(
        sequence_length=64, lanes=4, lanes_per_step=4, micro_batch_size=2, data_rank=0, data_size=1, start_step=0, prefetch=2
    )
    stream = BatchStream(Dataset.open(sys.argv[1]), load_tokenizer(sys.argv[2]), plan, seed=0, workers=2)
    kept = [next(stream) for _ in range(3)]
    print(json.dumps([worker.pid for worker in stream._steps._stop.__self__._workers]), flush=True)
    time.sleep(100)
"""


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_of_a_killed_process_end_and_leave_nothing(token_folder, tokenizer, tmp_path, clean):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, "-P", str(script), str(token_folder), str(tokenizer.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pids = json.loads(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives who listened to it"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_precedes_damage_is_given_first(workers, write_dataset, tokenizer, tmp_path):
    """A document that is no list of ids, in the middle of documents that go into rows together, costs none of those before."""
    contents = [(token_payload(np.arange(1, 8) + 10 * n, 1 << 16), 5, 7) for n in range(30)]
    folder = tmp_path / "sound"
    folder.mkdir()
    write_dataset(folder, contents, "tokens", tokenizer)
    plan = StepPlan.constant(
        sequence_length=8, lanes=1, lanes_per_step=1, micro_batch_size=1, data_rank=0, data_size=1, start_step=0, prefetch=1
    )

    def steps(place, count):
        with BatchStream(Dataset.open(place), tokenizer, plan, seed=2, unit_documents=30, workers=workers) as stream:
            for step in islice(stream, count):
                yield step.micro_batches[0].labels[0].tolist()

    order = list(steps(folder, 30))
    victim = (order[11][0] - 1) // 10
    contents[victim] = (b"no list of ids", 5, 7)
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    write_dataset(damaged, contents, "tokens", tokenizer)
    given = steps(damaged, 30)
    assert [next(given) for _ in range(11)] == order[:11]
    with pytest.raises(DataError, match=f"document train{victim:027d} of .* is no list of token ids"):
        next(given)
