"""Synthetic tasks: every example is what the task says, a pure function of its number, and can be answered by reading it."""

import itertools
import json
from collections import Counter, defaultdict
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.synthetic import Examples, below, different, others, shuffled
from baton.data_pipeline.synthetic_stream import ExampleCursor, SyntheticStream, synthetic_evaluation_set, synthetic_fingerprint
from baton.data_pipeline.task_config import FuzzyRecallConfig, InductionConfig, MqarConfig, NoisyRecallConfig, SelectiveCopyConfig

SEEDS = st.integers(0, 2**70)


@st.composite
def mqar(draw):
    pairs = draw(st.integers(1, 12))
    return MqarConfig(
        pairs=pairs,
        length=4 * pairs + draw(st.integers(0, 30)),
        vocab_size=2 * pairs + draw(st.integers(2, 200)),
        power=draw(st.sampled_from([0.01, 0.5, 1.0])),
        filler=draw(st.sampled_from(["random", "zero"])),
    )


INDUCTION = st.builds(InductionConfig, length=st.integers(3, 60), vocab_size=st.integers(4, 40))


@st.composite
def selective_copy(draw):
    count = draw(st.integers(1, 9))
    length, vocab_size = 2 * count + draw(st.integers(0, 50)), draw(st.integers(4, 30))
    return SelectiveCopyConfig(data_tokens=count, length=length, vocab_size=vocab_size)


@st.composite
def noisy_recall(draw):
    noise_vocab_size = draw(st.integers(1, 20))
    return NoisyRecallConfig(
        length=2 * draw(st.integers(2, 40)),
        noise_vocab_size=noise_vocab_size,
        vocab_size=max(4, noise_vocab_size + draw(st.integers(2, 30))),
        noise=draw(st.sampled_from([0.0, 0.2, 0.9])),
    )


@st.composite
def fuzzy_recall(draw):
    key_tokens, value_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return FuzzyRecallConfig(
        key_tokens=key_tokens,
        value_tokens=value_tokens,
        length=2 * (key_tokens + value_tokens) + draw(st.integers(0, 80)),
        vocab_size=max(4, 1 + 2 * max(key_tokens, value_tokens) + draw(st.integers(0, 9))),
    )


TASKS = st.one_of(mqar(), INDUCTION, selective_copy(), noisy_recall(), fuzzy_recall())


def read(config, seed=0, lane=0, first=0, count=3):
    """Examples of a training lane as lists of (token, label) rows."""
    tokens, labels = Examples(config).take([(("train", seed, lane), first, count)])
    assert tokens.shape == labels.shape == (count, config.length)
    assert tokens.dtype == labels.dtype == np.int64
    assert ((tokens >= 0) & (tokens < config.vocab_size)).all()
    return list(zip(tokens.tolist(), labels.tolist()))


@given(mqar(), SEEDS, st.integers(0, 10**9))
def test_recall_has_its_pairs_then_each_key_once_and_its_value_as_the_answer(config, seed, first):
    for tokens, labels in read(config, seed=seed, first=first):
        head, tail = tokens[: 2 * config.pairs], tokens[2 * config.pairs :]
        keys, values = head[::2], head[1::2]
        half = config.vocab_size // 2
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < config.vocab_size for value in values)
        assert len(set(keys)) == len(set(values)) == config.pairs
        assert sorted(token for token in tail if token in keys) == sorted(keys), "every key once more, in the fillers' places too"
        asked = [t for t, label in enumerate(labels) if label != -1]
        assert sorted(tokens[t] for t in asked) == sorted(keys)
        assert all(t >= 2 * config.pairs and t % 2 == 0 for t in asked)
        for t in asked:  # by reading back: where was it, and what came after it?
            (place,) = (s for s in range(t) if tokens[s] == tokens[t])
            assert labels[t] == tokens[place + 1]
        if config.filler == "zero":
            assert all(token == 0 for t, token in enumerate(tokens) if t >= 2 * config.pairs and t not in asked)


@given(noisy_recall(), SEEDS)
def test_noisy_recall_asks_for_every_key_that_comes_again_and_for_nothing_else(config, seed):
    clean = config.vocab_size - config.noise_vocab_size
    for tokens, labels in read(config, seed=seed):
        known, expected = {}, []
        for first, second in zip(tokens[::2], tokens[1::2], strict=True):
            if first >= clean:
                assert second >= clean
                expected += [-1, -1]
                continue
            assert first < config.keys <= second < clean
            expected += [known.get(first, -1), -1]
            assert known.setdefault(first, second) == second, "one value each"
        assert labels == expected
        assert labels[-2] != -1, "the last place asks"


@given(fuzzy_recall(), SEEDS)
def test_fuzzy_recall_asks_for_all_tokens_of_the_values_of_keys_that_come_again(config, seed):
    """Read token by token, without the places that the generator knows: keys and values have tokens of their own."""
    blank, half = config.vocab_size - 1, config.key_vocabulary
    for tokens, labels in read(config, seed=seed):
        begin = next(t for t, token in enumerate(tokens) if token != blank)
        assert blank not in tokens[begin:]
        assert begin <= 2 * (config.key_tokens + config.value_tokens) - 3, "there is room for no further pair"
        runs = [(is_key, list(run)) for is_key, run in itertools.groupby(tokens[begin:], lambda token: token < half)]
        assert [is_key for is_key, _ in runs] == [True, False] * (len(runs) // 2)
        known, expected = {}, [-1] * begin
        for (_, key), (_, value) in zip(runs[::2], runs[1::2], strict=True):
            assert len(set(key)) == len(key) <= config.key_tokens
            assert len(set(value)) == len(value) <= config.value_tokens
            expected += [-1] * (len(key) - 1) + (value if tuple(key) in known else [-1] * len(value)) + [-1]
            assert known.setdefault(tuple(key), value) == value, "one value each"
        assert labels == expected
        assert labels[-2] != -1, "the last key asks"


def test_motifs_noise_and_the_last_key_are_as_likely_as_they_say():
    tokens, _ = Examples(NoisyRecallConfig(noise=0.3)).take([(("train", 3, 0), 0, 4000)])
    assert abs((tokens[:, :-2:2] >= 16).mean() - 0.3 * 62 / 63) < 0.005  # one of 63 places is never noise
    config = FuzzyRecallConfig()
    tokens, _ = Examples(config).take([(("train", 3, 0), 0, 4000)])
    lengths, choices = Counter(), Counter()
    for row in tokens.tolist():
        first = next(list(run) for is_key, run in itertools.groupby(row[row.count(15) :], lambda token: token < 7) if is_key)
        lengths[len(first)] += 1
        choices[tuple(first)] += len(first) == 1
    assert all(abs(lengths[n] - 4000 / 3) < 130 for n in (1, 2, 3)), lengths
    assert all(abs(choices[(token,)] - 4000 / 21) < 60 for token in range(7)), choices


@given(INDUCTION, SEEDS)
def test_induction_shows_the_special_token_twice_and_asks_for_what_came_after_it(config, seed):
    for tokens, labels in read(config, seed=seed):
        first, last = (t for t, token in enumerate(tokens) if token == config.vocab_size - 1)
        assert (last, first < last - 1) == (config.length - 1, True)
        assert labels == [-1] * last + [tokens[first + 1]]


@given(selective_copy(), SEEDS)
def test_selective_copying_asks_for_what_is_no_blank_in_its_order(config, seed):
    for tokens, labels in read(config, seed=seed):
        places, asking = tokens[: -config.data_tokens], tokens[-config.data_tokens :]
        assert set(asking) == {config.vocab_size - 1}
        assert config.vocab_size - 1 not in places
        assert labels == [-1] * len(places) + [token for token in places if token != 0]


def test_the_defaults_are_the_benchmarks():
    config = MqarConfig()
    assert (config.length, config.pairs, config.vocab_size, config.power, config.filler) == (256, 16, 8192, 0.01, "random")
    config = InductionConfig()
    assert (config.length, config.vocab_size) == (256, 16)
    config = SelectiveCopyConfig()
    assert (config.length, config.data_tokens, config.vocab_size) == (4096, 16, 16)
    config = NoisyRecallConfig()
    assert (config.length, config.vocab_size, config.noise_vocab_size, config.noise) == (128, 32, 16, 0.2)
    config = FuzzyRecallConfig()
    assert (config.length, config.vocab_size, config.key_tokens, config.value_tokens) == (128, 16, 3, 3)


def places_asked(config, examples=20_000):
    _, labels = Examples(config).take([(("train", 3, 0), 0, examples)])
    slots = (labels[:, 2 * config.pairs :: 2] != -1)[:, : (config.length - 2 * config.pairs) // 2]
    return slots.mean(axis=0)


@pytest.mark.parametrize("power", [0.01, 0.6, 1.0])
def test_gaps_follow_the_power_law_without_replacement(power):
    """Against the exact chance of each slot to be among two draws without replacement: p_i + sum_j p_j p_i / (1 - p_j)."""
    config = MqarConfig(length=20, pairs=2, vocab_size=40, power=power)
    p = np.arange(1, 9) ** (power - 1)
    p /= p.sum()
    exact = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(8) if j != i) for i in range(8)]
    assert np.abs(places_asked(config) - exact).max() < 0.015  # four standard deviations
    assert places_asked(config).sum() == pytest.approx(2)


def test_every_choice_and_every_order_is_as_likely():
    words = np.random.Philox(key=5).random_raw(60_000).reshape(20_000, 3)
    chosen = Counter(tuple(sorted(row)) for row in different(words, 5).tolist())
    assert set(chosen) == set(itertools.combinations(range(5), 3))
    assert max(abs(n - 2000) for n in chosen.values()) < 200
    orders = Counter(map(tuple, shuffled(np.tile([7, 8, 9], (20_000, 1)), words).tolist()))
    assert len(orders) == 6
    assert max(abs(n - 20_000 / 6) for n in orders.values()) < 250
    assert (np.sort(different(words, 3), axis=1) == [0, 1, 2]).all(), "also when there is no choice"
    drawn = np.bincount(below(words.ravel(), 7), minlength=7)
    assert drawn.sum() == 60_000
    assert np.abs(drawn - 60_000 / 7).max() < 400
    extremes = np.array([0, 2**64 - 1], np.uint64)
    assert below(extremes, 8192).tolist() == [0, 8191]


@given(st.lists(st.sets(st.integers(0, 14), min_size=4, max_size=4), min_size=1, max_size=5))
def test_what_is_excluded_is_skipped(excluded):
    ranks = np.tile(np.arange(11), (len(excluded), 1))
    expected = [[n for n in range(15) if n not in row] for row in excluded]
    assert others(ranks, np.array([list(row) for row in excluded]), 15).tolist() == expected


@given(TASKS, SEEDS, st.integers(0, 99), st.integers(0, 10**12), st.integers(1, 5))
def test_an_example_depends_on_nothing_but_its_number(config, seed, lane, first, count):
    together = read(config, seed, lane, first, count)
    assert [read(config, seed, lane, first + n, 1)[0] for n in range(count)] == together
    beside = Examples(config).take([(("train", seed, lane + 1), 4, 2), (("train", seed, lane), first, count)])
    assert list(zip(beside[0][2:].tolist(), beside[1][2:].tolist())) == together


def test_examples_are_fixed_for_ever():
    # recorded once: a change of these values would silently exchange the data of every run under way
    (recall,) = read(MqarConfig(length=14, pairs=3, vocab_size=20), 1234, 2, 5, 1)
    assert recall == ([2, 11, 9, 14, 3, 15, 12, 8, 9, 7, 2, 13, 3, 5], [-1] * 8 + [14, -1, 11, -1, 15, -1])
    (induction,) = read(InductionConfig(length=10), 1234, 2, 5, 1)
    assert induction == ([15, 10, 2, 2, 12, 3, 12, 3, 13, 15], [-1] * 9 + [10])
    (copying,) = read(SelectiveCopyConfig(length=12, data_tokens=3), 1234, 2, 5, 1)
    assert copying == ([0, 7, 2, 0, 0, 0, 5, 0, 0, 15, 15, 15], [-1] * 9 + [7, 2, 5])
    (noisy,) = read(NoisyRecallConfig(length=14, vocab_size=10, noise_vocab_size=4, noise=0.3), 1234, 2, 5, 1)
    assert noisy == ([1, 5, 0, 4, 1, 5, 0, 4, 0, 4, 1, 5, 1, 5], [-1, -1, -1, -1, 5, -1, 4, -1, 4, -1, 5, -1, 5, -1])
    (fuzzy,) = read(FuzzyRecallConfig(length=20, vocab_size=8, key_tokens=2, value_tokens=2), 1234, 2, 5, 1)
    assert fuzzy == ([1, 0, 4, 6, 0, 1, 4, 0, 3, 6, 1, 2, 4, 3, 2, 3, 1, 2, 4, 3], [-1] * 17 + [4, 3, -1])


def as_bytes(arrays):
    return [row.tobytes() for row in arrays[0]]


def test_training_lanes_seeds_tasks_and_evaluation_have_no_example_in_common():
    config, other = MqarConfig(), MqarConfig(power=0.02)
    examples = Examples(config)
    streams = [examples.take([(("train", seed, lane), 0, 300)]) for seed in (0, 1) for lane in (0, 1, 10)]
    streams.append(Examples(other).take([(("train", 0, 0), 0, 300)]))
    evaluation = synthetic_evaluation_set(
        config, tokens=300 * 256, sequence_length=256, micro_batch_size=4, data_rank=0, data_size=1
    )
    streams += [(batch.tokens, batch.labels) for batch in evaluation.batches]
    rows = [row for stream in streams for row in as_bytes(stream)]
    assert len(rows) == 8 * 300
    assert len(set(rows)) == len(rows)


LANES = 12


def open_stream(config, **changes):
    cursors, seed = changes.pop("cursors", None), changes.pop("seed", 11)
    plan = {
        "sequence_length": 2 * config.length,
        "lanes": LANES,
        "lanes_per_step": LANES,
        "micro_batch_size": 1,
        "data_rank": 0,
        "data_size": 1,
    }
    return SyntheticStream(
        config, StepPlan.constant(**{**plan, "start_step": 0, "prefetch": 2, **changes}), seed=seed, cursors=cursors
    )


def rows_of(step, into):
    for batch in step.micro_batches:
        assert (batch.tokens.dtype, batch.labels.dtype, batch.pos.dtype) == (np.int64, np.int64, np.int32)
        for row, lane in enumerate(batch.lanes):
            into[lane].append(np.stack([batch.tokens[row], batch.labels[row], batch.pos[row]], axis=1))


SEGMENTS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(0, 4), st.sampled_from([12, 24])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50)
@given(TASKS, SEGMENTS, st.integers(1, 3), SEEDS)
def test_stopping_anywhere_and_changing_ranks_loses_and_repeats_nothing(config, segments, prefetch, seed):
    """Each segment is a life of the run: (data ranks, examples per row, steps until it is killed, rows per step / half of it)."""
    got = defaultdict(list)
    cursors, step = None, 0
    for data_size, per_row, steps, rows in segments:
        after = {}
        sizes = {
            "sequence_length": per_row * config.length,
            "lanes_per_step": rows // 2 if data_size < 4 else 12,
            "data_size": data_size,
        }
        for rank in range(data_size):
            arguments = {"data_rank": rank, "start_step": step, "prefetch": prefetch, "cursors": cursors, "seed": seed, **sizes}
            with open_stream(config, **arguments) as stream:
                assert set(stream.cursors) == set(range(rank, LANES, data_size))
                for number, data in enumerate(islice(stream, steps)):
                    assert data.step == step + number
                    assert all(lane % data_size == rank for batch in data.micro_batches for lane in batch.lanes)
                    rows_of(data, got)
                after |= {lane: ExampleCursor.from_json(json.loads(json.dumps(c.to_json()))) for lane, c in stream.cursors.items()}
        cursors, step = after, step + steps
    for lane, cursor in cursors.items():
        found = np.concatenate(got[lane]) if got[lane] else np.zeros((0, 3))
        assert len(found) == cursor.example * config.length
        if cursor.example:
            tokens, labels = np.array(read(config, seed, lane, 0, cursor.example)).transpose(1, 0, 2)
            pos = np.tile(np.arange(config.length), cursor.example)
            np.testing.assert_array_equal(found, np.stack([tokens.ravel(), labels.ravel(), pos], axis=1))


def test_a_wrong_cursor_is_noticed_by_the_same_comparison():
    config = MqarConfig(length=16, pairs=2)
    for start, differs in ((0, False), (1, True)):
        got = defaultdict(list)
        with open_stream(config, cursors={lane: ExampleCursor(start) for lane in range(LANES)}) as stream:
            rows_of(next(stream), got)
        expected = [token for tokens, _ in read(config, 11, 5, 0, 2) for token in tokens]
        assert (got[5][0][:, 0].tolist() != expected) is differs


def test_a_step_that_is_made_in_pieces_is_the_same(monkeypatch):
    config = SelectiveCopyConfig(length=64, data_tokens=4)
    found = []
    for piece in (1, 300, 1 << 18):
        monkeypatch.setattr("baton.data_pipeline.synthetic_stream.CHUNK_TOKENS", piece)
        with open_stream(config, micro_batch_size=3) as stream:
            found.append([batch.tokens.tolist() for step in islice(stream, 2) for batch in step.micro_batches])
    assert found[0] == found[1] == found[2]


@given(TASKS, st.integers(1, 400), st.none() | st.integers(1, 9), st.integers(1, 3), st.integers(1, 100), st.integers(1, 4))
def test_the_evaluation_set_is_the_same_examples_once_each_on_any_layout(
    config, tokens, examples, micro_batch_size, sequence_length, data_size
):
    sizes = {"tokens": tokens, "examples": examples, "sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    sets = [synthetic_evaluation_set(config, data_rank=rank, data_size=data_size, **sizes) for rank in range(data_size)]
    assert len({(len(s.batches), s.labels) for s in sets}) == 1, "every rank takes part in as many batches"
    batches = [batch for round_ in zip(*(s.batches for s in sets), strict=True) for batch in round_]
    assert len({batch.tokens.shape for batch in batches}) == 1
    assert all(batch.pos.tolist() == [list(range(config.length))] * len(batch.tokens) for batch in batches)
    found, answers = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels"))
    count = examples or max(1, tokens // config.length)
    expected = Examples(config).take([(("evaluation",), 0, count)])
    np.testing.assert_array_equal(found[:count], expected[0])
    np.testing.assert_array_equal(answers[:count], expected[1])
    assert (answers[count:] == -1).all()
    assert sets[0].labels == (answers != -1).sum()


def test_cases_change_what_is_measured_and_nothing_else():
    config = MqarConfig(length=64, pairs=4, cases=({}, {"length": 512, "pairs": 32}, {"pairs": 8}))
    found = config.evaluated()
    assert list(found) == ["length-64-pairs-4", "length-512-pairs-32", "length-64-pairs-8"]
    assert [(c.length, c.pairs, c.vocab_size) for c, _ in found.values()] == [(64, 4, 8192), (512, 32, 8192), (64, 8, 8192)]
    assert [n for _, n in MqarConfig(cases=({}, {"length": 512, "examples": 9})).evaluated().values()] == [None, 9]
    assert list(MqarConfig().evaluated()) == ["length-256-pairs-16"]
    assert list(InductionConfig(cases=({"length": 1024},)).evaluated()) == ["length-1024"]
    assert list(SelectiveCopyConfig().evaluated()) == ["length-4096-data-tokens-16"]


def test_the_fingerprint_is_of_all_that_decides_the_examples():
    def of(config, **changes):
        return synthetic_fingerprint(config, **{"seed": 0, "lanes": 4, **changes})

    same = {of(MqarConfig()), of(MqarConfig(prefetch=7)), of(MqarConfig(cases=({"length": 512},)))}
    assert len(same) == 1
    others = [MqarConfig(**c) for c in ({"length": 512}, {"pairs": 8}, {"vocab_size": 512}, {"power": 0.1}, {"filler": "zero"})]
    others += [NoisyRecallConfig(), NoisyRecallConfig(noise=0.1), FuzzyRecallConfig(), FuzzyRecallConfig(key_tokens=2)]
    others = [of(config) for config in (*others, InductionConfig(), SelectiveCopyConfig())]
    others += [of(MqarConfig(), seed=1), of(MqarConfig(), lanes=8)]
    assert len(same.union(others)) == 1 + len(others)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MqarConfig(length=63, pairs=16), "length=63 is too short: these settings need 64"),
        (lambda: MqarConfig(pairs=8, vocab_size=16), "pairs=8 need as many different keys, and vocab_size=16 has 7"),
        (lambda: InductionConfig(length=2), "length=2 is too short: these settings need 3"),
        (lambda: SelectiveCopyConfig(length=31), "length=31 is too short: these settings need 32"),
        (lambda: MqarConfig(cases=({"pairs": 65},)), "case 0: .*length=256 is too short: these settings need 260"),
        (lambda: MqarConfig(cases=({}, {"pairs": 16})), "case 1 is a second length-256-pairs-16"),
        (lambda: InductionConfig(cases=({"pairs": 16},)), "Extra inputs"),
        (lambda: MqarConfig(power=0), "greater than 0"),
        (lambda: MqarConfig(filler="keys"), "'random' or 'zero'"),
        (lambda: NoisyRecallConfig(length=127), "length=127 is odd, and places have two tokens; set 128"),
        (lambda: NoisyRecallConfig(noise_vocab_size=31), "noise_vocab_size=31 leaves no key and value of vocab_size=32"),
        (lambda: FuzzyRecallConfig(length=11), "length=11 is too short: these settings need 12"),
        (lambda: FuzzyRecallConfig(key_tokens=8), "vocab_size=16 has 7 for each; raise vocab_size"),
        (lambda: MqarConfig(cases=({"examples": 0},)), "greater than or equal to 1"),
    ],
)
def test_tasks_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


@given(mqar(), st.integers(1, 300))
def test_rows_that_are_not_full_are_refused_with_sizes_that_work(config, sequence_length):
    def passes(length, sequence_length):
        try:
            config.model_copy(update={"length": length}).check_sequence_length(sequence_length)
        except DataError:
            return False
        return True

    try:
        config.check_sequence_length(sequence_length)
    except DataError as error:
        text = str(error)
    else:
        assert sequence_length % config.length == 0
        return
    assert f"training.sequence_length={sequence_length} is not a multiple of data.length={config.length}" in text
    near, _, lengths = text.partition("nearest that are: ")[2].partition("; lengths that fill this one: ")
    assert all(passes(config.length, int(n)) for n in near.split(" and "))
    named = {int(n) for n in lengths.split(", ")} if lengths else set()
    assert named == {n for n in range(4 * config.pairs, sequence_length + 1) if passes(n, sequence_length)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 17}, "nearest that are: 16 and 32"),
        ({"data_size": 5}, "use 1, 2, 3, 4, 6 or 12 data ranks"),
        ({"data_rank": 2, "data_size": 2}, "use 0 to 1"),
        ({"start_step": 3}, "those saved after step 2"),
        ({"cursors": {0: ExampleCursor()}}, r"no cursor for lane 1 \(of 11 missing\)"),
    ],
)
def test_impossible_streams_are_refused_at_once(changes, message):
    with pytest.raises(DataError, match=message):
        open_stream(MqarConfig(length=16, pairs=2), **changes)


@pytest.mark.parametrize("value", [None, {}, {"example": -1}, {"example": 1.0}, {"unit": 0, "document": 1, "offset": 0}])
def test_damaged_cursors_and_those_of_shards_are_refused(value):
    with pytest.raises(DataError, match="not a cursor of a synthetic task"):
        ExampleCursor.from_json(value)
