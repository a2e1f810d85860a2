"""Lattice's recurrence as a `SequentialRecurrence`, for state passing and for tests."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_gates, extreme_keys, randn
from baton.kernels.lattice.chunked import Options, Prepared, apply_limits, chunk_length, initial_slots, prepare, run_chunk
from baton.kernels.lattice.op import lattice
from baton.kernels.lattice.reference import lattice_reference
from baton.kernels.lattice.triton_launch import lattice_triton, no_kernel, use_triton
from baton.kernels.lattice.variant import UpdateRule, Variant
from baton.kernels.protocol import Inputs, SequentialRecurrence, State, StateSpec, check


class Context(NamedTuple):
    """A segment of a sequence whose state has not arrived. chunks: None if it runs on Triton kernels, which prepare nothing."""

    inputs: Inputs
    pos: Tensor | None
    chunks: list[Prepared] | None


@dataclass(frozen=True)
class Lattice(SequentialRecurrence):
    """Inputs q, k, v, gamma, then mu if it forgets, then tau if it is sparse, along time, then S0; State {S [batch, heads, d, m]}.

    See `op.lattice`. A State of None, and a State of zeros, stand for S0.
    """

    variant: Variant = "dec"
    project: bool = True
    forget: bool = False
    sparse: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        options = [("project", self.project), ("forget", self.forget), ("sparse", self.sparse)]
        return "-".join(["lattice", self.variant, *(name for name, on in options if on)])

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("q", "k", "v", "gamma", *("mu" for _ in range(self.forget)), *("tau" for _ in range(self.sparse)), "S0")

    @property
    def num_time_inputs(self) -> int:  # type: ignore[override]
        return self.options.num_time_inputs

    @property
    def error_amplifying(self) -> bool:  # type: ignore[override]
        """Enc is, most of all with keys of 30: over a dozen seeds its error in float32 is up to 30 times that of the definition in
        float32, and as often smaller."""
        return self.variant == "enc"

    @property
    def no_kernel(self) -> str | None:
        return no_kernel(sparse=self.sparse)

    @property
    def options(self) -> Options:
        return Options(UpdateRule(self.variant, self.project), self.forget, self.sparse)

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        return (StateSpec("S", tuple(inputs[-1].shape), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        arguments, initial = dict(zip(self.input_names, inputs, strict=True)), None if state is None else state["S"]
        y, S = lattice(**arguments, variant=self.variant, project=self.project, pos=pos, initial_state=initial)
        return y, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        arguments, initial = dict(zip(self.input_names, inputs, strict=True)), None if state is None else state["S"]
        y, S = lattice_reference(**arguments, rule=self.options.rule, pos=pos, initial_state=initial)
        return y, {"S": S}

    @torch.no_grad()
    def prepare(self, inputs: Inputs, pos: Tensor | None) -> Context:
        """Casts, masks, and an orthonormal basis of each chunk's values where the recurrence runs in coordinates."""
        num_inputs, length, step = self.num_time_inputs, inputs[0].shape[1], chunk_length(self.options)
        chunks = []
        with without_autocast(inputs[0]):
            limited = apply_limits(self.options, inputs)
            if use_triton(inputs[0], state_dtype(*inputs), sparse=self.sparse):
                return Context(limited, pos, None)
            for begin in range(0, length, step):
                piece = (*(x[:, begin : begin + step] for x in limited[:num_inputs]), *limited[num_inputs:])
                chunks.append(prepare(self.options, piece, None if pos is None else pos[:, begin : begin + step]))
        return Context(limited, pos, chunks)

    @torch.no_grad()
    def run_prepared(self, context: Context, state: State) -> tuple[Tensor, State]:
        check(state, self.state_specs(context.inputs), context.inputs[0].shape[0])
        ys = []
        with without_autocast(context.inputs[0]):
            S = initial_slots(self.options, context.inputs, context.pos, state["S"])
            if context.chunks is None:
                q, k, v, gamma, *mu, S0 = context.inputs
                y, S = lattice_triton(q, k, v, gamma, S0, mu=mu[0] if mu else None, rule=self.options.rule, pos=context.pos, S=S)
                return y, {"S": S}
            for chunk in context.chunks:
                y, S = run_chunk(self.options, chunk, S)
                ys.append(y)
        return torch.cat(ys, dim=1).to(context.inputs[0].dtype), {"S": S}

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        heads, d, m = (5, 33, 17) if wide else (3, 5, 3)
        normal, along = partial(randn, generator, dtype=dtype), (batch, length, heads)
        k = extreme_keys(generator, *along, m, dtype=dtype)
        optional = []
        if self.forget:
            optional.append(extreme_gates(generator, *along, dtype=dtype))
        if self.sparse:
            optional.append(0.05 * normal(*along).clamp(min=0.0))
        gamma = extreme_gates(generator, *along, dtype=dtype)
        S0 = torch.linalg.qr(normal(heads, d, m))[0].contiguous()
        S = normal(batch, heads, d, m)
        if self.project:
            S /= torch.linalg.vector_norm(S, dim=-2, keepdim=True)
        return (normal(*along, m), k, normal(*along, d), gamma, *optional, S0), {"S": S}

    def smooth(self, inputs: Inputs) -> Inputs:
        """Keys of moderate size, gates above their limit, and thresholds that entries near 0 do not reach."""
        mu = tuple(x.clamp(0.05, 0.95) for x in inputs[4 : 4 + self.forget])
        tau = tuple(x + 0.01 for x in inputs[4 + self.forget : -1])
        return (inputs[0], inputs[1].clamp(-2.0, 2.0), *inputs[2:4], *mu, *tau, inputs[-1])


RECURRENCES = (
    Lattice("dec"),
    Lattice("enc"),
    Lattice("sim"),
    Lattice("dec", project=False),
    Lattice("enc", project=False),
    Lattice("sim", forget=True),
    Lattice("enc", sparse=True),
    Lattice("sim", project=False, sparse=True),
)
