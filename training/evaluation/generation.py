"""Generates text with the recurrent step: constant memory and time per token for a context of any length.

Prompts of unequal length share a batch without padding: all rows are read up to the end of the shortest prompt, the others go on to
the end of the next longer one, and so on. So each State is that of the prompt alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.models.lm import LanguageModel, States

PREFILL_TOKENS = 16384
"""Tokens of all rows together in one forward pass over prompts, which bounds its memory."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    temperature: 0: the most probable token. top_k: among the k most probable tokens; 0: among all. top_p: among the most probable
    tokens whose probabilities together first reach p, after temperature and top_k.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


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
) -> list[list[int]]:
    """Ids that follow each prompt: at most `tokens`, ending before `stop`.

    A row's ids are a function of its prompt and its seed, whatever else is in the batch, as far as matmuls of another size round
    alike.

    Args:
        prompts: ids, at least one each; the first is the EOD token. Equal prompts are read once.
        vocab_size: ids of the tokenizer; padding is never sampled.
        seeds: of each row; None: 0 for all.
        ended: called with a row's number and its ids so far; the row ends where it returns True.
    """
    written: list[list[int]] = [[] for _ in prompts]
    generators = [torch.Generator(device="cpu").manual_seed(seed) for seed in seeds or [0] * len(prompts)]
    whole_sequence = replace(model.forward_context, link=None)  # every context-parallel rank decodes all of it
    device = next(model.parameters()).device
    for batch in batches_of_prompts(model, prompts):
        distinct = list(dict.fromkeys(tuple(prompts[row]) for row in batch))
        place = {prompt: n for n, prompt in enumerate(distinct)}
        index = torch.tensor([place[tuple(prompts[row])] for row in batch], device=device)
        hidden, states = read_prompts(model, distinct)
        hidden, states = None if hidden is None else hidden[index], take_rows(states, index)
        pos = torch.tensor([len(prompts[row]) for row in batch], dtype=torch.int32, device=device)
        rows = list(batch)
        while True:
            chosen = torch.zeros(len(rows), dtype=torch.int64, device=device)
            if hidden is not None:
                logits = model.logits(hidden)[:, :vocab_size]
                chosen = _sample(logits, sampling, [generators[row] for row in rows]).to(device)
            if model.pipeline is not None:
                chosen = model.pipeline.from_last(chosen)
            kept = []
            for n, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
                if token == stop:
                    continue
                written[row].append(token)
                if len(written[row]) < tokens and (ended is None or not ended(row, written[row])):
                    kept.append(n)
            if not kept:
                break
            if len(kept) < len(rows):
                index = torch.tensor(kept, device=device)
                rows, chosen, pos, states = [rows[n] for n in kept], chosen[index], pos[index], take_rows(states, index)
            last, states = model.through_stages(chosen[:, None], pos[:, None], states, whole_sequence)
            hidden = None if last is None else last[:, -1]
            pos = pos + 1
    return written


@torch.no_grad()
def read_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> tuple[Tensor | None, States]:
    """Hidden vectors of each prompt's last token [B, d_model] (None except on the last pipeline stage), and the prompts' States.

    Prompts of a model whose State grows must be equally long (`batches_of_prompts`).
    """
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
    together = {
        layer: {name: torch.cat([states[layer][name] for _, states in ends])[index] for name in state}
        for layer, state in ends[0][1].items()
    }
    hiddens = [hidden for hidden, _ in ends if hidden is not None]
    return (torch.cat(hiddens)[index] if hiddens else None), together


def batches_of_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows that can be decoded together: all of them, or those of equal length where a State grows with its sequence."""
    if not any(mixer.state_grows for mixer in model.config.mixers.values()):
        return [list(range(len(prompts)))] if prompts else []
    of_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        of_length.setdefault(len(prompt), []).append(row)
    return list(of_length.values())


def take_rows(states: States, rows: Tensor | slice) -> States:
    """States of some sequences of a batch."""
    return {layer: {name: leaf[rows] for name, leaf in state.items()} for layer, state in states.items()}


def _sample(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Ids int64 [B] drawn from logits [B, vocab], each row with its generator. On the CPU, where draws do not depend on the GPU."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.cpu()
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[1])).values[:, -1:]
        logits = torch.where(logits >= least, logits, -torch.inf)
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        ordered = torch.where(ordered.cumsum(dim=-1) - ordered < sampling.top_p, ordered, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(1, ids, ordered)
    return torch.cat([torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generators, strict=True)])
