"""A trained model with its tokenizer on one device: logits, the loss of text, and generation. `baton.load` returns it.

Shapes: B sequences, T tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from baton.data_pipeline.tokenizer import Tokenizer
from baton.kernels.protocol import State
from baton.models.lm import LanguageModel, States
from baton.training.errors import RunError
from baton.training.evaluation.generation import Sampling, StepRecorder, generate, step_recorder
from baton.training.evaluation.prompts import SCORED_TOKENS


class SequenceStates(dict[str, State]):
    """States of a batch of sequences, by layer, with the position of each one's next token, `pos` int32 [B]."""

    def __init__(self, states: States, pos: Tensor) -> None:
        super().__init__(states)
        self.pos = pos


@dataclass(frozen=True)
class TextLoss:
    """loss: nats per predicted token. tokens: how many were predicted. bits_per_byte: of UTF-8; None for token ids."""

    loss: float
    tokens: int
    bits_per_byte: float | None


class LoadedModel:
    """`loaded(tokens)` are logits and States.

    Attributes:
        model: the module, (tokens [B, T], pos [B, T], States) -> (hidden, States); see baton.models.library.
        tokenizer: None for a run on a synthetic task, and for a folder without one.
        vocab_size: ids below it have logits and can be generated.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, tokenizer.vocab_size)

    @cached_property
    def step_recorder(self) -> StepRecorder | None:
        """Keeps the last step that was recorded, with its batch's States, so that batches of as many rows share it."""
        return step_recorder(self.model)

    def release(self) -> None:
        """Free the GPU memory that generation keeps for the next batch."""
        if self.step_recorder is not None:
            self.step_recorder.release()

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next(self.model.parameters()).device

    def __call__(self, tokens: Tensor, states: States | None = None, pos: Tensor | None = None) -> tuple[Tensor, SequenceStates]:
        """Logits float32 [B, T, vocab_size] of the token after each, and the States after the last. Waits for the GPU, to see
        whether all ids are in the vocabulary.

        Args:
            tokens: int64 [B, T] on the model's device. A document begins with the EOD token.
            states: of the tokens before; None: there are none.
            pos: int32 [B, T] position in the document; None: from 0, or from `states.pos` on.

        Raises ValueError for ids outside the vocabulary, for no tokens, and for States that are not this method's, without pos.
        """
        self._expect_ids("tokens", tokens)
        if pos is None:
            if states is not None and not isinstance(states, SequenceStates):
                raise ValueError("states: a plain dictionary does not say where its sequences are; give pos")
            ahead = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device).expand(tokens.shape)
            pos = ahead if states is None else ahead + states.pos[:, None]
        hidden, after = self.model(tokens, pos, states)
        return self.model.logits(hidden)[..., : self.vocab_size], SequenceStates(after, pos[:, -1] + 1)

    @torch.no_grad()
    def loss(self, text: str | Sequence[int] | Tensor) -> TextLoss:
        """Negative log-likelihood of a document, or of token ids.

        text: a document; its tokens and the EOD token after it are predicted, the first behind an EOD token, as in training. Or ids
        int [T] or [B, T], of which all but the first are predicted.

        Memory does not grow with the length, unless the State does. Raises RunError for text without a tokenizer, and for fewer
        than two ids; ValueError for ids outside the vocabulary.
        """
        if isinstance(text, str):
            tokenizer = self._require_tokenizer()
            end = [tokenizer.eod_id]
            ids = torch.from_numpy(np.concatenate([end, tokenizer.encode(text), end]).astype(np.int64))[None]
        else:
            ids = torch.atleast_2d(torch.as_tensor(text, dtype=torch.int64))
        if ids.shape[1] < 2:
            raise RunError("tokens: fewer than two ids, so none is predicted; give the EOD token before the first")
        self._expect_ids("text", ids)
        ids = ids.to(self.device)
        total, states = torch.zeros((), dtype=torch.float64, device=self.device), None
        width = max(1, SCORED_TOKENS // len(ids))
        pos = torch.arange(ids.shape[1] - 1, dtype=torch.int32, device=self.device).expand(len(ids), -1)
        for start in range(0, ids.shape[1] - 1, width):
            piece = slice(start, min(start + width, ids.shape[1] - 1))
            hidden, states = self.model(ids[:, piece], pos[:, piece], states)
            total += self.model.loss(hidden, ids[:, 1:][:, piece])
        nats, count = float(total), ids[:, 1:].numel()
        size = len(text.encode()) if isinstance(text, str) else 0
        return TextLoss(nats / count, count, nats / math.log(2) / size if size else None)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> list[str]:
        """Text that goes on from each prompt, up to the end of the document or max_new_tokens.

        Args:
            prompts: of any lengths; "" is the beginning of a document.
            max_new_tokens: of each prompt; 0: none.
            temperature: 0: the most probable token each time.
            top_k: sample among the k most probable tokens; 0: among all.
            top_p: sample among the most probable tokens whose probabilities together first reach p.
            seed: a prompt's sample is a function of it and of the prompt's place in `prompts`.
            batch_size: prompts decoded together; None: all.

        Raises RunError without a tokenizer; ValueError for an argument that is none of these.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts) if isinstance(prompts, Iterable) else [prompts]
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"prompts: expected a string or strings, found {prompts!r:.80}")
        sampling = Sampling(temperature, top_k, top_p)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give 0 or more")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give 1 or more, or None for all prompts together")
        size = batch_size or max(1, len(prompts))
        batches = self.generate_batches(prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, batch_size=size)
        return [text for texts in batches for text in texts]

    def generate_batches(
        self, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling, seed: int, batch_size: int
    ) -> Iterator[list[str]]:
        """As `generate`, each batch as soon as it is written."""
        tokenizer, size = self._require_tokenizer(), batch_size
        before = [[tokenizer.eod_id, *tokenizer.encode(prompt).tolist()] for prompt in prompts]
        for start in range(0, len(prompts), size):
            some = before[start : start + size]
            ids = generate(
                self.model,
                some,
                tokens=max_new_tokens,
                vocab_size=self.vocab_size,
                stop=tokenizer.eod_id,
                sampling=sampling,
                seeds=[row_seed(seed, start + n) for n in range(len(some))],
                recorder=self.step_recorder,
            )
            yield [tokenizer.continuation(a, b) for a, b in zip(some, ids, strict=True)]

    def _expect_ids(self, name: str, ids: Tensor) -> None:
        if not ids.numel():
            raise ValueError(f"{name}: no token, of shape {tuple(ids.shape)}; give at least one")
        least, most = (int(x) for x in ids.aminmax())
        if least < 0 or most >= self.model.vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(f"{name}: id {wrong} is outside the model's vocabulary, 0 to {self.model.vocab_size - 1}")

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RunError("there is no tokenizer, so no text; give tokenizer=PATH to baton.load, or token ids")
        return self.tokenizer


def row_seed(seed: int, row: int) -> int:
    """The seed of a row's samples, below 2^64; that of row 0 is the seed itself."""
    seed &= (1 << 64) - 1
    return seed if row == 0 else int(np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0])
