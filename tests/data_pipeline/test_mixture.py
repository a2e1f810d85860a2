"""Several sources, and shards that come later: weights are kept, everything is read once an epoch, what does not fit is refused."""

import json
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from pydantic import ValidationError

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Mixture
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.run_source import ShardSource
from baton.data_pipeline.shards import ShardWriter, token_payload
from baton.data_pipeline.steps import StepPlan


def test_weights_are_shares_of_the_bytes_and_new_ones_begin_at_their_step():
    means = {"a": 100.0, "b": 400.0, "c": 50.0}
    schedule = [(0, {"a": 0.2, "b": 0.8, "c": 0.0}), (7, {"a": 0.0, "b": 0.5, "c": 0.5})]
    mixture, sizes = Mixture(3, schedule, means), list(means.values())
    for step, weights in ((0, schedule[0][1]), (6, schedule[0][1]), (7, schedule[1][1]), (900, schedule[1][1])):
        counts = Counter(mixture.source(lane, k, step) for lane in range(20) for k in range(1000))
        total = sum(counts[n] * sizes[n] for n in range(3))
        for number, name in enumerate(means):
            assert counts[number] * sizes[number] / total == pytest.approx(weights[name], abs=0.01)
            assert counts[number] or not weights[name]


def test_choices_are_fixed_for_ever():
    mixture = Mixture(1234, [(0, {"a": 0.5, "b": 0.5})], {"a": 1.0, "b": 1.0})
    assert [mixture.source(2, k, 0) for k in range(16)] == [1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture": [{"weights": {"a": 0.5, "b": 0.6}}]}, "the weights sum to 1.1, not 1; they are shares, such as a: 0.4545"),
        ({"mixture": [{"weights": {"a": 1.0}}]}, "disagree about b; give each source one weight"),
        ({"mixture": [{"weights": {"a": 1.5, "b": -0.5}}]}, "the weight of b is negative"),
        ({"mixture": [{"from_step": 3, "weights": {"a": 0.5, "b": 0.5}}]}, "begins at steps .3.; give weights from step 0"),
        ({}, "give weights from step 0"),
        ({"path": "elsewhere"}, "path and sources both"),
        ({"sources": {"a": "x"}}, "one source alone needs no mixture"),
        ({"sources": {}, "mixture": [{"weights": {"a": 1.0}}]}, "a mixture is of several sources"),
    ],
)
def test_impossible_mixtures_are_refused_when_read(settings, message):
    with pytest.raises(ValidationError, match=message):
        ShardsConfig(**{"sources": {"a": "x", "b": "y"}, **settings})


def test_sources_that_hold_out_different_documents_are_refused(corpus, tokenizer, tmp_path, quiet):
    places = {}
    for name, fraction in (("a", 0.2), ("b", 0.3)):
        prepare([corpus], tmp_path / name, validation_fraction=fraction, workers=1, progress=quiet)
        places[name] = str(tmp_path / name)
    config = ShardsConfig(sources=places, mixture=[{"weights": {"a": 0.5, "b": 0.5}}], tokenizer=tokenizer.path)
    with pytest.raises(DataError, match="hold out different fractions"):
        ShardSource(config)


def add_shard(folder, number, documents):
    """A further training shard, and its mention."""
    writer = ShardWriter(folder / f"train-{number:06d}.tar", "tokens")
    for i, ids in enumerate(documents):
        writer.add(f"{number:05d}{i:027d}", token_payload(np.array(ids), 1 << 16), 10, len(ids))
    manifest = json.loads((folder / "dataset.json").read_text())
    manifest["shards"].append(writer.close("train").__dict__)
    (folder / "dataset.json").write_text(json.dumps(manifest))


@pytest.fixture
def growing(tokenizer, write_dataset, tmp_path):
    documents = [[1000 + i] for i in range(20)]
    return write_dataset(tmp_path, [(token_payload(np.array(ids), 1 << 16), 10, 1) for ids in documents], "tokens", tokenizer)


def source_of(folder, tokenizer, **settings):
    return ShardSource(ShardsConfig(path=str(folder), tokenizer=tokenizer.path, unit_documents=2, **settings))


def test_added_shards_are_read_from_the_next_epoch_on(growing, tokenizer):
    """A lane takes a document, of one token and a mark, a step; 4 lanes, and 10 units of 2 documents in the first epochs."""
    seen, cursors, lanes = [], None, 4

    def live(source, start, steps, ranks):
        nonlocal cursors
        after = {}
        rows = {}
        for rank in range(ranks):
            shape = {"sequence_length": 2, "lanes": lanes, "lanes_per_step": lanes, "micro_batch_size": 1, "prefetch": 1}
            plan = StepPlan.constant(**shape, data_rank=rank, data_size=ranks, start_step=start)
            with source.stream(plan, seed=1, cursors=cursors) as stream:
                for step in islice(stream, steps):
                    for batch in step.micro_batches:
                        rows[step.step, batch.lanes[0]] = int(batch.tokens[0, 1])
                after |= stream.cursors
        seen.extend(rows[key] for key in sorted(rows))
        cursors = after

    source = source_of(growing, tokenizer)
    live(source, 0, 7, 1)  # 28 of 20 documents: in the second epoch
    state, fingerprint = json.loads(json.dumps(source.state())), source.fingerprint(seed=1, lanes=lanes)
    add_shard(growing, 1, [[2000 + i] for i in range(8)])
    with pytest.raises(DataError, match="has 1 shards more than the run has begun with"):
        source_of(growing, tokenizer).adopt(state, cursors, seed=1, lanes=lanes)
    grown = source_of(growing, tokenizer, append=True)
    grown.adopt(state, cursors, seed=1, lanes=lanes)
    assert grown.fingerprint(seed=1, lanes=lanes) == fingerprint
    assert [entry[:2] for entry in grown.state()[""]] == [[0, 1], [2, 2]]
    live(grown, 7, 9, 2)
    again = source_of(growing, tokenizer, append=True)
    again.adopt(grown.state(), cursors, seed=1, lanes=lanes)
    assert again.state() == grown.state(), "nothing has been added since"
    live(again, 16, 20, 4)
    old, every = [1000 + i for i in range(20)], [1000 + i for i in range(20)] + [2000 + i for i in range(8)]
    # a lane reads a unit's two documents one after the other, so epochs overlap by a step: slots tell them apart
    slots = [(step // 2 * lanes + lane, step % 2) for step in range(36) for lane in range(lanes)]
    ordered = [document for _, document in sorted(zip(slots, seen))]
    assert sorted(ordered[:20]) == sorted(ordered[20:40]) == old
    assert sorted(ordered[40:68]) == sorted(ordered[68:96]) == every


def test_a_shard_that_changed_is_refused(growing, tokenizer):
    source = source_of(growing, tokenizer)
    state = source.state()
    state[""][0][2] = "0" * 64
    with pytest.raises(DataError, match="first 1 shards are not those that the run has read"):
        source.adopt(state, {}, seed=1, lanes=4)
    with pytest.raises(DataError, match="the run reads web, these settings name nothing"):
        source.adopt({"web": []}, {}, seed=1, lanes=4)


def test_duplicate_document_ids_are_refused(tokenizer, tmp_path, write_dataset):
    folder = write_dataset(tmp_path, [(token_payload(np.array([1]), 1 << 16), 1, 1)] * 3, "tokens", tokenizer)
    writer = ShardWriter(folder / "train-000000.tar", "tokens")
    for _ in range(3):
        writer.add("0" * 32, token_payload(np.array([1]), 1 << 16), 1, 1)
    manifest = json.loads((folder / "dataset.json").read_text())
    manifest["shards"][0] = writer.close("train").__dict__
    (folder / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="has 2 document ids twice"):
        Dataset.open(folder).index(Dataset.open(folder).shards["train"][0])


def test_an_index_that_disagrees_with_its_shard_is_named(tokenizer, tmp_path, write_dataset):
    """Two shards of the same size, whose indexes were exchanged."""
    rng = random.Random(0)
    contents = [(token_payload(np.array([rng.randrange(1000)]), 1 << 16), 1, 1) for _ in range(4)]
    folder = write_dataset(tmp_path, contents, "tokens", tokenizer)
    other = folder / "validation-000000.index.npz"
    (folder / "train-000000.index.npz").write_bytes(other.read_bytes())
    dataset = Dataset.open(folder)
    with pytest.raises(DataError, match=r"train-000000.index.npz is damaged \(its checksum differs\)"):
        dataset.read(dataset.shards["train"][0], 0, 4)
