"""Copies that kernels need of tensors that do not lie as they read them."""

import pytest
import torch

from baton.kernels.common.launch_utils import contiguous_by_words

ROWS = torch.arange(2 * 5 * 24, dtype=torch.float32).view(2, 5, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lies", "by_words"),
    [
        (lambda x: x[..., 8:16], True),
        (lambda x: x[..., 8:16].unflatten(-1, (2, 4)), True),
        (lambda x: x[:, 1:4], True),
        (lambda x: x[..., 7:15], False),  # does not begin with a word
        (lambda x: x[..., 8:15], False),  # nor end with one
        (lambda x: x.transpose(1, 2), False),
        (lambda x: x[..., ::4], False),
        (lambda x: x[..., :9:9], False),
        (lambda x: x[:, :0], None),
        (lambda x: x, None),
    ],
)
def test_columns_are_copied_by_words_where_they_lie_so(monkeypatch, lies, by_words, dtype):
    x, seen = lies(ROWS.to(dtype)), []
    of_words = torch.Tensor.view
    monkeypatch.setattr(torch.Tensor, "view", lambda self, *to: (seen.append(to), of_words(self, *to))[1])
    found = contiguous_by_words(x)
    monkeypatch.undo()
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found, x)
    if by_words is None or dtype == torch.float64:
        assert not seen
    elif dtype != torch.float32 or by_words:  # two of 4 bytes are a word
        assert ((torch.int64,) in seen) == by_words
