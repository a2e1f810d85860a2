"""Whole optimizer steps at 1.3B on several GPUs: `baton train` with each layout, compared with one GPU and with `baton plan`.

Layouts that split the data or the sequence have the work of one GPU on every GPU (weak scaling). Layouts that split the model
divide one GPU's micro-batch (tensor), or have one GPU's number of micro-batches times the number of stages (pipeline). Results are
efficiencies: the share of the throughput of as many independent GPUs. The planned memory of the first rank and the planned seconds
of a step are reported beside the measured ones; a plan does not include waiting.

    python benchmarks/scaling.py [--model mamba-1.4b,gsa-1.3b] [--layouts data,context,tensor] [--micro-batches 4]

The single GPU's runs, of both shapes and all models, go on at once, each on a GPU of its own. With --tiny it all runs on a CPU, on
sizes that mean nothing, and writes no results.
"""

import argparse
import functools
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from report import Report
from train_step import MODELS, NEAR, OTHER_TEXT, Bench, Found, Shape, bench_arguments

from baton.launcher.cluster import load_cluster
from baton.launcher.config import RunConfig
from baton.launcher.planner.plan import make_plan

LAYOUTS = ("data", "context", "tensor", "sequence_parallel", "pipeline")
"""sequence_parallel: tensor ranks with Megatron's split of what lies between their blocks."""


@dataclass(frozen=True)
class Case:
    """A run. layout: what divides its work, or one: nothing; ranks: over how many; base: the single GPU's shape that it is held
    against."""

    model: str
    layout: str
    ranks: int
    shape: Shape
    micro_batches: int
    base: Shape

    def __str__(self) -> str:
        how = "1 rank" if self.layout == "one" else f"{self.layout} {self.ranks}"
        return f"{self.model}, {how}, {self.shape} x {self.micro_batches}"

    @property
    def tokens(self) -> int:
        """Of a step, all ranks together."""
        replicas = self.ranks if self.layout == "data" else 1
        return replicas * self.shape.rows * self.shape.sequence_length * self.micro_batches


def case_of(model: str, layout: str, ranks: int, count: int, wide: Shape, long: Shape) -> Case:
    """count: micro-batches of a step on one GPU. wide, long: its shapes, of which sequence ranks lengthen the second."""
    if layout == "context":
        return Case(model, layout, ranks, Shape(long.rows, ranks * long.sequence_length), count, long)
    return Case(model, layout, ranks, wide, ranks * count if layout == "pipeline" else count, wide)


def words_of(case: Case, arguments: argparse.Namespace) -> list[str]:
    words = [] if case.layout == "one" else [f"layout.{case.layout}={case.ranks}"]
    if case.layout == "sequence_parallel":
        words = [f"layout.tensor={case.ranks}", "layout.sequence_parallel=true"]
    words += [f"training.global_batch_tokens={case.tokens}"]
    words += ["training.recompute=selective"] if arguments.selective else []
    words += ["training.recompute=full"] if arguments.recompute else []
    return words + (["training.cuda_graphs=true"] if arguments.graphs else [])


def cluster_of(device: str) -> str:
    """The shipped cluster whose GPUs these are."""
    return next((name for name in ("h100", "h200", "a100") if name.upper() in device), "h100")


def beside_plan(report: Report, case: Case, config: RunConfig, seconds: float, nbytes: int, cluster: str) -> None:
    """What was found beside what was said beforehand. config: with what the run has chosen where a setting is auto."""
    plan = make_plan(config, load_cluster(cluster))
    assert plan.speed is not None
    memory, step = plan.stages[0].memory.peak / 2**30, plan.speed.step
    report.row(f"{case}", "peak GiB", nbytes / 2**30, "baton plan", memory, gate=str(case), higher_is_better=False)
    report.row(f"{case}", "seconds a step", seconds, "baton plan", step, gate=str(case), higher_is_better=False)


@dataclass(frozen=True)
class Run:
    """A case's run, and what was found; found is None: out of memory."""

    case: Case
    config: RunConfig
    path: Path
    found: Found | None

    @property
    def seconds(self) -> float:
        """Of a step."""
        assert self.found is not None
        return statistics.median(self.found.timed[self.case.micro_batches].seconds)


def run(bench: Bench, case: Case, gpu: int | None = None) -> Run:
    config, path = bench.config(case.model, case.shape, [case.micro_batches], *words_of(case, bench.arguments))
    return Run(case, config, path, bench.ours(config, path, [case.micro_batches], gpu=gpu))


def alone(bench: Bench, cases: list[Case], gpus: int) -> dict[tuple[str, Shape], Run]:
    """Runs of one GPU, as many at once as there are GPUs."""
    for case in cases:
        bench.config(case.model, case.shape, [case.micro_batches])  # the text, before several want it at once

    def on(gpu: int) -> list[Run]:
        return [run(bench, case, gpu if gpus else None) for case in cases[gpu :: max(1, gpus)]]

    with ThreadPoolExecutor(max(1, gpus)) as pool:
        found = chain.from_iterable(pool.map(on, range(max(1, gpus))))
    return {(one.case.model, one.case.shape): one for one in found}


def said(bench: Bench, one: Run, base: Run) -> None:
    """One run's lines and rows."""
    report, case = bench.report, one.case
    if one.found is None:
        report.say(f"{case}: out of memory")
        return
    timed = one.found.timed[case.micro_batches]
    if one is base:
        bench.gate(str(case), case.model, case.shape, one.found, one.path)
    elif base.found is not None:
        # the same tokens only where one data rank has as many
        limit = NEAR if case.layout in ("tensor", "sequence_parallel") else OTHER_TEXT
        off = abs(one.found.loss - base.found.loss) / base.found.loss
        detail = f"first loss {one.found.loss:.5f}, of one GPU {base.found.loss:.5f}: {off:.1e} <= {limit:g}"
        report.gate(str(case), off <= limit, detail)
    report.say(
        f"{case}: {case.tokens / one.seconds:,.0f} tokens/s, {1000 * one.seconds:,.1f} ms a step of {case.tokens:,} tokens "
        f"({1000 * min(timed.seconds):,.1f} to {1000 * max(timed.seconds):,.1f}, {len(timed.seconds)} steps), "
        f"{timed.bytes / 2**30:.2f} GiB on the first rank, recompute {one.found.training.recompute}"
        f"{', recorded' if one.found.training.cuda_graphs else ''}"
    )
    if one.found.profile:
        for line in one.found.profile.splitlines():
            report.say(f"    {line}".rstrip())
    if base.found is None:
        report.say(f"{case}: one GPU alone is out of memory")
        return
    if one is not base:
        apart = case.ranks * base.case.tokens / base.seconds
        report.row(str(case), "tokens/s", case.tokens / one.seconds, f"{case.ranks} times one GPU", apart, gate=str(case))
    chosen = one.config.model_copy(update={"training": one.found.training})
    beside_plan(report, case, chosen, one.seconds, timed.bytes, bench.arguments.cluster)


def main() -> None:
    parser = bench_arguments(__doc__.partition("\n")[0])
    parser.add_argument("--model", default="mamba-1.4b,gsa-1.3b", help=f"separated by commas, of {', '.join(MODELS)}")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"separated by commas, of {', '.join(LAYOUTS)}")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a data rank's step (default 4)")
    parser.add_argument("--ranks", type=int, default=0, help="of the layouts (default: the GPUs there are)")
    parser.add_argument("--cluster", help="whose rates a plan is made with (default: the shipped one with this GPU)")
    parser.set_defaults(name="scaling")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    ranks = arguments.ranks or max(2, gpus)
    if not arguments.tiny and gpus < ranks:
        parser.error(f"{ranks} GPUs are needed, {gpus} are here; --tiny tries the program without")
    arguments.segment = arguments.segment or 1 << 20  # none is cut
    arguments.reference_tokens = 0  # the reference form's loss of a model's first shape serves its second
    wide, long = (Shape(2, 32), Shape(1, 64)) if arguments.tiny else (Shape(8, 2048), Shape(1, 16384))
    of = functools.partial(case_of, ranks=ranks, count=arguments.micro_batches, wide=wide, long=long)
    cases = [of(model, layout) for model in arguments.model.split(",") for layout in arguments.layouts.split(",")]
    device = f"{ranks} x {torch.cuda.get_device_name()}" if gpus else None
    arguments.cluster = arguments.cluster or cluster_of(device or "")
    report = Report("scaling", device=device, keep=not arguments.tiny)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(report, folder.resolve(), arguments)
        singles = dict.fromkeys(Case(case.model, "one", 1, case.base, arguments.micro_batches, case.base) for case in cases)
        bases = alone(bench, list(singles), gpus)
        for base in bases.values():
            said(bench, base, base)
        for case in cases:
            if bench.left() < arguments.reserve:
                report.say(f"{case}: left out, for want of time")
                continue
            try:
                said(bench, run(bench, case), bases[case.model, case.base])
            except RuntimeError as error:  # the others are worth their time
                failed = True
                report.say(f"{case}: FAILED: {error}")
    report.save()
    sys.exit(failed)


if __name__ == "__main__":
    main()
