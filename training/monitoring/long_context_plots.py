"""Plots of the rows of metrics.jsonl about long context: loss by position, norms by layer and position.

Norms are drawn on a logarithmic scale. A norm of exactly 0 has no logarithm and is drawn black, to show that it vanished;
norms that were not measured are left white.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from baton.data_pipeline.errors import error_reason
from baton.training.errors import RunError

PLOTTED_KINDS = ("long_context", "state_gradients", "gradient_reach")
"""Of the rows that have a picture."""

Panel = Callable[[Axes], None]
_TICKS = 6
_NORMS = 5
"""Labels of a scale. They are plain numbers: powers set as mathematics, and ticks between them, take half of a picture's time."""


def panels(row: dict[str, Any]) -> list[Panel]:
    """Functions that draw a row, one for each panel."""
    if row["kind"] == "long_context":
        maps = [_map(f"norm of {name}", row["positions"], norms, "tokens read") for name, norms in row["states"].items()]
        return [lambda axes: _draw_losses(axes, row["losses"]), *maps]
    places = [border * row["span"] for border in row["boundaries"]]
    if row["kind"] == "state_gradients":
        return [_map(f"State gradient: {name}", places, norms, "boundary (tokens)") for name, norms in row["norms"].items()]
    before = [places[-1] - place for place in places]
    return [_map(f"gradient reach: {name}", before, norms, "tokens before the loss") for name, norms in row["norms"].items()]


def save_figure(figure: Figure, out: Path) -> Path:
    """Write a figure as PNG, whole or not at all. Raises RunError if `out` cannot be written."""
    aside = out.with_name(f".{out.name}.new.png")
    try:
        figure.savefig(aside, dpi=120)
        aside.replace(out)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RunError(f"{out}: cannot be written ({error_reason(error)}); choose another place with --out") from None
    return out


def render_row(row: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """A row's panels side by side, uint8 [height, width, 3]."""
    drawn = panels(row)
    figure = Figure(figsize=(4.5 * len(drawn), 3.5), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for number, draw in enumerate(drawn):
        draw(figure.add_subplot(1, len(drawn), number + 1))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_losses(axes: Axes, losses: list[dict[str, Any]]) -> None:
    axes.plot([bucket["from"] for bucket in losses], [bucket["loss"] for bucket in losses], "o-", ms=3)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("position in the document, from")
    axes.set_ylabel("validation loss (nats / token)")
    axes.grid(alpha=0.3)


def _map(title: str, places: list[int], norms: dict[str, list[float | None]], xlabel: str) -> Panel:
    """A heat map of norms, layers by positions."""

    def draw(axes: Axes) -> None:
        layers = sorted(norms, key=int, reverse=True)
        values = np.array([[np.nan if norm is None else norm for norm in norms[layer]] for layer in layers], dtype=float)
        found = values[np.isfinite(values) & (values > 0)]
        if found.size:
            # one value alone would be a scale without length
            low, high = found.min(), max(found.max(), found.min() * 1.001)
            image = axes.imshow(
                np.ma.masked_where(~(values > 0), values),
                norm=LogNorm(low, high),
                cmap="viridis",
                aspect="auto",
                interpolation="nearest",
            )
            ticks = FixedLocator(np.geomspace(low, high, _NORMS).tolist())
            axes.figure.colorbar(image, ax=axes, ticks=ticks, format="{x:.3g}").minorticks_off()
        zeros = values == 0
        axes.imshow(np.ma.masked_where(~zeros, zeros), cmap=ListedColormap(["black"]), aspect="auto", interpolation="nearest")
        axes.set_title(f"{title}; black: 0" if zeros.any() else title, fontsize="small")
        shown = np.unique(np.linspace(0, len(places) - 1, _TICKS).round().astype(int))
        axes.set_xticks(shown, [f"{places[n]:,}" for n in shown], fontsize="x-small")
        shown = np.unique(np.linspace(0, len(layers) - 1, _TICKS).round().astype(int))
        axes.set_yticks(shown, [layers[n] for n in shown], fontsize="x-small")
        axes.set_xlabel(xlabel, fontsize="small")
        axes.set_ylabel("layer", fontsize="small")

    return draw
