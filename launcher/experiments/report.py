"""What an experiment shows: NAME.json has all results, from which NAME.md with a table and a picture is made, and README.md with a
line for each experiment of the folder. Runs with other seeds than the experiment's make NAME-seeds-2-3.json, a page of their own,
and a comparison on NAME.md."""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from baton.launcher.experiments import statement
from baton.launcher.experiments.cells import FOLDER, Trial, figures_by_cell
from baton.launcher.experiments.config import UNITS, ExperimentConfig
from baton.launcher.experiments.trainer import Result, read_result
from baton.launcher.run_directory import write_whole

Cell = tuple[str, ...]
Found = Mapping[str, Any]
"""What `collect` returns."""

OVERVIEW = """# Reproduced

Statements of the papers as experiments: `baton experiment NAME` trains what is left of one, resumes what was interrupted, and
writes its page and this one ([how](../experiments.md)). The verdict is computed. shown: every inequality of the statement holds,
with every seed; not shown: one holds with no seed; not decided: runs are missing, or seeds disagree. Other seeds: the verdict of a
rerun with them. Distance: the largest one of a cell from the paper's figure. Cost: the time of all runs together; on a CPU each has
one core.

| experiment | verdict | other seeds | distance | cost | command |
| --- | --- | --- | --- | --- | --- |"""


def write(name: str, experiment: ExperimentConfig, made: list[Trial], command: str, out: Path) -> list[str]:
    """Writes the page of an experiment, and the folder's README.md anew. A page of more runs is kept while
    some are missing, as in a checkout where they have not been repeated yet. Returns lines for the terminal."""
    found = collect(name, experiment, made, command)
    lines = [f"{one['verdict']}: {one['text']}" + (f" ({one['reason']})" if one["reason"] else "") for one in found["statement"]]
    name = found["name"]
    results, page = out / f"{name}.json", out / f"{name}.md"
    before = json.loads(results.read_text(encoding="utf-8"))["runs"][1] if results.exists() else 0
    if found["runs"][1] < min(before, found["runs"][0]):
        return [*lines, f"{name}: {found['verdict']}; {page} is kept: it is of {before} runs, and here are {found['runs'][1]}"]
    out.mkdir(parents=True, exist_ok=True)
    write_whole(results, json.dumps(found, indent=1) + "\n")
    if found["cells"]:
        from baton.launcher.experiments import picture

        picture.draw(found, out / f"{name}.png")
    for path, text in pages(out).items():
        write_whole(path, text)
    return [*lines, f"{name}: {found['verdict']}; see {page}"]


def pages(folder: Path) -> dict[Path, str]:
    """The text of every page of a folder, from its results. Path to text."""
    experiments = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    reruns = defaultdict[str, list[Found]](list)
    for found in experiments.values():
        if "rerun_of" in found:
            reruns[found["rerun_of"]].append(found)
    lines = [OVERVIEW]
    for name, found in experiments.items():
        if found.get("rerun_of") not in experiments:  # a rerun is in the line of its experiment
            lines.append(_line(found, reruns[name]))
    texts = {folder / f"{name}.md": _page(found, reruns[name], experiments) for name, found in experiments.items()}
    return texts | {folder / "README.md": "\n".join(lines) + "\n"}


def collect(name: str, experiment: ExperimentConfig, made: list[Trial], command: str) -> dict[str, Any]:
    """Everything that a page says, JSON-able. made: runs with the experiment's seeds, or all with others, whose page has another
    name and says of which experiment it is a rerun."""
    seeds = tuple(dict.fromkeys(trial.seed for trial in made))
    page, title, again = name, experiment.title, {}
    if set(seeds) != set(experiment.seeds):
        page, again = f"{name}-seeds-{'-'.join(map(str, seeds))}", {"rerun_of": name}
        title += f"; {_named(seeds)}"
        command += f" --seeds {','.join(map(str, seeds))}"
    values, rates, results = _values(experiment, made)
    figures = figures_by_cell(name, experiment)
    mean = {cell: sum(by_seed.values()) / len(by_seed) for cell, by_seed in values.items()}
    distances = {cell: _distance(experiment, mean[cell], figure) for cell, figure in figures.items() if cell in mean}
    distance = max(distances.values()) if figures and len(distances) == len(figures) else None
    outcomes = [
        statement.judge(text, experiment.axes, values, seeds, distance, f"{name}: statement.{number}")
        for number, text in enumerate(experiment.statement)
    ]
    return {
        "name": page,
        **again,
        "title": title,
        "about": " ".join(experiment.about.split()),
        "measure": experiment.measure,
        "where": experiment.paper.where,
        "axes": {axis: list(labels) for axis, labels in experiment.axes.items()},
        "cells": [
            {"cell": list(cell), "seeds": {str(s): round(x, 6) for s, x in values[cell].items()}, "rate": rates.get(cell)}
            for cell in experiment.cells
            if cell in values
        ],
        "figures": [{"cell": list(cell), "value": value} for cell, value in figures.items()],
        "verdict": statement.verdict_of(outcomes),
        "statement": [asdict(outcome) for outcome in outcomes],
        "distance": None if distance is None else round(distance, 3),
        "distance_unit": "points" if experiment.in_points else "%",
        "seconds": round(sum(result.seconds for result in results)),
        "on": sorted({result.on for result in results}),
        "commits": sorted({result.commit[:7] for result in results if result.commit}),
        "dates": sorted({result.date for result in results}),
        "runs": [0 if experiment.is_computed else len(made), len(results)],
        "command": command,
    }


def _values(
    experiment: ExperimentConfig, made: list[Trial]
) -> tuple[dict[Cell, dict[int, float]], dict[Cell, float | None], list[Result]]:
    """Figures of the table's cells by seed with the best learning rate, these rates, and all results that there are."""
    if experiment.is_computed:
        from baton.launcher.experiments.computed import figure

        return {trial.cell: {trial.seed: figure(experiment.measure, trial)} for trial in made}, {}, []
    results = {(trial.cell, trial.rate, trial.seed): read_result(trial) for trial in made}
    by_cell: dict[Cell, dict[float | None, dict[int, Result | None]]] = defaultdict(lambda: defaultdict(dict))
    for (cell, rate, seed), result in results.items():
        by_cell[cell][rate][seed] = result
    values, rates = dict[Cell, dict[int, float]](), dict[Cell, float | None]()
    for cell, by_rate in by_cell.items():
        losses = {rate: _mean_loss(by_seed) for rate, by_seed in by_rate.items()}
        if None in losses.values():
            continue  # runs are missing, so the best rate is not known
        rate = min(losses, key=lambda rate: losses[rate] or 0.0)
        if losses[rate] == math.inf:
            continue  # all have diverged
        for case in experiment.cases or (None,):
            place = cell if case is None else (*cell, case)
            values[place] = {seed: _figure(experiment, result, case) for seed, result in by_rate[rate].items()}
            rates[place] = rate
    return values, rates, [result for result in results.values() if result is not None]


def _mean_loss(by_seed: Mapping[int, Result | None]) -> float | None:
    """Infinite if a run has diverged; None if one is missing."""
    rows = [None if result is None else (result.row or {"loss": math.inf}) for result in by_seed.values()]
    return None if None in rows else sum(float(row["loss"]) for row in rows if row is not None) / len(rows)


def _figure(experiment: ExperimentConfig, result: Result | None, case: str | None) -> float:
    assert result is not None
    assert result.row is not None
    row = result.row if case is None else result.row["cases"][experiment.cases[case]]
    if experiment.measure == "accuracy":
        return 100 * float(row["accuracy"])
    return math.exp(float(row["loss"])) if experiment.measure == "perplexity" else float(row["loss"])


def _distance(experiment: ExperimentConfig, ours: float, paper: float) -> float:
    return abs(ours - paper) if experiment.in_points else 100 * abs(ours / paper - 1)


# ------------------------------------------------------------------------------------------------------------------- the pages


def _named(seeds: Iterable[int | str]) -> str:
    first, *rest = map(str, seeds)
    return f"seeds {', '.join([first, *rest[:-1]])} and {rest[-1]}" if rest else f"seed {first}"


def _seeds(found: Found) -> str:
    return _named(found["cells"][0]["seeds"]) if found["cells"] else "no seed yet"


def _cost(found: Found) -> str:
    if not found["runs"][0]:
        return "computed"
    done = found["runs"][1]
    return f"{done} of {found['runs'][0]} runs, {_time(found['seconds'])} on {' and '.join(found['on']) or 'nothing yet'}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _line(found: Found, reruns: list[Found]) -> str:
    distance = "" if found["distance"] is None else f"{found['distance']:.3g} {found['distance_unit']}"
    name = f"[{found['name']}]({found['name']}.md)"
    others = ", ".join(f"[{again['verdict']}]({again['name']}.md)" for again in reruns)
    return f"| {name}: {found['title']} | {found['verdict']} | {others} | {distance} | {_cost(found)} | `{found['command']}` |"


def _page(found: Found, reruns: list[Found], experiments: Collection[str]) -> str:
    others = "".join(f" With {_seeds(again)}: **[{again['verdict']}]({again['name']}.md).**" for again in reruns)
    lines = [f"# {found['title']}", "", f"**{found['verdict'].capitalize()}.**{others} {_sentence(found)}"]
    if found["about"]:
        lines += ["", found["about"]]
    lines += ["", "| statement | verdict | |", "| --- | --- | --- |"]
    lines += [f"| `{one['text']}` | {one['verdict']} | {one['reason']} |" for one in found["statement"]]
    lines += ["", *_table(found)]
    if found["cells"]:
        lines += ["", f"![{found['title']}]({found['name']}.png)"]
    if rates := _rates(found):
        lines += ["", f"Learning rates chosen by validation loss: {', '.join(rates)}."]
    lines += ["", f"{_made(found)}."]
    if "rerun_of" not in found:
        lines += _again(found)
    elif (name := found["rerun_of"]) in experiments:
        lines += ["", f"[{name}]({name}.md) with other seeds."]
    for again in reruns:
        lines += ["", *_comparison(found, again)]
    return "\n".join(lines) + "\n"


def _rates(found: Found) -> list[str]:
    """The learning rate of each cell of the grid; cases are evaluations of the same runs."""
    length = len([axis for axis in found["axes"] if axis != "case"])
    cells = [cell for cell in found["cells"] if cell["rate"] is not None]
    return list(dict.fromkeys(f"{'/'.join(cell['cell'][:length])} {cell['rate']:g}" for cell in cells))


def _made(found: Found) -> str:
    """The command, and what it took, where and when."""
    said = [_cost(found)]
    said += [f"commit {' and '.join(found['commits'])}"] if found["commits"] else []
    said += [" to ".join(dict.fromkeys((found["dates"][0], found["dates"][-1])))] if found["dates"] else []
    return f"`{found['command']}`: {', '.join(said)}"


def _again(found: Found) -> list[str]:
    """How to run it again, for a reader who has this page alone."""
    if not found["runs"][0] or not found["cells"]:
        return []
    used = [int(seed) for seed in found["cells"][0]["seeds"]]
    others = range(max(used) + 1, max(used) + 1 + len(used))
    return [
        "",
        "## Run it again",
        "",
        f"The command trains what `{FOLDER / found['name']}` does not have yet, goes on where it was interrupted, and writes this "
        "page when it has as many runs; `--out FOLDER` writes it elsewhere. The time is that of all runs together: on a CPU each "
        "has one core, and `--processes 1` trains one at a time. Other seeds have runs and a page of their own, and are compared "
        f"here: `{found['command']} --seeds {','.join(map(str, others))}`.",
    ]


def _comparison(found: Found, again: Found) -> list[str]:
    """The verdict and the figures of a rerun beside those of the page."""
    verdicts = {one["text"]: one["verdict"] for one in found["statement"]}
    other = [one for one in again["statement"] if one["verdict"] != verdicts.get(one["text"])]
    same = "the same verdict" if again["verdict"] == found["verdict"] else f"another than with {_seeds(found)} ({found['verdict']})"
    lines = [f"With {_seeds(again)}: [{again['verdict']}]({again['name']}.md), {same}. {_made(again)}."]
    if other:
        lines += ["", *(f"- `{one['text']}`: {one['verdict']}" + (f" ({one['reason']})" if one["reason"] else "") for one in other)]
    ours, theirs = ({tuple(cell["cell"]): list(cell["seeds"].values()) for cell in one["cells"]} for one in (found, again))
    lines += ["", f"| {'/'.join(found['axes'])} | {_seeds(found)} | {_seeds(again)} |", "| --- | --- | --- |"]
    cells = product(*found["axes"].values())
    return lines + [f"| {'/'.join(cell)} | {_shown(ours.get(cell), None)} | {_shown(theirs.get(cell), None)} |" for cell in cells]


def _sentence(found: Found) -> str:
    unit = UNITS[found["measure"]]
    text = f"The paper: {found['where']}. Figures: {unit}"
    if found["runs"][0] and found["cells"]:
        several = len(found["cells"][0]["seeds"]) > 1
        text += f", the mean over {_seeds(found)} ± half of the range" if several else f", with {_seeds(found)}"
    if found["figures"]:
        text += ", the paper's in parentheses"
    if found["distance"] is not None:
        text += f"; the largest distance is {found['distance']:.3g} {found['distance_unit']}"
    return text + "."


def _table(found: Found) -> list[str]:
    (first, rows), *others = found["axes"].items()
    columns = list(product(*(labels for _, labels in others)))
    ours = {tuple(cell["cell"]): list(cell["seeds"].values()) for cell in found["cells"]}
    paper = {tuple(figure["cell"]): figure["value"] for figure in found["figures"]}
    head = [first, *("/".join(column) or found["measure"] for column in columns)]
    if others:
        head[0] = f"{first}, by {' and '.join(axis for axis, _ in others)}"
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        shown = [_shown(ours.get((row, *column)), paper.get((row, *column))) for column in columns]
        lines.append(f"| {row} | {' | '.join(shown)} |")
    return lines


def _shown(ours: list[float] | None, paper: float | None) -> str:
    if ours is None:
        text = "-"
    else:
        middle, spread = sum(ours) / len(ours), (max(ours) - min(ours)) / 2
        text = _number(middle) + (f" ± {spread:.2g}" if len(ours) > 1 else "")
    return text + (f" ({_number(paper)})" if paper is not None else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}" if value < 1000 else f"{value:.1f}"
