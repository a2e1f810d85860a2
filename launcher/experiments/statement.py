"""The statement of an experiment: inequalities between cells, and the verdict on them. Torch-free.

An inequality is a chain, as `transformer >= bmojo >= mamba + 5`. A term is a number, `distance`, or cells, named by labels that are
joined by a slash, with a number added or subtracted. A label names its axis where no other axis has it; a label that is a number is
written with its axis, as pairs=12 (behind a slash it need not be). Axes that are named on no side have the same label on both
sides; the inequality must hold for all labels.
"""

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

from baton.launcher.errors import ConfigError

Verdict = Literal["shown", "not shown", "not decided"]
Axes = Mapping[str, tuple[str, ...]]
Values = Mapping[tuple[str, ...], Mapping[int, float]]
"""The figure of each cell by seed; a cell that is not whole is missing."""

SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
DISTANCE = "distance"


@dataclass(frozen=True)
class Term:
    """One side of an inequality. at: axis to label, of cells; None: `distance` if is_distance, else the number alone."""

    text: str
    at: Mapping[str, str] | None
    number: float = 0.0
    is_distance: bool = False


@dataclass(frozen=True)
class Outcome:
    """The verdict on an inequality, and the reason in a few words."""

    text: str
    verdict: Verdict
    reason: str


def cell_of(text: str, axes: Axes, where: str) -> dict[str, str]:
    """Axis to label of cells that are named, as bmojo/12. Raises ConfigError."""
    found: dict[str, str] = {}
    for part in text.split("/"):
        axis, equals, label = part.partition("=")
        if not equals:
            having = [name for name, labels in axes.items() if part in labels]
            if not having:
                known = ", ".join(label for labels in axes.values() for label in labels)
                raise ConfigError(f"{where}: no cell is called {part!r}; labels: {known}")
            if len(having) > 1:
                raise ConfigError(f"{where}: {part!r} is a label of {' and '.join(having)}; write {having[0]}={part}")
            axis, label = having[0], part
        elif label not in axes.get(axis, ()):
            known = f"labels of {axis}: {', '.join(axes[axis])}" if axis in axes else f"axes: {', '.join(axes)}"
            raise ConfigError(f"{where}: {part!r} names no cell; {known}")
        if axis in found:
            raise ConfigError(f"{where}: {text!r} has two labels of {axis}; keep one")
        found[axis] = label
    return found


def parse(text: str, axes: Axes, where: str) -> list[tuple[Term, str, Term]]:
    """The comparisons of an inequality: left, sign, right. Raises ConfigError."""
    words = re.split(r"\s(>=|<=|>|<)\s", text)
    if len(words) < 3:
        raise ConfigError(f"{where}: {text!r} is no inequality; write it as `bmojo >= mamba + 5`, with spaces around the signs")
    terms = [_term(word.strip(), axes, f"{where}: {text!r}") for word in words[::2]]
    if all(term.at is None and not term.is_distance for term in terms):
        raise ConfigError(f"{where}: {text!r} names no cell")
    return [(left, sign, right) for (left, right), sign in zip(pairwise(terms), words[1::2], strict=True)]


def _term(text: str, axes: Axes, where: str) -> Term:
    first, *rest = text.split()
    number = _number(first)
    if number is None and first != DISTANCE:
        at = cell_of(first, axes, where)
    else:
        at = None
    total = number or 0.0
    for sign, word in zip(rest[::2], rest[1::2]):
        more = _number(word)
        if sign not in ("+", "-") or more is None:
            raise ConfigError(f"{where}: {text!r}: expected + or - and a number behind {first}")
        total += more if sign == "+" else -more
    if len(rest) % 2:
        raise ConfigError(f"{where}: {text!r}: expected + or - and a number behind {first}")
    return Term(text, at, total, first == DISTANCE)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def judge(text: str, axes: Axes, values: Values, seeds: tuple[int, ...], distance: float | None, where: str) -> Outcome:
    """The verdict on an inequality. distance: of the cells from the paper's figures; None: a cell is missing."""
    wrong, open_, held = list[str](), list[str](), 0
    for left, sign, right in parse(text, axes, where):
        for sides in _assignments(left, right, axes):
            of_sides = [_by_seed(term, cell, values, seeds, distance) for term, cell in zip((left, right), sides, strict=True)]
            ours, theirs = of_sides
            named = " and ".join("/".join(cell) for cell in sides if cell is not None) or DISTANCE
            if ours is None or theirs is None:
                open_.append(f"{named}: runs are missing or diverged")
                continue
            holds = [SIGNS[sign](a, b) for a, b in zip(ours, theirs, strict=True)]
            shown = f"{named}: {_shown(left, ours)} against {_shown(right, theirs)}"
            if all(holds):
                held += 1
            elif any(holds):
                open_.append(f"{shown}, the seeds disagree")
            else:
                wrong.append(shown)
    if wrong:
        return Outcome(text, "not shown", _some(wrong))
    if open_:
        return Outcome(text, "not decided", _some(open_))
    return Outcome(text, "shown", f"in all {held} comparisons" if held > 1 else "")


def verdict_of(outcomes: list[Outcome]) -> Verdict:
    """Of all inequalities together."""
    found = {outcome.verdict for outcome in outcomes}
    return "not shown" if "not shown" in found else "not decided" if "not decided" in found else "shown"


def _assignments(left: Term, right: Term, axes: Axes) -> Iterator[tuple[tuple[str, ...] | None, ...]]:
    """The cells of both sides that are compared; None for a side that is a number."""
    sides = [term.at for term in (left, right)]
    # an axis that one side names and the other does not is free on the other side
    shared = [name for name in axes if all(at is None or name not in at for at in sides)]
    alone = [[name for name in axes if at is not None and name not in at and name not in shared] for at in sides]
    for common in product(*(axes[name] for name in shared)):
        for own in product(*(product(*(axes[name] for name in names)) for names in alone)):
            chosen = [dict(zip((*shared, *names), (*common, *of_side))) for names, of_side in zip(alone, own, strict=True)]
            yield tuple(None if at is None else tuple((chosen[n] | dict(at))[name] for name in axes) for n, at in enumerate(sides))
        if all(at is None for at in sides):
            return


def _by_seed(
    term: Term, cell: tuple[str, ...] | None, values: Values, seeds: tuple[int, ...], distance: float | None
) -> list[float] | None:
    if term.is_distance:
        return None if distance is None else [distance + term.number] * len(seeds)
    if cell is None:
        return [term.number] * len(seeds)
    by_seed = values.get(cell, {})
    return [by_seed[seed] + term.number for seed in seeds] if all(seed in by_seed for seed in seeds) else None


def _shown(term: Term, of_seeds: list[float]) -> str:
    """The mean over the seeds, and what the inequality adds to it."""
    alone = term.at is None and not term.is_distance
    added = 0.0 if alone else term.number
    return f"{sum(of_seeds) / len(of_seeds) - added:.4g}" + (f" {'+' if added > 0 else '-'} {abs(added):g}" if added else "")


def _some(reasons: list[str]) -> str:
    return "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
