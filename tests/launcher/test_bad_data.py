"""Bad data is reported before the start if possible, else by the rank that reads it, with one line and exit status 2."""

import functools
import http.server
import json
import threading
from dataclasses import asdict

import numpy as np
import pytest
import yaml
from support.runs import flip

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.files import sha256_file
from baton.data_pipeline.shards import UNITS, Index, UnitIndex, index_name
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.launcher.cli import main


@pytest.fixture
def refused(tmp_path, capsys):
    """A function that runs `baton train` in this process, checks that nothing is written, and returns the one-line error."""

    def run(path, *words):
        assert main(["train", str(path), f"directory={tmp_path / 'run'}", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), (tmp_path / "run").exists()) == ("", 1, False)
        return err

    return run


@pytest.fixture
def ended(inputs, launch, tmp_path):
    """A function that runs `baton train` on one rank, which ends with an error, and returns the command's one line."""

    def run(place, *words):
        where = (f"data.path={place}", f"data.tokenizer={inputs.tokenizer}", "layout.data=1", "data.workers=1")
        found = launch(tmp_path / "run", str(inputs.run), *where, *words, where=tmp_path).end()
        assert found.status == 2, found.err
        assert found.err.startswith("baton: ")
        assert found.err.count("\n") == 1, found.err
        return found.err

    return run


@pytest.fixture
def served(inputs, copy_of):
    """A copy of the corpus on an HTTP server: its folder, its URL, and the set of file names whose responses are cut short."""
    folder, cut = copy_of(inputs.shards), set()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def copyfile(self, source, outputfile):
            content = source.read()
            half = self.path.lstrip("/") in cut
            outputfile.write(content[: len(content) // 2] if half else content)
            self.close_connection = True

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}", cut
    server.shutdown()
    server.server_close()


def change_manifest(folder, change):
    manifest = json.loads((folder / "dataset.json").read_text())
    change(manifest)
    (folder / "dataset.json").write_text(json.dumps(manifest))


def rewrite_index(folder, number, change):
    """Changes a shard's index, and dataset.json accordingly."""
    shard = Dataset.open(folder).shards["train"][number]
    place = folder / index_name(shard.name)
    columns = asdict(Index.from_bytes(place.read_bytes(), ""))
    change(columns)
    Index(**columns).save(place)

    def agree(manifest):
        entry = next(entry for entry in manifest["shards"] if entry["name"] == shard.name)
        entry |= {"index_bytes": place.stat().st_size, "index_sha256": sha256_file(place)}
        manifest.pop("units", None)  # it would be refused before

    change_manifest(folder, agree)
    return shard


# ------------------------------------------------------------------------------------------------------------- before the start


def test_weights_that_do_not_sum(refused, inputs, tmp_path):
    values = inputs.settings()
    values["data"] = {
        "sources": {"web": str(inputs.shards), "books": str(inputs.elsewhere)},
        "mixture": [{"weights": {"web": 0.7, "books": 0.5}}],
        "tokenizer": str(inputs.tokenizer),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    text = refused(tmp_path / "run.yaml")
    assert "data.mixture from step 0: the weights sum to 1.2, not 1; they are shares, such as books: 0.4167, web: 0.5833" in text


@pytest.mark.parametrize("content", ["text", "tokens"])
def test_a_corpus_smaller_than_one_batch(refused, inputs, tmp_path, content):
    """The limit is exact, although the number of tokens of a text is not stored."""
    folder, model = (inputs.shards, inputs.tokenizer) if content == "text" else (inputs.tokens, inputs.other)
    tokenizer = load_tokenizer(model)
    tokens = sum(1 + len(tokenizer.encode(text)) for text in documents(Dataset.open(folder), "train", tokenizer))
    assert tokens < sum(shard.text_bytes for shard in Dataset.open(folder).shards["train"])
    words = (f"data.path={folder}", f"data.tokenizer={model}", "layout.data=1", "training.sequence_length=1")
    text = refused(inputs.run, *words, f"training.global_batch_tokens={tokens + 1}")
    assert f"{folder} have {tokens:,} tokens, fewer than one batch (training.global_batch_tokens={tokens + 1:,}); prepare" in text
    # one token less, and what is refused is the next thing that is wrong
    (tmp_path / "run").touch()
    assert main(["train", str(inputs.run), *words, f"training.global_batch_tokens={tokens}", f"directory={tmp_path / 'run'}"]) == 2


def test_a_url_that_answers_404(refused, inputs, served):
    _, url, _ = served
    text = refused(inputs.run, f"data.path={url}/elsewhere")
    assert f"no dataset at {url}/elsewhere (dataset.json: the server answers 404 File not found); prepare one, or correct" in text


def test_a_server_that_is_not_there(refused, inputs):
    text = refused(inputs.run, "data.path=http://127.0.0.1:9/shards")
    assert "no dataset at http://127.0.0.1:9/shards (dataset.json: the server cannot be reached" in text


def test_a_description_that_stops_half_way(refused, inputs, served):
    _, url, cut = served
    cut.add("dataset.json")
    assert f"no dataset at {url} (dataset.json: the server stopped half-way, after " in refused(inputs.run, f"data.path={url}")


# ---------------------------------------------------------------------------------------------------------------- while it reads


def test_an_index_and_a_shard_that_disagree(ended, inputs, copy_of):
    folder = copy_of(inputs.shards)
    for number in range(len(Dataset.open(folder).shards["train"])):
        rewrite_index(folder, number, lambda columns: columns.update(crc32=columns["crc32"] + np.uint32(1)))
    text = ended(folder)
    assert f"of {folder}/train-" in text
    assert "is damaged (not what its index says); restore it from a copy, or prepare the dataset again" in text


def test_an_index_that_is_not_the_datasets(ended, inputs, copy_of):
    folder = copy_of(inputs.shards)
    for path in folder.glob("train-*.index.npz"):
        flip(path)
    text = ended(folder)
    assert "index.npz is damaged (" in text


def test_duplicate_document_ids(ended, inputs, copy_of):
    folder = copy_of(inputs.shards)

    def same(columns):
        columns["ids"][-1] = columns["ids"][0]

    for number in range(len(Dataset.open(folder).shards["train"])):
        rewrite_index(folder, number, same)
    assert "has 1 document ids twice; prepare the dataset again" in ended(folder)


def test_duplicate_document_ids_of_two_shards(inputs, copy_of, capsys):
    """No rank looks at all indexes at once; `baton data verify` does."""
    folder = copy_of(inputs.shards)
    shards = Dataset.open(folder).shards["train"]
    theirs = Index.from_bytes((folder / index_name(shards[0].name)).read_bytes(), "").ids[0]
    rewrite_index(folder, 1, lambda columns: columns["ids"].__setitem__(0, theirs))
    assert main(["data", "verify", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert f"{folder}: 1 document ids occur more than once; prepare the dataset again" in out
    assert err.count("\n") == 1


def test_units_that_are_not_the_datasets(ended, inputs, copy_of):
    """With the default units, which alone are read from their file."""
    folder = copy_of(inputs.shards)
    shards = Dataset.open(folder).shards["train"]
    table = UnitIndex.of(64, 32 << 20, [(shard.name, shard.index_sha256, np.arange(0, shard.documents, 3)) for shard in shards])
    (folder / UNITS).write_bytes(table.to_bytes())
    entry = {"bytes": (folder / UNITS).stat().st_size, "sha256": sha256_file(folder / UNITS)}
    change_manifest(folder, lambda manifest: manifest.update(units=entry))
    assert f"{folder / UNITS} disagrees with the index of train-" in ended(folder, "data.unit_documents=64")


def test_a_shard_that_answers_404(ended, served):
    folder, url, _ = served
    for path in folder.glob("train-*.tar"):
        path.unlink()
    text = ended(url)
    assert f"of {url}/train-" in text
    assert "the server answers 404 File not found; check that it can be reached, or restore it" in text


def test_a_shard_that_stops_half_way(ended, served):
    folder, url, cut = served
    cut.update(path.name for path in folder.glob("train-*.tar"))
    text = ended(url)
    assert f"of {url}/train-" in text
    assert "the server stopped half-way, after " in text
