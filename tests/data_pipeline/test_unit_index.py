"""A start reads where units begin from one small file, not from every index; the file changes no order, and one that is not of this
dataset is refused."""

import json
import shutil
from itertools import islice

import numpy as np
import pytest

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.files import sha256_file
from baton.data_pipeline.reader import CorpusSpec
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.shards import UNITS, ShardWriter, UnitIndex, unit_starts
from baton.data_pipeline.steps import StepPlan

DEFAULTS = tuple(ShardsConfig.model_fields[name].default for name in ("unit_documents", "unit_bytes"))


@pytest.fixture
def copy(text_folder, tmp_path):
    return shutil.copytree(text_folder, tmp_path / "dataset")


def order_of(dataset, lanes=4, units=60):
    """The samples that lanes read, in order, by a run with the default units."""
    corpus = CorpusSpec(split="train", seed=3, lanes=lanes, unit_documents=DEFAULTS[0], unit_bytes=DEFAULTS[1])
    orders, _ = corpus.orders([dataset])
    found = [orders[0].unit(lane, k) for k in range(units // lanes) for lane in range(lanes)]
    return [(unit.shard, unit.first, samples.tolist()) for unit, samples in found]


def change_manifest(folder, change):
    manifest = json.loads((folder / "dataset.json").read_text())
    change(manifest)
    (folder / "dataset.json").write_text(json.dumps(manifest))


def without_table(folder):
    """The dataset as it was prepared before there was such a file."""
    change_manifest(folder, lambda manifest: manifest.pop("units"))
    (folder / UNITS).unlink()
    return folder


def mention(folder):
    """Let dataset.json agree with the file that is there."""
    place = folder / UNITS
    entry = {"bytes": place.stat().st_size, "sha256": sha256_file(place)}
    change_manifest(folder, lambda manifest: manifest.update(units=entry))


def refused(folder, read=order_of):
    with pytest.raises(DataError) as caught:
        read(Dataset.open(folder))
    assert "\n" not in str(caught.value)
    assert UNITS in str(caught.value)
    return str(caught.value)


def test_a_start_reads_no_index(copy):
    expected = order_of(Dataset.open(copy))
    dataset = Dataset.open(copy)
    for path in copy.glob("*.index.npz"):
        path.unlink()
    assert order_of(dataset) == expected


def test_the_order_is_that_of_a_dataset_without_the_file(copy, tmp_path):
    older = without_table(shutil.copytree(copy, tmp_path / "older"))
    assert order_of(Dataset.open(copy)) == order_of(Dataset.open(older))
    assert Dataset.open(copy).fingerprint == Dataset.open(older).fingerprint, "runs under way go on with either"


def test_other_units_than_the_default_ones_are_computed(copy, tmp_path, tokenizer):
    older = without_table(shutil.copytree(copy, tmp_path / "older"))
    shape = {"sequence_length": 60, "lanes": 4, "lanes_per_step": 4, "micro_batch_size": 4, "data_rank": 0, "data_size": 1}
    plan = StepPlan.constant(**shape, start_step=0, prefetch=2)

    def read(folder, **units):
        with BatchStream(Dataset.open(folder), tokenizer, plan, seed=3, **units) as stream:
            return np.concatenate([step.micro_batches[0].tokens for step in islice(stream, 8)])

    for units in ({"unit_documents": 5}, {"unit_bytes": 3000}, {"unit_documents": 7, "unit_bytes": 900}):
        np.testing.assert_array_equal(read(copy, **units), read(older, **units))
    assert (read(copy) != read(copy, unit_documents=5)).any()


def test_a_shard_added_later_is_computed(copy):
    before = order_of(Dataset.open(copy), units=12)
    shards = Dataset.open(copy).shards["train"]
    writer = ShardWriter(copy / f"train-{len(shards):06d}.tar", "text")
    for number in range(70):
        writer.add(f"{number:032d}", b"added", 5, -1)
    change_manifest(copy, lambda manifest: manifest["shards"].append(writer.close("train").__dict__))
    grown = Dataset.open(copy)
    assert grown.unit_starts(grown.shards["train"][-1], *DEFAULTS).tolist() == [0, 64]
    after = {(shard, first) for shard, first, _ in order_of(grown, units=(len(before) + 2) * 4)}
    assert {(len(shards), 0), (len(shards), 64)} <= after
    assert {(shard, first) for shard, first, _ in before} <= after


@pytest.mark.parametrize("at", [0, 40, 300, -30])
def test_a_damaged_file_is_refused(copy, at):
    content = bytearray((copy / UNITS).read_bytes())
    content[at] ^= 4
    (copy / UNITS).write_bytes(content)
    assert "its checksum differs" in refused(copy)


def test_a_missing_or_truncated_file_is_refused_at_once(copy):
    content = (copy / UNITS).read_bytes()
    (copy / UNITS).write_bytes(content[:-1])
    assert "is truncated" in refused(copy, lambda dataset: None)
    (copy / UNITS).unlink()
    assert "is missing" in refused(copy, lambda dataset: None)
    with pytest.raises(DataError, match=f"cannot read .*{UNITS}: No such file"):
        order_of(Dataset.open(copy, check_sizes=False))


def test_a_file_of_other_shards_is_refused(copy):
    """Its names are those of this dataset, its indexes are not."""
    shards = Dataset.open(copy).shards["train"]
    others = [shards[1], shards[0], *shards[2:]]
    table = UnitIndex.of(*DEFAULTS, [(shard.name, other.index_sha256, np.array([0])) for shard, other in zip(shards, others)])
    (copy / UNITS).write_bytes(table.to_bytes())
    mention(copy)
    assert "is of another train-000000.tar" in refused(copy)


@pytest.mark.parametrize("starts", [[1], [0, 0], [0, 3, 2], [0, 10**6], [], [-1, 0]])
def test_units_that_cannot_be_are_refused(copy, starts):
    shard = Dataset.open(copy).shards["train"][0]
    table = UnitIndex.of(*DEFAULTS, [(shard.name, shard.index_sha256, np.array(starts, np.int64))])
    (copy / UNITS).write_bytes(table.to_bytes())
    mention(copy)
    assert "names impossible units of train-000000.tar" in refused(copy)


def test_units_that_disagree_with_an_index_are_refused_when_it_is_read(copy, tokenizer):
    shards = Dataset.open(copy).shards["train"]
    table = UnitIndex.of(*DEFAULTS, [(shard.name, shard.index_sha256, np.array([0, 3])) for shard in shards])
    (copy / UNITS).write_bytes(table.to_bytes())
    mention(copy)
    plan = StepPlan.constant(
        sequence_length=8, lanes=1, lanes_per_step=1, micro_batch_size=1, data_rank=0, data_size=1, start_step=0, prefetch=1
    )

    def read(dataset):
        with BatchStream(dataset, tokenizer, plan, seed=0) as stream:
            next(stream)

    assert "disagrees with the index of train-" in refused(copy, read)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no archive"])
def test_what_is_no_such_file_is_refused(copy, content):
    (copy / UNITS).write_bytes(content)
    mention(copy)
    assert "is damaged" in refused(copy)
    with open(copy / UNITS, "wb") as file:
        np.savez(file, units=np.zeros(3), starts=np.zeros(2), counts=np.zeros(1), names=np.zeros(1), indexes=np.zeros(1))
    mention(copy)
    assert "unexpected types" in refused(copy)


def test_starts_are_those_of_the_definition_also_where_bytes_end_units():
    """One document after the other, as the definition reads."""
    rng = np.random.default_rng(4)
    for _ in range(300):
        sizes = rng.choice([1, 7, 60, 500], rng.integers(1, 90), p=[0.5, 0.3, 0.15, 0.05])
        documents, limit = int(rng.integers(1, 9)), int(rng.integers(1, 200))
        expected, count, held = [0], 1, int(sizes[0])
        for number in range(1, len(sizes)):
            if count == documents or held + sizes[number] > limit:
                expected.append(number)
                count = held = 0
            count, held = count + 1, held + int(sizes[number])
        assert unit_starts(sizes, documents, limit).tolist() == expected
