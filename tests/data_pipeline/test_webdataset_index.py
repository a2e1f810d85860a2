"""Shards by the webdataset library's own writer are read where they lie, as that library reads them."""

import json
import shutil

import numpy as np
import pytest
import webdataset

from baton.data_pipeline.dataset import LONG_BYTES, Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.shards import tokens_of
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.verify import verify
from baton.data_pipeline.webdataset_index import index_shards
from baton.launcher.cli import main


@pytest.fixture
def written(tmp_path, texts, tokenizer):
    """A folder for each kind of member, of three shards; the keys of a shard are its own, and a picture lies in each sample."""

    def write(member: str, contents: list) -> None:
        (tmp_path / member).mkdir()
        for shard, start in enumerate(range(0, len(contents), 31)):
            with webdataset.TarWriter(str(tmp_path / member / f"part-{shard}.tar")) as writer:
                for number, content in enumerate(contents[start : start + 31]):
                    key = f"a-folder/sample-with-a-name-of-fifty-bytes-{number:07d}"
                    writer.write({"__key__": key, "jpg": b"\xff\xd8\xff picture", member: content, "cls": number})

    write("txt", [*texts, "long " * (LONG_BYTES // 4)])
    write("json", [{"text": text, "n": number} for number, text in enumerate(texts)])
    write("npy", [tokenizer.encode(text).astype(np.uint16) for text in texts])
    return tmp_path


def stream(folder, tokenizer, **state):
    """The first steps of a run's data, and its cursors."""
    plan = StepPlan.constant(
        sequence_length=64, lanes=4, lanes_per_step=2, micro_batch_size=2, data_rank=0, data_size=1, prefetch=1, **state.pop("plan")
    )
    return BatchStream(Dataset.open(folder), tokenizer, plan, seed=3, unit_documents=8, **state)


@pytest.mark.parametrize("member", ["txt", "json", "npy"])
def test_documents_are_those_that_webdataset_reads(written, tokenizer, quiet, member):
    folder = written / member
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    arguments = {"tokenizer": tokenizer.path} if member == "npy" else {}
    report = index_shards(folder, validation_shards="part-2*", workers=1, progress=quiet, **arguments)
    assert "rejected: none" in str(report)
    assert {name: (folder / name).read_bytes() for name in before} == before
    verify(folder, progress=quiet)
    dataset = Dataset.open(folder)
    for split, shards in (("train", [0, 1]), ("validation", [2])):
        urls = [str(folder / f"part-{shard}.tar") for shard in shards]
        theirs = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode())
        if member == "npy":
            ours = [tokens_of(payload).tolist() for _, _, payload in dataset.samples(split)]
            assert ours == [sample["npy"].tolist() for sample in theirs]
        else:
            assert list(documents(dataset, split)) == [
                sample["txt"] if member == "txt" else sample["json"]["text"] for sample in theirs
            ]
    texts = list(documents(dataset, "train", tokenizer))
    assert dataset.totals["train"]["text_bytes"] == sum(len(text.encode()) for text in texts)


def test_a_stream_over_them_resumes_inside_documents(written, tokenizer, quiet):
    for member in ("txt", "json", "npy"):
        index_shards(written / member, workers=1, progress=quiet, **({"tokenizer": tokenizer.path} if member == "npy" else {}))
    shutil.rmtree(written / "txt")  # it has one document more
    found = {}
    for member in ("json", "npy"):
        with stream(written / member, tokenizer, plan={"start_step": 0}) as whole:
            steps = [next(whole) for _ in range(12)]
        found[member] = [step.micro_batches[0].tokens for step in steps]
        with stream(written / member, tokenizer, plan={"start_step": 7}, cursors=steps[6].cursors) as resumed:
            again = [next(resumed).micro_batches[0].tokens for _ in range(5)]
        assert any(cursor.offset for cursor in steps[6].cursors.values())
        np.testing.assert_array_equal(again, found[member][7:])
    np.testing.assert_array_equal(found["json"], found["npy"])


def test_samples_that_are_no_documents_are_left_out_and_listed(tmp_path, quiet):
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        for number, content in enumerate([b"one", b" \n", b"\xff\xfe", b"two"]):
            writer.write({"__key__": f"s{number}", "txt": content})
    report = index_shards(tmp_path, workers=1, progress=quiet)
    assert report.rejected == {"empty": 1, "invalid utf-8": 1}
    assert len((tmp_path / "rejected.jsonl").read_text().splitlines()) == 2
    verify(tmp_path, progress=quiet)
    assert list(documents(Dataset.open(tmp_path), "train")) == ["one", "two"]


def test_what_cannot_be_indexed_is_refused_in_a_line_and_leaves_nothing(tmp_path, written, tokenizer, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(written / "txt", damaged)
    (damaged / "part-1.tar").write_bytes((damaged / "part-1.tar").read_bytes()[:20_000])
    for name, array in (
        ("wide", np.array([1, 2, 3])),
        ("foreign", np.array([1, 420], np.uint16)),
        ("square", np.ones((2, 2), np.uint16)),
        ("ended", np.array([5, tokenizer.eod_id], np.uint16)),
    ):
        (tmp_path / name).mkdir()
        with webdataset.TarWriter(str(tmp_path / name / "a.tar")) as writer:
            writer.write({"__key__": "s", "npy": array})
    (tmp_path / "pictures").mkdir()
    with webdataset.TarWriter(str(tmp_path / "pictures" / "a.tar")) as writer:
        writer.write({"__key__": "s", "jpg": b"picture"})
    (tmp_path / "empty").mkdir()
    before = sorted(path for path in tmp_path.rglob("*"))
    ids = ["--tokenizer", tokenizer.path]
    for name, words, message in (
        ("damaged", [], "it is no sound tar"),
        ("wide", ids, "no uint16 or uint32 ids"),
        ("foreign", ids, "has the id 420"),
        ("square", ids, "no uint16 or uint32 ids"),
        ("ended", ids, "ends with the EOD token"),
        ("pictures", [], "has no .txt, .json or .npy but .jpg"),
        ("empty", [], "has no .tar"),
        ("npy", [], "need the tokenizer that made them"),
        ("txt", ids, "leave out --tokenizer"),
        ("json", ["--text-field", "body"], "no document for training"),
        ("txt", ["--validation-shards", "*.tar"], "no document for training"),
    ):
        capsys.readouterr()
        assert main(["data", "index", str(tmp_path / name), "--workers", "1", *words]) == 2, name
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert sorted(path for path in tmp_path.rglob("*")) == before
    with pytest.raises(DataError, match="make one of its tars with `baton data index`"):
        Dataset.open(written / "txt")


def test_a_tar_that_changes_afterwards_is_named(written, quiet):
    folder = written / "json"
    index_shards(folder, workers=1, progress=quiet)
    with pytest.raises(DataError, match="is a dataset already"):
        index_shards(folder, workers=1, progress=quiet)
    content = (folder / "part-0.tar").read_bytes()
    (folder / "part-0.tar").write_bytes(content.replace(json.dumps({"n": 0})[1:5].encode(), b'"m":', 1))
    with pytest.raises(DataError, match="is damaged"):
        list(documents(Dataset.open(folder), "train"))
