"""`verify` finds any flipped byte and any missing file and names them all; `inspect` shows what is there."""

import json
import os
import random
import shutil

import pytest

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.verify import inspect, verify


@pytest.fixture
def copy(text_folder, tmp_path):
    return shutil.copytree(text_folder, tmp_path / "dataset")


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


def test_whole_datasets_pass(text_folder, token_folder, capsys):
    for folder in (text_folder, token_folder):
        report = verify(folder)
        assert report.documents == 90
        assert "every checksum and count agrees" in str(report)
    assert "verifying" in capsys.readouterr().out  # not a terminal: progress as lines


def test_any_flipped_byte_is_found(copy):
    rng = random.Random(2)
    for path in sorted(copy.glob("*.tar")) + sorted(copy.glob("*.npz")):
        before = path.read_bytes()
        for at in rng.sample(range(len(before)), 6):
            flip(path, at)
            lines = []
            with pytest.raises(DataError, match="problem") as caught:
                verify(copy, report=lines.append)
            assert any(path.name in line for line in lines)
            assert "\n" not in str(caught.value)
            path.write_bytes(before)
    verify(copy)


def test_every_problem_is_reported(copy, quiet):
    shards = [shard.name for shard in Dataset.open(copy).shards["train"]]
    flip(copy / shards[0], 512)
    os.truncate(copy / shards[1], 900)
    (copy / shards[2]).unlink()
    (copy / shards[3].replace(".tar", ".index.npz")).unlink()
    manifest = json.loads((copy / "dataset.json").read_text())
    manifest["totals"]["train"]["documents"] += 1
    (copy / "dataset.json").write_text(json.dumps(manifest))
    lines = []
    with pytest.raises(DataError, match=r"problems, the first: .*train-000000.tar"):
        verify(copy, report=lines.append, progress=quiet)
    text = "\n".join(lines)
    for expected in (*shards[:4:1][:3], "train-000003.index.npz", "total documents of train", "crc32", "not a readable tar"):
        assert expected in text


@pytest.mark.parametrize("name", ["train-000001.tar", "validation-000000.tar", "train-000000.index.npz"])
def test_missing_and_truncated_files_are_refused_at_once(copy, name):
    path = copy / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(DataError, match=f"{name} is truncated"):
        Dataset.open(copy)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Dataset.open(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[]", "does not describe a dataset"),
        ('{"format": "baton-dataset", "version": 99}', "format 99, which another version of Baton wrote"),
        ('{"format": "baton-dataset", "version": 1}', "damaged"),
    ],
)
def test_a_damaged_description_is_refused(copy, content, message):
    (copy / "dataset.json").write_text(content)
    with pytest.raises(DataError, match=message):
        Dataset.open(copy)


def test_inspect_shows_totals_and_documents(text_folder, token_folder, tokenizer, dataset):
    report = inspect(text_folder, count=2, characters=20)
    assert report.summary["fingerprint"] == dataset.fingerprint
    assert len(report.documents) == 2
    assert "train:" in str(report)
    assert report.documents[0][0] in str(report)
    as_text = inspect(token_folder, count=2, characters=20, tokenizer=tokenizer.path)
    assert [d[1:] for d in as_text.documents] == [d[1:] for d in report.documents]
    first = inspect(token_folder, count=1).documents[0][1].split()[0]
    assert first.isdigit()
