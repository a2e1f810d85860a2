"""Generates text with the recurrent step: constant memory and time per token for a context of any length."""

from dataclasses import replace

import torch
from torch import Tensor

from baton.models.lm import LanguageModel, States


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: list[int],
    *,
    tokens: int,
    vocab_size: int,
    stop: int | None,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    """Ids that follow the prompt: at most `tokens`, ending before `stop`.

    Args:
        prompt: ids, at least one; the first is the EOD token.
        vocab_size: ids of the tokenizer; padding is never sampled.
        temperature: 0: the most probable token.
        top_k: sample among the k most probable tokens; 0: among all.
        seed: the samples are a function of it.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    written: list[int] = []
    piece = torch.tensor([prompt], dtype=torch.int64, device=device)
    pos = torch.arange(len(prompt), dtype=torch.int32, device=device)[None]
    states: States | None = None
    whole_sequence = replace(model.forward_context, link=None)  # every context-parallel rank decodes all of it
    while len(written) < tokens:
        hidden, states = model.through_stages(piece, pos, states, whole_sequence)
        token = -1
        if hidden is not None:
            token = _sample(model.logits(hidden[0, -1])[:vocab_size].cpu(), temperature, top_k, generator)
        if model.pipeline is not None:
            token = int(model.pipeline.from_last(torch.tensor(token, device=device)))
        if token == stop:
            break
        written.append(token)
        piece = torch.tensor([[token]], dtype=torch.int64, device=device)
        pos = pos[:, -1:] + 1
    return written


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits = torch.where(logits >= logits.topk(min(top_k, len(logits))).values[-1], logits, -torch.inf)
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
