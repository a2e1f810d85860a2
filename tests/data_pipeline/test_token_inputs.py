"""Token ids that other projects' writers have written are read as those projects' readers read them, or refused before a word is
written."""

import io
import itertools
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import webdataset
from support.long_form import alternating

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.shards import tokens_of
from baton.data_pipeline.verify import verify
from baton.launcher.cli import main


def indexed_dataset():
    """Megatron's module, imported when a test needs it: the import takes seconds, and every process collects this file."""
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


@pytest.fixture(scope="module")
def ids(tokenizer, texts) -> list[list[int]]:
    return [tokenizer.encode(text).tolist() for text in texts]


@pytest.fixture
def take(tokenizer, tmp_path, quiet):
    """(input, arguments of prepare) -> the ids of every document of the dataset, which verify has found whole."""

    def run(*inputs: Path, workers=1, shard_bytes=2000, **arguments):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        settings = {"workers": workers, "progress": quiet, "shard_bytes": shard_bytes, "validation_fraction": 0.0, "ids": True}
        prepare(inputs, out, tokenizer=tokenizer.path, **{**settings, **arguments})
        verify(out, progress=quiet)
        dataset = Dataset.open(out)
        assert "validation" not in dataset.splits
        return [tokens_of(payload).tolist() for _, _, payload in dataset.samples("train")]

    return run


@pytest.fixture(scope="module")
def megatron(ids, tokenizer, tmp_path_factory) -> Path:
    """A .bin with its .idx, by Megatron's own writer: documents of one or two sequences, the EOD token behind each."""
    path = tmp_path_factory.mktemp("megatron") / "corpus.bin"
    builder = indexed_dataset().IndexedDatasetBuilder(str(path), dtype=np.uint16)
    for number, document in enumerate(ids):
        whole = [*document, tokenizer.eod_id]
        half = len(whole) // 2 if number % 3 == 0 else len(whole)
        builder.add_document(torch.tensor(whole), [half, len(whole) - half] if half < len(whole) else [half])
    builder.finalize(str(path.with_suffix(".idx")))
    return path


def test_megatrons_documents_are_those_of_its_reader(megatron, ids, take, tokenizer):
    reader = indexed_dataset().IndexedDataset(str(megatron.with_suffix("")))
    bounds = reader.document_indices
    theirs = [np.concatenate([reader[i] for i in range(a, b)]).tolist() for a, b in itertools.pairwise(bounds)]
    assert theirs == [[*document, tokenizer.eod_id] for document in ids]
    assert take(megatron) == ids
    assert take(megatron.parent, shard_bytes=10**9) == ids


@pytest.mark.parametrize(("suffix", "dtype"), alternating(["bin", "npy"], ["uint16", "uint32"]))
def test_flat_arrays_are_cut_at_the_separator_wherever_pieces_begin(ids, take, tokenizer, tmp_path, suffix, dtype):
    flat = np.array([i for document in ids for i in [*document, tokenizer.eod_id]], dtype)
    path = tmp_path / f"flat.{suffix}"
    flat.tofile(path) if suffix == "bin" else np.save(path, flat)
    assert take(path, ids_dtype=dtype, shard_bytes=700) == ids
    front = tmp_path / f"front.{suffix}"  # the separator before each document, not behind it
    front_ids = np.roll(flat, 1)
    front_ids.tofile(front) if suffix == "bin" else np.save(front, front_ids)
    assert take(front, ids_dtype=dtype) == ids
    other = np.where(flat == tokenizer.eod_id, 7, flat)
    other.tofile(path) if suffix == "bin" else np.save(path, other)
    cut = [document for part in take(path, ids_dtype=dtype, separator_id=7) for document in part]
    assert cut == [i for document in ids for i in document if i != 7]


def test_lists_in_tables_are_those_of_their_libraries(ids, take, tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": ids, "wide": [[*document, tokenizer.eod_id] for document in ids]}
    table = pyarrow.table(
        columns, pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int32()), "wide": pyarrow.large_list(pyarrow.int64())})
    )
    pyarrow.parquet.write_table(table, tmp_path / "ids.parquet", row_group_size=13)
    with pyarrow.ipc.new_file(tmp_path / "ids.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    for name in ("ids.parquet", "ids.arrow"):
        assert take(tmp_path / name) == ids
        assert take(tmp_path / name, ids_field="wide") == ids
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved", num_shards=3)
    theirs = datasets.load_from_disk(tmp_path / "saved")
    shutil.copy(tmp_path / "saved" / "data-00000-of-00003.arrow", tmp_path / "saved" / "cache-0.arrow")
    assert take(tmp_path / "saved") == theirs["input_ids"] == ids


def test_a_saved_dataset_of_text_is_read_without_its_caches(texts, tmp_path, quiet):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": texts, "n": list(range(len(texts)))})
    datasets.DatasetDict({"train": made.shuffle(seed=1), "test": made.select(range(4))}).save_to_disk(tmp_path / "saved")
    theirs = datasets.load_from_disk(tmp_path / "saved")
    made.save_to_disk(tmp_path / "cached")
    shutil.copy(next((tmp_path / "cached").glob("data-*.arrow")), tmp_path / "saved" / "train" / "cache-1.arrow")
    for name in ("train", "test"):
        prepare([tmp_path / "saved" / name], tmp_path / name, validation_fraction=0.0, workers=1, progress=quiet)
        assert list(documents(Dataset.open(tmp_path / name), "train")) == theirs[name]["text"]
    for pattern in ("train", "train/*"):
        prepare([tmp_path / "saved"], tmp_path / "one", exclude=[pattern], validation_fraction=0.0, workers=1, progress=quiet)
        assert list(documents(Dataset.open(tmp_path / "one"), "train")) == theirs["test"]["text"]
        shutil.rmtree(tmp_path / "one")
    next((tmp_path / "saved" / "train").glob("data-*.arrow")).unlink()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"lacks data-.*restore it"):
        prepare([tmp_path / "saved" / "train"], tmp_path / "out", workers=1, progress=quiet)
    for above in (tmp_path / "saved", tmp_path):
        with pytest.raises(
            DataError, match=r"saved has the splits train, test; name the folders of those to take, such as .*saved/train"
        ):
            prepare([above], tmp_path / "out", workers=1, progress=quiet)
    (tmp_path / "saved" / "test" / "state.json").write_text('{"_data_files": [')
    with pytest.raises(DataError, match=r"state.json does not say which files the saved dataset has; restore it"):
        prepare([tmp_path / "saved" / "test"], tmp_path / "out", workers=1, progress=quiet)
    assert sorted(tmp_path.iterdir()) == before


def test_npy_members_of_webdatasets_own_writer(ids, take, tmp_path):
    with webdataset.TarWriter(str(tmp_path / "shard.tar")) as writer:
        for number, document in enumerate(ids):
            writer.write({"__key__": f"sample{number:05d}", "npy": np.array(document, np.uint16), "json": {"n": number}})
    theirs = webdataset.WebDataset(str(tmp_path / "shard.tar"), shardshuffle=False, empty_check=False).decode()
    assert take(tmp_path / "shard.tar") == [sample["npy"].tolist() for sample in theirs] == ids


def test_text_bytes_and_held_out_documents_are_those_of_the_text(megatron, corpus, tokenizer, tmp_path, quiet):
    settings = {"tokenizer": tokenizer.path, "validation_fraction": 0.3, "workers": 1, "progress": quiet}
    prepare([corpus], tmp_path / "text", **settings)
    prepare([megatron], tmp_path / "ids", ids=True, **settings)
    text, ids = (Dataset.open(tmp_path / name) for name in ("text", "ids"))
    assert text.totals["validation"] == ids.totals["validation"]
    assert text.totals["train"] == ids.totals["train"]
    for split in ("train", "validation"):
        assert sorted(documents(text, split, tokenizer)) == sorted(documents(ids, split, tokenizer))


def damaged_megatron(folder: Path, what: str) -> Path:
    path, index = folder / "corpus.bin", folder / "corpus.idx"
    content = bytearray(index.read_bytes())
    if what == "a shorter bin":
        path.write_bytes(path.read_bytes()[:-2])
    elif what == "an idx of another corpus":
        builder = indexed_dataset().IndexedDatasetBuilder(str(folder / "other.bin"), dtype=np.uint16)
        builder.add_document(torch.tensor([1, 2, 3]), [3])
        builder.finalize(str(index))
    elif what == "a shorter idx":
        index.write_bytes(content[:-8])
    elif what == "another type":
        content[17] = 4  # int32
        index.write_bytes(content)
    elif what == "floats":
        content[17] = 6
        index.write_bytes(content)
    elif what == "documents of one of two merged parts":
        # of such files tell NVIDIA/Megatron-LM#81 and NVIDIA-NeMo/Speech#9821
        content[-8:] = (int.from_bytes(content[-8:], "little") - 1).to_bytes(8, "little")
        index.write_bytes(content)
    elif what == "no idx":
        index.write_bytes(b"TNTIDX\x00\x00" + content[8:])
    return path


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a shorter bin", "does not match it: the index has .* bytes of uint16 ids"),
        ("an idx of another corpus", "does not match it: the index has 6 bytes"),
        ("a shorter idx", "cut off or damaged"),
        ("another type", "do not lie behind each other"),
        ("floats", "type code 6; version 1 with integer ids"),
        ("documents of one of two merged parts", "has documents that do not make up its [0-9]+ sequences"),
        ("no idx", "is no Megatron index"),
    ],
)
def test_an_index_that_does_not_match_is_refused_before_anything_is_written(megatron, take, tmp_path, what, message):
    shutil.copytree(megatron.parent, tmp_path / "in")
    with pytest.raises(DataError, match=message):
        take(damaged_megatron(tmp_path / "in", what))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_refusal_is_one_line_and_status_2(megatron, tokenizer, tmp_path, capsys):
    shutil.copytree(megatron.parent, tmp_path / "in")
    path = damaged_megatron(tmp_path / "in", "a shorter bin")
    words = ["data", "prepare", str(path), "--ids", "--tokenizer", tokenizer.path, "--out", str(tmp_path / "out")]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: its index corpus.idx does not match it" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "--ids-dtype", "uint32"], "--ids-dtype has no effect without --ids; give --ids, or leave it out"),
        (["prepare", "--ids-field", "wide"], "--ids-field has no effect without --ids; "),
        (["prepare", "--separator-id", "0"], "--separator-id has no effect without --ids; "),
        (["prepare", "--eod-token", "</s>"], "--eod-token has no effect without --tokenizer; "),
        (["prepare", "--ids", "--text-field", "wide"], "--text-field has no effect with --ids; leave one of them out"),
        (["index", "--eod-token", "</s>"], "--eod-token has no effect without --tokenizer; "),
    ],
)
def test_an_option_without_effect_is_refused(words, message, tmp_path, capsys):
    command, *options = words
    (tmp_path / "in").mkdir()
    out = ["--out", str(tmp_path / "out")] if command == "prepare" else []
    assert main(["data", command, str(tmp_path / "in"), *out, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"baton: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_another_index_of_the_same_file_is_another_input(megatron, tokenizer, tmp_path, quiet):
    shutil.copytree(megatron.parent, tmp_path / "in")
    arguments = {"ids": True, "tokenizer": tokenizer.path, "workers": 1, "progress": quiet}
    prepare([tmp_path / "in"], tmp_path / "out", **arguments)
    index = tmp_path / "in" / "corpus.idx"
    whole = indexed_dataset().IndexedDatasetBuilder(str(tmp_path / "whole.bin"), dtype=np.uint16)
    count = (tmp_path / "in" / "corpus.bin").stat().st_size // 2
    whole.add_document(torch.zeros(count, dtype=torch.int64), [count])
    whole.finalize(str(index))
    with pytest.raises(DataError, match=r"prepared differently .*in/corpus\.bin has changed"):
        prepare([tmp_path / "in"], tmp_path / "out", **arguments)


def test_ids_of_another_type_or_tokenizer_are_refused_before_anything_is_written(ids, take, tokenizer, tmp_path):
    flat = np.array([i for document in ids for i in [*document, tokenizer.eod_id]], np.uint32)
    wide, narrow, odd, foreign, pairs, cut = (tmp_path / name for name in ("a.bin", "b.bin", "c.bin", "d.bin", "e.npy", "f.npy"))
    flat.tofile(wide)
    flat.astype(np.uint16).tofile(narrow)
    odd.write_bytes(narrow.read_bytes()[:-1])
    np.append(flat, 420).astype(np.uint16).tofile(foreign)
    np.save(pairs, flat[: len(flat) // 2 * 2].reshape(-1, 2))
    buffer = io.BytesIO()
    np.save(buffer, flat)
    cut.write_bytes(buffer.getvalue()[:-10])
    (tmp_path / "g.parquet").write_bytes(b"PAR1 nothing")
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [1.5, 2.5]}), tmp_path / "h.parquet")
    (tmp_path / "i.txt").write_text("text")
    with pyarrow.ipc.new_stream(tmp_path / "j.arrow", pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int32())})):
        pass
    (tmp_path / "j.arrow").write_bytes((tmp_path / "j.arrow").read_bytes()[:50])
    before = sorted(tmp_path.iterdir())
    for path, message in {
        wide: "every second id is 0, as in uint32 read as uint16; set --ids-dtype uint32",
        odd: "no whole number of uint16 ids",
        foreign: "is 420, and the tokenizer has 0 <= id < 420",
        pairs: r"shape \([0-9]+, 2\)",
        cut: "no sound .npy array",
        tmp_path / "g.parquet": "no sound parquet",
        tmp_path / "h.parquet": "holds double, not lists of integer ids; name the column with --ids-field",
        tmp_path / "i.txt": "token ids are read from .bin",
        tmp_path / "j.arrow": "no sound Arrow file",
    }.items():
        with pytest.raises(DataError, match=message):
            take(path)
    with pytest.raises(DataError, match=r"every second id is 0|0 <= id < 420"):
        take(narrow, ids_dtype="uint32")
    with pytest.raises(DataError, match="name it with --tokenizer"):
        prepare([narrow], tmp_path / "out", ids=True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_separator_that_is_in_no_file_is_said(tokenizer, tmp_path, quiet):
    ids = np.array([5, 6, tokenizer.eod_id, 7] * 99, np.uint16)
    ids.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", ids)
    settings = {"ids": True, "tokenizer": tokenizer.path, "workers": 1, "validation_fraction": 0.0, "progress": quiet}
    words = ["a.bin", "b.npy"]
    reports = [
        prepare([tmp_path / name for name in words], tmp_path / f"out{number}", separator_id=number, **settings)
        for number in (8, tokenizer.eod_id)
    ]
    (line,) = reports[0].remarks
    assert line == "a.bin and 1 more: the separator 8 was not seen; if another one ends documents, give --separator-id"
    assert reports[1].remarks == ()
    with pytest.raises(DataError, match=r"separator_id 420: the tokenizer has 0 <= id < 420"):
        prepare([tmp_path / "a.bin"], tmp_path / "out", separator_id=420, **settings)


def test_an_id_beyond_the_vocabulary_is_found_wherever_it_is(take, tmp_path, tokenizer):
    flat = np.full(1 << 22, 5, np.uint16)
    flat[1 << 20 :: 4096] = tokenizer.eod_id
    flat[random.Random(3).randrange(1 << 20, 1 << 21)] = 9999
    flat.tofile(tmp_path / "flat.bin")
    with pytest.raises(DataError, match="the id 9999"):
        take(tmp_path / "flat.bin", shard_bytes=10**9)
