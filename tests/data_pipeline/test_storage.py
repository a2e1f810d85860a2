"""A dataset is the same wherever it lies: folder, file:, http:, pipe:; and the webdataset library itself reads its tars."""

import functools
import http.server
import shutil
import threading
from itertools import islice

import numpy as np
import pytest
import webdataset

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.steps import StepPlan


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(text_folder, tmp_path):
    """(folder, its URL on a local server)."""
    folder = shutil.copytree(text_folder, tmp_path / "served")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def tokens(dataset, tokenizer):
    sizes = {"sequence_length": 60, "lanes": 4, "lanes_per_step": 4, "micro_batch_size": 2}
    plan = StepPlan.constant(**sizes, data_rank=0, data_size=1, start_step=0, prefetch=2)
    with BatchStream(dataset, tokenizer, plan, seed=3, unit_documents=20) as stream:
        return np.concatenate([batch.tokens for step in islice(stream, 12) for batch in step.micro_batches])


def test_folder_file_http_and_pipe_give_the_same_stream(dataset, served, tokenizer):
    folder, url = served
    expected = tokens(dataset, tokenizer)
    for place in (f"file:{folder}", url, f"pipe:cat {folder}", f"pipe:cat {folder}/{{}}"):
        opened = Dataset.open(place)
        assert opened.fingerprint == dataset.fingerprint
        np.testing.assert_array_equal(tokens(opened, tokenizer), expected)


def test_what_is_gone_or_stops_half_way_on_a_server_is_named(served, tokenizer):
    folder, url = served
    with pytest.raises(DataError, match="no dataset at"):
        Dataset.open(url + "/elsewhere")
    opened = Dataset.open(url)
    shard = opened.shards["train"][0]
    content = (folder / shard.name).read_bytes()
    (folder / shard.name).write_bytes(content[: len(content) // 2])
    last = shard.documents - 1
    with pytest.raises(DataError, match=rf"{shard.name}.*truncated"):
        opened.read(shard, last, 1)
    assert opened.read(shard, 0, 2)
    (folder / shard.name).unlink()
    with pytest.raises(
        DataError, match=f"cannot read document [0-9a-f]+ of {url}/{shard.name}: the server answers 404 File not found"
    ):
        opened.read(shard, 0, 1)
    (folder / shard.name.replace(".tar", ".index.npz")).unlink()
    with pytest.raises(DataError, match=r"index\.npz"):
        Dataset.open(url).index(shard)


def test_the_webdataset_library_reads_the_same_documents(text_folder, token_folder, dataset, tokenizer):
    texts = list(documents(dataset, "train"))
    for folder, read in ((text_folder, lambda s: s["txt"].decode()), (token_folder, lambda s: tokenizer.decode(s["tokens.npy"]))):
        urls = [str(path) for path in sorted(folder.glob("train-*.tar"))]
        samples = webdataset.WebDataset(urls, shardshuffle=False, handler=webdataset.reraise_exception)
        if folder == token_folder:
            samples = samples.decode()
        assert [read(sample) for sample in samples] == texts


@pytest.mark.parametrize("first", [0, 1, 7])
def test_any_run_of_samples_is_read_alone(dataset, first):
    shard = dataset.shards["train"][0]
    everything = [payload for _, _, payload in dataset.samples("train")][: shard.documents]
    assert dataset.read(shard, first, 3) == everything[first : first + 3]
