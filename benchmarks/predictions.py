"""docs/planned.md: what `baton plan` says of whole steps at 1.3B on 4, 8, 64 and 4,096 H100s, to be held against later runs.

The layouts are those of scaling.py; `make tables` writes the page. Where scaling.py has measured a case, what was found is beside
the plan for the cards that it was found on.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from scaling import Case, case_of, cluster_of, words_of_layout
from train_step import MODELS, Shape

from baton.launcher.cluster import load_cluster
from baton.launcher.config import load
from baton.launcher.errors import ConfigError
from baton.launcher.planner import automatic
from baton.launcher.planner.memory import of_stages
from baton.launcher.planner.time import Speed, bubble, speed

MODEL_NAMES = ("mamba-1.4b", "gsa-1.3b")
LAYOUTS = {
    1: ("",),
    4: (
        *("data=4", "context=4", "tensor=2", "tensor=4", "sequence_parallel=4", "pipeline=2x8", "pipeline=2x16"),
        *("pipeline=4x8", "pipeline=4x16", "tensor=2+context=2", "tensor=2+data=2"),
    ),
    8: ("data=8", "context=8", "tensor=8", "pipeline=8x32", "tensor=2+context=2+data=2"),
    64: ("data=64", "context=8+data=8", "tensor=2+pipeline=4+data=8x16"),
    4096: ("data=4096", "context=16+data=256", "tensor=2+pipeline=4+data=512x16"),
}
"""Of a table, by the GPUs it is for. Micro-batches of a step: 4, or as given."""
CLUSTER = "h100"
INTRODUCTION = """# Planned

What `baton plan` says of optimizer steps of models with 1.3 billion parameters on H100s (`configs/clusters/h100.yaml`), with
default settings: predictions, to be held against later runs. The rates behind them are those of runs on one to four GPUs. A GPU has
16,384 tokens a micro-batch and 4 micro-batches a step; pipelines have as many as is written behind x. Layouts that split the model
(tensor, pipeline) divide one GPU's work, all others add to it. The share is that of the throughput of as many independent GPUs, as
planned. A plan knows the waiting of pipeline stages and none of other ranks. Where scaling.py has measured a case, its share is in
the last column, with the seconds of a step planned for that card and measured. `make tables` writes this page.
"""


@dataclass(frozen=True)
class Planned:
    """gib: of a rank of the fullest stage."""

    gib: float
    speed: Speed
    waiting: float


@cache
def planned(case: Case, cluster_name: str = CLUSTER) -> Planned:
    """Raises ConfigError."""
    base, settings = MODELS[case.model]
    values: dict[str, Any] = {
        "name": "planned",
        "directory": "runs/planned",
        "model": base,
        "device": "cuda",
        "data": {"path": "nowhere", "tokenizer": "nowhere.model"},
        "training": {
            "steps": 1000,
            "sequence_length": case.shape.sequence_length,
            "micro_batch_size": case.shape.rows,
            "global_batch_tokens": case.tokens,
            "optimizer": {"lr": 1e-4},
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(yaml.safe_dump(values))
        config = load(path, [*settings, *words_of_layout(case)])
    cluster = load_cluster(cluster_name)
    config, _ = automatic.resolve(config, int(cluster.usable_gib * 2**30), cluster.kind)
    counted = of_stages(config)
    peak = max(one.memory().peak for one in counted)
    return Planned(peak / 2**30, speed(config, counted, cluster), bubble(counted))


def lines(gpus: int, model: str, layouts: Sequence[str], measured: Sequence[dict[str, Any]]) -> Iterator[str]:
    wide, long = Shape(8, 2048), Shape(1, 16384)
    for layout in layouts:
        case = case_of(model, layout, gpus, 4, wide, long) if layout else Case(model, (), wide, 4, wide)
        try:
            plan, alone = planned(case), planned(Case(model, (), case.base, 4, case.base))
        except ConfigError as error:
            yield f"| {str(case).partition(', ')[2]} | {case.ranks:,} | {str(error).replace('|', ' ')} |  |  |  |  |  |  |"
            continue
        share = plan.speed.tokens_per_second / (case.ranks * alone.speed.tokens_per_second)
        found = {row["metric"]: row for row in measured if row["case"] == str(case)}
        beside = ""
        if "seconds a step" in found:
            seconds = found["seconds a step"]
            card = seconds["device"].replace("NVIDIA ", "")
            of = f"{found['tokens/s']['ratio']:.2f}, " if "tokens/s" in found else ""
            beside = f"{of}{planned(case, cluster_of(seconds['device'])).speed.step:.3g} and {seconds['ours']:.3g} s, {card}"
        yield (
            f"| {str(case).partition(', ')[2]} | {case.ranks:,} | {case.tokens:,} | {plan.gib:.1f} | "
            f"{plan.speed.step:.3f} | {plan.speed.tokens_per_second:,.0f} | {share:.2f} | {plan.waiting:.2f} | {beside} |"
        )


def page(measured: Sequence[dict[str, Any]]) -> str:
    """The page. measured: rows of scaling.json."""
    parts = [INTRODUCTION]
    for model in MODEL_NAMES:
        parts.append(f"## {model}\n")
        parts.append("| layout | GPUs | tokens a step | GiB a GPU | s a step | tokens/s | share | waiting of stages | measured |")
        parts.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        parts += [line for gpus, layouts in LAYOUTS.items() for line in lines(gpus, model, layouts, measured)]
        parts.append("")
    return "\n".join(parts)
