"""Cases of a test of which the default suite runs some, and the long form all."""

import itertools

import pytest


def some(cases, kept):
    """The cases, values or tuples of several, of which those not in `kept` are marked as long."""
    return [c if c in kept else pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.long) for c in cases]


def alternating(firsts, seconds, step=2):
    """All pairs; all but every `step`-th one are marked as long. No value of either may have fewer than `step` partners: then every
    value occurs."""
    pairs = [(n + m, first, second) for n, first in enumerate(firsts) for m, second in enumerate(seconds)]
    return [pytest.param(*pair, marks=pytest.mark.long if number % step else ()) for number, *pair in pairs]


def every_pair(*values):
    """All combinations of two-valued options; those are marked as long that are not needed for every pair of values to occur."""
    combinations = list(itertools.product(*values))
    kept = [c for c in combinations if sum(v.index(x) for v, x in zip(values, c, strict=True)) % 2 == 0]
    return [c if c in kept else pytest.param(*c, marks=pytest.mark.long) for c in combinations]
