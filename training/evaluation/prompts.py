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
    ends: list[tuple[Tensor | None, States]] = []  # of the shortest prompts first
    states: States | None = None
    start, rows = 0, len(order)
    while rows:
        stop = min(lengths[rows - 1], start + max(1, PREFILL_TOKENS // rows))
        hidden, states = model.through_stages(tokens[:rows, start:stop], pos[:rows, start:stop], states, whole_sequence)
        start, before = stop, rows
        while rows and lengths[rows - 1] == stop:
            rows -= 1
        if rows < before:
            finished = slice(rows, before)
            ends.append((None if hidden is None else hidden[finished, -1], take_rows(states, finished)))
            states = take_rows(states, slice(rows))
    ends.reverse()
    index = torch.empty(len(order), dtype=torch.int64)
    index[torch.tensor(order)] = torch.arange(len(order))
    index = index.to(device)
    growing = rows_of_tokens(model)

    def together(layer: str, name: str) -> Tensor:
        leaves = [states[layer][name] for _, states in ends]
        if growing.get((layer, name), 0) is None:
            leaves = [_with_rows(leaf, lengths[0] - leaf.shape[1], 0) for leaf in leaves]
        return torch.cat(leaves)[index]

    hiddens = [hidden for hidden, _ in ends if hidden is not None]
    all_states = {layer: {name: together(layer, name) for name in state} for layer, state in ends[0][1].items()}
    return (torch.cat(hiddens)[index] if hiddens else None), all_states


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
        self._windows, self._lengths = dict(windows), list(lengths)
        self._longest = max(lengths)
        # the last token is not read
        self._most = self._longest + tokens - 1
        self._rows = self._enough(self._longest)

    def of_prompts(self, states: States) -> States:
        """States of `read_prompts`, with room."""
        return self._changed(states, self._moved)

    @property
    def is_used(self) -> bool:
        """Whether the next token has no row."""
        return None in self._windows.values() and self._longest >= self._rows

    def use(self) -> None:
        """Count a token of each sequence."""
        self._longest += 1

    def enlarge(self, states: States) -> States:
        """States with room, copied to more of it."""
        before, self._rows = self._rows, self._enough(self._rows + self._rows // 2)
        more = self._rows - before
        return self._changed(states, lambda leaf, window: leaf if window else _with_rows(leaf, 0, more))

    def take_over(self, new: "Room", states: States, of_new: States) -> bool:
        """Copy the States of another batch with as many sequences over `states`, if there is room; whether there was."""
        pairs = [(states[layer][name], leaf, (layer, name)) for layer, state in of_new.items() for name, leaf in state.items()]
        if any(leaf.shape[1] > kept.shape[1] for kept, leaf, place in pairs if place in self._windows):
            return False
        for kept, leaf, place in pairs:
            (kept[:, : leaf.shape[1]] if place in self._windows else kept).copy_(leaf)
        self._longest, self._most = new._longest, new._most
        return True

    def _enough(self, used: int) -> int:
        return -(-min(self._most, used + _ROOM) // _ROWS) * _ROWS

    def _changed(self, states: States, change: Callable[[Tensor, int | None], Tensor]) -> States:
        return {
            layer: {
                name: change(leaf, self._windows[layer, name]) if (layer, name) in self._windows else leaf
                for name, leaf in state.items()
            }
            for layer, state in states.items()
        }

    def _moved(self, leaf: Tensor, window: int | None) -> Tensor:
        """[B, rows, ...] of the last tokens of each sequence in order: each one's row becomes that of its position."""
        there = leaf.shape[1]
        rows = self._rows if window is None else min(window, -(-self._most // _ROWS) * _ROWS)
        if min(self._lengths) == max(self._lengths) == there:
            return _with_rows(leaf, 0, rows - there)
        lengths, at = torch.tensor(self._lengths, device=leaf.device)[:, None], torch.arange(rows, device=leaf.device)
        if there == 0:  # a window of the token alone
            return leaf.new_zeros(len(leaf), rows, *leaf.shape[2:])
        # of the row's last token; where none has been read, and where the next one will be, any row stands
        position = lengths - 1 - (lengths - 1 - at) % rows
        from_row = (there - (lengths - position)).clamp(0, there - 1)
        return leaf[torch.arange(len(leaf), device=leaf.device)[:, None], from_row]


def _with_rows(leaf: Tensor, before: int, behind: int) -> Tensor:
    """[B, T, ...] with rows of zeros before and behind the others."""
    return F.pad(leaf, (*[0, 0] * (leaf.dim() - 2), before, behind)) if before or behind else leaf
