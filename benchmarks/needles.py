"""Needle heat maps of two small models: a Gated DeltaNet and a Transformer that learn to answer questions about a text, and how far
back.

Both learn documents of up to 512 tokens: statements ("The number of the amber anchor is 48213."), said and said again, with lines
of Python packages between them. Keys and numbers are drawn anew for each document, and its lines begin at new places, so that
little of it can be learnt by heart. To look up is learnt from many repetitions that are near, and then goes further: half of the
documents consist of little else, in the others up to nine tenths are lines. `baton eval --long-context niah_single` asks at
lengths up to four times as long, about packages that were not learnt, and draws docs/needles-gated_delta_net.png and
docs/needles-transformer.png. The gate asks that each model finds most needles in texts as long as those that it has seen: without
that a map of longer ones says nothing. (A Mamba of eight layers of 256 channels found none after 1800 steps.)

    python benchmarks/needles.py [--steps 3000] [--folder FOLDER] [--cpu | --tiny]

--cpu: 128 channels and documents of up to 256 tokens, to see on two cores in an hour that the documents teach it; --tiny: two
steps, to see that the program runs. Neither writes results.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from report import Report

from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.training.evaluation.long_context_tasks import needle_statements

ROOT = Path(__file__).resolve().parent.parent
BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
MOST = 0.8
AGAIN = (1, 2)
"""How often a statement is said again."""
SHORTEST = 40
"""Tokens of a document."""
LINES = (0.1, 0.9)
"""Shares of lines in a document: that of one half of them, and the most in the others."""


@dataclass(frozen=True)
class Size:
    """What is learnt and asked. longest: tokens of a document; rows: of `longest` tokens in a batch; characters: of source text;
    lengths, samples: of prompts, as for `baton eval`."""

    steps: int
    longest: int
    rows: int
    d_model: int
    documents: int
    characters: int
    vocabulary: int
    lengths: str
    samples: int
    layers: dict[str, int]


GPU = Size(3000, 512, 64, 256, 120_000, 60_000_000, 4096, "128,256,512,1024,2048", 16, {"gated_delta_net": 6, "transformer": 6})
CPU = Size(1500, 256, 16, 128, 40_000, 20_000_000, 1024, "64,128,256", 16, {"gated_delta_net": 2, "transformer": 2})
TINY = Size(2, 160, 4, 64, 200, 200_000, 1024, "128,256", 2, {"gated_delta_net": 1, "transformer": 1})

MIXERS: dict[str, dict[str, Any]] = {
    "gated_delta_net": {"gated_delta_net": {"heads": 4, "d_key": 64, "d_value": 128}},
    "transformer": {"attention": {"head_dim": 32}},
}


def baton(*words: str) -> None:
    done = subprocess.run([*BATON, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"baton {' '.join(words)}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def source_lines(most: int) -> list[str]:
    """Lines of the installed packages' source, in the order of a draw of files, of `most` characters together."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).glob("*/**/*.py"))
    random.Random(0).shuffle(files)
    found: list[str] = []
    size = 0
    for path in [*files, *sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) < 200_000:  # tables of numbers are longer
            lines = [f"{line}\n" for line in text.split("\n") if len(line) < 200]
            found += lines
            size += sum(map(len, lines))
        if size >= most:
            break
    return found


def document(draw: random.Random, lines: Sequence[str], longest: int, tokens_of: tuple[float, float]) -> str:
    """Statements at random places, each of them once or twice more behind it, and runs of lines between them. tokens_of: tokens of
    a statement, and of a character of the lines."""
    near = draw.random() < 0.5
    length = 0.9 * draw.randint(SHORTEST, longest // 2 if near else longest)
    share = LINES[0] if near else draw.uniform(*LINES)
    said: list[tuple[float, str]] = []
    room = int((1 - share) * length / tokens_of[0])
    for statement in needle_statements(draw, max(1, room // (1 + AGAIN[0]))):
        first = draw.random()
        times = min(1 + draw.randint(*AGAIN), max(2, room - len(said)))
        said += [(first, statement), *((draw.uniform(first, 1), statement) for _ in range(times - 1))]
        if len(said) >= room:
            break
    characters = max(0.0, length - len(said) * tokens_of[0]) / tokens_of[1]
    parts, at = [], 0.0
    for place, statement in [*sorted(said), (1.0, "")]:
        parts += [*_run(draw, lines, (place - at) * characters), f"{statement}\n" if statement else ""]
        at = place
    return "".join(parts)


def _run(draw: random.Random, lines: Sequence[str], characters: float) -> list[str]:
    """Lines that follow each other, of about so many characters."""
    number, found = draw.randrange(len(lines)), list[str]()
    while characters > len(lines[number]) * draw.random():
        found.append(lines[number])
        characters -= len(lines[number])
        number = (number + 1) % len(lines)
    return found


def _documents(file: Path, lines: Sequence[str], size: Size, tokens_of: tuple[float, float], part: int, parts: int) -> None:
    """A part of all documents, as JSON lines."""
    draw = random.Random(part)
    with file.with_name(f"documents-{part}.jsonl").open("w") as out:
        for _ in range(size.documents // parts):
            out.write(json.dumps({"text": document(draw, lines, size.longest, tokens_of)}) + "\n")


class Trainings:
    """Runs in a folder with their data."""

    def __init__(self, folder: Path, size: Size, steps: int) -> None:
        self.folder, self.size, self.steps = folder, size, steps
        lines = source_lines(size.characters)
        self.text = folder / "text.txt"
        held = min(20_000, len(lines) // 10)
        self.text.write_text("".join(lines[:held]))  # asked about; not learnt
        lines, model = lines[held:], folder / "tokenizer.json"
        # so many that three digits are a token, where the vocabulary is large enough: a number of few is learnt sooner
        statements = "\n".join(statement for n in range(400) for statement in needle_statements(random.Random(f"{n}"), 300))
        some = "".join(lines[:60_000])
        train_tokenizer(iter([some, statements]), model, size.vocabulary, kind="hf-bpe")
        encode = load_tokenizer(model).encode
        tokens_of = len(encode(statements)) / (400 * 300), len(encode(some)) / len(some)
        parts = 8
        write = partial(_documents, folder / "documents", lines, size, tokens_of, parts=parts)
        with ProcessPoolExecutor(parts, mp_context=get_context("fork")) as pool:
            list(pool.map(write, range(parts)))
        files = [str(path) for path in sorted(folder.glob("documents-*.jsonl"))]
        baton("data", "prepare", *files, "--out", str(folder / "shards"), "--validation-fraction", "0.01")

    def train(self, name: str) -> Path:
        """A run to its end; its folder."""
        size = self.size
        mixers = MIXERS[name]
        pattern = ["+".join((*mixers, "swiglu"))]
        mixers = mixers | {"swiglu": {"multiple_of": 64}}
        model = {"d_model": size.d_model, "n_layers": size.layers[name], "pattern": pattern, "mixers": mixers}
        values = {
            "name": name,
            "directory": str(self.folder / name),
            "model": model,
            "data": {"path": str(self.folder / "shards"), "tokenizer": str(self.folder / "tokenizer.json")},
            "training": {
                "steps": self.steps,
                "sequence_length": size.longest,
                "global_batch_tokens": size.rows * size.longest,
                "micro_batch_size": size.rows,
                "log_every": 50,
                "optimizer": {"lr": 2e-3},
                "schedule": {"kind": "cosine", "warmup_steps": self.steps // 20, "final_lr": 2e-4},
                "checkpoint": {"every": self.steps},
                "evaluation": {"every": 0},
            },
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        baton("train", str(file))
        return self.folder / name

    def asked(self, run: Path, picture: Path) -> list[dict[str, Any]]:
        """Rows {length, depth, score} of the run's model, which are also drawn."""
        words = ["--text", str(self.text), "--lengths", self.size.lengths, "--depths", "5", "--samples", str(self.size.samples)]
        baton("eval", str(run), "--long-context", "niah_single", *words, "--batch", "80", "--plot", str(picture))
        row = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
        found: list[dict[str, Any]] = row["long_context"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, help=f"of each model (default {GPU.steps})")
    parser.add_argument("--folder", type=Path, help="keeps data and runs (default: a temporary one)")
    smaller = parser.add_mutually_exclusive_group()
    smaller.add_argument("--cpu", action="store_const", dest="size", const=CPU, default=GPU, help="sizes for a CPU; no results")
    smaller.add_argument("--tiny", action="store_const", dest="size", const=TINY, help="sizes that mean nothing; no results")
    arguments = parser.parse_args()
    size, keep = arguments.size, arguments.size is GPU
    report = Report("needles", torch.cuda.get_device_name() if torch.cuda.is_available() else None, keep=keep)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trainings = Trainings(folder.absolute(), size, arguments.steps or size.steps)
        with ThreadPoolExecutor() as pool:
            runs = dict(zip(MIXERS, pool.map(trainings.train, MIXERS), strict=True))
            pictures = [(ROOT / "docs" if keep else folder.absolute()) / f"needles-{name}.png" for name in MIXERS]
            found = dict(zip(MIXERS, pool.map(trainings.asked, runs.values(), pictures), strict=True))
    compare(report, found, size)
    report.save()


def compare(report: Report, found: dict[str, list[dict[str, Any]]], size: Size) -> None:
    scores = {name: mean_scores(rows) for name, rows in found.items()}
    for name, by_length in scores.items():
        report.say(f"{name}: " + ", ".join(f"{length} tokens {score:.3f}" for length, score in by_length.items()))
    near = {name: min(score for length, score in by_length.items() if length <= size.longest) for name, by_length in scores.items()}
    detail = f"needles that are found in texts of lengths that were learnt: {near}, each at least {MOST}"
    report.gate("needles", size is not GPU or min(near.values()) >= MOST, detail)
    for length, score in scores["gated_delta_net"].items():
        peer = scores["transformer"][length]
        if peer:
            report.row(f"needles {length} tokens", "found", score, "a Transformer", peer, gate="needles")


def mean_scores(rows: list[dict[str, Any]]) -> dict[int, float]:
    """By length, over all depths."""
    lengths = sorted({row["length"] for row in rows})
    return {length: statistics.mean(row["score"] for row in rows if row["length"] == length) for length in lengths}


if __name__ == "__main__":
    main()
