"""`make grid`: every mixer on every layout of the equality grid, and docs/equality-grid.md written from what was found.

Ends with status 1 if a cell is beyond its limit; the page is written all the same and shows it.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))  # after -P has kept it out

from support import grid
from support.compare import worst
from support.pool import Pool

from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig

PAGE = Path(__file__).parent.parent / "docs" / "equality-grid.md"
TIMEOUT_S = 1800
TOGETHER = 8
"""Mixers whose results come back in one message: each tensor in it takes a file descriptor until it is read."""


def main() -> int:
    torch.set_num_threads(1)
    meshes.initialize(LayoutConfig(), device=torch.device("cpu"), rank=0, store=torch.distributed.HashStore())
    pool, started = Pool(grid.RANKS), time.monotonic()
    exact = run(pool, {layout: [*grid.MIXERS] for layout in grid.LAYOUTS}, "float32")
    low = run(pool, grid.selection(grid.IN_BFLOAT16), "bfloat16")
    both = ("float32", "bfloat16")
    free = {precision: [(layout, *free_run(pool, layout, precision)) for layout in grid.LAYOUTS] for precision in both}
    pool.close()
    minutes = (time.monotonic() - started) / 60
    PAGE.write_text(page(exact, low, free), encoding="utf-8")
    too_far = {"float32": beyond(exact, "float32"), "bfloat16": beyond(low, "bfloat16")}
    for precision, cells in too_far.items():
        for layout, mixer, found in cells:
            print(f"BEYOND {grid.LIMITS[precision]:g} in {precision}: {mixer} on {layout}: {found}")
    count = sum(map(len, exact.values())) + sum(map(len, low.values()))
    print(f"{count} cells in {minutes:.1f} minutes; {sum(map(len, too_far.values()))} beyond the limit; {PAGE} written")
    return int(any(too_far.values()))


def run(pool, selection, precision):
    """{layout: {mixer: errors}}"""
    found = {}
    for layout, mixers in selection.items():
        found[layout] = {}
        for some in (mixers[n : n + TOGETHER] for n in range(0, len(mixers), TOGETHER)):
            shares = pool.run(grid.cells, grid.tasks(some, precision), timeout_s=TIMEOUT_S, **layout.keywords)
            for n, mixer in enumerate(some):
                found[layout][mixer] = grid.errors(grid.one_process(mixer, precision), [share[n] for share in shares])
        print(f"{precision} {layout}: {worst(worst(e.values()) for e in found[layout].values()):.1e}", flush=True)
    return found


def free_run(pool, layout, precision):
    """B'MOJO with its own selections: (entries that changed, entries, gap of scores, errors)."""
    expected = grid.one_process("bmojo", precision)
    shares = [share[0] for share in pool.run(grid.cells, [("bmojo", precision, None)], timeout_s=TIMEOUT_S, **layout.keywords)]
    return *grid.swaps(expected, shares), grid.errors(expected, shares)


def beyond(found, precision):
    cells = [(layout, m, grid.beyond(m, precision, e)) for layout, mixers in found.items() for m, e in mixers.items()]
    return [cell for cell in cells if cell[2]]


def page(exact, low, free) -> str:
    quantities = {
        "loss": "loss", "norm": "gradient norm", "parameters": "parameters, as every rank holds them", "master": "master copies",
        "exp_avg": "first moments", "exp_avg_sq": "second moments",
    }  # fmt: skip
    scalars = {layout: {m: {key: e[key] for key in ("loss", "norm")} for m, e in cells.items()} for layout, cells in low.items()}
    rounding = {"rounding": {m: grid.rounding(m, "bfloat16") for m in grid.MIXERS}}
    swaps = []
    for one, other in zip(free["float32"], free["bfloat16"], strict=True):
        cells = [f"{changed} of {total} | {gap:.1e} | {max(e.values()):.1e}" for _, changed, total, gap, e in (one, other)]
        swaps.append(f"| {one[0]} | {' | '.join(cells)} |")
    return PAGE_TEXT.format(
        steps=grid.STEPS,
        accumulation=grid.ACCUMULATION,
        limit=grid.LIMITS,
        times=grid.ROUNDING,
        exact="\n".join(table(exact)),
        quantities="\n".join(
            f"| {name} | {largest(exact, key):.1e} | {largest(low, key):.1e} |" for key, name in quantities.items()
        ),
        low="\n".join(table(rounding | low)),
        scalars="\n".join(table(scalars)),
        swaps="\n".join(swaps),
    )


PAGE_TEXT = """# The equality grid

Written by `make grid`; `make test` runs a part of it in which every two values of the factors meet, with a model of each
family of recurrences; in `make test-long` every model meets every value of the factors, and every combination of them a model.

A cell trains a small model for {steps} steps (packed documents of unequal length, {accumulation} or more micro-batches a step,
clipping active, AdamW) on CPU processes with gloo, through megatron-core's layers, DeepSpeed and the executor. It is compared with
one process of plain PyTorch on the whole batch. Its number is the largest relative error, ‖a−b‖/‖b‖, of the losses, the gradient
norms, every gathered parameter, and both of AdamW's moments of each. TP: tensor, PP: pipeline, SP: sequence, DP: data ranks.

## float32, limit {limit[float32]:g}

{exact}

The largest by quantity, all cells together:

| quantity | float32 | bfloat16 |
| --- | --- | --- |
{quantities}

## bfloat16, limit {limit[bfloat16]:g} for losses

Matmuls and activations in bfloat16 on both sides, in cells such that most mixers meet every value of the factors. Eight bits of
mantissa move single tensors further than the limit whatever the layout: the row `rounding` is the one process in bfloat16 against
itself in float32. A gradient norm or a tensor may be {times} times as far, a gradient norm also as far as the gradient itself
moved. Errors of parameters and master copies are here relative to how far these moved from their initial values.

{low}

Losses and gradient norms alone:

{scalars}

## B'MOJO with its own selections

B'MOJO keeps the tokens with the largest scores, and rounding may exchange two whose scores are nearly equal. Above, its cells
select by the one process's scores. Here they select by their own: how many entries of published memories differ, and by how much
the scores of the exchanged ones differ, relative to the larger.

| layout | float32: exchanged | gap | largest error | bfloat16: exchanged | gap | largest error |
| --- | --- | --- | --- | --- | --- | --- |
{swaps}
"""


def table(found):
    mixers = grid.MIXERS
    yield f"| | {' | '.join(mixers)} |"
    yield f"| --- |{' --- |' * len(mixers)}"
    for layout, cells in found.items():
        yield f"| {layout} | {' | '.join(f'{worst(cells[m].values()):.0e}' if m in cells else '' for m in mixers)} |"


def largest(found, key):
    return worst(errors[key] for cells in found.values() for errors in cells.values())


if __name__ == "__main__":
    sys.exit(main())
