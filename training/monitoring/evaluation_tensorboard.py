"""Results of `baton eval` in TensorBoard, by the checkpoint's step, in a folder beside the run's, whose writer may be busy."""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def show_evaluation(folder: Path, row: dict[str, Any]) -> None:
    """Write a row of evaluations.jsonl that has a step. folder: the run directory. Raises OSError."""
    # importing TensorBoard takes a fifth of a second
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard" / "evaluations")) as writer:
        for tag, value in scalars(row):
            writer.add_scalar(tag, value, row["step"])


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values of a row: of a dataset, of lm_eval's tasks, or of questions about long texts, whose depths are averaged."""
    if "loss" in row:
        place = f"{Path(row['data']).name}.{row['split']}"
        for name in ("loss", "perplexity", "bits_per_byte"):
            yield f"{place}/{name}", row[name]
        for bucket in row.get("by_position", ()):
            yield f"{place} by position/from_{bucket['from']:07d}", bucket["loss"]
    for task, metrics in row.get("tasks", {}).items():
        for name, value in metrics.items():
            yield f"{task}/{name.removesuffix(',none')}", value
    scores = defaultdict[str, list[float]](list)
    for one in row.get("long_context", ()):
        scores[f"{one['task']}/{one['length']}_tokens"].append(one["score"])
    for tag, found in scores.items():
        yield tag, math.fsum(found) / len(found)
