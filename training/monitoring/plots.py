"""Plots of a run's curves, or of several runs' in one figure, from metrics.jsonl alone."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogFormatter, StrMethodFormatter

from baton.training.errors import RunError
from baton.training.monitoring.long_context_plots import PLOTTED_KINDS, panels, save_figure
from baton.training.monitoring.metrics import read_metrics


def plot_runs(folders: Sequence[Path], out: Path | None = None) -> Path:
    """`plot` one run, or `compare` several. out: None for curves.png, or compared.png, in the first run's directory."""
    if len(folders) == 1:
        return plot(folders[0], out or folders[0] / "curves.png")
    return compare(folders, out or folders[0] / "compared.png")


def plot(folder: Path, out: Path) -> Path:
    """Draw a run's `curves` into `out`. Raises RunError: the run has no steps, or `out` cannot be written."""
    figure = curves(folder)
    try:
        return save_figure(figure, out)
    finally:
        plt.close(figure)


def curves(folder: Path) -> Figure:
    """Figure of a run's loss, bits per byte (accuracy by case for a synthetic task), learning rate, gradient norm, and step
    times.

    Below them, if the run evaluates long contexts, the latest of those results.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "train"]
    if not steps:
        raise RunError(f"{folder}: no steps in metrics.jsonl; is this a run directory that has trained?")
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    x = [row["tokens"] for row in steps]
    last = {row["kind"]: row for row in rows if row["kind"] in PLOTTED_KINDS}
    looked = [panel for kind in PLOTTED_KINDS if kind in last for panel in panels(last[kind])]
    below = -(-len(looked) // 2)
    figure, axes = plt.subplots(2 + below, 2, figsize=(11, 7 + 3.5 * below), constrained_layout=True)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06, wspace=0.05)  # between a panel's right label and the next one's left
    figure.suptitle(str(folder))
    (loss, bits), (rate, time) = axes[:2]
    for axis, draw in itertools.zip_longest(axes[2:].flat, looked):
        axis.axis("off") if draw is None else draw(axis)

    loss.plot(x, [row["loss"] for row in steps], lw=0.8, label="training")
    if evaluations:
        at = [row["tokens"] for row in evaluations]
        loss.plot(at, [row["loss"] for row in evaluations], "o-", ms=3, label="validation")
    of_task = any("cases" in row for row in evaluations)
    if of_task:
        for case in evaluations[-1]["cases"]:  # a restart may have changed them
            shown = [(row["tokens"], row["cases"][case]["accuracy"]) for row in evaluations if case in row["cases"]]
            bits.plot(*zip(*shown), "o-", ms=3, label=case)
        bits.legend(fontsize="small")
    elif evaluations:
        bits.plot(at, [row["bits_per_byte"] for row in evaluations], "o-", ms=3, color="C1")
    loss.set_ylabel("loss (nats / label)" if of_task else "loss (nats / token)")
    loss.legend()
    bits.set_ylabel("validation accuracy" if of_task else "validation bits / byte")

    rate.plot(x, [row["lr"] for row in steps], color="C2")
    rate.set_ylabel("learning rate", color="C2")
    norm = rate.twinx()
    norm.plot(x, [row["grad_norm"] for row in steps], lw=0.6, color="C3")
    norm.set_yscale("log")
    norm.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    norm.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    norm.tick_params(labelsize="small", which="both")
    norm.set_ylabel("gradient norm", color="C3")

    parts = steps[-1]["seconds"]
    time.stackplot(x, [[row["seconds"].get(part, 0.0) for row in steps] for part in parts], labels=list(parts), alpha=0.8)
    typical = sorted(sum(row["seconds"].values()) for row in steps)[len(steps) // 2]
    time.set_ylim(0, 3 * typical)  # the first step of an attempt takes long and would hide all others
    time.set_ylabel("seconds / step")
    time.legend(loc="upper right", fontsize="small")
    for axis in (loss, bits, rate, time):
        axis.set_xlabel("tokens")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 250k, 1.5M: short at any size
        axis.grid(alpha=0.3)
    return figure


def compare(folders: Sequence[Path], out: Path) -> Path:
    """Plot the validation losses and learning rates of several runs over tokens into one figure.

    A fork's curve begins where it was forked. Raises RunError: none of the runs has been evaluated.
    """
    figure, (losses, rates) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=(3, 2), constrained_layout=True)
    try:
        found = of_task = False
        for folder in folders:
            rows = read_metrics(folder / "metrics.jsonl")
            evaluations = [(row["tokens"], row["loss"]) for row in rows if row["kind"] == "evaluation"]
            steps = [(row["tokens"], row["lr"]) for row in rows if row["kind"] == "train"]
            if not steps:
                raise RunError(f"{folder}: no steps in metrics.jsonl; is this a run directory that has trained?")
            label = _label(folder, folders)
            (line,) = losses.plot(*zip(*evaluations), "o-", ms=3, label=label) if evaluations else losses.plot([], [], label=label)
            rates.plot(*zip(*steps), color=line.get_color())
            found = found or bool(evaluations)
            of_task = of_task or any("cases" in row for row in rows)
        if not found:
            raise RunError(f"{folders[0]}: none of these runs has been evaluated; set training.evaluation.every")
        losses.set_ylabel("validation loss (nats / label)" if of_task else "validation loss (nats / token)")
        losses.legend()
        rates.set_ylabel("learning rate")
        for axis in (losses, rates):
            axis.set_xlabel("tokens")
            axis.grid(alpha=0.3)
        return save_figure(figure, out)
    finally:
        plt.close(figure)


def _label(folder: Path, folders: Sequence[Path]) -> str:
    """A run's name, or its path where two have the same one."""
    names = [other.resolve().name for other in folders]
    name = folder.resolve().name
    return name if names.count(name) == 1 else str(folder)
