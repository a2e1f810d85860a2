"""Whole optimizer steps at 1.3B on several GPUs: `baton train` with each layout, compared with one GPU and with `baton plan`.

Layouts that split the data or the sequence have the work of one GPU on every GPU (weak scaling). Layouts that split the model
divide one GPU's micro-batch (tensor), or have one GPU's number of micro-batches times the number of stages (pipeline). Results are
efficiencies: the share of the throughput of as many independent GPUs. The planned memory of the first rank and the planned seconds
of a step are reported beside the measured ones; a plan does not include waiting.

    python benchmarks/scaling.py [--model mamba-1.4b,gsa-1.3b] [--layouts data,context,tensor] [--micro-batches 4]
    python benchmarks/scaling.py --layouts tensor=2,sequence_parallel=2,pipeline=2x16,tensor=2+context=2

A layout is one or more ways to divide the work, joined by +, with their ranks where these are not all GPUs; x and a number behind
it: micro-batches of a step (pipeline: 4 a stage). Runs on fewer GPUs than there are go on at once, each on GPUs of its own: the
single GPU's, of both shapes and all models, first. With --tiny it all runs on a CPU, on sizes that mean nothing, and writes no
results.
"""

import argparse
import functools
import math
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import torch
from report import Report
from train_step import MODELS, NEAR, OTHER_TEXT, Bench, Found, Shape, bench_arguments

from baton.launcher.cluster import load_cluster
from baton.launcher.config import RunConfig
from baton.launcher.planner.plan import make_plan

LAYOUTS = ("data", "context", "tensor", "sequence_parallel", "pipeline")
"""sequence_parallel: tensor ranks with Megatron's split of what lies between their blocks."""
CONFIGURING = threading.Lock()


@dataclass(frozen=True)
class Case:
    """A run. sizes: what divides its work, by name, over how many ranks; none: one GPU. base: the single GPU's shape that it is
    held against."""

    model: str
    sizes: tuple[tuple[str, int], ...]
    shape: Shape
    micro_batches: int
    base: Shape

    def __str__(self) -> str:
        how = ", ".join(f"{name} {ranks}" for name, ranks in self.sizes) or "1 rank"
        return f"{self.model}, {how}, {self.shape} x {self.micro_batches}"

    @property
    def ranks(self) -> int:
        return math.prod(ranks for _, ranks in self.sizes)

    @property
    def tokens(self) -> int:
        """Of a step, all ranks together."""
        return dict(self.sizes).get("data", 1) * self.shape.rows * self.shape.sequence_length * self.micro_batches


def case_of(model: str, layout: str, gpus: int, count: int, wide: Shape, long: Shape) -> Case:
    """layout: as given. count: micro-batches of a step on one GPU. wide, long: its shapes, of which context ranks lengthen the
    second. Raises ValueError."""
    found = re.fullmatch(r"([a-z_]+(?:=\d+)?(?:\+[a-z_]+=\d+)*)(?:x(\d+))?", layout)
    if found is None:
        raise ValueError(f"{layout!r} is no layout; known: NAME, NAME=RANKS, NAME=RANKS+NAME=RANKS, each with xCOUNT")
    parts, given = found.groups()
    pairs = [(name, int(ranks or gpus)) for name, _, ranks in (part.partition("=") for part in parts.split("+"))]
    if unknown := sorted({name for name, _ in pairs} - set(LAYOUTS)):
        raise ValueError(f"{unknown[0]!r} is no way to divide the work; known: {', '.join(LAYOUTS)}")
    sizes = dict(pairs)
    micro_batches = int(given) if given else sizes.get("pipeline", 1) * count
    if "context" in sizes:
        return Case(model, tuple(pairs), Shape(long.rows, sizes["context"] * long.sequence_length), micro_batches, long)
    return Case(model, tuple(pairs), wide, micro_batches, wide)


def words_of_layout(case: Case) -> list[str]:
    """Settings of a run."""
    names = {"sequence_parallel": "tensor"}
    words = [f"layout.{names.get(name, name)}={ranks}" for name, ranks in case.sizes]
    return words + (["layout.sequence_parallel=true"] if "sequence_parallel" in dict(case.sizes) else [])


def words_of(case: Case, arguments: argparse.Namespace) -> list[str]:
    words = [*words_of_layout(case), f"training.global_batch_tokens={case.tokens}"]
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


def run(bench: Bench, case: Case, gpus: Sequence[int] = ()) -> Run | RuntimeError:
    """On these GPUs alone; none: on those that it sees."""
    with CONFIGURING:  # several at once would write each other's text
        config, path = bench.config(case.model, case.shape, [case.micro_batches], *words_of(case, bench.arguments))
    try:
        return Run(case, config, path, bench.ours(config, path, [case.micro_batches], gpus=gpus))
    except RuntimeError as error:  # the others are worth their time
        return error


def together(bench: Bench, cases: Iterable[Case], gpus: int) -> Iterator[tuple[Case, Run | RuntimeError | None]]:
    """Runs in the order of their cases; of neighbours with as many ranks as many at once as there are GPUs for. None: left out, for
    want of time."""
    for ranks, of_size in groupby(cases, lambda case: case.ranks):
        left, at_once = list(of_size), max(1, gpus // ranks)
        for some in (left[first : first + at_once] for first in range(0, len(left), at_once)):
            if bench.left() < bench.arguments.reserve:
                yield from ((case, None) for case in some)
                continue
            own = [range(at * ranks, (at + 1) * ranks) if gpus else () for at in range(len(some))]
            with ThreadPoolExecutor(len(some)) as pool:
                yield from zip(some, pool.map(functools.partial(run, bench), some, own), strict=True)


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
        limit = NEAR if {name for name, _ in case.sizes} <= {"tensor", "sequence_parallel"} else OTHER_TEXT
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
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"separated by commas, see above; of {', '.join(LAYOUTS)}")
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
    models, layouts = arguments.model.split(","), arguments.layouts.split(",")
    try:
        cases = [case_of(model, layout, ranks, arguments.micro_batches, wide, long) for model in models for layout in layouts]
    except ValueError as error:
        parser.error(str(error))
    if (most := max(case.ranks for case in cases)) > ranks:
        parser.error(f"a layout has {most} ranks, {ranks} GPUs are here")
    device = f"{ranks} x {torch.cuda.get_device_name()}" if gpus else None
    arguments.cluster = arguments.cluster or cluster_of(device or "")
    report = Report("scaling", device=device, keep=not arguments.tiny)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(report, folder.resolve(), arguments)
        singles = dict.fromkeys(Case(case.model, (), case.base, arguments.micro_batches, case.base) for case in cases)
        bases = dict[tuple[str, Shape], Run]()
        for case, one in together(bench, chain(singles, cases), gpus):
            if isinstance(one, Run) and not case.sizes:
                bases[case.model, case.shape] = one
            if one is None:
                report.say(f"{case}: left out, for want of time")
            elif isinstance(one, Run) and (base := bases.get((case.model, case.base))) is not None:
                said(bench, one, base)
            else:
                failed = True
                report.say(f"{case}: FAILED: {one if isinstance(one, RuntimeError) else 'there is no run of one GPU'}")
            report.save()
    report.save()
    sys.exit(failed)


if __name__ == "__main__":
    main()
