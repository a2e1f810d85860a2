"""A long document is read in pieces: the same stream as from whole documents, resumed anywhere, and nothing of a damaged one."""

import io
import os
import random
from itertools import islice

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.data_pipeline import dataset as module
from baton.data_pipeline.dataset import Dataset, LongPayloadReader
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import evaluation_batches
from baton.data_pipeline.lane_order import Cursor, permutation
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.shards import token_payload, unit_starts
from baton.data_pipeline.steps import StepPlan

SEED, LANES, UNIT_DOCUMENTS, UNIT_BYTES = 3, 3, 4, 9000
LONG, PIECE = 700, 194  # what counts as long in these tests, and a piece that divides nothing


@pytest.fixture(scope="module")
def long_texts(make_text):
    """Documents of no, one, and a few tokens among long ones, one of which has no white space."""
    rng = random.Random(8)
    made = [make_text(rng, 1500), "", "a", make_text(rng, 3), make_text(rng, 900), "", "語", make_text(rng, 20)]
    made += ["".join(rng.choice("éxay+1語") for _ in range(2500)), make_text(rng, 2), make_text(rng, 400), "a b"]
    assert sum(len(text.encode()) > LONG for text in made) == 4
    return made


@pytest.fixture(scope="module", params=["text", "tokens"])
def folder(request, write_dataset, long_texts, tokenizer, tmp_path_factory):
    contents = []
    for text in long_texts:
        ids = tokenizer.encode(text)
        payload = text.encode() if request.param == "text" else token_payload(ids, tokenizer.vocab_size)
        contents.append((payload, len(text.encode()), len(ids) if request.param == "tokens" else -1))
    return write_dataset(tmp_path_factory.mktemp(request.param), contents, request.param, tokenizer)


@pytest.fixture(scope="module")
def whole(long_texts, tokenizer):
    """lane -> (int[n, 3] of (input, label, pos), the cursor before each of them), made from whole documents without our reader."""
    starts = unit_starts(np.array([len(text.encode()) for text in long_texts]), UNIT_DOCUMENTS, UNIT_BYTES).tolist()
    units = list(zip(starts, [*starts[1:], len(long_texts)]))
    streams = {}
    for lane in range(LANES):
        rows, cursors, k = [], [], 0
        while len(rows) < 30_000:
            epoch, place = divmod(lane + k * LANES, len(units))
            number = int(permutation(len(units), "units", SEED, epoch)[place])
            first, end = units[number]
            for d, i in enumerate(permutation(end - first, "documents", SEED, epoch, number).tolist()):
                ids = tokenizer.encode(long_texts[first + i]).tolist()
                rows += zip([tokenizer.eod_id, *ids], [*ids, tokenizer.eod_id], range(len(ids) + 1))
                cursors += [Cursor(k, d, offset) for offset in range(len(ids) + 1)]
            k += 1
        streams[lane] = (np.array(rows), cursors)
    return streams


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "LONG_BYTES", LONG)
    monkeypatch.setattr(module, "CHUNK_BYTES", PIECE)


def open_stream(place, tokenizer, cursors=None, sequence_length=50, **changes):
    opened = place if isinstance(place, Dataset) else Dataset.open(place)
    sizes = {
        "sequence_length": sequence_length,
        "lanes": LANES,
        "lanes_per_step": LANES,
        "micro_batch_size": LANES,
        "data_rank": 0,
        "data_size": 1,
    }
    plan = StepPlan.constant(**{**sizes, "start_step": int(cursors is not None), "prefetch": 1, **changes})
    return BatchStream(opened, tokenizer, plan, seed=SEED, cursors=cursors, unit_documents=UNIT_DOCUMENTS, unit_bytes=UNIT_BYTES)


def assert_equal(data, whole, taken):
    """One step against the oracle; taken: inputs consumed before it in each lane. Its cursors too."""
    (batch,) = data.micro_batches
    width = batch.tokens.shape[1]
    for row, lane in enumerate(batch.lanes):
        rows, cursors = whole[lane]
        got = np.stack([batch.tokens[row], batch.labels[row], batch.pos[row]], axis=1)
        np.testing.assert_array_equal(got, rows[taken[lane] : taken[lane] + width])
        assert data.cursors[lane] == cursors[taken[lane] + width]


@pytest.mark.parametrize("sequence_length", [1, 61, 500, 4096])
def test_pieces_give_the_stream_of_whole_documents(folder, tokenizer, whole, sequence_length):
    with open_stream(folder, tokenizer, sequence_length=sequence_length) as stream:
        for number, data in enumerate(islice(stream, 9000 // sequence_length if sequence_length > 1 else 300)):
            assert_equal(data, whole, dict.fromkeys(range(LANES), number * sequence_length))


def kinds_of_places(rows, cursors):
    """Places in a lane to resume at: marks and first and last tokens of documents, and around the borders of pieces."""
    ends = [n for n in range(1, 15_000) if cursors[n].offset == 0]
    found = {n + d for n in ends for d in (-2, -1, 0, 1, 2)}
    found |= {
        n for n in range(15_000) if (cursors[n].offset * 2 + 128) % PIECE in (190, 192, 0, 2, 4) and cursors[n].offset > LONG // 2
    }
    return sorted(n for n in found if n >= 0)


def test_any_place_in_a_document_can_be_resumed_from_its_three_integers(folder, tokenizer, whole):
    places = {lane: kinds_of_places(*whole[lane]) for lane in whole}
    opened = Dataset.open(folder)
    for together in islice(zip(*places.values()), 0, None, 3 if opened.content == "text" else 2):
        cursors = {lane: Cursor.from_json(whole[lane][1][n].to_json()) for lane, n in enumerate(together)}
        with open_stream(opened, tokenizer, cursors, sequence_length=5) as stream:
            assert_equal(next(stream), whole, dict(enumerate(together)))


@settings(max_examples=25)
@given(data=st.data())
def test_random_lives_lose_and_repeat_nothing(folder, tokenizer, whole, data):
    opened = Dataset.open(folder)
    taken, cursors = 0, None
    for _ in range(data.draw(st.integers(1, 4))):
        sequence_length, steps = data.draw(st.sampled_from([1, 7, 64, 331, 1500])), data.draw(st.integers(1, 4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHUNK_BYTES", 2 * data.draw(st.sampled_from([64, 97, 1009, 10**6])))
            patch.setattr(module, "LONG_BYTES", data.draw(st.sampled_from([0, 100, 700, 10**6])))
            with open_stream(opened, tokenizer, cursors, sequence_length) as stream:
                for step in islice(stream, steps):
                    assert_equal(step, whole, dict.fromkeys(range(LANES), taken))
                    taken += sequence_length
                cursors = stream.cursors


def test_a_wrong_cursor_is_noticed_by_the_same_comparison(folder, tokenizer, whole):
    n = max(range(4000), key=lambda n: whole[0][1][n].offset)
    right = {lane: whole[lane][1][n] for lane in whole}
    wrong = right | {0: Cursor(right[0].unit, right[0].document, right[0].offset - 1)}
    for cursors, differs in ((right, False), (wrong, True)):
        with open_stream(folder, tokenizer, cursors) as stream:
            try:
                assert_equal(next(stream), whole, dict.fromkeys(range(LANES), n))
            except AssertionError:
                assert differs
            else:
                assert not differs


def test_a_cursor_beyond_the_end_of_a_long_document_is_refused(folder, tokenizer, whole):
    n = max(range(4000), key=lambda n: whole[0][1][n].offset)
    place = whole[0][1][n]
    cursors = dict.fromkeys(range(LANES), Cursor()) | {0: Cursor(place.unit, place.document, 10**6)}
    with open_stream(folder, tokenizer, cursors) as stream, pytest.raises(DataError, match=r"token 1000000 of document .* shorter"):
        next(stream)


def test_evaluation_takes_the_same_documents_in_pieces(folder, tokenizer, monkeypatch):
    def collect(limit):
        found = evaluation_batches(
            Dataset.open(folder), tokenizer, sequence_length=37, micro_batch_size=2, max_tokens=limit, data_rank=0, data_size=1
        )
        arrays = [np.concatenate([getattr(b, name) for b in found.batches]) for name in ("tokens", "labels", "pos")]
        return (found.tokens, found.text_bytes, found.documents), np.stack(arrays)

    for limit in (1, 2000, 4000, 10**6):
        pieces = collect(limit)
        with monkeypatch.context() as patch:
            patch.setattr(module, "LONG_BYTES", 1 << 30)
            held = collect(limit)
        assert pieces[0] == held[0]
        np.testing.assert_array_equal(pieces[1], held[1])


# text in blocks


NO_SPACE = st.text("aé語1+xy\u2581\t", max_size=80)


@settings(max_examples=200)
@given(st.lists(st.one_of(NO_SPACE, st.text(max_size=9), st.text(" \n", max_size=5)), max_size=12).map("".join), st.integers(1, 40))
def test_a_text_in_blocks_has_the_ids_of_the_whole(tokenizer, text, size):
    content = text.encode()
    pieces = list(tokenizer.encode_blocks(content[i : i + size] for i in range(0, len(content), size)))
    joined = np.concatenate([np.zeros(0, np.int32), *pieces])
    np.testing.assert_array_equal(joined, tokenizer.encode(text))
    if "\u2581" not in text:
        np.testing.assert_array_equal(joined, sentencepiece.SentencePieceProcessor(model_file=tokenizer.path).encode(text))


def test_a_text_without_white_space_is_cut_too_where_no_piece_can_reach(tokenizer, texts):
    rng = random.Random(1)
    letters = sorted(set("".join(texts)) - set(" \n\u2581"))
    content = "".join(rng.choice(letters) for _ in range(60_000)).encode()
    pieces = list(tokenizer.encode_blocks(content[i : i + 1000] for i in range(0, len(content), 1000)))
    np.testing.assert_array_equal(np.concatenate(pieces), tokenizer.encode_utf8(content))
    assert max(map(len, pieces)) < 1500
    (uncut,) = tokenizer.encode_blocks([b" " * 100] * 50)  # its ids depend on all of it
    np.testing.assert_array_equal(uncut, tokenizer.encode(" " * 5000))


# damage


def positions(folder):
    """(dataset, training shard, sample number of its longest payload, where its payload begins and ends)."""
    opened = Dataset.open(folder)
    (shard,) = opened.shards["train"]
    index = opened.index(shard)
    sample = int(np.argmax(index.sizes))
    begin = int(index.offsets[sample]) + 512
    return opened, shard, sample, begin, begin + int(index.sizes[sample])


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_nothing_of_a_damaged_document_is_given_out(folder):
    opened, shard, sample, begin, end = positions(folder)
    path = folder / shard.name
    for at in (begin - 512, begin, (begin + end) // 2, end - 1):
        flip(path, at)
        with pytest.raises(DataError, match=r"document \S+ of .*train-000000.tar is damaged"):
            LongPayloadReader(opened, shard, sample)
        flip(path, at)
    LongPayloadReader(opened, shard, sample)


def test_a_long_document_that_is_cut_off_or_gone_is_named(write_dataset, tokenizer, tmp_path):
    text = b"to be or not to be " * 300
    write_dataset(tmp_path, [(b"a", 1, -1), (text, len(text), -1)], "text", tokenizer)
    opened, shard, sample, begin, end = positions(tmp_path)
    payload = LongPayloadReader(opened, shard, sample)
    pieces = payload.chunks()
    next(pieces)
    for size in (end - 1, begin + 100, begin, begin - 1, 0):
        os.truncate(tmp_path / shard.name, size)
        with pytest.raises(DataError, match=r"train-000000.tar ends before document train0+1 does; it is truncated"):
            LongPayloadReader(opened, shard, sample)
    with pytest.raises(DataError, match="truncated"):
        list(pieces)
    (tmp_path / shard.name).unlink()
    with pytest.raises(DataError, match=r"cannot read document train0+1 of .*: No such file"):
        LongPayloadReader(opened, shard, sample)


def test_a_file_that_changes_while_it_is_read_is_noticed(folder):
    opened, shard, sample, begin, end = positions(folder)
    payload = LongPayloadReader(opened, shard, sample)
    pieces = payload.chunks(PIECE + 3)
    assert len(next(pieces)) == PIECE - 3
    flip(folder / shard.name, end - 1)
    with pytest.raises(DataError, match="is damaged"):
        list(pieces)
    flip(folder / shard.name, end - 1)
    assert len(b"".join(payload.chunks(5))) == end - begin - 5


@pytest.mark.parametrize("ids", [np.arange(900, dtype=np.int32), np.zeros((2, 450), np.uint16), np.arange(899, dtype=np.uint16)])
def test_a_long_payload_that_is_no_list_of_ids_is_named(write_dataset, tokenizer, tmp_path, ids):
    payload = io.BytesIO()
    np.save(payload, ids)
    write_dataset(tmp_path, [(payload.getvalue(), 900, 900)], "tokens", tokenizer)
    with open_stream(tmp_path, tokenizer) as stream, pytest.raises(DataError, match="prepare the dataset again") as caught:
        next(stream)
    assert "document train000" in str(caught.value)
