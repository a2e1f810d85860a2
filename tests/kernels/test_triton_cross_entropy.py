"""The two halves of cross-entropy on a part of the columns, in PyTorch and in Triton, compared with torch's in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.cross_entropy import gradient, partial_sums
from baton.kernels.cross_entropy.triton_launch import gradient_triton, partial_sums_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMS = {
    "torch": (torch.device("cpu"), partial_sums, gradient),
    "triton": (DEVICE, partial(partial_sums_triton, columns=16), partial(gradient_triton, columns=16)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_parts_of_the_columns_are_torchs_whole(form, dtype):
    """Logits that exponentials overflow on, a row of equal ones, labels at both ends of a part and one that does not count."""
    place, sums, slope = FORMS[form]
    logits = 30 * torch.randn(9, 61, generator=seeded(0))
    logits[2] = -1e4
    logits, labels = logits.to(dtype), torch.tensor([0, 38, 39, 60, -1, 5, 40, 59, 1])
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, labels, ignore_index=-1, reduction="sum")
    expected.backward()
    assert leaf.grad is not None
    parts = [x.clone().to(place) for x in logits.split((39, 22), 1)]
    found = [sums(x, labels.to(place), first) for x, first in zip(parts, (0, 39), strict=True)]
    largest = torch.maximum(found[0][0], found[1][0])
    total = sum(total * (most - largest).exp() for most, total, _ in found)
    own = found[0][2] + found[1][2]
    of_rows = (total.log() + largest - own).cpu().masked_fill(labels < 0, 0.0)
    assert relative_error(of_rows.sum().double(), expected.detach()) <= 1e-6
    slopes = [slope(x, labels.to(place), first, largest, total) for x, first in zip(parts, (0, 39), strict=True)]
    assert all(x is y and x.dtype == dtype for x, y in zip(parts, slopes, strict=True)), "in the logits' place"
    limit = 1e-6 if dtype == torch.float32 else 3e-3
    assert relative_error(torch.cat(slopes, 1).cpu().double(), leaf.grad) <= limit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_adds_nothing(form, dtype):
    """Columns with the least logits there are, behind others and on a rank that has no others."""
    place, sums, slope = FORMS[form]
    logits, labels = torch.randn(5, 20, generator=seeded(0)).to(dtype).to(place), torch.tensor([0, 3, -1, 19, 7]).to(place)
    padding = torch.full((5, 18), torch.finfo(dtype).min, dtype=dtype, device=place)
    expected = sums(logits, labels, 0)
    beside, alone = torch.cat((logits, padding), 1), padding.clone()
    for x, y in zip(sums(beside, labels, 0), expected, strict=True):
        torch.testing.assert_close(x, y)
    largest, total, own = sums(alone, labels, 38)
    assert torch.equal(total * (largest - expected[0]).exp() + own, torch.zeros_like(total))
    for found in (slope(beside, labels, 0, *expected[:2])[:, 20:], slope(alone, labels, 38, *expected[:2])):
        assert found.count_nonzero() == 0
    torch.testing.assert_close(beside[:, :20], slope(logits.clone(), labels, 0, *expected[:2]))


@pytest.mark.parametrize("form", FORMS)
def test_views_are_taken_as_what_they_show(form):
    """Every other label, one maximum for all rows, logits with rows for columns: what their copies give."""
    place, sums, slope = FORMS[form]
    logits = torch.randn(21, 9, generator=seeded(0)).to(place).t()
    labels = torch.randint(-1, 21, (18,), generator=seeded(1)).to(place)[::2]
    largest, total = torch.full((1,), 4.0, device=place).expand(9), torch.rand(18, generator=seeded(2)).to(place)[::2] + 1
    for found, expected in zip(sums(logits, labels, 0), sums(logits.contiguous(), labels.contiguous(), 0), strict=True):
        torch.testing.assert_close(found, expected)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (logits, labels, largest, total)]
    expected = slope(copies[0], copies[1], 0, copies[2], copies[3])
    assert slope(logits, labels, 0, largest, total) is logits
    torch.testing.assert_close(logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_launch_configs_of_runs(dtype):
    """Compiled on a GPU with a vocabulary of the usual size."""
    logits, labels = 5 * torch.randn(300, 50280, generator=seeded(0)), torch.randint(-1, 50280, (300,), generator=seeded(1))
    logits = logits.to(dtype)
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, labels, ignore_index=-1, reduction="sum")
    expected.backward()
    assert leaf.grad is not None
    logits, labels = logits.to(DEVICE), labels.to(DEVICE)
    largest, total, own = partial_sums(logits, labels, 0)
    of_rows = (total.log() + largest - own).masked_fill(labels < 0, 0.0)
    assert relative_error(of_rows.sum().double().cpu(), expected.detach()) <= 1e-6
    found = gradient(logits, labels, 0, largest, total).cpu().double()
    assert relative_error(found, leaf.grad) <= (1e-6 if dtype == torch.float32 else 3e-3)
