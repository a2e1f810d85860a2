"""The page of shoot_out.py's records, docs/shoot-out.md, and its two pictures: held-out loss by tokens, and by seconds on the GPU.

python benchmarks/shoot_out_page.py
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from report import RESULTS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs"
COLUMNS = """
family; million parameters; learning rate; loss; bits per byte; tokens/s; GPU seconds; recall, %; needles, %; decoded tokens/s;
State, KiB; commits of loss and speed
"""
PAGE = """# Families beside each other on real text

Models of 130 million parameters (to 2 %) learn the same {tokens} million tokens, in windows of 2048, with the same recipe: AdamW,
betas 0.9 and 0.95, decay 0.1, steps of 65,536 tokens, warmup and cosine to a tenth, the best learning rate of a few by the loss of
runs of 60 steps (below). Mamba, Mamba-2 and Longhorn are stacks of the mixer alone, as their papers have them, as deep as the
parameters allow; all others are 16 layers (B'MOJO 12) of a mixer and an MLP, as wide as they allow. One run each, on {devices}.

The text is {documents:,} files, {bytes:,} bytes, of source code and documentation out of packages of Debian and PyPI, which a
byte-level BPE of 8192 tokens reads; a hundredth of the files is held out. There is less of it than is learned, so that part of it
is seen twice. Held-out loss is in nats a token. GPU seconds are those of all training steps at the speed of the usual one, all
settings being defaults; compiling and evaluation are not in them.

- recall: of the tokens in held-out documents of 2048 tokens that follow a pair of tokens which was last seen, followed by the same
  token, more than 512 tokens before, the share that the model finds most probable.
- needles: `baton eval --long-context niah_single` at 512, 1024 and 2048 tokens and five depths, 8 prompts each.
- decoded tokens/s: of 64 sequences, 512 tokens of prompt and 128 new ones, reading of the prompts included.
- State: of one sequence after 2048 tokens, convolutions' last tokens included. The Transformer's grows on.
- –: trained, but not measured further yet.

{table}

![Held-out loss by tokens](shoot-out-tokens.png)

![Held-out loss by seconds on the GPU](shoot-out-seconds.png)

At this budget most of the differences are when a model begins to copy from its context, where its curve falls steeply: early with
short convolutions before the recurrence, later for attention, last for GLA and GSA, whose layers have neither convolutions nor
positions. More tokens would bring them nearer to each other; which family is better at many tokens, these runs do not say.

B'MOJO as its paper has it, `fading_norm: false`, diverged at 0.001 after 283 steps (`benchmarks/results/shoot_out_bmojo.log`); the
run above has the default, which divides the fading tokens by their root mean square.

`python benchmarks/shoot_out_text.py TEXT && python benchmarks/shoot_out.py --text TEXT --folder FOLDER --only NAME` trains one of
them again. The records, with the whole curves, are in `benchmarks/results/shoot_out/`.
"""
STYLES = ("-", "--", ":")


def records() -> list[dict[str, Any]]:
    """All that have been made, the lowest loss first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS / "shoot_out").glob("*.json")]
    return sorted(found, key=lambda record: record["curve"][-1]["loss"])


def text_of(found: Sequence[dict[str, Any]]) -> str:
    """The page of records with the same text."""
    texts = {record["text"]["sha256"]: record["text"] for record in found}
    if len(texts) != 1:
        raise SystemExit(f"the records are of {len(texts)} texts; train those of the older one again")
    columns = [name.strip() for name in COLUMNS.split(";")]
    rows = [columns, ["---", *["---:"] * (len(columns) - 1)], *(cells(record) for record in found)]
    return PAGE.format(
        **next(iter(texts.values())),
        tokens=round(found[0]["curve"][-1]["tokens"] / 1e6),
        devices=", ".join(sorted({record["device"] for record in found})),
        table="\n".join(f"| {' | '.join(row)} |" for row in rows),
    )


def cells(record: dict[str, Any]) -> list[str]:
    last, measured = record["curve"][-1], ["–"] * 4
    if "needles" in record:
        asked = record["needles"]["long_context"]
        needles = sum(row["score"] for row in asked) / len(asked)
        measured = [
            f"{100 * record['recall']:.1f}",
            f"{100 * needles:.1f}",
            f"{record['decoded_per_s']:,.0f}",
            f"{record['state_bytes'] / 1024:,.0f}",
        ]
    rates = ", ".join(rate if loss is not None else f"{rate} (diverged)" for rate, loss in record["sweep"].items())
    return [
        record["family"],
        f"{record['parameters'] / 1e6:.1f}",
        f"{record['rate']:g} of {rates}",
        f"{last['loss']:.4f}",
        f"{last['bits_per_byte']:.4f}",
        f"{record['speed']['tokens_per_s']:,.0f}",
        f"{last['tokens'] / record['speed']['tokens_per_s']:.0f}",
        *measured,
        " and ".join(dict.fromkeys(f"{found['commit'][:7]}, {found['date']}" for found in (record, record["speed"]))),
    ]


def draw(found: Sequence[dict[str, Any]], axis: str, unit: Callable[[dict[str, Any]], float], label: str) -> None:
    """Losses by tokens, in a record's unit, into the axis' picture."""
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    colours = len(plt.rcParams["axes.prop_cycle"])
    for number, record in enumerate(found):
        points = [(row["tokens"] / unit(record), row["loss"]) for row in record["curve"]]
        axes.plot(*zip(*points, strict=True), STYLES[number // colours], lw=1.2, label=record["family"])
    best = found[0]["curve"][-1]["loss"]
    axes.set_ylim(best - 0.03, best + 1.0)
    axes.set_xlabel(label)
    axes.set_ylabel("held-out loss (nats / token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(DOCS / f"shoot-out-{axis}.png", dpi=110)
    plt.close(figure)


def main() -> None:
    found = records()
    (DOCS / "shoot-out.md").write_text(text_of(found), encoding="utf-8")
    draw(found, "tokens", lambda record: 1e6, "million tokens")
    draw(found, "seconds", lambda record: float(record["speed"]["tokens_per_s"]), "seconds of training steps on the GPU")


if __name__ == "__main__":
    main()
