"""Losses of 200 steps on real text in bfloat16 with our Triton kernels, compared with PyTorch operators in their place.

Every run is one rank of `baton train` with the same text, order and initial values. Rounding makes two bfloat16 runs diverge; a
third run, with our kernels and half the micro-batch size, shows how much. The relative differences of single steps' losses are
compared over the second half of the runs. The gates allow three times the third run's difference, both for PyTorch operators
(`on_gpu` is false everywhere, and no Triton kernel is launched) and for our kernels with a residual stream or with moments of AdamW
in bfloat16.

All runs are started at once, because nothing is timed and most of each run is waiting for the host. Runs that are not finished
after --seconds are ended.

    python benchmarks/curves.py [--models mamba,gsa,bmojo,longhorn,lattice] [--steps 200] [--seconds 500]
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from report import Report
from train_step_data import text_for

from baton.launcher.config import load
from baton.training.monitoring.metrics import read_metrics

VOCABULARY = 4096
ROWS, SEQUENCE_LENGTH = 8, 512
ALLOWED = 3.0  # times the drift of another rounding
SIZES = {"d_model": 512, "n_layers": 2, "vocab_size": VOCABULARY}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"pattern": ["mamba"]},
    "longhorn": {"pattern": ["longhorn"]},
    "gsa": {"pattern": ["gsa+swiglu"], "mixers": {"gsa": {"heads": 4, "slots": 64}}},
    "lattice": {"pattern": ["lattice+swiglu"], "mixers": {"lattice": {"heads": 8, "head_dim": 64, "slots": 64}}},
    "bmojo": {"pattern": ["bmojo"], "mixers": {"bmojo": {"window": 128, "fading": "chunk", "fading_tokens": 16, "eidetic": 32}}},
}
STREAM, MOMENTS = "kernels, residual stream in bfloat16", "kernels, moments in bfloat16"
OPTIMIZER = {"lr": 1e-3}
FORMS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "kernels, half the rows": {"micro_batch_size": ROWS // 2},
    "plain": {},
    STREAM: {"residual_dtype": "bfloat16"},
    MOMENTS: {"optimizer": {**OPTIMIZER, "moments_dtype": "bfloat16"}},
}
"""Settings that each variant changes."""


def rank(config: Path, plain: bool) -> None:
    """Runs one variant in this process."""
    if plain:
        import baton.kernels.compile.aot as ahead

        # before anything that has it by name is imported
        ahead.on_gpu = lambda x: False
    from baton.launcher import worker

    sys.argv = ["worker", str(config)]
    sys.exit(worker.main())


class Run:
    """A variant of a model that is trained in a process of its own. where: its folder."""

    def __init__(self, model: str, form: str, folder: Path, arguments: argparse.Namespace) -> None:
        self.name, self.steps = f"{model}, {form}", arguments.steps
        self.where = folder / f"{model}-{form.replace(' ', '-').replace(',', '')}"
        values = {
            "name": self.where.name,
            "directory": str(self.where),
            "device": "auto",
            "model": {**SIZES, **MODELS[model]},
            "data": text_for(VOCABULARY, folder, documents=4 if arguments.tiny else None),
            "training": {
                "steps": arguments.steps,
                "sequence_length": arguments.context,
                "micro_batch_size": ROWS,
                "global_batch_tokens": 2 * ROWS * arguments.context,
                "compute_dtype": "bfloat16",
                "log_every": 1,
                "optimizer": OPTIMIZER,
                "schedule": {"kind": "constant", "warmup_steps": 20},
                "checkpoint": {"every": 1_000_000},
                "evaluation": {"every": 0},
                **FORMS[form],
            },
        }
        self.where.mkdir()
        path = self.where / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        path.write_text(load(path, []).to_yaml())
        settings = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        command = [sys.executable, __file__, "--rank", str(path), *(["--plain"] if form == "plain" else [])]
        with (self.where / "output").open("w") as output:
            self.process = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT)

    def losses(self, seconds: float) -> list[float]:
        """Of each step that is done in so many seconds from now. Raises RuntimeError for a run that ended by itself before that."""
        cut = False
        try:
            self.process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            cut = True
            self.process.kill()
            self.process.wait()
        metrics = self.where / "metrics.jsonl"
        rows = [row for row in read_metrics(metrics) if row["kind"] == "train"] if metrics.exists() else []
        if len(rows) < self.steps and not cut:
            raise RuntimeError(f"{len(rows)} of {self.steps} steps of {self.name}\n{(self.where / 'output').read_text()[-3000:]}")
        return [row["loss"] for row in rows]


def drift(a: list[float], b: list[float]) -> float:
    """Root mean square of the relative differences over the second half of the steps."""
    pairs = list(zip(a, b, strict=True))[len(a) // 2 :]
    return math.sqrt(sum(((x - y) / y) ** 2 for x, y in pairs) / len(pairs))


def mean_of_last(curve: list[float]) -> float:
    last = curve[-max(1, len(curve) // 4) :]
    return sum(last) / len(last)


def one_model(report: Report, model: str, runs: dict[str, Run], deadline: float) -> bool:
    """Whether all runs of a model finished in time."""
    whole = {form: run.losses(deadline - time.monotonic()) for form, run in runs.items()}
    steps, wanted = min(map(len, whole.values())), next(iter(runs.values())).steps
    for form, curve in whole.items():
        marks = ", ".join(f"{curve[n]:.4f}" for n in range(0, len(curve), max(1, wanted // 10)))
        report.say(f"{model}, {form}: {marks}" + (f", last quarter {mean_of_last(curve):.5f}" if len(curve) == wanted else ""))
    if steps < 2:
        report.say(f"{model}: one of its runs was cut off after {steps} of {wanted} steps")
        return False
    ours, half, plain, stream, moments = (curve[:steps] for curve in whole.values())
    noise = drift(half, ours)
    for case, curve, beside, other in (
        (model, ours, "PyTorch's operators", plain),
        (f"{model}, residual stream in bfloat16", stream, "in float32", ours),
        (f"{model}, moments in bfloat16", moments, "in float32", ours),
    ):
        off, first = drift(other, curve), f"first losses differ by {abs(curve[0] - other[0]) / other[0]:.1e}"
        if steps < wanted:
            found = f"{first}, later ones by {off:.1e}, for rounding {noise:.1e}"
            report.say(f"{case}: cut off after {steps} of {wanted} steps: {found}")
            continue
        detail = f"{steps} steps, {first}, later ones by {off:.1e} <= "
        detail += f"{ALLOWED:g} x {noise:.1e}, as far as rounding alone drives two runs apart"
        report.gate(case, off <= ALLOWED * noise, detail)
        nats = mean_of_last(curve), mean_of_last(other)
        report.row(case, "nats, last quarter", nats[0], beside, nats[1], gate=case, higher_is_better=False)
    return steps == wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"separated by commas, of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context", type=int, default=SEQUENCE_LENGTH)
    parser.add_argument("--seconds", type=float, default=500, help="for all of it (default 500)")
    parser.add_argument(
        "--tiny", action="store_true", help="on a CPU, where there are no kernels: to try the program; writes no results"
    )
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank(arguments.rank, arguments.plain)
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny tries the program without one")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    report = Report("curves", device=device, keep=not arguments.tiny)
    deadline, failed = time.monotonic() + arguments.seconds, False
    with tempfile.TemporaryDirectory() as folder:
        models = arguments.models.split(",")
        runs = {model: {form: Run(model, form, Path(folder), arguments) for form in FORMS} for model in models}
        for model in models:
            try:
                failed |= not one_model(report, model, runs[model], deadline)
            except RuntimeError as error:  # the others are worth their time
                failed = True
                report.say(f"{model}: FAILED: {error}")
    report.save()
    sys.exit(failed)


if __name__ == "__main__":
    main()
