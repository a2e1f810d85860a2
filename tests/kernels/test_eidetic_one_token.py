"""B'MOJO's attention one token at a time, over States that are written over, against the same tokens in one call."""

import pytest
import torch
from support.compare import relative_error
from support.long_form import alternating
from support.recurrences import seeded

from baton.kernels.eidetic_attention.recurrence import RECURRENCES, EideticAttention

LENGTH = 26
SEVERAL = (*RECURRENCES, EideticAttention(1, 1, 2), EideticAttention(6, 2, 30), EideticAttention(50, 3, 4))
"""Also of a window of the token alone, of more entries than tokens, and of a window that is never left."""


def in_turn(state, specs, read, most):
    """The State of lanes with as many tokens read as `read` says, in which the row of the token at position p is p modulo their
    number: one more than the State's, but no more than `most`. Rows without a token have any values."""
    found = {name: x.clone() for name, x in state.items()}
    for spec in (spec for spec in specs if spec.tail):
        rows = min(spec.shape[0] + 1, most)
        x = found[spec.name] = torch.full((len(read), rows, *spec.shape[1:]), 7.0, dtype=state[spec.name].dtype)
        for lane, end in enumerate(read):
            for back in range(min(spec.shape[0], end)):
                x[lane, (end - 1 - back) % rows] = state[spec.name][lane, spec.shape[0] - 1 - back]
    return found


def in_order(state, specs, read):
    """The inverse: rows without a token are 0."""
    found = dict(state)
    for spec in (spec for spec in specs if spec.tail):
        rows = state[spec.name].shape[1]
        x = found[spec.name] = torch.zeros(len(read), *spec.shape, dtype=state[spec.name].dtype)
        for lane, end in enumerate(read):
            for back in range(min(spec.shape[0], end)):
                x[lane, spec.shape[0] - 1 - back] = state[spec.name][lane, (end - 1 - back) % rows]
    return found


@pytest.mark.parametrize(
    ("case", "starts"),
    alternating(
        [*((each, torch.float64) for each in SEVERAL), (RECURRENCES[0], torch.bfloat16), (RECURRENCES[5], torch.bfloat16)],
        [(0, 1, 7), (8, 13, 4)],
    ),
    ids=str,
)
def test_tokens_one_by_one_are_those_of_one_call(case, starts):
    """The State too, to the bit; scores have ties."""
    recurrence, dtype = case
    inputs, _ = recurrence.example(seeded(4), len(starts), LENGTH, dtype, False)
    lanes = [tuple(x[lane : lane + 1] for x in inputs) for lane in range(len(starts))]
    specs, pos = recurrence.state_specs(inputs), torch.arange(LENGTH)[None]

    def read(lane, count):
        if not count:
            return None, recurrence.initial(lanes[lane])
        return recurrence.run(tuple(x[:, :count] for x in lanes[lane]), pos[:, :count], None)

    def read_all(more):
        """Outputs of the last tokens, and the States, with `more` tokens in each lane than at the start."""
        of_lanes = [read(lane, start + more) for lane, start in enumerate(starts)]
        y = torch.cat([y[:, -1:] for y, _ in of_lanes]) if more else None
        return y, {name: torch.cat([state[name] for _, state in of_lanes]) for name in of_lanes[0][1]}

    own = in_turn(read_all(0)[1], specs, starts, LENGTH)
    places = {name: x.data_ptr() for name, x in own.items()}
    for more in range(1, LENGTH - max(starts) + 1):
        at = torch.tensor(starts) + more - 1
        y, own = recurrence.step(tuple(x[torch.arange(len(starts)), at][:, None] for x in inputs), at[:, None].int(), own)
        expected, state = read_all(more)
        assert relative_error(y.double(), expected.double()) <= (1e-12 if dtype == torch.float64 else 4e-3), more
        for name, x in in_order(own, specs, (at + 1).tolist()).items():
            assert torch.equal(x, state[name]), (more, name)
    assert places == {name: x.data_ptr() for name, x in own.items()}, "written over"
