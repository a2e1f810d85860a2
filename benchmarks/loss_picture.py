"""docs/loss-curves.svg: the losses of curves.py, of runs with kernels and with PyTorch's operators, from results/curves.log."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

STEPS_APART = 20
"""Steps between two losses of a line in the log."""

_LINE = re.compile(r"^(\w+), (kernels|plain): ([0-9., ]+), last quarter", re.MULTILINE)
_COLOURS = {"mamba": "#1f77b4", "longhorn": "#2ca02c", "lattice": "#9467bd", "gsa": "#ff7f0e", "bmojo": "#d62728"}
_NAMES = {"mamba": "Mamba", "longhorn": "Longhorn", "lattice": "Lattice", "gsa": "GSA", "bmojo": "B'MOJO"}
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 380, 56, 120, 16, 48
_LOW, _HIGH = 3.0, 8.5


def curves(log: str) -> dict[tuple[str, str], list[float]]:
    """Losses by model and form, "kernels" or "plain" (PyTorch's operators): the latest of each."""
    return {(model, form): [float(x) for x in losses.split(",")] for model, form, losses in _LINE.findall(log)}


def picture(log: str) -> str:
    """An SVG. Lines: with kernels; circles: with PyTorch's operators."""
    found = curves(log)
    steps = STEPS_APART * (max(map(len, found.values())) - 1)
    font = 'font-family="sans-serif" font-size="13" fill="#222"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        "<title>Training loss of five models with Triton kernels and with PyTorch's operators</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for loss in range(int(_LOW), int(_HIGH) + 1):
        y = _y(loss)
        lines.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end" {font}>{loss}</text>')
    for step in range(0, steps + 1, 2 * STEPS_APART):
        lines.append(f'<text x="{_x(step, steps)}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle" {font}>{step}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) // 2
    lines.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle" {font}>optimizer step</text>')
    turned = f"translate(16 {(_TOP + _HEIGHT - _BOTTOM) // 2}) rotate(-90)"
    lines.append(f'<text transform="{turned}" text-anchor="middle" {font}>training loss, nats per token</text>')
    for number, (model, colour) in enumerate(_COLOURS.items()):
        points = [f"{x},{y}" for x, y in _points(found[model, "kernels"], steps)]
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in _points(found[model, "plain"], steps):
            lines.append(f'<circle cx="{x}" cy="{y}" r="4" fill="none" stroke="{colour}"/>')
        x, y = _WIDTH - _RIGHT + 12, _TOP + 20 + 20 * number
        lines.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{_WIDTH - _RIGHT + 42}" y="{y + 4}" {font}>{_NAMES[model]}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def page(results: Path) -> str:
    """The picture of a folder of results."""
    return picture((results / "curves.log").read_text(encoding="utf-8"))


def _points(losses: Sequence[float], steps: int) -> Iterator[tuple[float, float]]:
    for number, loss in enumerate(losses):
        yield _x(number * STEPS_APART, steps), _y(loss)


def _x(step: int, steps: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / steps, 1)


def _y(loss: float) -> float:
    return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (_HIGH - loss) / (_HIGH - _LOW), 1)
