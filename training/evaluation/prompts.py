"""Reads prompts of unequal length in one batch, without padding, and makes room in their States for what is written behind them.

All rows are read up to the end of the shortest prompt, the others go on to the end of the next longer one, and so on. So each State
is that of the prompt alone. Keys and values of full attention have a row for each token; those of a shorter prompt are the last of
the batch's rows, and the rows before them are 0 and not seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.lm import LanguageModel, States

PREFILL_TOKENS = 65536
"""Tokens of all rows together in one forward pass over prompts, which bounds its memory. With fewer the kernels of small models run
faster than Python launches them."""

SCORED_TOKENS = 16384
"""The same where every token's logits are computed, which take 200 KB a token."""

_ROOM, _ROWS = 1024, 64
"""Tokens for which room is made at once, and what numbers of rows are multiples of: attention's kernels read whole vectors."""


@torch.no_grad()
def read_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> tuple[Tensor | None, States]:
    """Hidden vectors of each prompt's last token [B, d_model] (None except on the last pipeline stage), and the prompts' States."""
    device = next(model.parameters()).device
    whole_sequence = replace(model.forward_context, link=None)
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    lengths = [len(prompts[n]) for n in order]
    tokens = torch.zeros(len(order), lengths[0], dtype=torch.int64)
    for row, n in enumerate(order):
        tokens[row, : lengths[row]] = torch.as_tensor(prompts[n])
    tokens = tokens.to(device)
    pos = torch.arange(lengths[0], dtype=torch.int32, device=device).expand(len(order), -1)
    windows, numbers = rows_of_tokens(model), torch.tensor(order, device=device)
    last: Tensor | None = None
    found: States = {}
    states: States | None = None
    start, rows = 0, len(order)

    def put(layer: str, name: str, leaf: Tensor, numbers: Tensor) -> None:
        """The State of the prompts with these numbers, among those of all."""
        grows = windows.get((layer, name), 0) is None
        state = found[layer]
        if name not in state:
            state[name] = leaf.new_zeros(len(order), *((lengths[0], *leaf.shape[2:]) if grows else leaf.shape[1:]))
        state[name][(numbers, slice(lengths[0] - leaf.shape[1], None)) if grows else numbers] = leaf

    while rows:
        stop = min(lengths[rows - 1], start + max(1, PREFILL_TOKENS // rows))
        hidden, states = model.through_stages(tokens[:rows, start:stop], pos[:rows, start:stop], states, whole_sequence)
        start, before = stop, rows
        while rows and lengths[rows - 1] == stop:
            rows -= 1
        if rows < before:
            if hidden is not None:
                last = hidden.new_empty(len(order), hidden.shape[-1]) if last is None else last
                last[numbers[rows:before]] = hidden[rows:before, -1]
            for layer, state in states.items():
                found.setdefault(layer, {})
                for name in tuple(state):  # copied one at a time: views would keep the memory of all rows
                    leaf = state.pop(name)
                    put(layer, name, leaf[rows:], numbers[rows:before])
                    if rows:
                        state[name] = leaf[:rows]
    return last, found


def rows_of_tokens(model: LanguageModel) -> dict[tuple[str, str], int | None]:
    """Layer and name of the parts of this rank's State that have a row for each token, to the number of tokens that the next one
    sees, itself included; None: all."""
    return {
        (layer, spec.name): None if spec.grows else spec.shape[0] + 1
        for layer, specs in model.state_specs.items()
        for spec in specs
        if spec.grows or spec.tail
    }


def take_rows(states: States, rows: Tensor | slice) -> States:
    """States of some sequences of a batch."""
    return {layer: {name: leaf[rows] for name, leaf in state.items()} for layer, state in states.items()}


class Room:
    """Rows for the keys and values of a batch's prompts and of what is written behind them, as `Recurrence.step` takes them: the
    token at position p has row p, and in a window p modulo the window. Where all tokens are seen there are as many rows as a while
    takes, and more are made when these are used.

    windows: of `rows_of_tokens`; lengths: tokens of each prompt; tokens: those that will be written at most.
    """

    def __init__(self, windows: Mapping[tuple[str, str], int | None], lengths: Sequence[int], tokens: int) -> None:
        self._windows, self.lengths = dict(windows), list(lengths)
        self._longest = max(lengths)
        # the last token is not read
        self._most = self._longest + tokens - 1
        self._limit = _whole(self._most)
        self.rows = self._enough(self._longest)

    def of_prompts(self, states: States) -> States:
        """States of `read_prompts`, with room, which replace those given: no two copies of all keys are in memory at once."""
        return self._changed(states, self._moved)

    @property
    def is_used(self) -> bool:
        """Whether the next token has no row."""
        return None in self._windows.values() and self._longest >= self.rows

    def use(self) -> None:
        """Count a token of each sequence."""
        self._longest += 1

    def enlarge(self, states: States) -> States:
        """States with room, copied to more of it, which replace those given."""
        before, self.rows = self.rows, self._enough(self.rows + self.rows // 2)
        more = self.rows - before
        return self._changed(states, lambda leaf, window: _with_rows(leaf, more) if window is None else leaf)

    def fits(self, new: "Room") -> bool:
        """Whether another batch can take this room over: it is enough, and not so much that steps read many free rows."""
        pairs = [(self._rows_of(window), new._rows_of(window)) for window in self._windows.values()]
        return self._windows == new._windows and all(wanted <= rows <= 2 * wanted for rows, wanted in pairs)

    def take_over(self, new: "Room", states: States, of_new: States) -> None:
        """Copy the States of another batch with as many sequences, which fits, over `states`."""
        for layer, state in of_new.items():
            for name, leaf in state.items():
                target = states[layer][name]
                if (layer, name) in self._windows:
                    # what a row that had ended has left there may not be finite, and is multiplied by 0
                    target[:, leaf.shape[1] :].zero_()
                    target = target[:, : leaf.shape[1]]
                target.copy_(leaf)
        self._longest, self._most = new._longest, new._most

    def _enough(self, used: int) -> int:
        return _whole(min(self._most, used + _ROOM))

    def _rows_of(self, window: int | None) -> int:
        return self.rows if window is None else min(window, self._limit)

    def _changed(self, states: States, change: Callable[[Tensor, int | None], Tensor]) -> States:
        for (layer, name), window in self._windows.items():
            states[layer][name] = change(states[layer][name], window)
        return states

    def _moved(self, leaf: Tensor, window: int | None) -> Tensor:
        """[B, rows, ...] of the last tokens of each sequence in order: each one's row becomes that of its position."""
        there, rows = leaf.shape[1], self._rows_of(window)
        if min(self.lengths) == max(self.lengths) == there:
            return _with_rows(leaf, rows - there)
        if there == 0:  # a window of the token alone
            return leaf.new_zeros(len(leaf), rows, *leaf.shape[2:])
        lengths, at = torch.tensor(self.lengths, device=leaf.device)[:, None], torch.arange(rows, device=leaf.device)
        # of the row's last token; where none has been read, and where the next one will be, any row stands
        position = lengths - 1 - (lengths - 1 - at) % rows
        from_row = (there - (lengths - position)).clamp(0, there - 1)
        return leaf[torch.arange(len(leaf), device=leaf.device)[:, None], from_row]


def _whole(rows: int) -> int:
    """The next multiple of _ROWS."""
    return -(-rows // _ROWS) * _ROWS


def _with_rows(leaf: Tensor, free: int) -> Tensor:
    """[B, T, ...] with rows of zeros behind the others."""
    return F.pad(leaf, (*[0, 0] * (leaf.dim() - 2), 0, free)) if free else leaf
