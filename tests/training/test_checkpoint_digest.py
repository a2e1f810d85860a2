"""A tensor's checksum does not depend on how it is split, and changes with every bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.training.checkpoint import digest
from baton.training.checkpoint.digest import box_digest, combine_digests
from baton.training.checkpoint.interval import optimal_interval_s

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def cut(shape, data):
    """Boxes that tile a shape, by cuts along one dimension after the other."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(data.draw(st.integers(0, 4))):
        offset, extent = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, extent[dim]))
        for start, length in ((0, at), (at, extent[dim] - at)):
            if length:
                boxes.append(tuple((*x[:dim], y, *x[dim + 1 :]) for x, y in ((offset, offset[dim] + start), (extent, length))))
    return boxes


@settings(derandomize=True, max_examples=150)
@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]), st.data())
def test_any_cut_has_the_same_checksum(shape, dtype, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    whole = torch.randn(shape, generator=generator).mul(9).to(dtype)
    parts = []
    for offset, extent in cut(shape, data):
        box = whole[tuple(slice(o, o + n) for o, n in zip(offset, extent))]
        parts.append(box_digest(box, offset))
    assert combine_digests(parts) == combine_digests([box_digest(whole, (0,) * len(shape))])


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_every_bit_and_every_place_counts(monkeypatch, chunk):
    monkeypatch.setattr(digest, "CHUNK", chunk)
    whole = torch.randn(3, 4, 5)
    seen = {box_digest(whole, (0, 0, 0))}
    for place in range(60):
        for bit in range(0, 32, 5):
            changed = whole.clone()
            changed.view(-1).view(torch.int32)[place] ^= 1 << bit
            seen.add(box_digest(changed, (0, 0, 0)))
    assert len(seen) == 1 + 60 * 7
    swapped = whole.clone()
    swapped[0, 0, 0], swapped[1, 2, 3] = whole[1, 2, 3].clone(), whole[0, 0, 0].clone()
    assert box_digest(swapped, (0, 0, 0)) not in seen
    assert box_digest(whole, (0, 0, 1)) not in seen


def test_values_are_fixed_for_ever():
    # recorded once: checkpoints are compared with what earlier versions wrote
    assert combine_digests([box_digest(torch.arange(12.0).view(3, 4), (5, 0))]) == "ca8ac3a543200000"


def test_the_interval_loses_the_least_time():
    """Against the loss itself: a save's cost per interval, and half an interval per failure."""
    cost, failures = 0.5, 12.0
    best = optimal_interval_s(cost, failures)

    def lost(interval):
        return cost / interval + failures / 86400 * interval / 2

    assert lost(best) < min(lost(best * 1.05), lost(best / 1.05))
    assert best == pytest.approx((2 * 0.5 * 7200) ** 0.5)
