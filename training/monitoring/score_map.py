"""A picture of scores on questions about long texts: for each task lengths by depths, from 0 (red) to 1 (green)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from baton.training.monitoring.long_context_plots import save_figure


def plot_scores(rows: Sequence[dict[str, Any]], title: str, out: Path) -> Path:
    """Draw rows of `training.evaluation.long_context_scores.score_tasks` as PNG. Raises RunError if `out` cannot be written."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    depths = {task: sorted({row["depth"] for row in rows if row["task"] == task}, key=lambda x: x or 0) for task in tasks}
    heights = [max(1.0, 0.35 * len(depths[task])) for task in tasks]
    figure = Figure(figsize=(max(5.0, 2 + 0.7 * len(lengths)), 1 + sum(heights) + 0.6 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(tasks), 1, height_ratios=heights)
    for place, task in enumerate(tasks):
        axes = figure.add_subplot(grid[place, 0])
        values = np.full((len(depths[task]), len(lengths)), np.nan)
        for row in rows:
            if row["task"] == task:
                values[depths[task].index(row["depth"]), lengths.index(row["length"])] = row["score"]
        image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", interpolation="nearest")
        for (row_number, column), score in np.ndenumerate(values):
            if np.isfinite(score):
                axes.text(column, row_number, f"{100 * score:.0f}", ha="center", va="center", fontsize="x-small")
        axes.set_title(task, fontsize="small")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize="x-small")
        marked = [] if depths[task] == [None] else [f"{100 * depth:.0f} %" for depth in depths[task]]
        axes.set_yticks(range(len(marked)), marked, fontsize="x-small")
        if marked:
            axes.set_ylabel("depth", fontsize="small")
        if place == len(tasks) - 1:
            axes.set_xlabel("tokens of the prompt", fontsize="small")
    figure.colorbar(image, ax=figure.axes, label="share of answers found")
    figure.suptitle(title, fontsize="medium")
    return save_figure(figure, out)
