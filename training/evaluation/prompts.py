"""Reads prompts of unequal length in one batch, without padding, and makes room in their States for what is written behind them.

All rows are read up to the end of the shortest prompt, the others go on to the end of the next longer one, and so on. So each State
is that of the prompt alone. Keys and values of full attention have a row for each token; those of a shorter prompt are the last of
the batch's rows, and the rows before them are 0 and not seen.
"""

from collections.abc import Callable, Sequence
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
    growing, numbers = leaves_that_grow(model), torch.tensor(order, device=device)
    last: Tensor | None = None
    found: States = {}
    states: States | None = None
    start, rows = 0, len(order)

    def put(layer: str, name: str, leaf: Tensor, numbers: Tensor) -> None:
        """The State of the prompts with these numbers, among those of all."""
        grows = (layer, name) in growing
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


def leaves_that_grow(model: LanguageModel) -> set[tuple[str, str]]:
    """Layer and name of the parts of this rank's State that have a row for each token."""
    return {(layer, spec.name) for layer, specs in model.state_specs.items() for spec in specs if spec.grows}


def take_rows(states: States, rows: Tensor | slice) -> States:
    """States of some sequences of a batch."""
    return {layer: {name: leaf[rows] for name, leaf in state.items()} for layer, state in states.items()}


class Room:
    """Rows for the keys and values of tokens that are written behind a batch's prompts, as `GatheredRecurrence.step` takes them:
    those of the tokens read first, then free ones. There are as many as a while takes, and more are made when these are used.

    growing: of `leaves_that_grow`, where nothing needs room if it is empty; lengths: tokens of each prompt; tokens: those that will
    be written at most.
    """

    def __init__(self, growing: set[tuple[str, str]], lengths: Sequence[int], tokens: int) -> None:
        self._growing, self.lengths = growing, list(lengths)
        self._longest = max(lengths)
        # the last token is not read
        self._most = self._longest + tokens - 1
        self.rows = self._enough(self._longest)

    def of_prompts(self, states: States) -> States:
        """States of `read_prompts`, with room, which replace those given: no two copies of all keys are in memory at once."""
        return self._changed(states, self._moved)

    @property
    def is_used(self) -> bool:
        """Whether the next token has no row."""
        return bool(self._growing) and self._longest >= self.rows

    def use(self) -> None:
        """Count a token of each sequence."""
        self._longest += 1

    def enlarge(self, states: States) -> States:
        """States with room, copied to more of it, which replace those given."""
        before, self.rows = self.rows, self._enough(self.rows + self.rows // 2)
        return self._changed(states, lambda leaf: _with_rows(leaf, self.rows - before))

    def fits(self, new: "Room") -> bool:
        """Whether another batch can take this room over: it is enough, and not so much that steps read many free rows."""
        return self._growing == new._growing and (not self._growing or new.rows <= self.rows <= 2 * new.rows)

    def take_over(self, new: "Room", states: States, of_new: States) -> None:
        """Copy the States of another batch with as many sequences, which fits, over `states`."""
        for layer, state in of_new.items():
            for name, leaf in state.items():
                target = states[layer][name]
                if (layer, name) in self._growing:
                    # what a row that had ended has left there may not be finite, and is multiplied by 0
                    target[:, leaf.shape[1] :].zero_()
                    target = target[:, : leaf.shape[1]]
                target.copy_(leaf)
        self._longest, self._most = new._longest, new._most

    def _enough(self, used: int) -> int:
        return -(-min(self._most, used + _ROOM) // _ROWS) * _ROWS

    def _changed(self, states: States, change: Callable[[Tensor], Tensor]) -> States:
        for layer, name in self._growing:
            states[layer][name] = change(states[layer][name])
        return states

    def _moved(self, leaf: Tensor) -> Tensor:
        """The last rows of each sequence become the first of more rows."""
        longest = leaf.shape[1]
        if min(self.lengths) < longest:
            first = longest - torch.tensor(self.lengths, device=leaf.device)
            # behind a shorter prompt's rows its last one stands again, until it is written over
            rows = (torch.arange(longest, device=leaf.device) + first[:, None]).clamp(max=longest - 1)
            leaf = leaf[torch.arange(len(leaf), device=leaf.device)[:, None], rows]
        return _with_rows(leaf, self.rows - longest)


def _with_rows(leaf: Tensor, free: int) -> Tensor:
    """[B, T, ...] with rows of zeros behind the others."""
    return F.pad(leaf, (*[0, 0] * (leaf.dim() - 2), 0, free)) if free else leaf
