"""`baton generate`: generates text from a run's checkpoint in a single process, whatever layout wrote it."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from baton.data_pipeline.config import ShardsConfig
from baton.launcher.errors import ConfigError
from baton.launcher.inputs import read_text
from baton.launcher.load import load_model
from baton.launcher.run_directory import read_config
from baton.training.evaluation.generation import Sampling


@dataclass(frozen=True)
class Sample:
    """Text that goes on from a prompt. number: of the prompt's samples, from 0."""

    prompt: str
    number: int
    text: str


def generate_text(
    folder: Path,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int,
    samples: int = 1,
    batch: int = 16,
    step: int | None = None,
    device: str = "auto",
) -> Iterator[Sample]:
    """Texts that continue each prompt, `samples` of each one after the other; `batch` of them are decoded together, and come before
    the next ones are begun.

    Raises CheckpointError if the run has no valid checkpoint, and ConfigError if it was not trained on text.
    """
    if not (folder / "config.json").exists() and not (folder / "manifest.json").exists():
        config = read_config(folder / "config.yaml")
        if not isinstance(config.data, ShardsConfig):
            raise ConfigError(
                f"{folder}: the run learns the synthetic task {config.data.kind}, which has no text to write; give a run on "
                f"data.kind=shards (this one's accuracy is in its metrics.jsonl)"
            )
    loaded = load_model(folder, step=step, device=device, say=lambda text: print(text, file=sys.stderr))
    if loaded.tokenizer is None:
        raise ConfigError(f"{folder}: there is no tokenizer, so no text; put the model's tokenizer.model or tokenizer.json there")
    wanted = [(prompt, number) for prompt in prompts for number in range(samples)]
    batches = loaded.generate_batches(
        [prompt for prompt, _ in wanted],
        max_new_tokens=tokens,
        sampling=Sampling(temperature, top_k, top_p),
        seed=seed,
        batch_size=batch,
    )
    for (prompt, number), text in zip(wanted, chain.from_iterable(batches), strict=True):
        yield Sample(prompt, number, text)


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: its lines, or of a .jsonl file each line's string, or its object's "prompt".

    Raises ConfigError for a file that cannot be read, is not UTF-8, or has no prompt.
    """
    lines = read_text(path, "--prompts").splitlines()
    if path.suffix == ".jsonl":
        lines = [_prompt_of(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts: {path}: no prompt in it; write one a line")
    return lines


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    found = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise ConfigError(f'--prompts: {path}: line {number} is neither a JSON string nor an object with "prompt"; correct it')
    return found


def check_prompt(prompt: str) -> None:
    """Raises ConfigError for a prompt that was not UTF-8 on the command line; Python passes invalid bytes on as lone surrogates."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        byte, position = ord(prompt[error.start]), len(prompt[: error.start].encode("utf-8"))
        what = f"byte 0x{byte - 0xDC00:02x}" if 0xDC80 <= byte <= 0xDCFF else f"the lone surrogate U+{byte:04X}"
        raise ConfigError(
            f"--prompt: {what} at byte {position} is not UTF-8; give the text in UTF-8, as `iconv -t UTF-8` makes it"
        ) from None
