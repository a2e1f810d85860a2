"""A trained model as a model of lm-evaluation-harness (lm_eval), whose tasks then score it.

Nothing is cut to a maximum length: a State has none. The State of a context is computed once for all of its continuations, and a
text is read in pieces. The numbers are those of lm_eval's own backend for transformers on the exported model.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor

from baton.training.evaluation.generation import Sampling, generate
from baton.training.evaluation.loaded_model import LoadedModel
from baton.training.evaluation.prompts import SCORED_TOKENS, read_prompts, take_rows

# its bootstrap otherwise forks this process, which may hold a GPU
os.environ.setdefault("DISABLE_MULTIPROC", "1")

MAX_GENERATED = 256
"""Tokens that a task which does not say gets to generate; lm_eval's own default."""


class HarnessModel(TemplateLM):
    """loaded: the model, with a tokenizer. batch: requests scored together.

    Attributes: `answering`, whether requests are being answered. What fails at another time is a task's file or its data.
    """

    def __init__(self, loaded: LoadedModel, batch: int = 16) -> None:
        super().__init__()
        self.answering = False
        assert loaded.tokenizer is not None
        self.loaded, self._tokenizer, self.batch = loaded, loaded.tokenizer, batch

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod_id

    @property
    def tokenizer_name(self) -> str:
        """Of lm_eval's caches of requests."""
        return self._tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._tokenizer.encode(string).tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation behind its context, and whether greedy decoding gives it."""
        self.answering = True
        found = super().loglikelihood(requests, disable_tqdm)
        self.answering = False
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of each continuation behind its context, and whether it is what greedy decoding gives."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # contexts of like length, and continuations of one context, side by side
        order = sorted(range(len(requests)), key=lambda n: (len(requests[n][1]), requests[n][1], len(requests[n][2])))
        for start in range(0, len(order), self.batch):
            some = order[start : start + self.batch]
            for n, score in zip(some, self._scores([requests[n][1] for n in some], [requests[n][2] for n in some]), strict=True):
                found[n] = score
        return found

    @torch.no_grad()
    def _scores(self, contexts: Sequence[list[int]], continuations: Sequence[list[int]]) -> list[tuple[float, bool]]:
        model, device = self.loaded.model, self.loaded.device
        distinct = {tuple(context): n for n, context in enumerate(dict.fromkeys(map(tuple, contexts)))}
        index = torch.tensor([distinct[tuple(context)] for context in contexts], device=device)
        hidden, states = read_prompts(model, list(distinct))
        assert hidden is not None, "one stage"
        longest = max(map(len, continuations))
        tokens = torch.zeros(len(contexts), longest, dtype=torch.int64)
        for row, continuation in enumerate(continuations):  # behind a continuation's end nothing is read
            tokens[row, : len(continuation)] = torch.tensor(continuation)
        tokens = tokens.to(device)
        totals = torch.zeros(len(contexts), dtype=torch.float64, device=device)
        greedy = torch.ones(len(contexts), dtype=torch.bool, device=device)
        lengths = torch.tensor([len(c) for c in continuations], device=device)
        pos = torch.tensor([len(c) for c in contexts], dtype=torch.int32, device=device)

        def score(hidden: Tensor, first: int) -> None:
            """Of the tokens from `first` on, each by the hidden vector before it, [rows, tokens, width]."""
            wanted = tokens[:, first : first + hidden.shape[1]]
            logits = model.logits(hidden)[..., : self.loaded.vocab_size]
            counted = torch.arange(first, first + hidden.shape[1], device=device) < lengths[:, None]
            chosen = torch.log_softmax(logits, dim=-1).gather(-1, wanted[..., None])[..., 0]
            totals.add_(torch.where(counted, chosen, 0.0).sum(1, dtype=torch.float64))
            greedy.logical_and_(((logits.argmax(-1) == wanted) | ~counted).all(1))

        score(hidden[index][:, None], 0)
        states, width = take_rows(states, index), max(1, SCORED_TOKENS // len(contexts))
        for first in range(0, longest - 1, width):
            piece = tokens[:, first : min(first + width, longest - 1)]
            places = pos[:, None] + torch.arange(first, first + piece.shape[1], dtype=torch.int32, device=device)
            hidden, states = model(piece, places, states)
            score(hidden, first + 1)
        return [(float(total), bool(same)) for total, same in zip(totals, greedy, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, behind an EOD token."""
        self.answering = True
        pairs = [((("", text)), [self.prefix_token_id], self.tok_encode(text)) for (text,) in (one.args for one in requests)]
        found = [total for total, _ in self._loglikelihood_tokens(pairs)]
        self.answering = False
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Text behind each context up to the first of its stop strings, its maximum of tokens, or the end of the document."""
        found = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for n, one in enumerate(requests):
            kinds.setdefault(repr(sorted(one.args[1].items())), []).append(n)
        for members in kinds.values():
            options = normalize_gen_kwargs(requests[members[0]].args[1], MAX_GENERATED)
            sampling = Sampling(0.0)
            if options["do_sample"]:
                sampling = Sampling(options.get("temperature", 1.0), options.get("top_k") or 0, options.get("top_p", 1.0))
            members.sort(key=lambda n: len(requests[n].args[0]))
            for start in range(0, len(members), self.batch):
                some = members[start : start + self.batch]
                stops, most = list(options["until"]), int(options["max_gen_toks"])
                self.answering = True
                texts = self._texts(some, requests, stops, most, sampling)
                self.answering = False
                for n, text in zip(some, texts, strict=True):
                    found[n] = text
        self.loaded.release()
        return found

    def _texts(
        self, chosen: Sequence[int], requests: Sequence[Instance], stops: Sequence[str], most: int, sampling: Sampling
    ) -> list[str]:
        """Of the requests with these numbers, which are also the seeds of their samples."""
        before = [self.tok_encode(requests[n].args[0]) or [self.prefix_token_id] for n in chosen]

        def text_of(row: int, ids: list[int]) -> str:
            return self._tokenizer.continuation(before[row], ids)

        def ended(row: int, ids: list[int]) -> bool:
            # a stop string is found as soon as it is whole; one token may hold more than its end
            return any(stop in text_of(row, ids) for stop in stops)

        ids = generate(
            self.loaded.model,
            before,
            tokens=most,
            vocab_size=self.loaded.vocab_size,
            stop=self.eot_token_id,
            sampling=sampling,
            seeds=chosen,
            ended=ended if stops else None,
            recorder=self.loaded.step_recorder,
        )
        texts = [text_of(row, written) for row, written in enumerate(ids)]
        for stop in stops:
            texts = [text.split(stop)[0] if stop else text for text in texts]
        return texts
