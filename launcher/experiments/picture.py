"""The picture of an experiment: our figures and the paper's. Imports matplotlib."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from baton.launcher.experiments.config import UNITS


def draw(found: Mapping[str, Any], out: Path) -> None:
    """Draws `report.collect`'s results into a PNG. One axis: a point for each cell. More: a line for each label of the first, over
    the last, a panel for each label between them."""
    (_, rows), *others = found["axes"].items()
    ours = {tuple(cell["cell"]): list(cell["seeds"].values()) for cell in found["cells"]}
    paper = {tuple(figure["cell"]): figure["value"] for figure in found["figures"]}
    panels = list(product(*(labels for _, labels in others[:-1])))
    figure, axes = plt.subplots(1, len(panels), figsize=(1.5 + 4.5 * len(panels), 3.6), squeeze=False, constrained_layout=True)
    try:
        for panel, axis in zip(panels, axes.flat, strict=True):
            if others:
                _lines(axis, rows, panel, others[-1], ours, paper)
            else:
                _points(axis, rows, ours, paper)
            axis.set_title("/".join(panel) or found["title"], fontsize="medium", wrap=True)
        axes[0, 0].set_ylabel(UNITS[found["measure"]])
        axes[0, -1].legend(fontsize="small")
        aside = out.with_name(f".{out.name}")
        figure.savefig(aside, format="png", dpi=100, metadata={"Software": None})
        aside.replace(out)
    finally:
        plt.close(figure)


def _points(axis: Axes, rows: list[str], ours: Mapping[Any, list[float]], paper: Mapping[Any, float]) -> None:
    drawn = [(number, value) for number, row in enumerate(rows) for value in ours.get((row,), ())]
    axis.plot(*zip(*drawn), "o", label="ours")
    if printed := [(number, paper[row,]) for number, row in enumerate(rows) if (row,) in paper]:
        axis.plot(*zip(*printed), "_", ms=22, mew=2, color="black", label="paper")
    axis.set_xticks(range(len(rows)), rows, rotation=30 if len(rows) > 4 else 0, ha="right" if len(rows) > 4 else "center")


def _lines(
    axis: Axes,
    rows: list[str],
    panel: tuple[str, ...],
    last: tuple[str, list[str]],
    ours: Mapping[Any, list[float]],
    paper: Mapping[Any, float],
) -> None:
    name, labels = last
    for number, row in enumerate(rows):
        cells = [(at, (row, *panel, label)) for at, label in enumerate(labels)]
        means = [(at, sum(ours[cell]) / len(ours[cell])) for at, cell in cells if cell in ours]
        if means:
            axis.plot(*zip(*means), "o-", ms=4, color=f"C{number}", label=row)
            spread = [(at, value) for at, cell in cells for value in ours.get(cell, ())]
            axis.plot(*zip(*spread), ".", ms=3, alpha=0.5, color=f"C{number}")
        if printed := [(at, paper[cell]) for at, cell in cells if cell in paper]:
            axis.plot(*zip(*printed), "x--", ms=6, lw=0.8, color=f"C{number}", label=f"{row}, paper")
    axis.set_xticks(range(len(labels)), labels)
    axis.set_xlabel(name)
