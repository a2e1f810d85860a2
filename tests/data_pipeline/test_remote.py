"""Transfers that fail are begun again where they were, a few times; a cache is bounded and never gives half a file."""

import http.server
import threading
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from baton.data_pipeline import remote
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError, StorageError
from baton.data_pipeline.remote import Cache, HttpStream
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.steps import StepPlan


class Server:
    """A folder behind http. ranges: whether byte ranges are taken. faults: what happens to the next tars' answers, one after the
    other: a status, or how many bytes are sent before it hangs up."""

    def __init__(self, folder):
        self.ranges, self.faults, self.asked = True, [], []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                path = folder / self.path.lstrip("/")
                begin = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0]) if server.ranges else 0
                server.asked.append((path.name, begin))
                fault = server.faults.pop(0) if server.faults and path.suffix == ".tar" else None
                content = path.read_bytes() if path.exists() else b""
                status = 206 if begin else 200
                if not path.exists():
                    status = 404
                elif fault in (403, 429, 503):
                    status = fault
                elif begin >= len(content):
                    status = 416
                self.send_response(status)
                content = content[begin:] if status in (200, 206) else b""
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[:fault] if fault is not None and status in (200, 206) else content)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server(text_folder, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    server = Server(text_folder)
    yield server
    server.close()


def tokens(dataset, tokenizer, workers=0):
    shape = {"sequence_length": 60, "lanes": 4, "lanes_per_step": 4, "micro_batch_size": 4, "data_rank": 0, "data_size": 1}
    plan = StepPlan.constant(**shape, start_step=0, prefetch=2)
    with BatchStream(dataset, tokenizer, plan, seed=3, unit_documents=5, workers=workers) as stream:
        return np.concatenate([step.micro_batches[0].tokens for step in islice(stream, 8)])


@pytest.mark.parametrize("ranges", [True, False])
def test_transfers_that_fail_are_begun_again(dataset, server, tokenizer, ranges):
    server.ranges = ranges
    server.faults = [503, 700, None, 429, 0, None, 2000, None, 503, None]
    np.testing.assert_array_equal(tokens(Dataset.open(server.url), tokenizer), tokens(dataset, tokenizer))
    assert server.faults == []
    assert any(begin for _, begin in server.asked) is ranges


def test_a_transfer_that_always_fails_is_named_after_a_few_tries(server, dataset):
    opened, shard = Dataset.open(server.url), dataset.shards["train"][0]
    server.faults = [300] * 99
    where = rf"document [0-9a-f]+ of {server.url}/{shard.name}"
    with pytest.raises(DataError, match=rf"{where}: the server stopped half-way, after 300 of"):
        opened.read(shard, 0, 3)
    assert 99 - len(server.faults) == remote.TRIES
    server.faults = [403]
    with pytest.raises(DataError, match="the server answers 403"):
        opened.read(shard, 0, 3)
    assert server.faults == [], "asking again would not change the answer"


def test_a_server_that_is_away_is_named(server):
    url = server.url
    server.close()
    with pytest.raises(DataError, match=r"no dataset at .*the server cannot be reached"):
        Dataset.open(url)
    server.close = lambda: None


def test_any_place_of_a_file_behind_http_is_found(server, text_folder):
    path = next(text_folder.glob("train-*.tar"))
    content = path.read_bytes()
    for ranges in (True, False):
        server.ranges = ranges
        with HttpStream(f"{server.url}/{path.name}") as stream:
            assert stream.read(10) == content[:10]
            for begin in (5000, 10, len(content) - 3, len(content), len(content) + 9):
                stream.seek(begin)
                assert stream.read(7) == content[begin : begin + 7]
            stream.seek(0)
            assert stream.read() == content


def test_a_cache_is_bounded_and_spares_transfers(dataset, server, tokenizer, tmp_path):
    shards = dataset.shards["train"]
    largest = max(shard.tar_bytes for shard in shards)
    cache = Cache(tmp_path / "cache", 2 * largest)
    opened, expected = Dataset.open(server.url, cache=cache), tokens(dataset, tokenizer)
    server.faults = [700]
    np.testing.assert_array_equal(tokens(opened, tokenizer), expected)
    files = list((tmp_path / "cache").iterdir())
    assert files
    assert sum(path.stat().st_size for path in files) <= 2 * largest
    whole, asked = Dataset.open(server.url, cache=Cache(tmp_path / "large", 1 << 30)), len(server.asked)
    np.testing.assert_array_equal(tokens(whole, tokenizer), expected)
    np.testing.assert_array_equal(tokens(whole, tokenizer), expected)
    fetched = Counter(name for name, _ in server.asked[asked:] if name.endswith(".tar"))
    assert fetched
    assert max(fetched.values()) == 1, "what is here is not transferred again"
    np.testing.assert_array_equal(tokens(whole, tokenizer, workers=2), expected)


def test_a_cache_without_room_on_the_disk_is_named(dataset, server, small_disk):
    opened = Dataset.open(server.url, cache=Cache(small_disk / "cache", 1 << 30))
    (small_disk / "ballast").write_bytes(b"x" * ((2 << 20) - 8192))
    with pytest.raises(StorageError, match=f"No space left on device in the cache {small_disk / 'cache'}"):
        opened.read(dataset.shards["train"][0], 0, 3)
    assert list((small_disk / "cache").iterdir()) == []
