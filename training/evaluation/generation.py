"""Generates text with the recurrent step: constant memory and time per token for a context of any length, except where full
attention reads the keys and values of all tokens before. Prompts of unequal length share a batch without padding (prompts.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baton.models.lm import LanguageModel, States
from baton.parallel.cast_weights import CastWeightCache
from baton.training.errors import RunError
from baton.training.evaluation.prompts import Room, read_prompts, rows_of_tokens, take_rows
from baton.training.step.graph_recorder import CudaGraphRecorder, GraphRecorder, Run

_RECORDED_STEPS = 8
"""Steps that must be left to record one: recording takes about as long as three that are not recorded."""

_WEIGHT_BITS = 40
"""Probabilities are drawn from as integers of so many bits, whose sums are exact and therefore alike on every device."""


_DRAWN = 1024
"""Tokens for which numbers are drawn at once, so that memory does not depend on how many may be written."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    temperature: 0: the most probable token. top_k: among the k most probable tokens; 0: among all. top_p: among the most probable
    tokens whose probabilities together first reach p, after temperature and top_k. Raises ValueError for other values.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: give 0 for the most probable token, or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: give 0 for all tokens, or how many to draw among")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: give a probability above 0, at most 1")


class StepRecorder:
    """Records the steps of `generate`, which are then replayed without Python.

    The last recorded step is kept with its batch's States, and replayed by later calls with as many rows, until `release` or as
    long as this object lives. make: makes what records functions on a device.
    """

    def __init__(self, make: Callable[[torch.device], GraphRecorder]) -> None:
        self.make = make
        self._kept: _Decoding | None = None

    def resume(self, new: "_Decoding") -> "_Decoding":
        """What is kept, going on with the contents of `new`, if it is of the same kind; otherwise `new`."""
        kept, self._kept = self._kept, None
        if kept is None or kept.takes_over(new):
            return kept or new
        kept.release()
        return new

    def make_room(self, rows: int, sampling: Sampling, vocab_size: int, room: Room) -> None:
        """Free what is kept if it does not fit a batch that is about to be read."""
        kept = self._kept
        if kept is not None and not (kept.kind == (rows, sampling, vocab_size) and kept.room.fits(room)):
            self.release()

    def keep(self, decoding: "_Decoding") -> None:
        """Keep a batch whose text is written."""
        self._kept = decoding

    def release(self) -> None:
        """Free what is kept."""
        if self._kept is not None:
            self._kept.release()
            self._kept = None


def step_recorder(model: LanguageModel) -> StepRecorder | None:
    """Of a model's steps: CUDA graphs on a GPU; None on a CPU, and over pipeline stages, which exchange messages in every step."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    if not on_gpu or model.pipeline is not None:
        return None
    # a step leaves no reference cycles; collecting garbage takes much longer than a step
    return StepRecorder(partial(CudaGraphRecorder, frees_memory=False))


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    vocab_size: int,
    stop: int | None,
    sampling: Sampling = Sampling(),
    seeds: Sequence[int] | None = None,
    ended: Callable[[int, list[int]], bool] | None = None,
    recorder: StepRecorder | None = None,
) -> list[list[int]]:
    """Ids that follow each prompt: at most `tokens`, ending before `stop`.

    A row's ids are a function of its prompt and its seed, whatever else is in the batch, as far as matmuls of another size round
    alike.

    Args:
        prompts: ids, at least one each; the first is the EOD token. Equal prompts are read once.
        vocab_size: ids of the tokenizer; padding is never sampled.
        seeds: of each row; None: 0 for all.
        ended: called with a row's number and its ids so far; the row ends where it returns True.
        recorder: of this model's steps (`step_recorder`); None: no step is recorded.

    Raises RunError if logits are not finite.
    """
    written: list[list[int]] = [[] for _ in prompts]
    if tokens < 1 or not prompts:
        return written
    device = next(model.parameters()).device
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    place = {prompt: n for n, prompt in enumerate(distinct)}
    index = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)
    room = Room(rows_of_tokens(model), [len(prompt) for prompt in prompts], tokens)
    if recorder is not None:
        recorder.make_room(len(prompts), sampling, vocab_size, room)
    hidden, states = read_prompts(model, distinct)
    if len(distinct) < len(prompts):
        hidden, states = None if hidden is None else hidden[index], take_rows(states, index)
    draws = Draws(seeds or [0] * len(prompts), tokens, device)
    decoding = _Decoding(
        model,
        states,
        room,
        draws,
        sampling,
        vocab_size,
        None if recorder is None else recorder.make,
    )
    del states
    if recorder is not None:
        decoding = recorder.resume(decoding)
    finished = False
    try:
        chosen = decoding.first(hidden)
        numbers = list(range(len(prompts)))
        alive = set(numbers)
        while True:
            for row, token in zip(numbers, chosen, strict=True):
                if row not in alive:
                    continue
                if token < 0:
                    raise RunError(f"logits are not finite after {len(prompts[row]) + len(written[row])} tokens of prompt {row}")
                if token != stop:
                    written[row].append(token)
                if token == stop or len(written[row]) == tokens or (ended is not None and ended(row, written[row])):
                    alive.remove(row)
            if not alive:
                finished = True
                break
            if len(alive) < len(numbers) and decoding.shrinks_to(len(alive)):
                kept = [n for n, row in enumerate(numbers) if row in alive]
                numbers = [numbers[n] for n in kept]
                decoding.keep(kept)
            chosen = decoding.step()
    finally:
        if recorder is not None and finished and decoding.is_recorded:
            recorder.keep(decoding)
        else:
            decoding.release()
    return written


class _Weights:
    """What a recorded step reads besides its own memory: parameters, and their copies in the compute dtype, which are held here so
    that nothing else takes their place."""

    def __init__(self, model: LanguageModel) -> None:
        self._places = tuple((p.data_ptr(), None if p.is_inference() else p._version) for p in model.parameters())
        self._copies = tuple(m._cast_weight_cache for m in model.modules() if isinstance(m, CastWeightCache))

    def still_are_of(self, model: LanguageModel) -> bool:
        """Whether the model's are the same; a copy that was dropped since is not."""
        now = _Weights(model)
        return self._places == now._places and all(a is b for a, b in zip(self._copies, now._copies, strict=True))


class Draws:
    """A number uniform in [0, 1) for each row and token, of the row's seed: float64 [B] on the device, `left` times more. The
    generators are the CPU's, whose draws are the same beside every device."""

    def __init__(self, seeds: Sequence[int], tokens: int, device: torch.device) -> None:
        self.left, self.device = tokens, device
        self._generators = [torch.Generator(device="cpu").manual_seed(seed) for seed in seeds]
        self._drawn = torch.empty(len(seeds), 0, dtype=torch.float64, device=device)
        self._used = 0

    def next(self) -> Tensor:
        """Of the next token."""
        if self._used == self._drawn.shape[1]:
            some = min(_DRAWN, self.left)
            rows = [torch.rand(some, dtype=torch.float64, generator=generator) for generator in self._generators]
            self._drawn, self._used = torch.stack(rows).to(self.device), 0
        self._used += 1
        self.left -= 1
        return self._drawn[:, self._used - 1]

    def keep(self, rows: Sequence[int]) -> None:
        """Leave all other rows out."""
        self._generators = [self._generators[row] for row in rows]
        self._drawn = self._drawn[torch.tensor(rows, device=self.device)]


class _Chosen:
    """Tokens on their way from the device: int64 [B] as they are now, whatever is written over them."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens.to("cpu", non_blocking=True, copy=True)
        self._rows: Sequence[int] | None = None
        self._event = torch.cuda.Event() if tokens.is_cuda else None
        if self._event is not None:
            self._event.record()

    def keep(self, rows: Sequence[int]) -> None:
        """Leave all other rows out."""
        self._rows = rows if self._rows is None else [self._rows[row] for row in rows]

    def wait(self) -> None:
        """Until they are there, and all that was launched before them is done."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> list[int]:
        self.wait()
        tokens: list[int] = self._tokens.tolist()
        return tokens if self._rows is None else [tokens[row] for row in self._rows]


class _Decoding:
    """Rows of a batch that are decoded together: each one's last token and position, and the States of the tokens before it.

    States, of `read_prompts`, which get `room`, and draws, one for each token, are on the model's device. Of recorded steps one is
    launched before the tokens of the one before are read, so that the device does not wait for what is done with them; where these
    end the text, it was for nothing.
    """

    def __init__(
        self,
        model: LanguageModel,
        states: States,
        room: Room,
        draws: Draws,
        sampling: Sampling,
        vocab_size: int,
        recorder: Callable[[torch.device], GraphRecorder] | None,
    ) -> None:
        self.room = room
        pos = torch.tensor(room.lengths, dtype=torch.int32, device=draws.device)
        self._model, self._states, self._pos, self._draws = model, self.room.of_prompts(states), pos, draws
        self._sampling, self._vocab_size, self._made = sampling, vocab_size, recorder
        # every context-parallel rank decodes all of a sequence
        self._context = replace(model.forward_context, link=None, overwrite_states=True)
        self._token = torch.zeros(len(pos), dtype=torch.int64, device=pos.device)
        self._draw = draws.next().clone()
        self._inference = torch.is_inference_mode_enabled()
        self._recorded_weights: _Weights | None = None
        self._recorder: GraphRecorder | None = None
        self._replay: Run | None = None
        self._ahead: _Chosen | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether its steps are replayed."""
        return self._replay is not None

    @property
    def kind(self) -> tuple[int, Sampling, int]:
        """Rows, which change where some are left out, and how tokens are chosen."""
        return len(self._pos), self._sampling, self._vocab_size

    def takes_over(self, new: "_Decoding") -> bool:
        """Go on with the rows of a new batch where they fit what is recorded; whether they do."""
        fits = self.kind == new.kind and self.room.fits(new.room) and self._inference == new._inference
        if not fits or self._recorded_weights is None or not self._recorded_weights.still_are_of(self._model):
            return False
        self._ahead = None
        self.room.take_over(new.room, self._states, new._states)
        self._pos.copy_(new._pos)
        self._draws = new._draws
        self._draw.copy_(new._draw)
        return True

    def first(self, hidden: Tensor | None) -> list[int]:
        """The token after each prompt. hidden: of the prompts' last tokens [B, d_model]; None except on the last stage."""
        self._choose(hidden)
        return self._token.tolist()

    def step(self) -> list[int]:
        """The token after the last of each row; negative where logits are not finite."""
        chosen, self._ahead = self._ahead or self._launch(), None
        if self._replay is not None and self._draws.left and not self.room.is_used:
            self._ahead = self._launch()
        return chosen.read()

    def _launch(self) -> _Chosen:
        if self.room.is_used:
            self.release()
            self._states = self.room.enlarge(self._states)
        self.room.use()
        self._draw.copy_(self._draws.next())
        if self._replay is not None:
            self._replay()
        elif self._made is not None and self._draws.left >= _RECORDED_STEPS:
            self._recorder = self._made(self._pos.device)
            self._recorder.warm_up(self._run)  # which is this step
            self._replay = self._recorder.record(self._run)
            self._recorded_weights = _Weights(self._model)
        else:
            self._run()
        return _Chosen(self._token)

    def shrinks_to(self, rows: int) -> bool:
        """Whether the others are left out: recorded steps have all rows until half of them have ended."""
        return self._replay is None or 2 * rows <= len(self._pos)

    def keep(self, rows: Sequence[int]) -> None:
        """Leave all other rows out."""
        self.release()
        index = torch.tensor(rows, device=self._pos.device)
        self._states = take_rows(self._states, index)
        self._token, self._pos, self._draw = (x[index] for x in (self._token, self._pos, self._draw))
        self._draws.keep(rows)
        if self._ahead is not None:
            self._ahead.keep(rows)

    def release(self) -> None:
        """Free what was recorded."""
        if self._ahead is not None:
            self._ahead.wait()
        self._replay = None
        if self._recorder is not None:
            self._recorder.release()
            self._recorder = None

    def _run(self) -> None:
        # a row that has ended goes on as long as steps are recorded, also where its logits are not finite
        tokens = self._token.clamp(min=0)[:, None]
        hidden, after = self._model.through_stages(tokens, self._pos[:, None], self._states, self._context)
        if self._recorder is None:
            self._states = after
        else:  # a replay reads them where this step has read them
            for layer, state in after.items():
                for name, leaf in state.items():
                    if leaf.data_ptr() != self._states[layer][name].data_ptr():  # not written over it
                        self._states[layer][name].copy_(leaf)
        self._pos += 1
        self._choose(None if hidden is None else hidden[:, -1])

    def _choose(self, hidden: Tensor | None) -> None:
        chosen = self._token
        if hidden is not None:
            chosen = choose(self._model.logits(hidden)[:, : self._vocab_size], self._sampling, self._draw)
        if self._model.pipeline is not None:
            chosen = self._model.pipeline.from_last(chosen)
        self._token.copy_(chosen)


def choose(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """Ids int64 [B] for logits float32 [B, vocab]; -1 where logits are not finite.

    draws: float64 [B] uniform in [0, 1): the token at that part of the summed probabilities is chosen.
    """
    finite = logits.amax(dim=-1).isfinite()
    if sampling.temperature < torch.finfo(logits.dtype).tiny:  # or 0
        return torch.where(finite, logits.argmax(dim=-1), -1)
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[1])).values[:, -1:]
        logits = torch.where(logits >= least, logits, -torch.inf)
    # what is divided is at most 0: a small temperature may make it infinite, and its probability 0
    probabilities = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        weights = _integers(ordered)
        before = weights.cumsum(dim=-1) - weights
        probabilities = torch.zeros_like(probabilities).scatter(
            1, ids, torch.where(before < max(1, int(sampling.top_p * 2**_WEIGHT_BITS)), ordered, 0.0)
        )
    sums = torch.where(finite[:, None], _integers(probabilities), 1).cumsum(dim=-1)
    at = (draws[:, None] * sums[:, -1:]).to(torch.int64).minimum(sums[:, -1:] - 1)
    return torch.where(finite, torch.searchsorted(sums, at, right=True)[:, 0], -1)


def _integers(probabilities: Tensor) -> Tensor:
    return (probabilities.double() * 2**_WEIGHT_BITS).to(torch.int64)
