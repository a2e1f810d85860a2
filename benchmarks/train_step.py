"""Whole optimizer steps at 1.3B on one GPU: `baton train` with its loop, DeepSpeed ZeRO-1 and fp32 masters, compared with other
libraries.

Every run is the command that users start, on real text. The benchmark reads its metrics.jsonl and stops it when enough steps are
done, so a step's time includes everything. A run has steps of one micro-batch and of many, by batch-size warm-up. Its first loss
is compared with that of the float64 reference for the same initial values and tokens. The other libraries' models have bfloat16
weights and moments, fused AdamW, the same number of micro-batches, a batch that is on the GPU already, and processes of their own.

    python benchmarks/train_step.py --model mamba-1.4b [--shapes 8x2048,1x16384,1x131072] [--micro-batches 1,16] [--steps 5]
    python benchmarks/train_step.py --model lattice-sim,lattice-enc,lattice-dec --shapes 8x2048
    python benchmarks/train_step.py --model mamba-1.4b --shapes 8x2048 --micro-batches 16 --profile    # and where the time goes

Sequences longer than a segment (16k) go in exact segments (but for full attention, whose keys would be kept), one micro-batch a
step. What does not fit into --seconds is left out and said to be; what is done is saved. With --tiny it all runs on a CPU in a
minute, on sizes that mean nothing, and writes no results.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import yaml
from report import Report
from train_step_data import text_for
from train_step_run import end, start_of, steps_of
from train_step_sides import peer_main, peer_of, reference_main

from baton.launcher.config import RunConfig, load
from baton.launcher.planner.memory import flops_per_token, of_stages
from baton.launcher.run_directory import read_config
from baton.training.config import TrainingConfig
from baton.training.monitoring.peak_flops import Utilisation, device_peak

NEAR = 3e-4  # relative, of losses that are means over 16k tokens and more: bfloat16's rounding averages out
OTHER_TEXT = 0.02  # relative, of an untrained model's losses
SAME_SIZE = 0.02  # relative, of two models' parameters
LIKE_MAMBA = 0.1  # relative, of a model's parameters and mamba-1.4b's: their speeds are compared
SEEMS_TRAINED = 0.2  # relative, of two untrained models' losses
BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
MODELS: dict[str, tuple[str, list[str]]] = {
    "mamba-1.4b": ("mamba-1.4b", []),
    "gsa-1.3b": ("gsa-1.3b", []),
    "longhorn": ("longhorn-1.3b", []),
    "bmojo": ("bmojo-1.4b", []),
    **{f"lattice-{kind}": ("lattice-1.3b", [f"model.mixers.lattice.variant={kind}"]) for kind in ("sim", "enc", "dec")},
    "transformer": ("transformer-1.3b", []),
    **{name: (name, []) for name in ("mamba-130m", "mamba-370m", "mamba-2.8b", "mamba2-370m", "mamba2-1.3b", "transformer-350m",
                                      "mamba3-1.5b", "mamba3-mimo-1.5b")},
    **{f"{kind}-{size}": (f"{kind}-{size}", []) for kind in ("gsa", "gla", "delta-net", "retnet", "hgrn2", "gated-delta-net")
       for size in ("340m", "1.3b") if (kind, size) != ("gsa", "1.3b")},
    **{name: (name, []) for name in ("gsa-2.7b", "gated-delta-net-hybrid-1.3b")},
}  # fmt: skip
"""A name in configs/models, and settings over it."""
TINY = {
    "gsa-1.3b": ["model.mixers.gsa={kind: gsa, heads: 2, head_dim: 32, slots: 8}"],
    "bmojo": ["model.mixers.bmojo={kind: bmojo, window: 32, fading: chunk, fading_tokens: 8, eidetic: 8}"],
    "lattice": ["model.mixers.lattice.heads=2", "model.mixers.lattice.head_dim=32", "model.mixers.lattice.slots=8"],
    "transformer": ["model.mixers.attention={kind: attention, heads: 2, head_dim: 32}"],
}
for _size in ("340m", "1.3b", "2.7b"):
    TINY[f"gsa-{_size}"] = TINY["gsa-1.3b"]
    TINY |= {
        f"{kind}-{_size}": [f"model.mixers.{name}={{kind: {name}, heads: 2, d_key: 32, d_value: 32}}"]
        for kind, name in (("delta-net", "delta_net"), ("gated-delta-net", "gated_delta_net"))
    }
    TINY |= {f"{kind}-{_size}": [f"model.mixers.{kind}={{kind: {kind}, d_key: 32}}"] for kind in ("retnet", "hgrn2")}
    TINY[f"gla-{_size}"] = ["model.mixers.gla={kind: gla, heads: 2}"]
TINY["transformer-350m"] = TINY["transformer"]
TINY["gated-delta-net-hybrid-1.3b"] = TINY["gated-delta-net-1.3b"] + TINY["transformer"]


@dataclass(frozen=True)
class Shape:
    """Of a micro-batch: sequences, and their tokens."""

    rows: int
    sequence_length: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.sequence_length}"


@dataclass(frozen=True)
class Timed:
    """Steps of one number of micro-batches. seconds: of those that are timed; bytes: at the peak so far."""

    seconds: list[float]
    bytes: int


@dataclass(frozen=True)
class Found:
    """Of a run of ours. loss: of its first step; timed: by the number of micro-batches; start_s: until the first step was done, by
    what was being done, in this order; profile: of a step of the most micro-batches; training: the settings of its last attempt, in
    which those that are `auto` have values."""

    loss: float
    timed: dict[int, Timed]
    start_s: dict[str, float]
    profile: str | None
    training: TrainingConfig


class Bench:
    """What the cases have in common."""

    def __init__(self, report: Report, folder: Path, arguments: argparse.Namespace) -> None:
        self.report, self.folder, self.arguments = report, folder, arguments
        self.began = time.monotonic()
        self.mamba: dict[tuple[Shape, int], Utilisation] = {}
        self.references: dict[tuple[str, Shape], float] = {}

    @property
    def steps(self) -> int:
        """Of each number of micro-batches."""
        return int(self.arguments.warm_up + self.arguments.steps)

    def left(self) -> float:
        return float(self.arguments.seconds - (time.monotonic() - self.began))

    # -------------------------------------------------------------------------------------------------------------------- runs

    def config(self, model: str, shape: Shape, counts: Sequence[int], *words: str) -> tuple[RunConfig, Path]:
        """A run as the command gets it, and its file. counts: of micro-batches, first of the first steps."""
        base, settings = MODELS[model]
        if self.arguments.tiny:
            settings = [*settings, "model.d_model=64", "model.n_layers=2", "model.vocab_size=512", *TINY.get(model, [])]
            settings += [*TINY["lattice"], "model.mixers.swiglu.hidden=128"] if base == "lattice-1.3b" else []
        elif self.arguments.vocab_size:
            settings = [*settings, f"model.vocab_size={self.arguments.vocab_size}"]
        name, segment, tokens = f"{model}-{shape}", self.arguments.segment, shape.rows * shape.sequence_length
        path = self.folder / f"{name}-{len(list(self.folder.glob(f'{name}-*.yaml')))}.yaml"
        values: dict[str, Any] = {
            "name": name,
            "directory": str(path.with_suffix("")),
            "model": base,
            "training": {
                "steps": 1_000_000,  # it is ended before
                "sequence_length": shape.sequence_length,
                "micro_batch_size": shape.rows,
                "global_batch_tokens": tokens * counts[-1],
                "batch_size_warmup": [{"steps": self.steps, "global_batch_tokens": tokens * count} for count in counts[:-1]],
                "log_every": 1,
                "optimizer": {"lr": 1e-4},
                "schedule": {"kind": "constant"},
                "checkpoint": {"every": 1_000_000},
                "evaluation": {"every": 0},
            },
        }
        path.write_text(yaml.safe_dump(values))
        resolved = load(path, settings).model
        vocab_size = resolved.vocab_size
        assert vocab_size is not None
        # a segment of full attention reads the keys of all before it: nothing is saved but activations
        if shape.sequence_length > segment and not any(mixer.state_grows for mixer in resolved.mixers.values()):
            values["training"]["bptt"] = {"mode": "exact", "segment": segment}
        values["data"] = text_for(vocab_size, self.folder, documents=2 if self.arguments.tiny else None)
        path.write_text(yaml.safe_dump(values))
        config = load(path, [*settings, *words])
        path.write_text(config.to_yaml())
        return config, path

    def ours(self, config: RunConfig, path: Path, counts: Sequence[int], gpus: Sequence[int] = ()) -> Found | None:
        """The run, as far as is needed. gpus: those that it sees; none: all. None: out of memory. Raises RuntimeError."""
        words, wanted, table = [], self.steps * len(counts), None
        if self.arguments.profile and config.training.segments == 1:
            # the profiler gets ready in a step that is not timed; every tenth step measures the update, which is not every step's
            first = next(n for n in range(wanted + 2, wanted + 22) if n % 10)
            words = [f"profile.skip_steps={first - 1}", "profile.steps=1"]  # of many micro-batches, which it takes a while to read
            table = config.folder / "profile" / f"step-{first:08d}-rank-0.txt"
        began = time.time()
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})
        command = [*BATON, "train", str(path), *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        deadline = time.monotonic() + max(60.0, self.left())
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if len(steps_of(config)) >= wanted and (table is None or table.exists()):
                    break
                time.sleep(0.2)
        finally:
            end(process)
        rows = steps_of(config)
        if len(rows) < wanted:
            logs = sorted(config.folder.glob("attempts/*/rank-0.log"))
            log = logs[-1].read_text(errors="replace") if logs else process.stderr.read().decode()  # type: ignore[union-attr]
            if "OutOfMemoryError" in log or "out of memory" in log:
                return None
            raise RuntimeError(f"{len(rows)} of {wanted} steps; its log ends with\n{log[-3000:]}")
        times, timed = [row["time"] for row in rows[:wanted]], {}
        for number, count in enumerate(counts):
            last = self.steps * (number + 1)
            marks = times[last - self.arguments.steps - 1 : last]
            peak = max(row["memory_bytes"] for row in rows[:last])
            timed[count] = Timed([after - before for before, after in pairwise(marks)], peak)
        return Found(
            loss=rows[0]["loss"],
            timed=timed,
            start_s=start_of(config, began, times[0]),
            profile=table.read_text() if table is not None and table.exists() else None,
            training=read_config(max(config.folder.glob("attempts/*/config.yaml"))).training,
        )

    def aside(self, function: Any, path: Path, *words: Any) -> dict[str, Any] | None:
        """What a function writes in a process of its own. None: it failed, or took too long."""
        found = path.with_suffix(f".{function.__name__}.json")
        found.unlink(missing_ok=True)
        # no daemon: those must not start processes, and the reference reads its text in one
        process = mp.get_context("spawn").Process(target=function, args=(str(path), str(found), *words))
        process.start()
        process.join(max(60.0, self.left()))
        if process.is_alive():
            process.kill()
        process.join()
        return json.loads(found.read_text()) if found.exists() else None

    # ------------------------------------------------------------------------------------------------------------------- cases

    def case(self, model: str, shape: Shape, counts: Sequence[int]) -> None:
        stream = ", bfloat16 residual" if self.arguments.residual_dtype == "bfloat16" else ""
        stream += ", selective recomputation" if self.arguments.selective else ""
        report, case = self.report, f"{model} {shape}{stream}"
        words: list[str] = ["training.recompute=selective"] if self.arguments.selective else []
        words += ["training.recompute=full"] if self.arguments.recompute else []
        words += [f"training.residual_dtype={self.arguments.residual_dtype}"]
        words += ["training.cuda_graphs=true"] if self.arguments.graphs else []
        if self.left() < self.arguments.reserve:
            report.say(f"{case}: left out, for want of time")
            return
        config, path = self.config(model, shape, counts, *words)
        found = self.ours(config, path, counts)
        if found is None:
            report.say(f"{case}: out of memory")
            return
        self.gate(case, model, shape, found, path)
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.start_s.items())
        report.say(f"{case}: the first step was done {sum(found.start_s.values()):.1f} s after the command: {parts}")
        uses = {count: self.said(case, config, found.training, count, timed) for count, timed in found.timed.items()}
        for count, used in uses.items():
            row = f"{case} x {count}"
            if model == "mamba-1.4b":
                self.mamba[shape, count] = used
            elif (mamba := self.mamba.get((shape, count))) and abs(used.parameters / mamba.parameters - 1) < LIKE_MAMBA:
                report.row(row, "tokens/s", used.tokens_per_s, "our mamba-1.4b", mamba.tokens_per_s, gate=case)
            if used.peak is not None:
                for metric, share in (("TFLOP/s as 6N", used.mfu_6n), ("TFLOP/s, mixers counted", used.mfu_model)):
                    assert share is not None
                    report.row(row, metric, share * used.peak.tflops, used.peak.name, used.peak.tflops, gate=case)
        report.save()
        self.peer(case, config, uses, found, path)
        if found.profile:
            for line in found.profile.splitlines():
                report.say(f"  {line}")
        report.save()

    def gate(self, case: str, model: str, shape: Shape, found: Found, path: Path) -> None:
        """The first loss beside the reference form's; where another one of the same model has been compared already, whose tokens
        are others, and this one's are too many to do so again, beside that."""
        loss, many = found.loss, shape.rows * shape.sequence_length > self.arguments.reference_tokens
        known = [of for (name, _), of in self.references.items() if name == model]
        if known and many:
            off = abs(loss - known[0]) / known[0]
            detail = f"first loss {loss:.5f}, of other tokens in the reference form {known[0]:.5f}: {off:.1e} <= {OTHER_TEXT:g}"
            self.report.gate(case, off <= OTHER_TEXT, detail)
            return
        reference = self.aside(reference_main, path, self.arguments.tiny)
        if reference is None:
            self.report.gate(case, False, "the reference form gave no loss")
            return
        self.references[model, shape] = reference["loss"]
        off, *others = (abs(x - reference["loss"]) / reference["loss"] for x in (loss, *reference["others"]))
        detail = f"first loss {loss:.6f}, of the reference form {reference['loss']:.6f}: {off:.1e} <= {NEAR:g}"
        self.report.gate(case, off <= NEAR, detail + "".join(f" (other initial values: {other:.1e})" for other in others))

    def said(self, case: str, config: RunConfig, training: TrainingConfig, count: int, found: Timed) -> Utilisation:
        """A line of what was found."""
        seconds, gpu = statistics.median(found.seconds), torch.cuda.is_available()
        device = torch.cuda.get_device_name() if gpu else "this CPU"
        used = Utilisation(
            parameters=sum(one.parameter_count for one in of_stages(config)),
            flops=flops_per_token(config, training),
            tokens=training.micro_batch_size * training.sequence_length * count,
            seconds=seconds,
            devices=1,
            peak=device_peak(device, training.compute_dtype, 0.1 if self.arguments.tiny else None),
        )
        spread = f"{1000 * min(found.seconds):,.1f} to {1000 * max(found.seconds):,.1f}"
        recomputed = {"none": "", "states": "states ", "selective": "cheap parts ", "full": ""}[str(training.recompute)]
        again = "" if training.recompute == "none" else f", {recomputed}recomputed"
        again += ", recorded" if training.cuda_graphs else ""
        cut = f", {training.segments} exact segments" if training.segments > 1 else ""
        self.report.say(
            f"{case} x {count}{cut}{again}: {used.tokens_per_s:,.0f} tokens/s, {1000 * seconds:,.1f} ms a step ({spread}, "
            f"{len(found.seconds)} steps), {found.bytes / 2**30:.2f} GiB, N = {used.parameters:,}"
        )
        self.report.say(f"{case} x {count}: {used}")
        return used

    def peer(self, case: str, config: RunConfig, uses: dict[int, Utilisation], found: Found, path: Path) -> None:
        """The peer of the model, where there is one."""
        of_model = None if self.arguments.no_peers else peer_of(config.model)
        if of_model is None:
            return
        name, _ = of_model
        if self.left() < self.arguments.reserve:
            self.report.say(f"{case}: {name} left out, for want of time")
            return
        theirs = self.aside(peer_main, path, list(uses), self.arguments.warm_up, self.arguments.steps)
        if theirs is None or "absent" in theirs:
            why = "it failed" if theirs is None else theirs["absent"]
            self.report.say(f"{case}: {name} is not here: {why}")
            return
        sequence_length, gate, size = theirs["tokens"], f"{case}, {name}", next(iter(uses.values())).parameters
        off = abs(theirs["parameters"] - size) / size
        far = abs(theirs["loss"] - found.loss) / found.loss
        detail = f"parameters {theirs['parameters']:,} and {size:,} to {off:.1e} <= {SAME_SIZE:g}, "
        detail += f"untrained losses {theirs['loss']:.3f} and {found.loss:.3f} to {far:.1e} <= {SEEMS_TRAINED:g}"
        self.report.gate(gate, off <= SAME_SIZE and far <= SEEMS_TRAINED, detail)
        if sequence_length < config.training.sequence_length:
            self.report.say(f"{case}: {name} is out of memory; the longest that fits is {sequence_length} tokens")
            name = f"{name} at {sequence_length}"
        for count, used in uses.items():
            of, row = theirs["timed"][str(count)], f"{case} x {count}"
            seconds, tokens = statistics.median(of["seconds"]), used.tokens * sequence_length // config.training.sequence_length
            theirs_used = replace(used, parameters=theirs["parameters"], tokens=tokens, seconds=seconds)
            self.report.say(f"{row}: {name} {1000 * seconds:,.1f} ms a step, {of['bytes'] / 2**30:.2f} GiB; {theirs_used}")
            self.report.row(row, "tokens/s", used.tokens_per_s, name, tokens / seconds, gate=gate)
            for whose, nbytes in ((name, 0), (f"{name} + 14 bytes a parameter", 14 * used.parameters)):
                mine, allowed = found.timed[count].bytes / 2**30, (of["bytes"] + nbytes) / 2**30
                self.report.row(row, "peak GiB", mine, whose, allowed, gate=gate, higher_is_better=False)


def bench_arguments(description: str) -> argparse.ArgumentParser:
    """What Bench needs to be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--warm-up", type=int, default=3, help="steps before those that are timed, of each number of micro-batches (default 3)"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed (default 5)")
    parser.add_argument("--segment", type=int, help="tokens of an exact segment (default 16384)")
    parser.add_argument("--vocab-size", type=int, help="another vocabulary than the model's own")
    parser.add_argument("--reference-tokens", type=int, default=32768, metavar="N", help="micro-batches of more tokens rest on the "
                        "reference form's loss of other tokens, where another shape has one (default 32768)")  # fmt: skip
    parser.add_argument("--recompute", action="store_true", help="training.recompute=full; default: auto")
    parser.add_argument("--selective", action="store_true", help="training.recompute=selective; default: auto")
    parser.add_argument("--residual-dtype", choices=("float32", "bfloat16"), default="float32", help="training.residual_dtype")
    parser.add_argument("--graphs", action="store_true", help="training.cuda_graphs=true, default: auto; not with --profile")
    parser.add_argument("--profile", action="store_true", help="also profile=true: where another step's time goes; not in segments")
    parser.add_argument("--seconds", type=float, default=570, help="after which no further case is begun (default 570)")
    parser.add_argument("--reserve", type=float, default=120, help="seconds that must be left to begin one (default 120)")
    parser.add_argument("--folder", type=Path, help="keeps data and runs (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="try the program on sizes that mean nothing; writes no results")
    return parser


def _arguments() -> argparse.Namespace:
    parser = bench_arguments(__doc__.partition("\n")[0])
    parser.add_argument("--model", default="mamba-1.4b", help=f"separated by commas, of {', '.join(MODELS)}; or all")
    parser.add_argument("--shapes", help="rows x tokens of a micro-batch (default 8x2048,1x16384,1x131072)")
    parser.add_argument("--micro-batches", default="1,16", help="per optimizer step (default 1,16)")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    arguments = parser.parse_args()
    if arguments.graphs and arguments.profile:
        parser.error("--graphs does not go with --profile: a graph's kernels are not launched one by one")
    arguments.segment = arguments.segment or (64 if arguments.tiny else 16384)
    arguments.shapes = arguments.shapes or ("2x32,1x64,1x256" if arguments.tiny else "8x2048,1x16384,1x131072")
    arguments.model = ",".join(MODELS) if arguments.model == "all" else arguments.model
    if unknown := [name for name in arguments.model.split(",") if name not in MODELS]:
        parser.error(f"no model is called {unknown[0]}; known: {', '.join(MODELS)}")
    if arguments.warm_up < 1 or arguments.steps < 1:
        parser.error("--warm-up and --steps are 1 or more")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny tries the program without one")
    return arguments


def main() -> None:
    # whoever ends this program ends what it has started, which would keep the GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments = _arguments()
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else None
    report = Report("train_step", device=device, keep=not arguments.tiny)
    if arguments.tiny:
        report.say("PLUMBING ONLY: tiny models, to see that the program runs; its numbers mean nothing and are not kept")
    shapes = [Shape(*map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(report, folder.resolve(), arguments)
        for shape in shapes:
            for name in arguments.model.split(","):
                counts = [1] if shape.sequence_length > arguments.segment else sorted(map(int, arguments.micro_batches.split(",")))
                try:
                    bench.case(name, shape, counts)
                except RuntimeError as error:  # the others are worth their time
                    failed = True
                    report.say(f"{name} {shape}: FAILED: {error}")
    report.save()
    sys.exit(failed)


if __name__ == "__main__":
    main()
