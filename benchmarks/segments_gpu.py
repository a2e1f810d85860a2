"""Passes over segments (training.bptt) as CUDA graphs beside the same passes launched kernel by kernel.

Each case is two runs of `baton train` from the same weights on the source of Python's standard library, one with
training.cuda_graphs=true, which is what auto chooses where it fits, one without. The gate asks that the losses of all steps are
equal to the bit. Tokens per second are those of the median step after the first three.

    python benchmarks/segments_gpu.py [--models mamba-130m] [--modes exact,truncated] [--tokens 65536] [--segment 8192] [--steps 12]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from report import Report
from train_step_data import text_for

from baton.training.monitoring.metrics import read_metrics

WARM_UP = 3
VOCABULARY = 50277


def rows_of(folder: Path, model: str, data: dict[str, Any], mode: str, graphs: bool, arguments: argparse.Namespace) -> list[Any]:
    """Rows of the steps of a run."""
    name = f"{model}-{mode}-{'graphs' if graphs else 'launches'}"
    values = {
        "name": name,
        "directory": str(folder / name),
        "model": model,
        "data": data,
        "training": {
            "steps": arguments.steps,
            "sequence_length": arguments.tokens,
            "global_batch_tokens": arguments.tokens,
            "micro_batch_size": 1,
            "cuda_graphs": graphs,
            "bptt": {"mode": mode, "segment": arguments.segment},
            "optimizer": {"lr": 1e-4},
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every": 0},
        },
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.launcher.cli", "train", str(file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [row for row in read_metrics(folder / name / "metrics.jsonl") if row["kind"] == "train"]


def tokens_per_s(rows: list[Any]) -> float:
    return float(rows[0]["step_tokens"] / statistics.median(sum(row["seconds"].values()) for row in rows[WARM_UP:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="mamba-130m", help="of configs/models, separated by commas")
    parser.add_argument("--modes", default="exact,truncated")
    parser.add_argument("--tokens", type=int, default=65536, help="of a sequence, the only one of a step")
    parser.add_argument("--segment", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    report = Report("segments_gpu", torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = text_for(VOCABULARY, folder)
        for model in arguments.models.split(","):
            for mode in arguments.modes.split(","):
                case = f"{model} 1x{arguments.tokens}, {mode} segments of {arguments.segment}"
                ours, plain = (rows_of(folder, model, data, mode, graphs, arguments) for graphs in (True, False))
                same = [row["loss"] for row in ours] == [row["loss"] for row in plain]
                report.gate(case, same, f"losses of {arguments.steps} steps have the same bits with and without graphs")
                for rows, graphs in ((ours, "graphs"), (plain, "launches")):
                    peak = max(row["memory_bytes"] for row in rows) / 2**30
                    report.say(f"{case}, {graphs}: {tokens_per_s(rows):,.0f} tokens/s, {peak:.1f} GiB, {rows[-1]['seconds']}")
                report.row(case, "tokens/s", tokens_per_s(ours), "launched kernel by kernel", tokens_per_s(plain), gate=case)


if __name__ == "__main__":
    main()
