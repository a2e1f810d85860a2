"""Long documents from places: memory that does not grow with them, few transfers, and streams that break off or stay open."""

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import psutil
import pytest
from support.long_form import some

from baton.data_pipeline import dataset as module
from baton.data_pipeline import remote
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.shards import token_payload
from baton.data_pipeline.steps import StepPlan

PROGRAM = """
import gc, json, sys, tracemalloc
from pathlib import Path
import psutil, webdataset.gopen
from baton.data_pipeline import remote
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.tokenizer import load_tokenizer

tokenizer = load_tokenizer(sys.argv[1])

def read(folder, sizes=dict(lanes=1, lanes_per_step=1, micro_batch_size=1, data_rank=0, data_size=1, start_step=0, prefetch=1)):
    "Tokens of the one document, and how much memory grew, in all and in what Python and numpy allocate."
    gc.collect()
    resident = peak = psutil.Process().memory_info().rss
    tracemalloc.start()
    with BatchStream(Dataset.open(folder), tokenizer, StepPlan.constant(sequence_length=4096, **sizes), seed=0) as stream:
        tokens = 0
        for step in stream:
            tokens += 4096
            peak = max(peak, psutil.Process().memory_info().rss)
            if stream.cursors[0].unit:
                break
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tokens, peak - resident, traced

read(sys.argv[2])  # everything is loaded
print(json.dumps([read(folder) for folder in sys.argv[3:]]))
"""


@pytest.mark.parametrize(
    ("content", "powers"), some([("tokens", (20, 22)), ("text", (19, 21)), ("text", (20, 22))], [("tokens", (20, 22))])
)
def test_memory_does_not_grow_with_the_document(content, powers, write_dataset, tokenizer, texts, tmp_path):
    """A document of 2^16 tokens (to load everything), then one of so many and one of four times as many, at a context of 4096."""
    folders = []
    line = "".join(texts[4:]).replace("\n\n", "\n").encode()
    per_byte = len(tokenizer.encode_utf8(line)) / len(line)
    for power in (16, *powers):
        count = 1 << power
        if content == "tokens":
            ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, count)
            contents = [(token_payload(ids, 1 << 20), 4 * count, count)]
        else:
            text = line * round(count / per_byte / len(line))
            contents = [(text, len(text), -1)]
        folders.append(str(write_dataset(tmp_path / str(power), contents, content, tokenizer)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, tokenizer.path, *folders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (small_tokens, *small), (tokens, *large) = json.loads(done.stdout)
    print(content, tokens, "tokens; bytes resident, traced:", small, large)
    assert tokens > 3.9 * small_tokens > 3.9 * 0.98 * 2 ** powers[0]
    assert os.path.getsize(f"{folders[-1]}/train-000000.tar") > 6e6
    for resident, traced in (small, large):
        assert resident < 2.5e6
        assert traced < 2.5e6
    assert large[1] - small[1] < 2e5


@pytest.fixture
def served(write_dataset, tokenizer, make_text, tmp_path, monkeypatch):
    """(folder, URL, log, limits): a dataset of three documents, the middle one long, on a server that logs what it is asked for and
    sends at most limits[0] bytes of a shard, for as long as there are any limits."""
    monkeypatch.setattr(module, "LONG_BYTES", 50_000)
    monkeypatch.setattr(module, "CHUNK_BYTES", 5_000)
    ids = np.random.default_rng(1).integers(0, tokenizer.vocab_size, 200_000)
    contents = [(token_payload(part, tokenizer.vocab_size), 10**6, len(part)) for part in (ids[:500], ids, ids[-300:])]
    folder = write_dataset(tmp_path, contents, "tokens", tokenizer)
    log, limits = [], []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def copyfile(self, source, outputfile):
            log.append(self.path)
            if not self.path.endswith(".tar") or not limits:
                return super().copyfile(source, outputfile)
            outputfile.write(source.read(limits.pop(0)))  # and no more, though the header promised the whole file

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}", log, limits
    server.shutdown()
    thread.join()
    server.server_close()


def open_stream(place, tokenizer):
    sizes = {"sequence_length": 3000, "lanes": 1, "lanes_per_step": 1, "micro_batch_size": 1, "data_rank": 0, "data_size": 1}
    plan = StepPlan.constant(**sizes, start_step=0, prefetch=1)
    return BatchStream(Dataset.open(place), tokenizer, plan, seed=1)


def epoch(place, tokenizer):
    with open_stream(place, tokenizer) as stream:
        return np.concatenate([step.micro_batches[0].labels for step in islice(stream, 60)])


def test_a_server_sends_a_long_document_twice_and_the_rest_once(served, tokenizer):
    folder, url, log, _ = served
    expected = epoch(folder, tokenizer)
    np.testing.assert_array_equal(epoch(f"pipe:cat {folder}/{{}}", tokenizer), expected)
    np.testing.assert_array_equal(epoch(url, tokenizer), expected)
    assert sum(path.endswith(".tar") for path in log) <= 3, "not again for each of its 81 pieces"


def test_a_transfer_that_breaks_off_goes_on_where_it_was(served, tokenizer):
    folder, url, log, limits = served
    whole = 10**9
    limits += [whole, whole, 90_000, 250_000]  # the unit, the check, and then the pieces
    np.testing.assert_array_equal(epoch(url, tokenizer), epoch(folder, tokenizer))
    assert not limits
    assert sum(path.endswith(".tar") for path in log) == 5


def test_a_server_that_gives_nothing_more_is_named(served, tokenizer, monkeypatch):
    _, url, _, limits = served
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    limits += [10**9, 10**9, 90_000, *[600] * 20]
    with (
        open_stream(url, tokenizer) as stream,
        pytest.raises(DataError, match=r"document train0+1 of .*stopped half-way") as caught,
    ):
        list(islice(stream, 60))
    assert "\n" not in str(caught.value)
    assert len(limits) == 20 - (remote.TRIES - 1)


def test_a_closed_stream_leaves_no_file_and_no_process(served, tokenizer):
    folder, url, _, _ = served
    process = psutil.Process()

    def held():
        files = sum(file.path.endswith(".tar") for file in process.open_files())
        port = int(url.rpartition(":")[2])
        files += sum(bool(link.raddr) and link.raddr.port == port for link in process.net_connections())
        return files + sum(child.name() in ("curl", "cat", "sh") for child in process.children(recursive=True))

    assert held() == 0
    for place in (folder, url, f"pipe:cat {folder}/{{}}"):
        with open_stream(place, tokenizer) as stream:
            while stream.cursors[0].offset < 10_000:  # in the middle of the long one
                next(stream)
            assert 1 <= held() <= 2  # sh, and the cat it started
        assert held() == 0
