"""Where a step's time went, from profiles in train_step.py's log, beside the least time that the work of each line could take.

The least time follows from the card's data sheet and from the necessary work of a category: matmul FLOPs, bytes that have to be
read and written once per direction, or exponentials. `make tables` (tables.py) writes docs/floors.md.
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import yaml

from baton.models.config import ModelConfig
from baton.models.settings.attention import AttentionConfig
from baton.models.settings.bmojo import BMojoConfig
from baton.models.settings.cost_model import SCAN_GPU_CHUNK
from baton.models.settings.delta_net import DeltaNetConfig
from baton.models.settings.gated_delta_net import GatedDeltaNetConfig
from baton.models.settings.gla import GLAConfig
from baton.models.settings.gsa import GSAConfig
from baton.models.settings.hgrn2 import HGRN2Config
from baton.models.settings.mamba import MambaConfig
from baton.models.settings.mamba2 import Mamba2Config
from baton.models.settings.retnet import RetNetConfig
from baton.models.settings.ssm_block import SSMBlockConfig
from baton.models.settings.swiglu import SwiGLUConfig

LOG = "train_step.log"
MODELS = {
    "gsa-1.3b": "gsa-1.3b",
    "mamba-130m": "mamba-130m",
    "mamba-370m": "mamba-370m",
    "mamba-1.4b": "mamba-1.4b",
    "mamba2-370m": "mamba2-370m",
    "longhorn": "longhorn-1.3b",
    "bmojo": "bmojo-1.4b without MLPs",
    "mamba-2.8b": "mamba-2.8b",
    "gla-1.3b": "gla-1.3b",
    "retnet-1.3b": "retnet-1.3b",
    "hgrn2-1.3b": "hgrn2-1.3b",
    "delta-net-1.3b": "delta-net-1.3b",
    "gated-delta-net-1.3b": "gated-delta-net-1.3b",
    "transformer": "transformer-1.3b",
}
"""Cases of train_step.py whose profiles the page shows, and their models in configs/models, or of EARLIER."""
EARLIER = {"bmojo-1.4b without MLPs": ("bmojo-1.4b", {"pattern": ["bmojo"], "n_layers": 31})}
"""What a preset was when it was measured: its name, and other settings than it has now."""
FLOPS = 989e12
"""Dense bfloat16 FLOPs of an H100 and an H200 per second."""
BYTES = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes of memory traffic per second, by card."""
EXPONENTIALS = 132 * 16 * 1.755e9
"""Exponentials per second: 16 per cycle and SM."""
LOW, WIDE = 2, 4  # bytes of a number in the compute type, and in float32
OF_PARAMETER = 4 + (4 + 8 + 8 + 8 + 2)
"""Bytes an update moves: the gradient for its norm; the gradient, parameter and moments for AdamW, and the parameter's copy in the
compute type."""
INTRODUCTION = """# Where a step's time goes, and the least it could take

From profiles in `benchmarks/results/train_step.log`, milliseconds of one optimizer step on one card, every kernel launched by
itself. The least is what the data sheet's 989 TFLOP/s and 3.35 TB/s (H100) or 4.8 TB/s (H200), or 16 exponentials a cycle and
processor, allow for what a line cannot do without; `benchmarks/floors.py` counts it. A line without one could take nothing. The
scans of recurrences are more than 4 times their least, so none of these bounds is what binds them. A transformer's scan is its
attention; B'MOJO's scans include those of its Mamba. The optimizer's least is one pass over everything, which since 2026-11-28 the
update makes; before, DeepSpeed's step made several."""
_ROW = re.compile(r"^  ([a-z][a-z ]*?) {2,}([\d,]+\.\d\d) +[\d.]+%")


class Least(NamedTuple):
    """The least time in seconds, and the resource that limits it."""

    seconds: float
    why: str


class Profile(NamedTuple):
    """ms by category, of a step of so many micro-batches of so many tokens, each of a sequence of `context`. card: of BYTES."""

    case: str
    ms: dict[str, float]
    micro_batches: int
    tokens: int
    sequence_length: int
    card: str


def read(log: str, case: str) -> Profile:
    """The last profile of this case in train_step.py's log, of its first shape. Raises ValueError where there is none."""
    begins = list(re.finditer(rf"profile of {re.escape(case)}-(\d+)x(\d+)-\d+, step", log))
    runs = [log.rfind("\n$ ", 0, begin.start()) + 1 for begin in begins]
    if not begins:
        raise ValueError(f"{LOG}: has no profile of {case}; change MODELS in {Path(__file__).name}")
    begin = begins[runs.index(runs[-1])]
    text = log[runs[-1] :]
    rows, sequence_length = int(begin[1]), int(begin[2])
    ms = dict[str, float]()
    for line in log[begin.start() :].splitlines()[2:]:
        row = _ROW.match(line)
        if row is None:
            break
        ms[row[1]] = float(row[2].replace(",", ""))
    counts = re.search(r"--micro-batches ([\d,]+)", text.splitlines()[0])
    count = max(int(n) for n in (counts[1] if counts else "1,16").split(","))
    name = log[begin.start() : log.index("\n", begin.start())]
    card = next((card for card in BYTES if card in name), None)
    if card is None:
        raise ValueError(f"{LOG}: {name.strip()}: the card's memory bandwidth is not in BYTES of {Path(__file__).name}")
    return Profile(f"{rows}x{sequence_length} x {count}", ms, count, rows * sequence_length, sequence_length, card)


def of_micro_batch(model: ModelConfig, tokens: int, sequence_length: int, card: str) -> dict[str, Least]:
    """The least time by category. Categories without an entry have no necessary work, or are not counted."""
    assert model.vocab_size is not None
    d, kinds = model.d_model, [model.mixers[name] for layer in model.layers for name in layer]
    products = sum(p.numel * p.uses for kind in kinds for p in kind.costs(d).parameters) + model.padded_vocab_size * d
    # of the residual stream's norms the first has nothing to add, and nothing reads the stream behind the last
    norms = ((len(kinds) - 1) * (4 * WIDE + 5 * LOW) + (3 * WIDE + 3 * LOW) + (2 * WIDE + 5 * LOW)) * d
    moved = {
        "norm": norms,
        "scan": 0,
        "convolution": 0,
        "other elementwise": 3 * WIDE * d,
        "loss": 2 * LOW * model.padded_vocab_size,
    }
    multiplied, exponentials = 0.0, 0
    for kind in kinds:
        scan = kind.ssm if isinstance(kind, BMojoConfig) else kind
        if isinstance(scan, SSMBlockConfig):
            inner = scan.expand * d
            # x, steps, gates and outputs; those, their gradients and that of the output; states at borders, left and read
            moved["scan"] += (4 + 7) * LOW * inner + 2 * WIDE * inner * scan.d_state // SCAN_GPU_CHUNK
            moved["convolution"] += (2 + 3) * LOW * inner
            exponentials += 2 * inner * scan.d_state * isinstance(scan, MambaConfig)
        if isinstance(kind, BMojoConfig):
            heads, kv_heads = kind.head_counts(d)
            # queries and outputs, keys and values of tokens and of what fades; the same with gradients
            moved["scan"] += LOW * kind.head_dim * ((2 + 4) * heads + (4 + 8) * kv_heads)
            found = kind.costs(d).recurrence_flops(sequence_length)
            multiplied += 3.5 * (found.matrix + found.attention)
        if isinstance(kind, GSAConfig):
            heads, kv_heads = kind.head_counts(d)
            width, kv_width = heads * kind.head_dim, kv_heads * kind.head_dim
            moved["scan"] += LOW * ((2 + 3) * width + (2 + 4) * kv_width) + 3 * WIDE * kv_heads * kind.slots
            moved["scan"] += 2 * LOW * (width + 2 * kv_width)  # activations, whose gradients the scan's kernels make
            moved["norm"] += 5 * LOW * width
            multiplied += 3 * kind.costs(d).matrix_flops
        if isinstance(kind, GLAConfig | RetNetConfig | HGRN2Config):
            heads, d_key, d_value = kind.head_sizes(d)
            keys, values = heads * d_key, heads * d_value
            # queries, keys, values and outputs, and decays of channels; the same with gradients
            moved["scan"] += LOW * ((2 + 4) * keys + (2 + 3) * values) + 3 * WIDE * keys * (not isinstance(kind, RetNetConfig))
            moved["norm"] += (5 if isinstance(kind, HGRN2Config) else 8) * LOW * values
            multiplied += 3 * kind.costs(d).matrix_flops
        if isinstance(kind, DeltaNetConfig | GatedDeltaNetConfig):
            keys, values = kind.head_count(d) * kind.d_key, kind.value_head_count(d) * kind.d_value
            # queries, keys, values and outputs; the same with gradients
            moved["scan"] += LOW * ((2 + 4) * keys + (2 + 3) * values)
            moved["convolution"] += (2 + 3) * LOW * (2 * keys + values)
            # the convolutions normalise queries and keys
            moved["norm"] += LOW * (8 if isinstance(kind, GatedDeltaNetConfig) else 5) * values
            multiplied += 3 * kind.costs(d).matrix_flops
        if isinstance(kind, Mamba2Config):
            keys, values = kind.n_groups * kind.d_state, kind.expand * d
            # B, C, values and outputs; the same with gradients. The norm reads x too, and x is multiplied by the step sizes
            moved["scan"] += LOW * ((2 + 4) * keys + (2 + 3) * values)
            moved["convolution"] += (2 + 3) * LOW * (2 * keys + values)
            moved["norm"] += (4 + 7) * LOW * values
            moved["other elementwise"] += (2 + 3) * LOW * values
            multiplied += 3 * kind.costs(d).matrix_flops
        if isinstance(kind, AttentionConfig):
            heads, kv_heads = kind.head_counts(d)
            # queries and outputs, keys and values; the same with gradients
            moved["scan"] += LOW * kind.head_dim * ((2 + 4) * heads + (2 + 4) * kv_heads)
            multiplied += 3.5 * kind.costs(d).recurrence_flops(sequence_length).attention
        if isinstance(kind, SwiGLUConfig):
            moved["other elementwise"] += 8 * LOW * kind.width(d)
    least = {name: Least(tokens * n / BYTES[card], f"{n / 1000:,.0f} kB a token") for name, n in moved.items() if n}
    least["matmul"] = Least(6 * tokens * products / FLOPS, f"{6 * products / 1e9:,.2f} GFLOP a token")
    by_exponentials = Least(tokens * exponentials / EXPONENTIALS, f"{exponentials / 1e6:,.1f} million exponentials a token")
    by_products = Least(tokens * multiplied / FLOPS, f"{multiplied / 1e9:,.2f} GFLOP a token")
    least["scan"] = max(least["scan"], by_exponentials, by_products)
    return least


@cache
def _model(name: str) -> ModelConfig:
    preset, others = EARLIER.get(name, (name, {}))
    return ModelConfig(**{**yaml.safe_load((files("baton.configs") / "models" / f"{preset}.yaml").read_text()), **others})


def rows(name: str, profile: Profile) -> Iterator[tuple[str, float, Least | None]]:
    """(category, ms, least) of a step; at the end all together."""
    model = _model(name)
    least = of_micro_batch(model, profile.tokens, profile.sequence_length, profile.card)
    least = {category: Least(profile.micro_batches * one.seconds, one.why) for category, one in least.items()}
    count = sum(p.numel for layer in model.layers for kind in layer for p in model.mixers[kind].costs(model.d_model).parameters)
    count += model.d_model * (1 + model.padded_vocab_size * (1 if model.tie_embeddings else 2))
    least["optimizer"] = Least(count * OF_PARAMETER / BYTES[profile.card], f"{OF_PARAMETER} bytes a parameter")
    for category, ms in profile.ms.items():
        if ms:
            yield category, ms, least.get(category)
    yield "together", sum(profile.ms.values()), Least(sum(one.seconds for one in least.values()), "")


def page(results: Path) -> str:
    """docs/floors.md."""
    lines = [INTRODUCTION]
    log = (results / LOG).read_text(encoding="utf-8")
    for case, name in MODELS.items():
        profile = read(log, case)
        count = f"{profile.case} micro-batch{'es' * (profile.micro_batches > 1)}"
        lines += ["", f"## {name}, {count}, {profile.card}", ""]
        lines += ["| | ms | least | times the least | which is |", "| --- | ---: | ---: | ---: | --- |"]
        for category, ms, one in rows(name, profile):
            cells = ("", "", "") if one is None else (f"{1e3 * one.seconds:,.1f}", f"{ms / 1e3 / one.seconds:.2f}", one.why)
            lines.append(f"| {category} | {ms:,.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
