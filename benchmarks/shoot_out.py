"""Families of mixers beside each other on real text: models of equal size, the same tokens, the same recipe.

Each model has 130 million parameters (the gate: within 2 %), as many layers or as wide an MLP as that takes, and learns the same
100 million tokens of source code and documentation (shoot_out_text.py), in windows of 2048 tokens. The learning rate is the best
one of a sweep of short runs; all else is the same for all. After the last step the held-out text, recall, needles, decoding and the
size of the State are measured. Each family has a record, `results/shoot_out/NAME.json`, with its whole curve, which is written when
the run is done and again when the rest is measured; shoot_out_page.py makes docs/shoot-out.md and its pictures of all records.

    python benchmarks/shoot_out_text.py TEXT
    python benchmarks/shoot_out.py --text TEXT --folder FOLDER --only mamba,transformer [--tiny]
    python benchmarks/shoot_out.py --text TEXT --folder FOLDER --speed [--only mamba]
    python benchmarks/shoot_out.py --text TEXT --folder FOLDER --rates [--only mamba]
    python benchmarks/shoot_out.py --sizes
    python benchmarks/shoot_out_page.py

Families may run at once on GPUs of their own (CUDA_VISIBLE_DEVICES) in one folder, once the text is prepared there. One that fails
does not end the others. What was interrupted goes on when the same command is given again. --speed repeats the best run of the
sweep of families that have a record, and measures their speed, and that of decoding, anew; --rates adds what a record's sweep
lacks. --tiny: two layers of 256 channels and 12 steps, also on a CPU, to see that the program runs; the records go to FOLDER.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from report import RESULTS, Report

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.launcher.config import RunConfig
from baton.launcher.load import find_checkpoint, load_checkpoint
from baton.launcher.planner.memory import Arithmetic
from baton.training.evaluation.generation import Sampling, generate
from baton.training.evaluation.loaded_model import LoadedModel
from baton.training.monitoring.metrics import read_metrics

RECORDS = RESULTS / "shoot_out"
TOKENIZER = Path(__file__).with_name("shoot_out_tokenizer.json")
"""Of `baton tokenizer train --kind hf-bpe --vocab-size 8192` on this text, once, so that records of any day have the same ids."""
BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
PARAMETERS, WITHIN = 130e6, 0.02
WIDTH, LAYERS, VOCABULARY = 768, 16, 8192
HEADS = {"heads": 12, "head_dim": 64}
MLP = 64
"""The width of an MLP is a multiple of it."""
WITH_MLP: dict[str, dict[str, Any]] = {
    "transformer": {"attention": HEADS},
    "gsa": {"gsa": {"heads": 6, "head_dim": 128, "slots": 64}},
    "gla": {"gla": {"heads": 3, "d_key": 128, "d_value": 256}},
    "gated_delta_net": {"gated_delta_net": {"d_key": 64, "d_value": 128}},
    "lattice": {"lattice": {"variant": "dec", "forget": True, **HEADS, "slots": 64}},
    "bmojo": {"bmojo": {"window": 512, "fading": "chunk", "fading_tokens": 16, "eidetic": 64}},
    "delta_net": {"delta_net": {"d_key": 64, "d_value": 64}},
    "kda": {"kda": {"d_key": 64, "d_value": 64}},
    "retnet": {"retnet": {"d_key": 256}},
    "hgrn2": {"hgrn2": {"d_key": 128}},
    "mlstm": {"mlstm": {"heads": 4}},
    "mamba3": {"mamba3": {"d_state": 128, "head_dim": 64}},
}
"""A mixer and an MLP in each of LAYERS layers, the MLP as wide as the parameters allow."""
FEWER_LAYERS = {"bmojo": 12}
"""Where a mixer is two, and leaves an MLP less than its due in LAYERS layers."""
WITHOUT_MLP: dict[str, dict[str, Any]] = {
    "mamba": {"mamba": {}},
    "longhorn": {"longhorn": {}},
    "mamba2": {"mamba2": {"d_state": 128}},
}
"""Layers of a mixer alone, as many as the parameters allow; the settings are those of configs/models at this width."""
FAMILIES = {**WITH_MLP, **WITHOUT_MLP}
RATES = (5e-4, 1e-3, 3e-3)
SWEEP_STEPS = 60
LENGTH, BATCH, TOKENS = 2048, 65536, 100_007_936
RECALL_BEHIND = 512


@dataclass(frozen=True)
class Size:
    """What is trained and measured. steps, sweep: optimizer steps; batch: tokens of a step; evaluated: held-out tokens; windows: of
    recall; prompt, new, rows: of decoding; lengths, samples: of prompts with needles."""

    steps: int
    sweep: int
    length: int
    batch: int
    evaluated: int
    windows: int
    rows: int
    prompt: int
    new: int
    lengths: str
    samples: int


FULL = Size(TOKENS // BATCH, SWEEP_STEPS, LENGTH, BATCH, 262_144, 64, 64, 512, 128, "512,1024,2048", 8)
TINY = Size(12, 4, 256, 512, 2000, 2, 2, 32, 8, "256", 1)


def model_of(family: str, tiny: bool = False) -> dict[str, Any]:
    """Settings of a family's model, as large as PARAMETERS allow."""
    words = {"d_model": 256 if tiny else WIDTH, "vocab_size": VOCABULARY, "tie_embeddings": True, "init_std": 0.02}
    mixers = FAMILIES[family]
    (kind,) = mixers

    def made(amount: int) -> dict[str, Any]:
        if family in WITHOUT_MLP:
            return words | {"n_layers": amount, "pattern": [kind], "mixers": mixers}
        return words | {
            "n_layers": FEWER_LAYERS.get(family, LAYERS),
            "pattern": [f"{kind}+swiglu"],
            "mixers": {**mixers, "swiglu": {"hidden": amount}},
        }

    if tiny:
        return made(2 if family in WITHOUT_MLP else MLP) | {"n_layers": 2}
    unit = 1 if family in WITHOUT_MLP else MLP
    one, two = parameters(made(unit)), parameters(made(2 * unit))
    return made(unit * (1 + round((PARAMETERS - one) / (two - one))))


def parameters(model: dict[str, Any]) -> int:
    return Arithmetic(config_of("sizes", "nowhere", model, FULL, FULL.steps, RATES[0], Path("nowhere"))).parameter_count


def values_of(name: str, folder: Path, model: dict[str, Any], size: Size, steps: int, rate: float, data: Path) -> dict[str, Any]:
    every = max(1, steps // 20)
    return {
        "name": name,
        "directory": str(folder),
        "model": model,
        "data": {"path": str(data / "shards"), "tokenizer": str(data / "tokenizer.json")},
        "training": {
            "steps": steps,
            "sequence_length": size.length,
            "global_batch_tokens": size.batch,
            "micro_batch_size": size.batch // size.length,
            "log_every": every,
            "optimizer": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.1},
            # steps at a rate that is reached too early diverge, also in a short run
            "schedule": {"kind": "cosine", "warmup_steps": max(steps // 20, min(steps // 2, 30)), "final_lr": rate / 10},
            "checkpoint": {"every": max(1, steps // 4), "keep_last": 1},
            "evaluation": {"every": every if steps == size.steps else steps, "tokens": size.evaluated, "sample_tokens": 0},
        },
    }


def config_of(name: str, folder: str | Path, *rest: Any) -> RunConfig:
    return RunConfig.model_validate(values_of(name, Path(folder), *rest))


def baton(*words: str, log: Path) -> int:
    with log.open("ab") as file:
        return subprocess.run([*BATON, *words], stdout=file, stderr=subprocess.STDOUT, check=False).returncode


class FamilyError(Exception):
    """A family's runs failed; the others go on."""


class ShootOut:
    """Runs in a folder, with the prepared text."""

    def __init__(self, folder: Path, text: Path, tiny: bool, report: Report) -> None:
        self.report = report
        self.folder, self.tiny, self.size = folder.absolute(), tiny, TINY if tiny else FULL
        folder.mkdir(parents=True, exist_ok=True)
        self.data = self.folder / "data"
        self.log = self.folder / "log.txt"
        if not (self.data / "shards").exists():
            self._prepare(text)

    def _prepare(self, text: Path) -> None:
        words = (
            "data",
            "prepare",
            str(text),
            "--include",
            "*.xz",
            "--validation-fraction",
            "0.01",
            "--out",
            str(self.data / "shards"),
        )
        if baton(*words, log=self.log):
            raise SystemExit(f"the text was not prepared; see {self.log}")
        (self.data / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())

    def train(self, name: str, family: str, steps: int, rate: float) -> list[dict[str, Any]]:
        """Rows of a run's record; none: it diverged. A run that was interrupted goes on, one that is there is read."""
        folder = self.folder / name
        there = read_metrics(folder / "metrics.jsonl")
        if any(row["kind"] == "evaluation" and row["step"] == steps for row in there):
            return there
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values_of(name, folder, model_of(family, self.tiny), self.size, steps, rate, self.data)))
        status = baton("train", str(file), log=self.log)
        return read_metrics(folder / "metrics.jsonl") if status == 0 else []

    def family(self, name: str) -> Iterator[dict[str, Any]]:
        """A family's record: of its training, and once more with what is measured behind it."""
        found = self.sweep(name, at_once=2)
        rows = self.train(name, name, self.size.steps, found["rate"])
        if not rows:
            raise FamilyError(f"{name}: the run failed; see {self.log}")
        found |= {"speed": speed_of(rows) | self.report.provenance}
        record = {"family": name, "parameters": parameters(model_of(name, self.tiny)), "model": model_of(name, self.tiny)}
        record |= found | {"curve": curve_of(rows)}
        yield record
        yield record | self._measured(name)

    def sweep(self, name: str, known: dict[str, float | None] | None = None, at_once: int = 1) -> dict[str, Any]:
        """Losses of short runs (None: it diverged), the best rate, and the speed of its run. known: losses by rate, which are not
        measured again; at_once: runs that share the GPU, which makes their speed meaningless."""
        asked = [rate for rate in RATES if f"{rate:g}" not in (known or {})]
        with ThreadPoolExecutor(at_once) as pool:
            found = pool.map(lambda rate: self.train(f"{name}-{rate:g}", name, self.size.sweep, rate), asked)
            runs = dict(zip(asked, found, strict=True))
        losses = {float(rate): loss for rate, loss in (known or {}).items()} | {
            rate: last_loss(rows) for rate, rows in runs.items()
        }
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        if not finite:
            raise FamilyError(f"{name}: every run of the sweep failed; see {self.log}")
        rate = min(finite, key=lambda rate: finite[rate])
        chosen = {"rate": rate, "sweep": {f"{rate:g}": losses[rate] for rate in sorted(losses)}}
        return chosen | ({"speed": speed_of(runs[rate]) | self.report.provenance} if rate in runs else {})

    def decoded(self, run: str) -> dict[str, Any]:
        """Speed of decoding with a run's last checkpoint."""
        return decoding(self._loaded(run), self._held(), self.size)

    def _loaded(self, run: str) -> LoadedModel:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return load_checkpoint(find_checkpoint(self.folder / run, None), device)

    def _held(self) -> list[str]:
        return list(documents(Dataset.open(self.data / "shards"), "validation"))

    def _measured(self, name: str) -> dict[str, Any]:
        loaded, held = self._loaded(name), self._held()
        found = recall(loaded, held, self.size)
        found |= decoding(loaded, held, self.size)
        del loaded
        torch.cuda.empty_cache()
        (self.folder / f"{name}-held.txt").write_text("\n\n".join(held[:200]), encoding="utf-8")
        words = ("eval", str(self.folder / name), "--long-context", "niah_single", "--text", str(self.folder / f"{name}-held.txt"))
        words += (
            "--lengths",
            self.size.lengths,
            "--samples",
            str(self.size.samples),
            "--out",
            str(self.folder / f"{name}-needles.jsonl"),
        )
        if baton(*words, log=self.log):
            raise FamilyError(f"{name}: no needles; see {self.log}")
        row = json.loads((self.folder / f"{name}-needles.jsonl").read_text().splitlines()[-1])
        return found | {"needles": row}


def last_loss(rows: Sequence[dict[str, Any]]) -> float | None:
    return next((row["loss"] for row in reversed(rows) if row["kind"] == "evaluation"), None)


def curve_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Held-out loss by tokens."""
    kept = ("tokens", "loss", "bits_per_byte")
    return [{key: row[key] for key in kept} for row in rows if row["kind"] == "evaluation"]


def speed_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second of a step as most are; what is not a step, as compiling and evaluation, does not count."""
    steps = [row for row in rows if row["kind"] == "train"]
    parts = {part: statistics.median(row["seconds"][part] for row in steps) for part in steps[0]["seconds"]}
    return {
        "tokens_per_s": steps[0]["step_tokens"] / statistics.median(sum(row["seconds"].values()) for row in steps),
        "step_parts_s": parts,
        "peak_gib": max(row["memory_bytes"] for row in steps) / 2**30,
    }


@torch.no_grad()
def recall(loaded: LoadedModel, held: Sequence[str], size: Size) -> dict[str, Any]:
    """Share of tokens that are found most probable, of those in held-out documents that follow a pair of tokens which was last
    seen, followed by the same token, more than RECALL_BEHIND tokens before."""
    assert loaded.tokenizer is not None
    right = asked = 0
    ids = (loaded.tokenizer.encode(text) for text in held)
    behind = min(RECALL_BEHIND, size.length // 4)
    for document in islice((x[: size.length] for x in ids if len(x) >= size.length), size.windows):
        tokens = torch.as_tensor(document.astype("int64"))[None].to(loaded.device)
        chosen = loaded(tokens)[0].argmax(-1)[0].tolist()
        last: dict[tuple[int, int], tuple[int, int]] = {}
        text = document.tolist()
        for t in range(1, len(text) - 1):
            pair, then = (text[t - 1], text[t]), text[t + 1]
            if pair in last and last[pair][0] < t - behind and last[pair][1] == then:
                asked += 1
                right += chosen[t] == then
            last[pair] = (t, then)
    return {"recall": right / max(1, asked), "recall_asked": asked}


def decoding(loaded: LoadedModel, held: Sequence[str], size: Size) -> dict[str, Any]:
    """New tokens per second of a batch, prompts included; bytes of a sequence's State behind a window of training."""
    assert loaded.tokenizer is not None
    ids = (loaded.tokenizer.encode(text) for text in held)
    prompts = [x[: size.prompt].tolist() for x in islice((x for x in ids if len(x) >= size.prompt), size.rows)]
    words = {"tokens": size.new, "vocab_size": loaded.vocab_size, "stop": None, "sampling": Sampling(0)}
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        written = generate(loaded.model, prompts, **words, recorder=loaded.step_recorder)
        seconds.append(time.perf_counter() - began)
        assert all(len(row) == size.new for row in written)
    row = torch.tensor([(prompts[0] * (1 + size.length // len(prompts[0])))[: size.length]], device=loaded.device)
    states = loaded(row)[1]
    return {
        "decoded_per_s": len(prompts) * size.new / statistics.median(seconds[1:]),
        "decoded_rows": len(prompts),
        "state_bytes": sum(x.nbytes for x in tensors(states)),
    }


def tensors(states: Any) -> list[torch.Tensor]:
    """All of a nested State's."""
    if isinstance(states, torch.Tensor):
        return [states]
    return [x for value in (states.values() if isinstance(states, dict) else states) for x in tensors(value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="what shoot_out_text.py wrote")
    parser.add_argument("--folder", type=Path, help="of data and runs")
    parser.add_argument("--only", default=",".join(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--speed", action="store_true", help="repeat only the sweep's best run, and measure speeds anew")
    parser.add_argument("--rates", action="store_true", help="add learning rates that the sweeps of families with a record lack")
    parser.add_argument("--sizes", action="store_true", help="only show the models' sizes")
    parser.add_argument("--tiny", action="store_true", help="try the program on sizes that mean nothing")
    arguments = parser.parse_args()
    families = arguments.only.split(",")
    if arguments.sizes:
        for name in families:
            model = model_of(name)
            print(f"{name:<16} {parameters(model):>12,}  {model['n_layers']} layers  {model['mixers']}")
        return
    report = Report("shoot_out", torch.cuda.get_device_name() if torch.cuda.is_available() else None, keep=False)
    sizes = {name: parameters(model_of(name)) for name in families}
    report.gate(
        "sizes", all(abs(n / PARAMETERS - 1) <= WITHIN for n in sizes.values()), f"parameters of {sizes} within 2 % of 130M"
    )
    shoot_out = ShootOut(arguments.folder, arguments.text, arguments.tiny, report)
    out = shoot_out.folder / "records" if arguments.tiny else RECORDS
    out.mkdir(exist_ok=True)
    failed = []
    for name in families:
        try:
            record = measured(shoot_out, name, out / f"{name}.json", report, arguments)
        except FamilyError as error:
            failed.append(name)
            report.say(str(error))
            continue
        speed = record["speed"]
        report.say(
            f"{name}: loss {record['curve'][-1]['loss']:.4f}, recall {record.get('recall', math.nan):.3f}, sweep {record['sweep']}"
        )
        report.say(f"{name}: {speed['tokens_per_s']:,.0f} tokens/s, parts of a step {speed['step_parts_s']}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def measured(shoot_out: ShootOut, name: str, file: Path, report: Report, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments ask for of a family, which is also its record in file. Raises FamilyError."""
    if not (arguments.speed or arguments.rates):
        text = json.loads((arguments.text / "text.json").read_text())
        for found in shoot_out.family(name):
            record = report.provenance | found | {"text": text}
            file.write_text(json.dumps(record, indent=1) + "\n")
        return record
    record = json.loads(file.read_text())
    best = f"{record['rate']:g}" if arguments.speed else None
    found = shoot_out.sweep(name, {rate: loss for rate, loss in record["sweep"].items() if rate != best})
    if found["rate"] != record["rate"]:
        raise FamilyError(f"{name}: {found['sweep']} asks for another rate than the record's {record['rate']}; train it again")
    record |= found
    if arguments.speed:
        record |= shoot_out.decoded(f"{name}-{found['rate']:g}")
    file.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    main()
