"""The first steps of the demo on a GPU and on the CPU of the same machine, to compare the GPU kernels with the CPU implementations.

Both use the same data, seed and command, in float32. The loss and the gradient norm of every step are compared.

    python benchmarks/demo_gpu.py [--steps 50]
"""

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import torch
from report import Report

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.launcher.demo import VOCABULARY
from baton.training.monitoring.metrics import read_metrics

ALLOWED = 1e-3  # relative, of losses; the norms of small early gradients get ten times as much
BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]


def prepare(folder: Path) -> None:
    """A part of `make demo`'s text: Python's standard library."""
    source = sysconfig.get_paths()["stdlib"]
    words = ["--include", "*.py", *(word for name in ("site-packages", "test", "tests") for word in ("--exclude", name))]
    command = [*BATON, "data", "prepare", source, "--out", str(folder / "shards"), *words, "--validation-fraction", "0.03"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    train_tokenizer(documents(Dataset.open(folder / "shards"), "train"), folder / "tokenizer.model", VOCABULARY)


def losses(folder: Path, device: str, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    run = folder / device
    settings = [
        f"device={device}", f"directory={run}", "layout.data=1", f"training.steps={steps}", "training.log_every=1",
        "training.schedule.decay_steps=10", "training.evaluation.every=0",
        f"data.path={folder / 'shards'}", f"data.tokenizer={folder / 'tokenizer.model'}",
    ]  # fmt: skip
    subprocess.run([*BATON, "train", str(files("baton.configs") / "runs" / "demo.yaml"), *settings], check=True)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    report = Report("demo_gpu", device=torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        with ThreadPoolExecutor() as pool:
            cpu, gpu = pool.map(lambda device: losses(folder, device, arguments.steps), ("cpu", "cuda"))
    assert len(cpu) == len(gpu) == arguments.steps
    loss, norm = (max(abs(g[n] - c[n]) / abs(c[n]) for g, c in zip(gpu, cpu, strict=True)) for n in (0, 1))
    for step in (1, *range(10, arguments.steps + 1, 10)):
        report.say(f"step {step:3d}: loss on the CPU {cpu[step - 1][0]:.7f}, on the GPU {gpu[step - 1][0]:.7f}")
    report.gate("losses", loss <= ALLOWED, f"largest relative difference of {arguments.steps} steps {loss:.1e}")
    report.gate("gradient norms", norm <= 10 * ALLOWED, f"largest relative difference of {arguments.steps} steps {norm:.1e}")
    report.save()


if __name__ == "__main__":
    main()
