"""The equality grid: its layouts, the layouts that a short run uses, and the comparison in one cell.

A cell is a mixer on a layout; it trains a small model for a few steps through DeepSpeed, megatron-core and the executor. What it is
compared with is one process of plain PyTorch: autograd, torch's AdamW and clipping, the whole batch at once.

B'MOJO selects tokens by scores, so its results are only equal for equal selections. In the grid it uses the scores of the one
process; a second run with its own scores reports which selections differ, and by how much the scores do.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache

import torch
from torch import Tensor

from baton.data_pipeline.packing import IGNORE_INDEX
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.models.mixers.bmojo import BMojo, Innovation
from baton.models.settings import kinds
from baton.parallel.param_layout import gather_parameters, initialize_parameters
from baton.parallel.parameter_groups import parameter_groups
from baton.training.build import DTYPES, build
from baton.training.checkpoint.shard_boxes import KINDS, optimizer_boxes
from baton.training.lr_schedule import learning_rates
from baton.training.step.executor import StepExecutor
from support.compare import relative_error, worst
from support.models import SEQUENCE_LENGTH, SEQUENCES, Batch, model_of, step_batch, training

STEPS, ACCUMULATION, RANKS = 2, 2, 8
MIXERS = (*kinds(), "hybrid", "full_attention")
IN_BFLOAT16 = tuple(
    mixer
    for mixer in MIXERS
    if mixer not in ("channel_mix", "kda", "linear_attention", "mamba3", "mlstm", "rg_lru", "rwkv6", "rwkv7", "s4d", "ttt")
)
"""Those that `make grid` trains in bfloat16 as well."""
IN_SHORT = ("decays", "gates", "deltas", "hybrid", "full_attention", "matrices", "bmojo", "mamba")
"""Models of which each meets every value in the long form. A layer of every mixer of IN_BFLOAT16 is in one of them; layers of the
others are in the models "groups", "ablated", "rwkv", "finch" and "baselines", but ttt, which tests/models/test_sequence_parallel.py
has in float64."""
ALWAYS = ("gla", "gated_delta_net", "lattice", "hybrid", "full_attention", "bmojo", "mamba")
"""Those of the default run: a model of each family of recurrences."""
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "bfloat16 residual": 1e-2}
PRECISIONS = {
    "float32": {"compute_dtype": "float32"},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "bfloat16 residual": {"compute_dtype": "bfloat16", "residual_dtype": "bfloat16"},
}
"""Settings by precision."""
ROUNDING = 3
"""In bfloat16 a gradient norm or a tensor may be further off than the limit where the precision itself moves it: by so many times
the distance of the one process in bfloat16 from that in float32. One for the one process itself, two for a layout, which rounds
more often: every tensor rank's part of a sum, every micro-batch's gradient of a weight."""

# Tiny layers of these cost float32 most of a digit each: with three of width 12, sums in another order alone move their gradients
# by up to 2e-5. Wider they are as well conditioned as the others.
SIZES = {kind: {"d_model": 48} for kind in ("delta_net", "gated_delta_net", "gla", "lattice")}
# What its weights make goes through a LayerNorm per head, and of six entries that loses another digit.
_TTT = {"kind": "ttt", "heads": 4, "head_dim": 16, "mini_batch": 16}
SIZES["ttt"] = {"d_model": 48, "mixers": {"ttt": _TTT}}
# layers that differ
SIZES |= {name: {"d_model": 48} for name in ("rwkv", "deltas", "decays", "gates", "matrices")}
# A document's first token reads a multiple of its own value, of which a norm per head leaves the direction: its gradient to what
# reads is nothing but rounding, larger the smaller the multiple. The epsilon ends that; with 1e-5 errors are ten times as large.
SIZES["rwkv6"] = {"d_model": 48, "norm_eps": 1e-3}
SIZES["retnet"] = {"n_layers": 3}  # the long form has it on three stages


@dataclass(frozen=True)
class Layout:
    """Factors of the grid. Data ranks: two where eight processes allow."""

    tensor: int
    pipeline: int
    context: int
    zero: int

    @property
    def data(self) -> int:
        return 2 if 2 * self.tensor * self.pipeline * self.context <= RANKS else 1

    @property
    def keywords(self) -> dict[str, int]:
        return {"data": self.data, **{f.name: getattr(self, f.name) for f in fields(self)}}

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}, CP {self.context}, DP {self.data}, ZeRO {self.zero}"


LAYOUTS = tuple(
    layout
    for layout in itertools.starmap(Layout, itertools.product((1, 2), (1, 2), (1, 2, 4), (0, 1, 2)))
    if layout.tensor * layout.pipeline * layout.context <= RANKS and not (layout.zero == 2 and layout.pipeline > 1)
)


def values(layout: Layout) -> set[tuple[str, int]]:
    """The factors' values in a layout."""
    return {(f.name, getattr(layout, f.name)) for f in fields(layout)}


def pairs(layout: Layout) -> set[tuple[tuple[str, int], ...]]:
    """Every two of the factors' values in a layout."""
    return set(itertools.combinations(sorted(values(layout)), 2))


@cache
def with_every_pair() -> tuple[Layout, ...]:
    """Few layouts in which every two values of different factors meet that meet in any."""
    left, chosen = set().union(*map(pairs, LAYOUTS)), []
    while left:
        chosen.append(max(LAYOUTS, key=lambda layout: len(pairs(layout) & left)))
        left -= pairs(chosen[-1])
    return tuple(chosen)


@cache
def selection(models: tuple[str, ...], layouts: tuple[Layout, ...] = LAYOUTS) -> dict[Layout, tuple[str, ...]]:
    """Models by layout such that every model meets every value of every factor, and every layout, so every combination, some model.

    Each model takes the three layouts, which is as few as have all values, that most others have left out.
    """
    every = set().union(*map(values, layouts))
    enough = [three for three in itertools.combinations(layouts, 3) if set().union(*map(values, three)) == every]
    chosen: dict[Layout, list[str]] = {layout: [] for layout in layouts}
    for model in models:
        for layout in min(enough, key=lambda three: sorted(len(chosen[layout]) for layout in three)[::-1]):
            chosen[layout].append(model)
    for own in chosen.values():
        if not own:
            own.append(min(models, key=lambda model: sum(model in m for m in chosen.values())))
    return {layout: tuple(own) for layout, own in chosen.items()}


def one_each(models: Sequence[str], layouts: Sequence[Layout]) -> dict[Layout, str]:
    """A model by layout: each in turn, on those that cut a model into most parts first; the last model on all that are left."""
    by_parts = sorted(layouts, key=lambda layout: -layout.tensor * layout.pipeline * layout.context)
    return dict(itertools.zip_longest(by_parts, models, fillvalue=models[-1]))


def model_for(mixer: str) -> ModelConfig:
    """The small model of the grid."""
    return ModelConfig(**model_of(mixer).model_dump() | SIZES.get(mixer, {}))


def settings_of(mixer: str, precision: str):
    """B'MOJO's state space has a learning rate of its own, as in its paper. Steps are small: AdamW makes whole ones of gradients
    that are little more than rounding, and the next gradients would be those of other parameters."""
    config = training(**PRECISIONS[precision], steps=STEPS)
    changes = {"lr": 1e-3, "eps": 1e-5, "lr_overrides": {"*.ssm.*": 3e-3} if mixer == "bmojo" else {}}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=changes)})


@dataclass
class Trained:
    """rows: (loss, gradient norm) by step. tensors: whole ones after the last step, by kind and name. scores: B'MOJO's by (step,
    layer), [sequences, context]. start: initial values of the master copies, only in bfloat16: their errors are relative to how far
    they moved from there. So faults of a weight that AdamW moved by a hundredth are seen a hundred times larger, and the few
    parameters that start at zero are measured as all others are. (In float32 so small a move has too few digits.)"""

    rows: list[tuple[float, float]]
    tensors: dict[str, Tensor]
    scores: dict[tuple[int, str], Tensor]
    start: dict[str, Tensor] = field(default_factory=dict)

    def error(self, key: str, values: Tensor) -> float:
        """Relative error of a tensor of this kind and name."""
        start = self.start.get(key, 0)
        return relative_error(values - start, self.tensors[key] - start)


@cache
def one_process(mixer: str, precision: str, scores_of: str | None = None) -> Trained:
    """The oracle: the whole batch at once, and nothing of DeepSpeed, the executor or splitting. scores_of: the precision by whose
    scores B'MOJO selects; None: its own."""
    config = settings_of(mixer, precision)
    types = {"compute_dtype": DTYPES[config.compute_dtype], "residual_dtype": DTYPES[config.residual_dtype]}
    model = LanguageModel(model_for(mixer), **types)
    initialize_parameters(model, config.seed, 0, 1)
    o = config.optimizer
    optimizer = torch.optim.AdamW(parameter_groups(model, o.weight_decay, tuple(o.lr_overrides)), lr=o.lr, betas=o.betas, eps=o.eps)
    found = Trained([], {}, {})
    if precision != "float32":
        found.start = {f"master.{name}": values.clone() for name, values in _blocks(dict(model.named_parameters()))}
    for step in range(STEPS):
        batch = step_batch(step)
        optimizer.zero_grad()
        forced = None
        if scores_of is not None:
            forced = {layer: [x] for (at, layer), x in one_process(mixer, scores_of).scores.items() if at == step}
        with recorded(forced) as scores:
            loss = model.loss(model(batch.tokens, batch.pos)[0], batch.labels) / (batch.labels != IGNORE_INDEX).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rates(step, config)[group["lr_override"]]
        optimizer.step()
        for module in model.modules():
            module._cast_weight_cache = None
        found.rows.append((loss.item(), norm.item()))
        found.scores |= {(step, layer): values[0] for layer, values in scores.items()}
    parameters = dict(model.named_parameters())
    for kind in KINDS:
        tensors = {n: p.detach() if kind == "master" else optimizer.state[p][kind] for n, p in parameters.items()}
        found.tensors |= {f"{kind}.{name}": values for name, values in _blocks(parameters, tensors)}
    return found


def _blocks(parameters: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, rows) of the blocks of each parameter, or of a tensor of its shape."""
    for name, p in parameters.items():
        for block in p.baton_layout.shard_boxes(name, 0, 1):
            whole = p.detach() if tensors is None else tensors[name]
            yield block.name, whole[block.local_row : block.local_row + block.extent[0]]


@dataclass
class Share:
    """The results of a rank. boxes: (whole shape, offset, values) of the optimizer's tensors; parameters: of its stage, whole."""

    rows: list[tuple[float, float, int]]
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]
    parameters: dict[str, Tensor]
    scores: dict[tuple[int, str], list[tuple[Tensor, slice, Tensor]]]


def tasks(mixers: Sequence[str], precision: str) -> list[tuple[str, str, dict | None]]:
    """What `cells` is told: B'MOJO selects by the one process's scores."""
    return [(m, precision, one_process(m, precision).scores if m == "bmojo" else None) for m in mixers]


def cells(mesh, tasks: Sequence[tuple[str, str, dict | None]]) -> list[Share]:
    """On every rank of a layout: (mixer, precision, scores to select by) one after the other."""
    return [cell(mesh, *task) for task in tasks]


def cell(mesh, mixer: str, precision: str, forced: dict | None, changes: dict | None = None) -> Share:
    config = settings_of(mixer, precision)
    config = config.model_copy(update={"micro_batch_size": SEQUENCES // (mesh.layout.data * ACCUMULATION), **(changes or {})})
    train_state = build(model_for(mixer), config, mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    rows = torch.arange(mesh.data_rank, SEQUENCES, mesh.layout.data).split(config.micro_batch_size)
    size = SEQUENCE_LENGTH // mesh.layout.context
    span = slice(mesh.context_rank * size, (mesh.context_rank + 1) * size)
    share = Share([], {}, {}, {})
    for step in range(STEPS):
        whole = step_batch(step)
        batches = [Batch(whole.tokens[r, span], whole.labels[r, span], whole.pos[r, span]) for r in rows]
        wanted = None
        if forced is not None:
            wanted = {layer: [scores[r, span] for r in rows] for (at, layer), scores in forced.items() if at == step}
        with recorded(wanted) as scores:
            result = executor.step(batches, learning_rates(step, config))
        share.rows.append((result.loss, result.grad_norm, result.labels))
        for layer, values in scores.items():
            share.scores[step, layer] = [(r, span, own) for r, own in zip(rows, values, strict=True)]
    found = optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True)
    share.boxes = {key: [(r.whole, r.offset, r.data.clone()) for r in boxes] for key, boxes in found.items()}
    share.parameters = gather_parameters(train_state.model, mesh.tensor_group)
    return share


@contextmanager
def recorded(wanted: dict[str, list[Tensor]] | None = None):
    """B'MOJO's scores by layer, in the order of the forward passes; wanted: what is selected by instead."""
    scores: dict[str, list[Tensor]] = {}

    def run_recurrence(self, recurrence, inputs, pos, state, context):
        y, leaving = super(BMojo, self).run_recurrence(recurrence, inputs, pos, state, context)
        if isinstance(recurrence, Innovation):
            layer = context.layer + self.path
            scores.setdefault(layer, []).append(y.detach().clone())
            if wanted is not None:
                y = wanted[layer][len(scores[layer]) - 1].to(y.dtype)
        return y, leaving

    BMojo.run_recurrence = run_recurrence
    try:
        yield scores
    finally:
        del BMojo.run_recurrence


def errors(expected: Trained, shares: Sequence[Share]) -> dict[str, float]:
    """Largest relative error of the losses, the gradient norms, and the gathered tensors of each kind; all ranks' together.

    Raises AssertionError if the ranks' boxes do not make up every tensor.
    """
    found = {
        "loss": worst(relative(row[0], want[0]) for share in shares for row, want in zip(share.rows, expected.rows, strict=True)),
        "norm": worst(relative(row[1], want[1]) for share in shares for row, want in zip(share.rows, expected.rows, strict=True)),
    }
    whole = {key: torch.full(values.shape, math.nan) for key, values in expected.tensors.items()}
    for share in shares:
        for key, boxes in share.boxes.items():
            for shape, offset, data in boxes:
                assert tuple(whole[key].shape) == shape, key
                whole[key][tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
    for kind in KINDS:
        found[kind] = worst(expected.error(key, whole[key]) for key in expected.tensors if key.startswith(f"{kind}."))
        assert not math.isnan(found[kind]), f"{kind}: no rank has all of it"
    held = [expected.error(f"master.{name}", p) for share in shares for name, p in share.parameters.items()]
    names = {name for share in shares for name in share.parameters}
    assert {f"master.{name}" for name in names} == {key for key in expected.tensors if key.startswith("master.")}
    return {**found, "parameters": worst(held)}


@cache
def rounding(mixer: str, precision: str) -> dict[str, float]:
    """How far the one process is in this precision from itself in float32; "gradient": all first moments as one vector."""
    other = one_process(mixer, precision, "float32")
    expected = replace(one_process(mixer, "float32"), start=other.start)
    boxes = {key: [(tuple(x.shape), (0,) * x.dim(), x)] for key, x in other.tensors.items()}
    parameters = {key.removeprefix("master."): x for key, x in other.tensors.items() if key.startswith("master.")}
    gradient, same = (
        torch.cat([x.flatten() for key, x in found.tensors.items() if key.startswith("exp_avg.")]) for found in (other, expected)
    )
    share = Share([(*row, 0) for row in other.rows], boxes, parameters, {})
    return {**errors(expected, [share]), "gradient": relative_error(gradient, same)}


def beyond(mixer: str, precision: str, found: dict[str, float]) -> dict[str, float]:
    """The errors that are larger than they may be; losses are held to the limit in any precision.

    A gradient norm may be off by as much as the precision moves the gradient: how far it moved the one process's norm is one number
    of either sign, by chance anything between nothing and that.
    """
    limit = dict.fromkeys(found, LIMITS[precision])
    if precision != "float32":
        moved = rounding(mixer, precision)
        limit |= {key: max(limit[key], ROUNDING * moved[key]) for key in found if key != "loss"}
        limit["norm"] = max(limit["norm"], moved["gradient"])
    return {key: error for key, error in found.items() if not error <= limit[key]}


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def swaps(expected: Trained, shares: Sequence[Share]) -> tuple[int, int, float]:
    """How B'MOJO's own selections differ from the one process's: entries of published memories that are others, of how many, and
    the largest difference of the scores of two entries that changed places, relative to the larger one."""
    settings = model_of("bmojo").mixers["bmojo"]
    changed, total, gap = 0, 0, 0.0
    for (step, layer), scores in expected.scores.items():
        own = torch.full_like(scores, math.nan)
        for share in shares:
            for rows, span, values in share.scores.get((step, layer), []):
                own[rows, span] = values.to(own.dtype)
        assert not own.isnan().any(), f"{layer}: no rank has scored some tokens"
        pos = step_batch(step).pos
        for row in range(SEQUENCES):
            for place in range(SEQUENCE_LENGTH):
                at = int(pos[row, place])
                if at == 0 or at % settings.window:
                    continue
                candidates = range(max(0, place - at), place)
                best, free = (set(_largest(s[row], candidates, settings.eidetic)) for s in (scores, own))
                total += len(best)
                changed += len(best - free)
                for one, other in itertools.product(best - free, free - best):
                    gap = max(gap, relative(float(scores[row, one]), float(scores[row, other])))
    return changed, total, gap


def _largest(scores: Tensor, candidates: range, count: int) -> list[int]:
    return sorted(candidates, key=lambda t: (-float(scores[t]), t))[:count]
