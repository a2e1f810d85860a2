"""Needle heat maps of two small models: a Mamba and a Transformer that learn to answer questions about a text, and how far back.

Both learn the source of Python's standard library with statements strewn into it ("The number of the amber anchor is 48213."), each
of which is said again at the end of its document; documents have 128 to 512 tokens. `baton eval --long-context niah_single` asks at
lengths up to eight times as long, and draws docs/needles-mamba.png and docs/needles-transformer.png. The gate asks that each model
finds most needles in texts as long as those that it has seen: without that a map of longer ones says nothing.

    python benchmarks/needles.py [--steps 3000] [--folder FOLDER] [--tiny]
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from report import Report

from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.training.evaluation.long_context_tasks import Haystack, needle_statements

ROOT = Path(__file__).resolve().parent.parent
BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
SEEN = (128, 512)
"""Tokens of the documents that are learnt."""
NEEDLES = 6
"""In a longest document; as many fewer as one is shorter."""
MOST = 0.8
MIXERS: dict[str, dict[str, Any]] = {
    "mamba": {"pattern": ["mamba"], "mixers": {"mamba": {"d_state": 64}}, "n_layers": 8},
    "transformer": {
        "pattern": ["attention+swiglu"],
        "mixers": {"attention": {"heads": 4, "head_dim": 64}, "swiglu": {"hidden": 768}},
        "n_layers": 6,
    },
}


def baton(*words: str) -> None:
    done = subprocess.run([*BATON, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"baton {' '.join(words)}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def source_text(most: int) -> str:
    """Source of Python's standard library, of `most` characters."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        found.append(text)
        size += len(text)
        if size >= most:
            break
    return "\n".join(found)[:most]


def learnt(hay: Haystack, count: int) -> Iterator[str]:
    """Documents: text with statements in it, and all statements once more at its end, in another order."""
    draw = random.Random(0)
    for _ in range(count):
        length = draw.randrange(*SEEN)
        statements = needle_statements(draw, draw.randrange(1, max(2, NEEDLES * length // SEEN[1])))
        again = "\n".join(draw.sample(statements, len(statements)))
        places = [(draw.random(), statement) for statement in statements]
        yield hay.around(places, f"\n{again}\n", length, draw)


class Trainings:
    """Runs in a folder with their data."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.steps, self.tiny = folder, arguments.steps, arguments.tiny
        self.text = folder / "text.txt"
        text = source_text(100_000 if self.tiny else 4_000_000)
        self.text.write_text(text[-len(text) // 10 :])  # asked about; not learnt
        text, model = text[: -len(text) // 10], folder / "tokenizer.model"
        statements = "\n".join(needle_statements(random.Random(1), 300))
        train_tokenizer(iter([text, statements]), model, 400 if self.tiny else 2048)
        tokenizer = load_tokenizer(model)
        hay = Haystack(text, lambda some: len(tokenizer.encode(some)))
        with (folder / "documents.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": document}) + "\n" for document in learnt(hay, 300 if self.tiny else 40_000))
        baton("data", "prepare", str(folder / "documents.jsonl"), "--out", str(folder / "shards"), "--validation-fraction", "0.02")

    def train(self, name: str) -> Path:
        """A run to its end; its folder."""
        length, rows = 512, 4 if self.tiny else 64
        model: dict[str, Any] = {"d_model": 64 if self.tiny else 256, **MIXERS[name]}
        values = {
            "name": name,
            "directory": str(self.folder / name),
            "model": model | ({"n_layers": 1} if self.tiny else {}),
            "data": {"path": str(self.folder / "shards"), "tokenizer": str(self.folder / "tokenizer.model")},
            "training": {
                "steps": self.steps,
                "sequence_length": length,
                "global_batch_tokens": rows * length,
                "micro_batch_size": rows,
                "log_every": 50,
                "optimizer": {"lr": 1e-3},
                "schedule": {"kind": "cosine", "warmup_steps": self.steps // 20, "final_lr": 1e-4},
                "checkpoint": {"every": self.steps},
                "evaluation": {"every": 0},
            },
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        baton("train", str(file))
        return self.folder / name

    def asked(self, run: Path) -> list[dict[str, Any]]:
        """Rows {length, depth, score} of the run's model, which are also drawn."""
        lengths = "128,256" if self.tiny else "128,256,512,1024,2048,4096"
        picture = run / "needles.png" if self.tiny else ROOT / "docs" / f"needles-{run.name}.png"
        words = ["--text", str(self.text), "--lengths", lengths, "--depths", "5", "--samples", "2" if self.tiny else "32"]
        baton("eval", str(run), "--long-context", "niah_single", *words, "--batch", "160", "--plot", str(picture))
        row = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
        found: list[dict[str, Any]] = row["long_context"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--folder", type=Path, help="keeps data and runs (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="try the program on sizes that mean nothing; writes no results")
    arguments = parser.parse_args()
    arguments.steps = 2 if arguments.tiny else arguments.steps
    report = Report("needles", torch.cuda.get_device_name() if torch.cuda.is_available() else None, keep=not arguments.tiny)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trainings = Trainings(folder.absolute(), arguments)
        with ThreadPoolExecutor() as pool:
            runs = dict(zip(MIXERS, pool.map(trainings.train, MIXERS), strict=True))
        found = {name: trainings.asked(run) for name, run in runs.items()}
    compare(report, found, arguments.tiny)
    report.save()


def compare(report: Report, found: dict[str, list[dict[str, Any]]], tiny: bool) -> None:
    scores = {name: mean_scores(rows) for name, rows in found.items()}
    for name, by_length in scores.items():
        report.say(f"{name}: " + ", ".join(f"{length} tokens {score:.3f}" for length, score in by_length.items()))
    near = {name: min(score for length, score in by_length.items() if length <= SEEN[1]) for name, by_length in scores.items()}
    detail = f"needles that are found in texts of lengths that were learnt: {near}, each at least {MOST}"
    report.gate("needles", tiny or min(near.values()) >= MOST, detail)
    for length, score in scores["mamba"].items():
        peer = scores["transformer"][length]
        if peer:
            report.row(f"needles {length} tokens", "found", score, "a Transformer", peer, gate="needles")


def mean_scores(rows: list[dict[str, Any]]) -> dict[int, float]:
    """By length, over all depths."""
    lengths = sorted({row["length"] for row in rows})
    return {length: statistics.mean(row["score"] for row in rows if row["length"] == length) for length in lengths}


if __name__ == "__main__":
    main()
