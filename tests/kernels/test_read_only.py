"""Ops do not modify their inputs: no bit of an input, an entering State or an output gradient changes, forward or backward.

Tensors come in every layout that a caller may have. All of their memory is compared, also the elements beside a view.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import bounds_checked
from support.interpreter import interpreted_quickly
from support.long_form import alternating
from support.recurrences import RECURRENCES, no_starts, positions, seeded
from torch import Tensor

import baton.kernels
from baton.kernels.common.kernel_check import moving
from baton.kernels.cross_entropy import gradient, partial_sums
from baton.kernels.eidetic_attention.recurrence import Innovation
from baton.kernels.embedding import add_rows
from baton.kernels.gate import forget_gate, gated, log_sigmoid
from baton.kernels.gate.triton_launch import activate_columns
from baton.kernels.gated_norm import gated_norm
from baton.kernels.head_scale import head_scale
from baton.kernels.lattice.recurrence import Lattice
from baton.kernels.protocol import Inputs, LinearRecurrence, Recurrence, SequentialRecurrence, State, StateFirstRecurrence
from baton.kernels.rms_norm import fused_add_rms_norm, rms_norm
from baton.kernels.rotary import rotary
from baton.kernels.window_attention.triton_launch import SHORT

BATCH, ROWS = 2, 6
GPU = torch.device("cuda")
CPU = torch.device("cpu")


def _swapped(x: Tensor, first: int, second: int) -> Tensor:
    """x in memory whose order of two dimensions is the other one."""
    return x.transpose(first, second).contiguous().transpose(first, second) if x.dim() > max(first, second) else x.clone()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: _swapped(x, 1, 2),
    "time first": lambda x: _swapped(x, 0, 1),
    "contiguous": Tensor.clone,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x.clone(),
    # as an expanded parameter has it, and the cotangent of a sum
    "one for the batch": lambda x: x[:1].clone().expand_as(x) if x.dim() else x.clone(),
    "one for all": lambda x: x.reshape(-1)[:1].clone().expand(x.shape),
    "columns of wider rows": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]] if x.dim() else x.clone(),
}


def shared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that all lie in one storage, one behind the other."""
    sizes = [-(-x.nbytes // 16) * 16 for x in tensors]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[0].device).split(sizes)
    found = [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(memory, tensors, strict=True)]
    for own, x in zip(found, tensors, strict=True):
        own.copy_(x)
    return found


def laid_out(tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
    plain = [x.detach() for x in tensors]
    if layout == "mixed":  # all layouts at once, a tensor each
        return [lie(x) for x, lie in zip(reversed(plain), itertools.cycle(LAYOUTS.values()))][::-1]
    return shared(plain) if layout == "shared" else [LAYOUTS[layout](x) for x in plain]


class Watched:
    """Tensors by name, and every bit of the memory that they lie in."""

    def __init__(self) -> None:
        self.before: list[tuple[str, Tensor, Tensor]] = []

    def add(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self.before += [(name, x, self._bits(x).clone()) for name, x in zip(names, tensors, strict=True)]

    def changed(self) -> list[str]:
        return [name for name, x, bits in self.before if not torch.equal(self._bits(x), bits)]

    @staticmethod
    def _bits(x: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())


def check_passes(call: Callable[..., Sequence[Tensor]], names: Sequence[str], inputs: Sequence[Tensor], layout: str) -> None:
    """`call` with inputs in a layout, then its gradients for cotangents of all its outputs in that layout. Outputs are left alone
    by the backward pass too: another op may have kept them."""
    watched = Watched()
    own = [x.requires_grad_(x.is_floating_point()) for x in laid_out(inputs, layout)]
    watched.add(names, own)
    with torch.enable_grad():
        outputs = list(call(*own))
    assert watched.changed() == [], f"forwards, {layout}"
    reached = [x for x in outputs if x.requires_grad]
    if not reached:
        return
    cotangents = laid_out([torch.randn(x.shape, generator=seeded(n)).to(x) for n, x in enumerate(reached)], layout)
    watched.add([f"cotangent {n}" for n in range(len(reached))], cotangents)
    watched.add([f"output {n}" for n in range(len(outputs))], outputs)
    torch.autograd.grad(reached, [x for x in own if x.requires_grad], cotangents, allow_unused=True)
    assert watched.changed() == [], f"backwards, {layout}"


def example(recurrence: Recurrence, device: torch.device, length: int, start: bool) -> tuple[list[str], list[Tensor]]:
    """Names and tensors: inputs, entering State and positions."""
    inputs, state = recurrence.example(seeded(0), BATCH, length, torch.float32, wide=False)
    pos = positions(seeded(1), BATCH, length, 0.3) if start else no_starts(recurrence, BATCH, length)
    names = [*recurrence.input_names, *(f"entering {name}" for name in state), *([] if pos is None else ["pos"])]
    return names, [x.to(device) for x in (*inputs, *state.values(), *([] if pos is None else [pos]))]


def split(recurrence: Recurrence, tensors: Sequence[Tensor]) -> tuple[Inputs, State, Tensor | None]:
    """The inverse."""
    n, names = (
        len(recurrence.input_names),
        [leaf.name for leaf in recurrence.state_specs(tuple(tensors[: len(recurrence.input_names)]))],
    )
    last = n + len(names)
    return tuple(tensors[:n]), dict(zip(names, tensors[n:last], strict=True)), tensors[last] if len(tensors) > last else None


def run(recurrence: Recurrence, form: str, *tensors: Tensor) -> list[Tensor]:
    inputs, state, pos = split(recurrence, tensors)
    y, leaving = (recurrence.reference if form == "reference" else recurrence.run)(inputs, pos, state)
    return [y, *leaving.values()]


def check_phases(recurrence: Recurrence, device: torch.device, length: int, layout: str) -> None:
    """As segments on several ranks run a recurrence: parts of the passes, and cotangents that are handed over."""
    names, tensors = example(recurrence, device, length, start=True)
    watched, own = Watched(), laid_out(tensors, layout)
    watched.add(names, own)
    inputs, state, pos = split(recurrence, own)
    leaving = recurrence.run(inputs, pos, state)[1]
    y = recurrence.forward_no_state(inputs, pos, state)
    cotangents = laid_out([torch.randn(x.shape, generator=seeded(5)).to(x) for x in (y, *moving(leaving).values())], layout)
    dy, dstate = cotangents[0], dict(zip(moving(leaving), cotangents[1:], strict=True))
    watched.add(["dy", *(f"cotangent of {name}" for name in dstate)], cotangents)
    recurrence.tail_state(inputs, pos)
    if isinstance(recurrence, StateFirstRecurrence):
        recurrence.final_state(inputs, pos, state)
    if isinstance(recurrence, SequentialRecurrence):
        recurrence.run_prepared(recurrence.prepare(inputs, pos), state)
    if isinstance(recurrence, LinearRecurrence):
        transition, effect = recurrence.begin(inputs, pos)
        given = laid_out(list(transition.values()), layout)
        transition = dict(zip(transition, given, strict=True))
        watched.add([f"transition of {name}" for name in transition], given)
        effect.compose(effect).apply(state)
        recurrence.finish(inputs, pos, state)
        recurrence.begin_backward(inputs, pos, transition, state, dy).apply(dstate)
        recurrence.finish_backward(inputs, pos, state, dy, dstate)
    if recurrence.differentiable:
        recurrence.vjp(inputs, pos, state, dy, dstate)
    assert watched.changed() == [], layout


@contextmanager
def _kernels_on_a_cpu() -> Iterator[None]:
    """Ops take their Triton kernels for tensors on a CPU, where the interpreter runs them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("baton.kernels.") and hasattr(module, "on_gpu"):
                patch.setattr(module, "on_gpu", lambda x: True)
        yield


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """In place of the folder's fixture of that name: these tests compare no values. The long ones check bounds."""
    with interpreted_quickly() if os.environ.get("TRITON_INTERPRET") == "1" else nullcontext():
        yield


ALL_LAYOUTS = (*LAYOUTS, "shared")
SOME_LAYOUTS = ("time first", "transposed", "one for all", "shared")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels are compiled")
EVERY = (*RECURRENCES, Innovation())
# one of each folder, but for Lattice's, which the interpreter takes half a minute for
FIRST = tuple({type(x): x for x in reversed(EVERY) if not isinstance(x, Lattice)}.values())
over_recurrences = pytest.mark.parametrize("recurrence", EVERY, ids=str)


def length_of(recurrence: Recurrence) -> int:
    """Fewer queries than SHORT have no kernel."""
    return SHORT if recurrence.name.startswith(("window_attention", "eidetic_attention")) else 5


# every fourth layout for each; the others in the long form
@pytest.mark.parametrize(("recurrence", "layout"), alternating(EVERY, SOME_LAYOUTS, 4), ids=str)
def test_definitions_of_recurrences_only_read(recurrence: Recurrence, layout: str):
    check_passes(partial(run, recurrence, "reference"), *example(recurrence, CPU, 3, start=True), layout)


@pytest.mark.parametrize(("recurrence", "layout"), alternating(EVERY, ALL_LAYOUTS, len(ALL_LAYOUTS)), ids=str)
def test_passes_of_recurrences_only_read(recurrence: Recurrence, layout: str):
    start = ALL_LAYOUTS.index(layout) // 2 % 2 == 0
    check_passes(partial(run, recurrence, "run"), *example(recurrence, CPU, 5, start=start), layout)


@pytest.mark.parametrize(("recurrence", "layout"), alternating(EVERY, SOME_LAYOUTS, 4), ids=str)
def test_phases_of_recurrences_only_read(recurrence: Recurrence, layout: str):
    check_phases(recurrence, CPU, 5, layout)


@interpreted
@pytest.mark.parametrize("recurrence", FIRST, ids=str)
def test_kernels_of_recurrences_only_read(recurrence: Recurrence):
    with _kernels_on_a_cpu():
        check_passes(partial(run, recurrence, "run"), *example(recurrence, CPU, length_of(recurrence), start=True), "mixed")


@interpreted
@pytest.mark.long
@pytest.mark.timeout(1200)
@over_recurrences
def test_kernels_of_recurrences_only_read_in_every_layout_and_phase(recurrence: Recurrence):
    with _kernels_on_a_cpu(), bounds_checked():
        for layout in ALL_LAYOUTS:
            check_passes(partial(run, recurrence, "run"), *example(recurrence, CPU, length_of(recurrence), start=True), layout)
            check_phases(recurrence, CPU, length_of(recurrence), layout)


@pytest.mark.gpu
@over_recurrences
def test_recurrences_only_read_on_a_gpu(recurrence: Recurrence):
    for layout in ALL_LAYOUTS:
        for length in (5, 40):
            check_passes(partial(run, recurrence, "run"), *example(recurrence, GPU, length, start=True), layout)
            check_phases(recurrence, GPU, length, layout)


def _norm_and_what_it_adds(x: Tensor, added: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return fused_add_rms_norm(x, weight, 1e-5, added=added)


def _norm_of_a_stream(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return fused_add_rms_norm(x, weight, 1e-5)


def _loss_gradient(logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor) -> Sequence[Tensor]:
    """Written in the logits' place, as its documentation says: in that of a copy here."""
    gradient(logits.detach().clone(), labels, 3, largest.detach(), total.detach())
    return ()


def _add_rows(into: Tensor, ids: Tensor, rows: Tensor) -> Sequence[Tensor]:
    """Added to `into`, as its documentation says: to a copy here."""
    add_rows(into.detach().clone(memory_format=torch.contiguous_format), ids, rows.detach())
    return ()


def _activations(x: Tensor, z: Tensor) -> Sequence[Tensor]:
    with torch.no_grad():
        return (*activate_columns(x, z), *activate_columns(x, z, logs=2.0))


_R = partial(torch.randn, generator=seeded(9))
_LABELS = torch.tensor([[3, -1, 8, 4, 100, 0]]).expand(1, ROWS)[0]
# folder: name of the op: (the call, its arguments by name)
OPS: dict[str, dict[str, tuple[Callable[..., Any], dict[str, Tensor]]]] = {
    "rms_norm": {
        "norm": (lambda x, weight: (rms_norm(x, weight, 1e-5),), {"x": _R(BATCH, ROWS, 7), "weight": _R(7)}),
        "silu": (lambda x, weight: (rms_norm(x, weight, 1e-5, silu=True),), {"x": _R(BATCH, ROWS, 7), "weight": _R(7)}),
        "stream": (_norm_of_a_stream, {"x": _R(BATCH, ROWS, 7), "weight": _R(7)}),
        "added": (_norm_and_what_it_adds, {"x": _R(BATCH, ROWS, 7), "added": _R(BATCH, ROWS, 7), "weight": _R(7)}),
    },
    "gate": {
        "silu": (lambda x, z: (gated(x, z),), {"x": _R(BATCH, ROWS, 7), "z": _R(BATCH, ROWS, 7)}),
        "gelu": (lambda x, z: (gated(x, z, activation="gelu"),), {"x": _R(BATCH, ROWS, 7), "z": _R(BATCH, ROWS, 7)}),
        "sigmoid": (lambda x, z: (gated(x, z, activation="sigmoid"),), {"x": _R(BATCH, ROWS, 7), "z": _R(BATCH, ROWS, 7)}),
        "log_sigmoid": (
            lambda x, bias: (log_sigmoid(x, bias=bias, divisor=2.0),),
            {"x": _R(BATCH, ROWS, 7), "bias": _R(7)},
        ),
        "forget": (
            lambda q, f, factor: forget_gate(q, f, factor=factor),
            {"q": _R(BATCH, ROWS, 7), "f": _R(BATCH, ROWS, 7), "factor": torch.sigmoid(_R(7))},
        ),
        "activate": (_activations, {"x": _R(BATCH, ROWS, 7), "z": _R(BATCH, ROWS, 7)}),
    },
    "gated_norm": {
        "heads": (
            lambda x, z, weight: (gated_norm(x, z, weight, 1e-5),),
            {"x": _R(BATCH, ROWS, 3, 4), "z": _R(BATCH, ROWS, 12), "weight": _R(4)},
        ),
        "rows": (
            lambda x, z, weight: (gated_norm(x, z, weight, 1e-5, activation="sigmoid", center=True),),
            {"x": _R(BATCH, ROWS, 3, 4), "z": _R(BATCH, ROWS, 12), "weight": _R(3, 4)},
        ),
        "skip": (
            lambda x, z, weight, u, D: (gated_norm(x, z, weight, 1e-5, gate_first=True, skip=(u, D)),),
            {"x": _R(BATCH, ROWS, 1, 8), "z": _R(BATCH, ROWS, 8), "weight": _R(8), "u": _R(BATCH, ROWS, 1, 8), "D": _R(2)},
        ),
    },
    "head_scale": {
        "scale": (lambda x, scale: (head_scale(x, scale),), {"x": _R(BATCH, ROWS, 3, 4), "scale": _R(BATCH, ROWS, 3)}),
    },
    "rotary": {
        "rotary": (
            lambda q, k, pos: rotary(q, k, pos, (1.0,)),
            {"q": _R(BATCH, ROWS, 3, 4), "k": _R(BATCH, ROWS, 2, 4), "pos": positions(seeded(1), BATCH, ROWS, 0.3)},
        ),
    },
    "cross_entropy": {
        "sums": (lambda logits, labels: partial_sums(logits.detach(), labels, 3), {"logits": _R(ROWS, 5), "labels": _LABELS}),
        "gradient": (
            _loss_gradient,
            {"logits": _R(ROWS, 5), "labels": _LABELS, "largest": _R(ROWS) + 4, "total": _R(ROWS).exp() + 1},
        ),
    },
    "embedding": {
        "add_rows": (_add_rows, {"into": _R(8, 5), "ids": _LABELS, "rows": _R(ROWS, 5)}),
    },
}
over_ops = pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder, ops in OPS.items() for name in ops])


@over_ops
def test_other_ops_only_read(folder: str, name: str):
    if name == "activate":
        pytest.skip("only a GPU uses it")
    call, arguments = OPS[folder][name]
    for layout in ALL_LAYOUTS:
        check_passes(call, list(arguments), list(arguments.values()), layout)


@interpreted
@over_ops
def test_kernels_of_other_ops_only_read(folder: str, name: str):
    call, arguments = OPS[folder][name]
    with _kernels_on_a_cpu():
        for layout in (*SOME_LAYOUTS, "contiguous"):
            check_passes(call, list(arguments), list(arguments.values()), layout)


@interpreted
@pytest.mark.long
@over_ops
def test_kernels_of_other_ops_only_read_in_every_layout_and_within_bounds(folder: str, name: str):
    call, arguments = OPS[folder][name]
    with _kernels_on_a_cpu(), bounds_checked():
        for layout in ALL_LAYOUTS:
            check_passes(call, list(arguments), list(arguments.values()), layout)


@pytest.mark.gpu
@over_ops
def test_other_ops_only_read_on_a_gpu(folder: str, name: str):
    call, arguments = OPS[folder][name]
    for layout in ALL_LAYOUTS:
        check_passes(call, list(arguments), [x.to(GPU) for x in arguments.values()], layout)


def test_every_op_is_among_them():
    """But for the optimizer's, which is there to write."""
    folders = {path.parent.name for path in Path(baton.kernels.__file__).parent.glob("*/op.py")} - {"adamw"}
    assert folders == {type(recurrence).__module__.split(".")[2] for recurrence in RECURRENCES} | set(OPS)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_write_would_be_seen(layout: str):
    """To an input forwards, and to a cotangent backwards, as far as PyTorch lets an op write there at all."""

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
            if now:
                x.detach().view(-1)[:1].add_(1) if x.is_contiguous() else x.detach().as_strided((1,), (1,)).add_(1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
            dys[0].as_strided((1,), (1,), dys[0].storage_offset()).add_(1)
            return dys[0], None

    for now, when in ((True, "forwards"), (False, "backwards")):
        with pytest.raises(AssertionError, match=when):
            check_passes(lambda x, now=now: (Careless.apply(x, now),), ["x"], [torch.randn(2, 3, 4)], layout)
