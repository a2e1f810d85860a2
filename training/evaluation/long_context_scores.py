"""Scores a model on questions about long texts (long_context_tasks), by the text that it generates."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from baton.training.evaluation.generation import Sampling, generate
from baton.training.evaluation.loaded_model import LoadedModel
from baton.training.evaluation.long_context_tasks import BY_DEPTH, Haystack, Sample, found_share, make_sample

_ANSWER_SLACK = 1.5
"""Generated tokens for each token of the answers: their order and what is between them is the model's choice."""

TOKENS_TOGETHER = 1 << 20
"""Tokens of prompts that are held at once."""


def score_tasks(
    loaded: LoadedModel,
    tasks: Sequence[str],
    text: str,
    lengths: Sequence[int],
    *,
    depths: int = 5,
    samples: int = 8,
    batch: int = 16,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Rows {task, length, depth, score, samples}. score: the share of the answers that greedy decoding gives, from 0 to 1.

    Args:
        loaded: a model with a tokenizer.
        text: running text around what is asked for; shorter ones are repeated.
        lengths: tokens of a prompt with the EOD token before it, at most; prompts are nearly as long.
        depths: places of the statement, evenly from the beginning to the end, in tasks that ask for one (BY_DEPTH). depth is None
            in rows of others.
        samples: prompts of each task, length and depth.
        batch: prompts decoded together; fewer where they are long.
        say: called with a line for each row.

    Raises ValueError for a text without any, and for a length that has no room for a task.
    """
    tokenizer = loaded.tokenizer
    assert tokenizer is not None

    def count(some: str) -> int:
        return len(tokenizer.encode(some))

    hay, rows = Haystack(text, count), []
    for task in tasks:
        places: Iterable[float | None] = [n / max(1, depths - 1) for n in range(depths)] if task in BY_DEPTH else [None]
        for length in lengths:
            for depth in places:
                made = [make_sample(task, hay, count, length - 1, depth or 0.0, f"{seed} {n}") for n in range(samples)]
                score = sum(_scores(loaded, made, batch)) / samples
                rows.append({"task": task, "length": length, "depth": depth, "score": score, "samples": samples})
                say(f"{task}, {length} tokens{'' if depth is None else f', depth {depth:.2f}'}: {score:.3f}")
    return rows


def _scores(loaded: LoadedModel, made: Sequence[Sample], batch: int) -> list[float]:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    found: list[float] = []
    prompts = [[tokenizer.eod_id, *tokenizer.encode(sample.prompt).tolist()] for sample in made]
    longest = max(len(tokenizer.encode(", ".join(sample.answers))) for sample in made)
    together = max(1, min(batch, TOKENS_TOGETHER // max(map(len, prompts))))
    for start in range(0, len(made), together):
        some = prompts[start : start + together]
        texts = generate(
            loaded.model,
            some,
            tokens=int(_ANSWER_SLACK * longest) + 4,
            vocab_size=loaded.vocab_size,
            stop=tokenizer.eod_id,
            sampling=Sampling(0),
            recorder=loaded.step_recorder,
        )
        for sample, prompt, ids in zip(made[start:], some, texts, strict=False):
            found.append(found_share(tokenizer.continuation(prompt, ids), sample.answers))
    loaded.release()
    return found
