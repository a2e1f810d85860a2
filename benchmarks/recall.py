"""Figure 2 of B'MOJO's paper, small: accuracy of two-layer models on multi-query associative recall, by the number of pairs.

Each model reads pairs of key and value and is then asked for the value of each key. All of them carry about as much from token to
token as B'MOJO does, except the transformer, which carries everything. Examples never repeat, so the accuracy of the last steps'
batches is one on unseen examples. Each model is trained with every learning rate of RATES and with SEEDS seeds; a row has the mean
over the seeds with the best rate. A curve that falls to 0.00 is that of a training whose loss became NaN. On a GPU each training
step is a CUDA graph and several models train at once; parts of the models are processes of their own.

    python benchmarks/recall.py [--steps 2000] [--seconds 240] [--models mamba,bmojo] [--cells FILE]

--cells writes no report but the trainings, one JSON object per line, and --report makes the report of such files.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from report import Report
from torch import Tensor, nn

from baton.data_pipeline.config import MqarConfig
from baton.data_pipeline.synthetic import Examples
from baton.models.config import ModelConfig
from baton.models.forward_context import ForwardContext
from baton.models.lm import LanguageModel
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.param_layout import initialize_parameters

D_MODEL, LENGTH, WINDOW, VOCABULARY, ROWS = 64, 64, 8, 32, 64
PAIRS = (4, 8, 12)
RATES = (3e-3, 1e-2)
SEEDS = (0, 1)
TOGETHER = 8  # models of a process that train at once
ATTENTION = {"heads": 2, "head_dim": 32}
BMOJO = {**ATTENTION, "window": WINDOW, "fading_tokens": 4, "eidetic": 16, "ssm": {"d_state": 16}}
LARGER = {"d_state": 64}
"""A state space alone, or without eidetic tokens, is given the memory that these take."""


def _model(*pattern: str, **mixers: dict[str, Any]) -> dict[str, Any]:
    return {"pattern": pattern, "mixers": mixers}


MODELS: dict[str, dict[str, Any]] = {
    "bmojo": _model("bmojo", bmojo=BMOJO),
    "bmojo-f": _model("bmojo", bmojo={**BMOJO, "eidetic": 0, "ssm": LARGER}),
    "as printed": _model("bmojo", bmojo={**BMOJO, "d_conv": None}),
    "mamba": _model("mamba", mamba=LARGER),
    "hybrid": _model("mamba", "attention", mamba={"d_state": 128}, attention={**ATTENTION, "window": WINDOW}),
    "transformer": _model("attention", attention=ATTENTION),
    **{f"eidetic {n}": _model("bmojo", bmojo={**BMOJO, "eidetic": n}) for n in (0, 2, 4, 8)},
}
"""bmojo-f: without eidetic tokens. as printed: without convolutions. hybrid: Mamba, then a window. eidetic N: B'MOJO with N."""
PARTS = (
    ("bmojo", "eidetic 8"),
    ("bmojo-f", "eidetic 0"),
    ("as printed", "eidetic 2", "eidetic 4"),
    ("mamba", "hybrid", "transformer"),
)
"""Models of one process."""


def numbers_carried(model: LanguageModel) -> int:
    """What goes from token to token per sequence; of what grows, all of an example's."""
    return sum(
        math.prod((LENGTH, *leaf.shape[1:]) if leaf.grows else leaf.shape)
        for leaves in model.state_specs.values()
        for leaf in leaves
        if leaf.shape
    )


class Training:
    """One model, trained for `steps` steps on `examples`: tokens [N, T], places of the questions [N, pairs], values [N, pairs]."""

    def __init__(self, cell: dict[str, Any], examples: tuple[Tensor, ...], steps: int, device: torch.device) -> None:
        self.cell, self._examples, self.left, self._steps = cell, examples, steps, steps
        config = ModelConfig(d_model=D_MODEL, n_layers=2, vocab_size=VOCABULARY, **MODELS[cell["model"]])
        self.model = LanguageModel(config)
        initialize_parameters(self.model, seed=cell["seed"], tensor_rank=0, tensor_size=1)
        self.model.to(device)
        self._on_gpu = device.type == "cuda"
        self._rate = torch.zeros((), device=device)
        rate = self._rate if self._on_gpu else 0.0
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, capturable=self._on_gpu
        )
        self._at = torch.zeros((), dtype=torch.int64, device=device)
        self._hits = torch.zeros(steps, device=device)
        self._rows = torch.arange(ROWS, device=device)
        self._pos = torch.arange(LENGTH, dtype=torch.int32, device=device).expand(ROWS, -1).contiguous()
        self._run = self.step
        if self._on_gpu:
            self._record()

    def step(self) -> None:
        """Forward, backward, AdamW, with a cosine from the learning rate to 2 % of it after 50 steps of warm-up."""
        rows = self._rows + self._at * ROWS
        tokens, places, values = (x.index_select(0, rows) for x in self._examples)
        hidden = self.model(tokens, self._pos, None, ForwardContext(need_final_state=False))[0]
        asked = hidden.gather(1, places[..., None].expand(-1, -1, D_MODEL))
        logits = self.model.local_logits(asked)[..., :VOCABULARY].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), values.flatten())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        done = self._at.float()
        cosine = 0.51 + 0.49 * torch.cos(math.pi * done / self._steps)
        self._rate.copy_(self.cell["rate"] * torch.minimum((done + 1) / 50, cosine))
        if not self._on_gpu:
            self._optimizer.param_groups[0]["lr"] = float(self._rate)
        self._optimizer.step()
        self._hits.index_copy_(0, self._at[None], (logits.argmax(-1) == values).float().mean()[None])
        self._at += 1

    def _record(self) -> None:
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                self.step()
                self.left -= 1
        torch.cuda.synchronize()
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self.step()
        self._run = graph.replay

    def some_steps(self, n: int) -> None:
        """At most n of the steps that are left; on a GPU they have only been launched."""
        with torch.cuda.stream(self._stream if self._on_gpu else None):
            for _ in range(min(n, self.left)):
                self._run()
        self.left -= min(n, self.left)

    def result(self) -> dict[str, Any]:
        """The cell with its accuracy over the last twentieth of the steps, and the curve in twentieths."""
        curve = [float(part.mean()) for part in self._hits.cpu().split(max(1, self._steps // 20))]
        carried, curve = numbers_carried(self.model), [round(x, 4) for x in curve]
        return {**self.cell, "steps": self._steps, "accuracy": curve[-1], "carried": carried, "curve": curve}


def examples_of(pairs: int, steps: int, device: torch.device) -> tuple[Tensor, ...]:
    """Questions anywhere behind the pairs; token 0 between them."""
    task = MqarConfig(length=LENGTH, pairs=pairs, vocab_size=VOCABULARY, power=1.0, filler="zero")
    tokens, labels = (torch.from_numpy(x) for x in Examples(task).take([(("recall",), 0, steps * ROWS)]))
    places = (labels >= 0).nonzero()[:, 1].view(-1, pairs)
    return tokens.to(device), places.to(device), labels.gather(1, places).to(device)


def cells_of(names: list[str]) -> list[dict[str, Any]]:
    """What is trained, the most telling first."""
    return [
        {"model": name, "pairs": pairs, "rate": rate, "seed": seed}
        for seed in SEEDS
        for rate in RATES
        for name in names
        for pairs in ((PAIRS[-1],) if name.startswith("eidetic") else PAIRS)
    ]


def train(names: list[str], steps: int, until: float, into: Path) -> None:
    """Train the models' cells until a time, and add a line for each that is done."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meshes.initialize(LayoutConfig(), device=device, rank=0, store=torch.distributed.HashStore())
    waiting, running, examples = cells_of(names), [], {}
    with into.open("a", encoding="utf-8") as lines:
        while (waiting or running) and time.time() < until:
            while waiting and len(running) < (TOGETHER if device.type == "cuda" else 1) and time.time() < until:
                cell = waiting.pop(0)
                if cell["pairs"] not in examples:
                    examples[cell["pairs"]] = examples_of(cell["pairs"], steps, device)
                running.append(Training(cell, examples[cell["pairs"]], steps, device))
            for _ in range(5):
                for training in running:
                    training.some_steps(10)
            if device.type == "cuda":
                torch.cuda.synchronize()
            for training in [training for training in running if training.left <= 0]:
                running.remove(training)
                result = training.result()
                lines.write(json.dumps(result) + "\n")
                lines.flush()
                print({name: x for name, x in result.items() if name != "curve"}, flush=True)
    meshes.shutdown()


def write_report(report: Report, cells: list[dict[str, Any]]) -> None:
    """All trainings, then B'MOJO beside each other model."""
    by_model: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        by_model[cell["model"], cell["pairs"]][cell["rate"]].append(cell)
    best = {key: max(rates.values(), key=lambda done: mean(x["accuracy"] for x in done)) for key, rates in by_model.items()}
    for (model, pairs), rates in sorted(by_model.items(), key=lambda item: (item[0][1], item[0][0])):
        for rate, done in sorted(rates.items()):
            for cell in sorted(done, key=lambda x: x["seed"]):
                curve = " ".join(f"{x:.2f}" for x in cell["curve"])
                say = f"{pairs:>2} pairs  {model:<11} carries {cell['carried']:>6}  rate {rate:g}  seed {cell['seed']}  "
                report.say(f"{say}accuracy {cell['accuracy']:.3f}  every {cell['steps'] // 20} steps: {curve}")
    carried = {cell["model"]: cell["carried"] for cell in cells}
    for model in carried:
        if model in ("bmojo-f", "mamba", "hybrid"):
            detail = f"{model} carries {carried[model]} numbers, B'MOJO {carried['bmojo']}"
            report.gate(model, carried[model] >= 0.9 * carried["bmojo"], detail)
        elif model != "bmojo":
            report.gate(model, True, f"{model} carries {carried[model]} numbers, B'MOJO {carried['bmojo']}")
    for model in carried:
        for pairs in PAIRS:
            if model == "bmojo" or not {(model, pairs), ("bmojo", pairs)} <= best.keys():
                continue
            ours, peer = (mean(x["accuracy"] for x in best[name, pairs]) for name in ("bmojo", model))
            report.row(f"{pairs} pairs, two layers of B'MOJO", "accuracy", ours, model, peer, gate=model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=7200.0, help="trainings that are not done by then are left out")
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--cells", type=Path, metavar="FILE", help="add the trainings to FILE instead of making a report")
    parser.add_argument("--report", type=Path, metavar="FILE", help="make the report of such a file")
    parser.add_argument("--device", help="with --report: where it was trained")
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    if arguments.models:
        names = arguments.models.split(",")
        parts = [[name for name in part if name in names] for part in PARTS]
    else:
        parts = [list(part) for part in PARTS]
    parts = [part for part in parts if part]
    if arguments.cells and len(parts) == 1:
        return train(parts[0], arguments.steps, until, arguments.cells)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cells = arguments.report
    with tempfile.TemporaryDirectory() as folder:
        if cells is None:
            cells = arguments.cells or Path(folder) / "cells.jsonl"
            common = ["--steps", str(arguments.steps), "--seconds", str(arguments.seconds), "--cells", str(cells)]
            commands = [[sys.executable, __file__, *common, "--models", ",".join(part)] for part in parts]
            if device is None:
                for command in commands:
                    subprocess.run(command, check=True)
            else:
                processes = [subprocess.Popen(command) for command in commands]
                if max(process.wait() for process in processes):
                    sys.exit(1)
        if arguments.cells is None:
            lines = cells.read_text(encoding="utf-8").splitlines()
            write_report(Report("recall", arguments.device or device), [json.loads(line) for line in lines])


if __name__ == "__main__":
    main()
