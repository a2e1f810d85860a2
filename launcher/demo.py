"""`make demo`: trains a model on text of this machine, kills and resumes the training, and generates text, in five minutes.

The text is the source of the running Python's standard library, which every machine has.
"""

import lzma
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.tokenizer import Tokenizer, load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.training.monitoring.metrics import format_duration, read_metrics

FOLDER = Path("demo")
VOCABULARY = 1024
KILL_AFTER = 12
"""Steps between a checkpoint and the kill: these are done twice, and must come out the same."""


def main() -> int:
    start = time.monotonic()
    baton = [sys.executable, "-P", "-m", "baton.launcher.cli"]
    run = FOLDER / "run"
    shutil.rmtree(FOLDER, ignore_errors=True)  # an earlier demo's, perhaps of another Python

    _headline("1. Text to shards: Python's standard library")
    _run([*baton, "data", "prepare", sysconfig.get_paths()["stdlib"], "--out", str(FOLDER / "shards"), "--include", "*.py"]
         + [word for name in ("site-packages", "dist-packages", "test", "tests", "idle_test") for word in ("--exclude", name)]
         + ["--shard-bytes", "2000000", "--validation-fraction", "0.03"])  # fmt: skip
    dataset = Dataset.open(FOLDER / "shards")

    _headline("2. A tokenizer of our own")
    print(train_tokenizer(documents(dataset, "train"), FOLDER / "tokenizer.model", VOCABULARY))
    tokenizer = load_tokenizer(FOLDER / "tokenizer.model")

    _headline("3. Training, until somebody pulls the plug")
    command = [*baton, "train", str(files("baton.configs") / "runs" / "demo.yaml"), *_hardware()]
    before, checkpoint = _train_and_kill(command, run)

    _headline("4. The same command again: it resumes by itself")
    _run(command)
    identical = _compare(before, checkpoint, read_metrics(run / "metrics.jsonl"))

    _headline("5. What it learned: bits per byte of held-out files (less is better)")
    better = _table(run, dataset, tokenizer)

    _headline("6. What it writes")
    prompt = "def main():\n"
    _run([*baton, "generate", str(run), "--prompt", prompt, "--tokens", "150", "--temperature", "0.6"])

    _headline("7. Where to look")
    _run([*baton, "plot", str(run)])
    print(f"curves:       {run / 'curves.png'}")
    print(f"TensorBoard:  {os.path.relpath(sys.executable)} -m tensorboard.main --logdir {run / 'tensorboard'}")
    print(f"all numbers:  {run / 'metrics.jsonl'}")
    print(f"\nThe demo took {format_duration(time.monotonic() - start)}.")
    return 0 if identical and better else 1


def _hardware() -> list[str]:
    """Two ranks where there are two processors for them, else one."""
    import torch

    ranks = min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    return [f"layout.data={ranks}"]


def _train_and_kill(command: list[str], run: Path) -> tuple[list[dict[str, Any]], int]:
    """Start training, SIGKILL every process of it in mid-step; returns its record and the checkpoint it will resume from."""
    import psutil

    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(0.05)
        steps = [row["step"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
        saved = [int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")]
        if saved and len(saved) >= 2 and steps and steps[-1] >= max(saved) + KILL_AFTER:
            break
    else:
        raise SystemExit(f"training ended by itself with status {process.returncode}; see {run / 'attempts'}")
    ranks = psutil.Process(process.pid).children(recursive=True)
    for victim in ranks:
        os.kill(victim.pid, signal.SIGKILL)
    process.wait()
    print(f"SIGKILL to all {len(ranks)} ranks after step {steps[-1]}; the newest checkpoint is of step {max(saved)}")
    return read_metrics(run / "metrics.jsonl"), max(saved)


def _compare(before: list[dict[str, Any]], checkpoint: int, after: list[dict[str, Any]]) -> bool:
    """Print whether the steps that were done twice, without and with an interruption before them, agree to the last bit."""
    first = {row["step"]: row for row in before if row["kind"] == "train" and row["step"] > checkpoint}
    second = {row["step"]: row for row in after if row["kind"] == "train" and row["step"] in first}
    print(f"\nSteps {min(first)} to {max(first)} were done twice: uninterrupted before the kill, and after resuming.")
    print("   step   loss, uninterrupted    loss, resumed")
    for step in sorted(first):
        print(f"  {step:5d}   {first[step]['loss'].hex():<22} {second[step]['loss'].hex()}")
    same = all(first[s][k] == second[s][k] for s in first for k in ("loss", "grad_norm", "lr", "tokens"))
    print(f"losses and gradient norms of all {len(first)} steps are " + ("bit-identical." if same else "DIFFERENT."))
    return same


def _table(run: Path, dataset: Dataset, tokenizer: Tokenizer) -> bool:
    """Print the model's bits per byte beside two baselines; returns whether the model is better by enough."""
    evaluations = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "evaluation"]
    ours = evaluations[-1]["bits_per_byte"]
    held_out = list(documents(dataset, "validation"))
    text = "".join(held_out).encode()
    bigram = bigram_bits(tokenizer, documents(dataset, "train"), held_out) / len(text)
    xz = 8 * len(lzma.compress(text, preset=9)) / len(text)
    trained, available = evaluations[-1]["tokens"], dataset.totals["train"]["text_bytes"] or 0
    print(f"  Mamba, {trained:,} tokens of training   {ours:.3f}")
    print(f"  token bigram (same tokenizer, all {available / 1e6:.1f} MB)  {bigram:.3f}")
    print(f"  xz -9 on the held-out files            {xz:.3f}")
    print(f"  ({len(held_out)} files, {len(text):,} bytes that neither model was trained on)")
    return bool(ours < min(0.9 * bigram, xz))


def bigram_bits(tokenizer: Tokenizer, train: Iterable[str], held_out: Iterable[str]) -> float:
    """Bits that a token bigram model needs for the held-out documents, their end marks included.

    Counts of the training documents with Witten-Bell smoothing: P(b|a) = (c(ab) + d(a) P(b)) / (c(a) + d(a)), where d(a) is the
    number of different tokens seen after a, and P(b) = (c(b) + 1) / (n + V).
    """
    v, doc = tokenizer.vocab_size, tokenizer.eod_id

    def pairs(texts: Iterable[str]) -> Iterable[np.ndarray]:
        for ids in tokenizer.encode_batch(list(texts)):
            marked = np.concatenate([[doc], ids, [doc]]).astype(np.int64)
            yield marked[:-1] * v + marked[1:]

    counts = np.zeros(v * v, dtype=np.int64)
    for chunk in pairs(train):
        counts += np.bincount(chunk, minlength=v * v)
    table = counts.reshape(v, v).astype(np.float64)
    unigram = (table.sum(axis=0) + 1) / (table.sum() + v)
    different = (table > 0).sum(axis=1, keepdims=True)
    seen = table.sum(axis=1, keepdims=True)
    # a token that was never followed by anything falls back to the unigram altogether
    probability = np.where(seen > 0, (table + different * unigram) / np.maximum(seen + different, 1), unigram)
    return -sum(float(np.log(probability.reshape(-1)[chunk]).sum()) for chunk in pairs(held_out)) / math.log(2)


def _headline(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command)
    if done.returncode:
        raise SystemExit(f"this step of the demo failed with status {done.returncode}: {' '.join(command[1:])}")


if __name__ == "__main__":
    sys.exit(main())
