"""Tables of everything measured, from results: docs/measured.md, docs/floors.md, and a few rows in README.md.

Nothing in them is typed by hand. `make tables` writes them, and tests/test_architecture.py fails when a result has changed and
they have not.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import floors

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEYS = {"case", "metric", "ours", "peer_name", "peer", "ratio", "gate"}
BEGIN, END = "<!-- figures: make tables -->", "<!-- end of figures -->"
LATTICE = "matrix_gpu_delta_net_lattice-sim_lattice-enc_2048"
CHOSEN = (
    ("train_step_mamba_8x2048", "mamba-1.4b 8x2048 x 16", "tokens/s", "mamba_ssm"),
    ("train_step_gsa_8x2048", "gsa-1.3b 8x2048 x 16", "tokens/s", "fla"),
    ("train_step_gsa_bfloat16", "gsa-1.3b 8x2048, bfloat16 residual x 16", "tokens/s", "fla"),
    ("train_step_1x16384_more", "longhorn 1x16384 x 16", "tokens/s", "our mamba-1.4b"),
    ("train_step_bmojo_8x2048", "bmojo 8x2048 x 16", "tokens/s", "our mamba-1.4b, the next run on the same GPU"),
    ("train_step_bmojo_graphs", "bmojo 1x16384 x 16", "TFLOP/s as 6N", "NVIDIA H200, dense bfloat16, data sheet"),
    ("train_step_transformer_keys64", "transformer 8x2048 x 16", "TFLOP/s as 6N", "NVIDIA H200, dense bfloat16, data sheet"),
    ("scan_gpu_main_conv", "mamba B8 T2048 D4096 N16", "forward us", "mamba_ssm"),
    ("scan_gpu_main_conv", "mamba B8 T2048 D4096 N16", "backward us", "mamba_ssm"),
    ("scan_gpu_main_conv", "longhorn B8 T2048 D4096 N16", "backward us", "our mamba"),
    ("matrix_gpu_mamba2_2048", "mamba2 B8 T2048 H64 K128 V64", "fwd+bwd us", "mamba_ssm"),
    ("matrix_gpu_gla_2048", "gla B8 T2048 H4 K256 V512", "fwd+bwd us", "fla"),
    ("matrix_gpu_gsa_2048", "gsa B8 T2048 H4 K512 V512 M64", "fwd+bwd as a graph us", "fla"),
    ("matrix_gpu_gsa", "gsa B1 T131072 H4 K512 V512 M64", "fwd+bwd as a graph us", "fla"),
    (LATTICE, "delta_net B8 T2048 H16 K128 V128", "fwd+bwd as a graph us", "fla"),
    ("matrix_gpu_delta_net_16384", "delta_net B1 T16384 H16 K64 V64", "fwd+bwd as a graph us", "fla"),
    (LATTICE, "lattice-sim B8 T2048 H32 K64 V64", "fwd+bwd as a graph us", "fla's DeltaNet"),
    ("matrix_gpu_loop", "lattice-dec B8 T2048 H32 K64 V64", "fwd+bwd us", "compiled step, looped"),
    ("matrix_gpu_bmojo", "bmojo B8 T2048 H32 D64", "fwd+bwd us", "FlexAttention"),
    ("exchange", "gsa-1.3b 2 x 16384", "pass ms, relay", "the same without exchange"),
    ("exchange", "mamba-1.4b 2 x 16384", "pass ms, relay", "the same without exchange"),
    ("exchange", "mamba-1.4b 2 x 16384", "pass ms, relay", "all-to-all over heads"),
    ("scaling", "mamba-1.4b, data 2, 8x2048 x 4", "tokens/s", "2 times one GPU"),
    ("scaling", "mamba-1.4b, sequence 2, 1x32768 x 4", "tokens/s", "2 times one GPU"),
    ("scaling_tensor_pipeline", "mamba-1.4b, tensor 2, 8x2048 x 4", "tokens/s", "2 times one GPU"),
    ("scaling_tensor_pipeline", "mamba-1.4b, pipeline 2, 8x2048 x 8", "tokens/s", "2 times one GPU"),
    ("checkpoint_stall_mamba-1_4b", "a save's stall", "seconds", "the limit"),
)
"""File, case, metric and peer of README's rows."""


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By name. Raises ValueError for a file that is no result."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if missing := {"command", "commit", "device", "rows"} - value.keys():
                raise ValueError(f"it has no {min(missing)}")
            if odd := [row for row in value["rows"] if row.keys() != KEYS]:
                raise ValueError(f"the row {odd[0]} has other keys than {sorted(KEYS)}")
        except ValueError as error:
            raise ValueError(f"{path}: not a benchmark's result: {error}") from None
        found[path.stem] = value
    return found


def measured(found: dict[str, dict[str, Any]]) -> str:
    """docs/measured.md."""
    lines = [
        "# Measured",
        "",
        "Every row of `benchmarks/results`: ours beside a peer's, of the same call. A ratio above 1 says that ours is better.",
        "No row is printed before its gate, a check that both sides compute the same, has passed; the gates are in the JSON",
        "files, and what else a program said is in the `.log` beside them. This page is written by `make tables`.",
    ]
    for name, value in found.items():
        commit = value["commit"] if " " in value["commit"] else value["commit"][:12]
        lines += ["", f"## {name}", "", f"`{value['command']}`, commit {commit}, on {value['device']}.", ""]
        if not value["rows"]:
            lines += [f"Gates alone: `{name}.log`."]
            continue
        lines += table(value["rows"])
    return "\n".join(lines) + "\n"


def chosen(found: dict[str, dict[str, Any]]) -> str:
    """README's rows. Raises ValueError where one is not there."""
    rows = []
    for name, *key in CHOSEN:
        own = [row for row in found[name]["rows"] if [row["case"], row["metric"], row["peer_name"]] == key]
        if not own:
            raise ValueError(f"{name}: has no row {key}; change CHOSEN in {Path(__file__).name}")
        rows += own[:1]
    return "\n".join(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| case | metric | ours | peer | peer's | ratio |", "| --- | --- | ---: | --- | ---: | ---: |"]
    for row in rows:
        cells = (row["case"], row["metric"], short(row["ours"]), row["peer_name"], short(row["peer"]), f"{row['ratio']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def short(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def pages(found: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """What the files should say."""
    readme = ROOT / "README.md"
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    figures = f"{BEGIN}\n{chosen(found)}\n{END}"
    return {
        ROOT / "docs" / "measured.md": measured(found),
        ROOT / "docs" / "floors.md": floors.page(RESULTS),
        readme: between.sub(lambda _: figures, readme.read_text(encoding="utf-8"), count=1),
    }


def main() -> None:
    for path, text in pages(results()).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
