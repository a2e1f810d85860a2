"""Tables of everything measured, from results: docs/measured.md, docs/floors.md, docs/loss-curves.svg, and rows in README.md; and
docs/planned.md.

Nothing in them is typed by hand. `make tables` writes them, and tests/test_architecture.py fails when a result has changed and
they have not.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import floors
import kernel_version
import loss_picture
import predictions
import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: make tables -->", "<!-- end of figures -->"
OLD = "†"
SHEET = "NVIDIA H200, dense bfloat16, data sheet"
CHOSEN = (
    ("train_step", "mamba-1.4b 8x2048 x 16", "tokens/s", "mamba_ssm"),
    ("train_step", "gsa-1.3b 8x2048 x 16", "tokens/s", "fla"),
    ("train_step", "longhorn 1x16384 x 16", "tokens/s", "our mamba-1.4b"),
    ("train_step", "transformer 8x2048 x 16", "TFLOP/s as 6N", SHEET),
    ("scan_gpu", "mamba B8 T2048 D4096 N16", "backward us", "mamba_ssm"),
    ("matrix_gpu", "mamba2 B8 T2048 H64 K128 V64", "fwd+bwd us", "mamba_ssm"),
    ("matrix_gpu", "gla B8 T2048 H4 K256 V512", "fwd+bwd us", "fla"),
    ("matrix_gpu", "gsa B8 T2048 H4 K512 V512 M64", "fwd+bwd as a graph us", "fla"),
    ("matrix_gpu", "delta_net B8 T2048 H16 K128 V128", "fwd+bwd as a graph us", "fla"),
    ("matrix_gpu", "lattice-sim B8 T2048 H32 K64 V64", "fwd+bwd as a graph us", "fla's DeltaNet"),
    ("matrix_gpu", "bmojo B8 T2048 H32 D64", "fwd+bwd us", "FlexAttention"),
    ("generation_gpu", "mamba-1.4b x 128", "tokens/s", "transformers' Mamba"),
    ("exchange", "mamba-1.4b 2 x 16384", "pass ms, ring", "all-to-all over heads"),
    ("scaling", "mamba-1.4b, data 4, 8x2048 x 4", "tokens/s", "4 times one GPU"),
    ("scaling", "mamba-1.4b, context 4, 1x65536 x 4", "tokens/s", "4 times one GPU"),
)
"""Benchmark, case, metric and peer of README's rows, fifteen at most."""
GROUPS = {
    "corners": re.compile(r"(.*?), (.*)"),
    "cpu_scan": re.compile(r"(.*), (T \d+)"),
    "train_step": re.compile(r"(.*) (x \d+)"),
    "long_context_cpu": re.compile(r"()(.*)"),
}
"""Benchmark -> the part of a case's name that is a line of docs/measured.md, and the part that is named within it."""
INTRODUCTION = f"""# Measured

All results of `benchmarks/`: our figure, a peer's from the same call in parentheses, and their ratio, above 1 where ours is
better. A row is recorded only after its gate, a check that both sides compute the same, has passed. There is one result of a case,
the latest; git keeps earlier ones. {OLD} marks figures of earlier kernels: the code of a Triton kernel of the case has changed.
`benchmarks/results/NAME.json` has every row with its gate, command, commit, card, date and versions of torch and Triton, and
`NAME.log` has what the runs printed. `make tables` writes this page.

| benchmark | case | measured | at |
| --- | --- | --- | --- |"""


def results(folder: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """Rows by benchmark. Raises ValueError for a file that is no result."""
    return {path.stem: report.load(path) for path in sorted(folder.glob("*.json"))}


def measured(found: dict[str, list[dict[str, Any]]]) -> str:
    """docs/measured.md."""
    lines = [INTRODUCTION]
    for name, rows in found.items():
        groups = dict[tuple[str, str], list[tuple[str, dict[str, Any]]]]()
        for row in rows:
            match = GROUPS[name].fullmatch(row["case"]) if name in GROUPS else None
            case, member = (match[1], match[2]) if match else (row["case"], "")
            groups.setdefault((case, at(row)), []).append((member, row))
        for (case, where), members in groups.items():
            lines.append(f"| {name} | {case or '*'} | {cell(members)} | {where} |")
        if not rows:
            lines.append(f"| {name} | gates alone | `{name}.log` | |")
    return "\n".join(lines) + "\n"


def at(row: dict[str, Any]) -> str:
    """Commit, card and date of a row, marked if its kernels are others today."""
    card = re.sub(r"NVIDIA |\(R\)| Processor| 80GB HBM3", "", row["device"])
    return f"{row['commit'][:7]}, {card}, {row['date']}{f' {OLD}' if old(row) else ''}"


def old(row: dict[str, Any]) -> bool:
    """Whether one of the row's Triton kernels has changed since."""
    return bool(row["kernels"]) and row["kernels"] != kernel_version.current(kernel_version.ops_of(row["case"]))


def cell(members: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The figures of one line: by member of the group, metric and peer; a metric's own figure once."""
    parts = list[str]()
    before = None
    for member, row in members:
        peer = f"({row['peer_name']} {short(row['peer'])}) {row['ratio']:.2f}"
        if before == (member, row["metric"], row["ours"]):
            parts[-1] += f", {peer}"
            continue
        before = (member, row["metric"], row["ours"])
        parts.append(f"{f'{member}: ' if member else ''}{row['metric']} {short(row['ours'])} {peer}")
    return "; ".join(parts)


def chosen(found: dict[str, list[dict[str, Any]]]) -> str:
    """README's rows. Raises ValueError where one is not there."""
    lines = ["| case | metric | ours | peer | peer's | ratio | measured at |", "| --- | --- | ---: | --- | ---: | ---: | --- |"]
    for name, *key in CHOSEN:
        own = [row for row in found[name] if [row["case"], row["metric"], row["peer_name"]] == key]
        if not own:
            raise ValueError(f"{name}: has no row {key}; change CHOSEN in {Path(__file__).name}")
        (row,) = own
        cells = (row["case"], row["metric"], short(row["ours"]), row["peer_name"], short(row["peer"]), f"{row['ratio']:.2f}")
        lines.append(f"| {' | '.join(cells)} | {at(row)} |")
    return "\n".join(lines)


def short(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def pages(found: dict[str, list[dict[str, Any]]]) -> dict[Path, str]:
    """Path of each page, and its text."""
    readme = ROOT / "README.md"
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    figures = f"{BEGIN}\n{chosen(found)}\n{END}"
    return {
        ROOT / "docs" / "measured.md": measured(found),
        ROOT / "docs" / "floors.md": floors.page(RESULTS),
        ROOT / "docs" / "planned.md": predictions.page(found["scaling"]),
        ROOT / "docs" / "loss-curves.svg": loss_picture.page(RESULTS),
        readme: between.sub(lambda _: figures, readme.read_text(encoding="utf-8"), count=1),
    }


def main() -> None:
    for path, text in pages(results()).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
