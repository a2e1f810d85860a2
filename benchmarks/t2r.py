"""A Transformer finetuned into recurrent models (T2R), in small: as good as from scratch, with a fifth of the tokens?

A Transformer++ learns the source of Python's standard library, with --packages also that of the installed packages. Its weights
begin a GSA, a GLA, a RetNet and a Gated DeltaNet (`baton export`, `baton import --to`), which learn on for a fifth of the tokens
that each of these models gets from scratch; GSA also with the activations of queries, keys and values that it has from scratch.
All schedules end at the same learning rate, and validation losses are of the same held-out files. The gate asks that the
Transformer itself ends below every model from scratch or within 2 % of it: a conversion cannot be better than what it begins with.
The losses over tokens are drawn into docs/t2r.png.

    python benchmarks/t2r.py [--steps 800] [--packages] [--together 3] [--only gsa,gla] [--folder FOLDER] [--tiny]
"""

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib
import torch
import yaml
from report import Report

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.training.monitoring.metrics import read_metrics

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
PART = 5
"""From scratch a model gets so many times the tokens of a finetuned one."""
AGREE = 1.02
WIDTH, LAYERS, HEADS = 256, 6, 4
HEAD = {"heads": HEADS, "d_key": WIDTH // HEADS, "d_value": WIDTH // HEADS}
SCRATCH: dict[str, dict[str, Any]] = {
    "gsa": {"heads": HEADS, "head_dim": WIDTH // HEADS, "slots": 64},
    "gla": HEAD,
    "retnet": HEAD,
    "gated_delta_net": HEAD,
}
"""Mixers from scratch, with heads of the Transformer's sizes; all else as by default."""
WITH_ACTIVATIONS = {"feature_map": "silu", "value_activation": "silu", "output_activation": "silu"}
FINETUNED = {"gsa": {}, "gsa, with activations": WITH_ACTIVATIONS, "gla": {}, "retnet": {}, "gated_delta_net": {}}
"""Converted models, and settings of the mixer that are changed behind the conversion."""


def baton(*words: str) -> None:
    done = subprocess.run([*BATON, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"baton {' '.join(words)}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


class Trainings:
    """Runs in a folder with their data."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.steps, self.tiny = folder, arguments.steps, arguments.tiny
        self.tokens = 256 if arguments.tiny else 32768
        self._text(arguments.packages)

    def _text(self, packages: bool) -> None:
        shards = self.folder / "shards"
        words = [
            "data",
            "prepare",
            *([sysconfig.get_paths()["purelib"]] if packages else []),
            sysconfig.get_paths()["stdlib"],
            "--out",
            str(shards),
            "--include",
            "json/*.py" if self.tiny else "*.py",
        ]
        for name in ("site-packages", "dist-packages", "test", "tests", "idle_test"):
            words += ["--exclude", name]
        baton(*words, "--shard-bytes", "2000000", "--validation-fraction", "0.2" if self.tiny else "0.01" if packages else "0.03")
        some = islice(documents(Dataset.open(shards), "train"), 0, None, 10 if packages else 1)
        train_tokenizer(some, self.folder / "tokenizer.model", 400 if self.tiny else 4096)

    def train(self, name: str, model: Any, steps: int, **training: Any) -> Path:
        """A run to its end; its folder. model: a group of settings, or a file of them."""
        length = 64 if self.tiny else 512
        values = {
            "name": name,
            "directory": str(self.folder / name),
            "model": model,
            "data": {"path": str(self.folder / "shards"), "tokenizer": str(self.folder / "tokenizer.model")},
            "training": {
                "steps": steps,
                "sequence_length": length,
                "global_batch_tokens": self.tokens,
                "micro_batch_size": self.tokens // length,
                "log_every": 50,
                "optimizer": {"lr": 2e-3},
                "schedule": {"kind": "cosine", "warmup_steps": steps // 20, "final_lr": 2e-5},
                "checkpoint": {"every": steps},
                "evaluation": {
                    "every": max(1, self.steps // (5 * PART)),
                    "tokens": 1000 if self.tiny else 1_000_000,
                    "sample_tokens": 0,
                },
                **training,
            },
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        baton("train", str(file))
        return self.folder / name

    def scratch(self, kind: str) -> Path:
        return self.train(f"{kind}-scratch", frame(kind, SCRATCH[kind]), self.steps)

    def finetuned(self, name: str, exported: Path) -> Path:
        kind, place = name.partition(",")[0], self.folder / name.replace(", ", "-").replace(" ", "-")
        start = place.with_name(f"{place.name}-start")
        baton("import", str(exported), "--out", str(start), "--to", kind)
        model = yaml.safe_load(start.with_suffix(".yaml").read_text())
        model["mixers"][kind] |= FINETUNED[name]
        weights = {"file": str(start.with_suffix(".safetensors")), "missing": "initialise"}
        return self.train(f"{place.name}-finetuned", model, self.steps // PART, initial_weights=weights)


def frame(kind: str, mixer: dict[str, Any]) -> dict[str, Any]:
    """The Transformer's layers with another mixer."""
    sizes = {"d_model": WIDTH, "n_layers": LAYERS, "pattern": [f"{kind}+swiglu"], "init_std": 0.02}
    return {**sizes, "mixers": {kind: mixer, "swiglu": {"hidden": 3 * WIDTH}}}


def losses(run: Path) -> list[tuple[int, float]]:
    """(tokens, validation loss) of a run."""
    return [(row["tokens"], row["loss"]) for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "evaluation"]


def draw(runs: dict[str, Path], out: Path) -> None:
    """Losses from scratch and finetuned, a kind to a panel."""
    kinds = [kind for kind in SCRATCH if f"{kind} from scratch" in runs]
    figure, panels = plt.subplots(1, len(kinds), figsize=(3.6 * len(kinds), 3.4), layout="constrained", sharey=True, squeeze=False)
    for axes, kind in zip(panels[0], kinds, strict=True):
        for name, run in runs.items():
            if name.partition(",")[0].partition(" ")[0] not in (kind, "Transformer"):
                continue
            tokens, found = zip(*losses(run), strict=True)
            axes.plot([n / 1e6 for n in tokens], found, marker="." if "finetuned" in name else None, lw=1.2, label=name)
        axes.set_title(kind, fontsize="medium")
        axes.set_xlabel("million tokens of its own")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    panels[0][0].set_ylabel("validation loss (nats / token)")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800, help="of a model from scratch")
    parser.add_argument("--together", type=int, default=3, help="trainings at a time")
    parser.add_argument("--only", help=f"kinds, separated by commas, of {', '.join(SCRATCH)} (default: all)")
    parser.add_argument("--packages", action="store_true", help="a larger text: also the source of the installed packages")
    parser.add_argument("--folder", type=Path, help="keeps data and runs (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="try the program on sizes that mean nothing; writes no results")
    arguments = parser.parse_args()
    report = Report("t2r", torch.cuda.get_device_name() if torch.cuda.is_available() else None, keep=not arguments.tiny)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        compare(report, Trainings(folder.absolute(), arguments), arguments)
    report.save()


def compare(report: Report, trainings: Trainings, arguments: argparse.Namespace) -> None:
    kinds = arguments.only.split(",") if arguments.only else list(SCRATCH)
    runs: dict[str, Path] = {}
    with ThreadPoolExecutor(arguments.together) as pool:
        attention = {"heads": HEADS, "head_dim": WIDTH // HEADS}
        teacher = pool.submit(trainings.train, "transformer", frame("attention", attention), trainings.steps)
        scratch = {kind: pool.submit(trainings.scratch, kind) for kind in kinds}
        runs["Transformer"] = teacher.result()
        baton("export", str(runs["Transformer"]), "--out", str(trainings.folder / "exported"))
        chosen = [name for name in FINETUNED if name.partition(",")[0] in kinds]
        finetuned = {name: pool.submit(trainings.finetuned, name, trainings.folder / "exported") for name in chosen}
        runs |= {f"{kind} from scratch": run.result() for kind, run in scratch.items()}
        runs |= {f"{name} finetuned": run.result() for name, run in finetuned.items()}
    ends = {name: losses(run)[-1] for name, run in runs.items()}
    for name, (tokens, loss) in ends.items():
        report.say(f"{name}: {loss:.4f} after {tokens:,} tokens")
    best = min(loss for name, (_, loss) in ends.items() if "scratch" in name)
    passed = arguments.tiny or ends["Transformer"][1] <= AGREE * best
    report.gate("t2r", passed, f"the Transformer ends at {ends['Transformer'][1]:.4f}, the best model from scratch at {best:.4f}")
    rows(report, chosen, ends)
    if not arguments.tiny:
        draw(runs, ROOT / "docs" / "t2r.png")


def rows(report: Report, chosen: Sequence[str], ends: dict[str, tuple[int, float]]) -> None:
    for name in chosen:
        peer = f"from scratch, {PART} times the tokens"
        own, other = ends[f"{name} finetuned"][1], ends[f"{name.partition(',')[0]} from scratch"][1]
        report.row(f"t2r {name}", "validation loss", own, peer, other, gate="t2r", higher_is_better=False)


if __name__ == "__main__":
    main()
