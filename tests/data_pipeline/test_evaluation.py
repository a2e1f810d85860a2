"""The evaluation set is the same documents on any number of ranks, scored once each; bits per byte divides by their bytes."""

import numpy as np
import pytest

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import EvaluationStream, documents, evaluation_batches
from baton.data_pipeline.prepare import prepare


def collect(dataset, tokenizer, *, data_size, **changes):
    arguments = {"sequence_length": 24, "micro_batch_size": 2, "max_tokens": 900, **changes}
    return [evaluation_batches(dataset, tokenizer, data_rank=rank, data_size=data_size, **arguments) for rank in range(data_size)]


@pytest.mark.parametrize("data_size", [1, 2, 3])
@pytest.mark.parametrize("sequence_length", [5, 24, 5000])
def test_ranks_share_the_same_documents(dataset, token_folder, tokenizer, data_size, sequence_length):
    sets = collect(dataset, tokenizer, data_size=data_size, sequence_length=sequence_length)
    assert len({len(s.batches) for s in sets}) == 1
    assert len({(s.tokens, s.text_bytes, s.documents) for s in sets}) == 1
    windows = [b for round_ in zip(*(s.batches for s in sets), strict=True) for b in round_]
    assert all(b.tokens.shape == (2, sequence_length) and b.labels.dtype == np.int64 and b.pos.dtype == np.int32 for b in windows)
    labels, tokens, pos = (np.concatenate([getattr(b, n) for b in windows]).ravel() for n in ("labels", "tokens", "pos"))
    expected_tokens, expected_labels, expected_pos, size = [], [], [], 0
    for text in list(documents(dataset, "validation"))[: sets[0].documents]:
        ids = tokenizer.encode(text).tolist()
        expected_tokens += [tokenizer.eod_id, *ids]
        expected_labels += [*ids, tokenizer.eod_id]
        expected_pos += range(len(ids) + 1)
        size += len(text.encode())
    n = len(expected_labels)
    assert (sets[0].tokens, sets[0].text_bytes) == (n, size)
    assert tokens[:n].tolist() == expected_tokens
    assert labels[:n].tolist() == expected_labels
    assert pos[:n].tolist() == expected_pos
    assert (labels[n:] == -1).all()
    assert n == len(labels) or pos[n] == 0
    from_tokens = collect(Dataset.open(token_folder), tokenizer, data_size=data_size, sequence_length=sequence_length)
    np.testing.assert_array_equal(from_tokens[-1].batches[-1].labels, sets[-1].batches[-1].labels)


def test_the_set_ends_with_the_last_document_that_fits(dataset, tokenizer):
    lengths = [len(tokenizer.encode(text)) + 1 for text in documents(dataset, "validation")]
    for limit in (1, lengths[0], sum(lengths[:3]), sum(lengths[:3]) - 1, 10**9):
        (chosen,) = collect(dataset, tokenizer, data_size=1, max_tokens=limit)
        expected = max(1, sum(np.cumsum(lengths) <= limit))
        assert (chosen.documents, chosen.tokens) == (expected, sum(lengths[:expected]))


def test_a_stream_holds_one_batch_and_reads_no_further(dataset, tokenizer):
    stream = EvaluationStream(dataset, tokenizer, sequence_length=8, micro_batch_size=2)
    batches = stream.batches
    first = next(batches)
    assert 0 < stream.tokens < sum(len(tokenizer.encode(text)) + 1 for text in documents(dataset, "validation"))
    kept = first.labels.copy()
    rest = list(batches)
    assert stream.documents == len(list(documents(dataset, "validation")))
    np.testing.assert_array_equal(first.labels, kept)
    (whole,) = collect(dataset, tokenizer, data_size=1, sequence_length=8, max_tokens=10**9)
    for one, other in zip([first, *rest], whole.batches, strict=True):
        np.testing.assert_array_equal(one.labels, other.labels)


def test_a_missing_split_says_what_to_do(corpus, tokenizer, tmp_path, quiet):
    prepare([corpus], tmp_path / "d", validation_fraction=0.0, workers=1, progress=quiet)
    with pytest.raises(DataError, match="larger validation_fraction"):
        collect(Dataset.open(tmp_path / "d"), tokenizer, data_size=1)


def test_texts_come_back_from_token_shards(dataset, token_folder, tokenizer, other_tokenizer):
    tokens = Dataset.open(token_folder)
    for split in ("train", "validation"):
        assert list(documents(tokens, split, tokenizer)) == list(documents(dataset, split))
    with pytest.raises(DataError, match="need the tokenizer"):
        next(documents(tokens, "train"))
    with pytest.raises(DataError, match="use that tokenizer"):
        next(documents(tokens, "train", other_tokenizer))
