"""State and Recurrence: what is carried between parts of a sequence, and the interface of the operators that carry it.

A State is a dict of tensors whose leading dimension is the batch. Its contents are private to the recurrence; all other code only
sends, detaches, saves or zeroes it, with the functions of this file. A Recurrence maps (inputs, State) to (outputs, State). Its
subclasses differ in how early the final State can be known, which decides how context parallelism can overlap ranks: a tail of the
inputs, a linear function of the entering State, a State that is cheap compared with the outputs, or none of these. Full attention,
which reads all earlier tokens, has no State that can be passed on: ranks gather what it reads.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor

from baton.kernels.errors import KernelError

State = dict[str, Tensor]


@dataclass(frozen=True)
class StateSpec:
    """Specification of one tensor of a State.

    Attributes:
        name: its key in the State.
        shape: without the leading batch dimension.
        dtype: in memory, in messages and in files.
        tp: the dimension of `shape` that is split over the tensor-parallel group; None if every rank holds all of it.
        grad: whether a gradient flows through it (not for indices and flags).
        grows: whether dimension 0 grows with every token, from the size in `shape`: the keys of full attention. Such a State
            cannot be sent in messages of a known size.
        tail: whether dimension 0 has a row for each of the last tokens, in their order, as the keys of attention over a window.
            `Recurrence.step` has them in turn, and one more: the row of the token at position p is p modulo their number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tp: int | None
    grad: bool
    grows: bool = False
    tail: bool = False

    def __post_init__(self) -> None:
        if self.tp is not None and not 0 <= self.tp < len(self.shape):
            raise KernelError(f"StateSpec: {self.name} has tp {self.tp}, expected None or a dimension of its shape {self.shape}")
        if self.grad and not self.dtype.is_floating_point:
            raise KernelError(f"StateSpec: {self.name} has dtype {self.dtype} and grad, expected a floating dtype or grad=False")

    def nbytes(self, batch: int) -> int:
        """Bytes of this tensor for `batch` sequences."""
        return batch * math.prod(self.shape) * self.dtype.itemsize


def zeros(leaves: Sequence[StateSpec], batch: int, device: torch.device | str) -> State:
    """The initial State of recurrences whose State starts at zero."""
    return {leaf.name: torch.zeros(batch, *leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves}


def detach(state: State) -> State:
    """The same values without a gradient: truncated backpropagation through time."""
    return {name: leaf.detach() for name, leaf in state.items()}


class _AbsentTensor:
    """Placeholder for a tensor of a State that was not computed. Every use of it raises KernelError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"not made: {self._name}"

    def __getattr__(self, asked: str) -> NoReturn:
        if asked.startswith("__"):
            raise AttributeError(asked)  # what Python looks for in anything
        raise KernelError(f"state: {self._name} was not made: the pass that it leaves was told that no State is wanted of it")


def absent_state(leaves: Sequence[StateSpec]) -> State:
    """Placeholder for a final State that is not needed: its keys, with placeholders that raise KernelError on use."""
    return {leaf.name: cast(Tensor, _AbsentTensor(leaf.name)) for leaf in leaves}


def check(state: State, leaves: Sequence[StateSpec], batch: int) -> None:
    """Refuse a State that is not exactly what `leaves` describe, for `batch` lanes.

    Raises:
        KernelError: a leaf is missing, unknown, or has another shape or dtype than described.
    """
    names = [leaf.name for leaf in leaves]
    if set(names) != set(state):
        raise KernelError(f"state: has leaves {sorted(state)}, expected {sorted(names)}")
    for leaf in leaves:
        tensor, shape = state[leaf.name], (batch, *leaf.shape)
        if leaf.grows and tensor.dim() > 1:
            shape = (batch, tensor.shape[1], *leaf.shape[1:])
        if tuple(tensor.shape) != shape:
            raise KernelError(f"state: {leaf.name} has shape {tuple(tensor.shape)}, expected (batch, ...) = {shape}")
        if tensor.dtype != leaf.dtype:
            raise KernelError(f"state: {leaf.name} has dtype {tensor.dtype}, expected {leaf.dtype}")


Inputs = tuple[Tensor, ...]
"""What a recurrence reads: `num_time_inputs` tensors [batch, T, ...], then the parameters that all tokens share."""


class StateTransition(ABC):
    """The map from the State that enters a span of tokens to the State after it, computed without the entering State."""

    @abstractmethod
    def apply(self, state: State) -> State:
        """The State after the span, given the entering State."""

    @abstractmethod
    def compose(self, later: "StateTransition") -> "StateTransition":
        """The transition of this span followed by the span of `later`."""


@dataclass(frozen=True)
class Affine(StateTransition):
    """S -> decay S + add, elementwise. decay broadcasts against its tensor; it is 0 if a document starts in the span.

    Multiplication always precedes addition, so equal spans give equal bits however they are grouped.
    """

    decay: State
    add: State

    def apply(self, state: State) -> State:
        return {name: self.decay[name] * state[name] + add for name, add in self.add.items()}

    def compose(self, later: StateTransition) -> "Affine":
        assert isinstance(later, Affine)
        return Affine({name: later.decay[name] * decay for name, decay in self.decay.items()}, later.apply(self.add))


@dataclass(frozen=True)
class MatrixAffine(StateTransition):
    """S -> M S + add for leaves [batch, heads, d_key, d_value], M [batch, heads, d_key, d_key]; M is 0 where a document starts."""

    matrix: State
    add: State

    def apply(self, state: State) -> State:
        return {name: self.matrix[name] @ state[name] + add for name, add in self.add.items()}

    def compose(self, later: StateTransition) -> "MatrixAffine":
        assert isinstance(later, MatrixAffine)
        return MatrixAffine({name: later.matrix[name] @ matrix for name, matrix in self.matrix.items()}, later.apply(self.add))


class Recurrence(ABC):
    """Interface of a recurrence. Instances hold its options and nothing else.

    Attributes:
        name: of the recurrence with its options, for messages and tests.
        input_names: names of the inputs in order, as errors use them.
        num_time_inputs: the number of inputs, the first ones, that have a time dimension.
        needs_pos: whether `run` requires positions even if no document starts in the span.
        differentiable: whether anything it returns has a gradient.
        error_amplifying: whether an error in the last bit grows from token to token.
        bfloat16_limit: allowed relative error of outputs and gradients with inputs in bfloat16.
        split_bitwise_exact: whether the PyTorch implementations keep every bit of outputs and States wherever a sequence is
            split; all keep them to rounding.
    """

    name: str
    input_names: ClassVar[tuple[str, ...]]
    num_time_inputs: ClassVar[int]
    needs_pos: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True
    error_amplifying: bool = False
    bfloat16_limit: ClassVar[float] = 5e-3
    split_bitwise_exact: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @property
    def no_kernel(self) -> str | None:
        """Why no Triton kernel supports this recurrence's options, so that a GPU runs several PyTorch operators per token; None:
        there is a kernel.

        The op asks the same function. Float64 inputs, which occur only in tests, never use kernels. The settings of mixers repeat
        the reason without torch (models.settings.cost_model.RecurrenceCosts.eager), for `baton plan` and the first lines of `baton
        train`.
        """
        return None

    @abstractmethod
    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        """The tensors of the State, for inputs of these shapes and dtypes."""

    @abstractmethod
    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """Outputs [batch, T, ...] and the final State, with exact gradients to inputs and state. state None: the initial State."""

    def forward_no_state(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> Tensor:
        """The outputs alone, bitwise equal to those of `run`, with equal gradients, for passes that drop the final State.

        Override it where computing the final State has a cost.
        """
        return self.run(inputs, pos, state)[0]

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        """`run` for one token a sequence, without gradients. The final State is written over the given one, in which rows of tokens
        stand otherwise (see StateSpec.tail and GatheredRecurrence.step).

        Override it where a kernel writes there itself: a State takes as much memory traffic as thousands of tokens.
        """
        y, after = self.run(inputs, pos, state)
        return y, {name: state[name].copy_(x) if x.shape == state[name].shape else x for name, x in after.items()}

    @abstractmethod
    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """The definition, a loop over tokens, in the inputs' dtype and with plain autograd."""

    @abstractmethod
    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """Random inputs and an entering State that cover corner cases: gates near 0 and 1, distinct values per head, odd sizes.

        Tests and `kernel_check` compare the implementations on them. wide: larger than one vector or tile.
        """

    def tail_state(self, inputs: Inputs, pos: Tensor | None) -> State | None:
        """The final State if it depends only on the last tokens and not on the entering State, else None. Differentiable."""
        return None

    def smooth(self, inputs: Inputs) -> Inputs:
        """An example's inputs, moved to where finite differences are accurate."""
        return inputs

    def vjp(
        self, inputs: Inputs, pos: Tensor | None, state: State | None, dy: Tensor, dstate: State | None
    ) -> tuple[tuple[Tensor, ...], State]:
        """Gradients of inputs and entering State ({} for None) for the gradients dy and dstate; what dstate omits is zero."""
        given, cotangents_of = state or {}, dstate or {}
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in (*inputs, *given.values())]
            entering = dict(zip(given, leaves[len(inputs) :], strict=True))
            y, leaving = self.run(tuple(leaves[: len(inputs)]), pos, entering if state is not None else None)
            carried = [name for name, leaf in leaving.items() if leaf.requires_grad and name in cotangents_of]
            outputs, cotangents = [y, *(leaving[name] for name in carried)], [dy, *(cotangents_of[name] for name in carried)]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True, materialize_grads=True))
            grads = [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]
        return tuple(grads[: len(inputs)]), dict(zip(given, grads[len(inputs) :], strict=True))


class GatheredRecurrence(Recurrence):
    """A recurrence whose outputs read the inputs of all earlier tokens, so that its State grows with every token: full attention.

    The first `num_queries` inputs are read by their own token alone; the others, keys and values, by all later tokens too.
    Context ranks and segments gather the latter instead of passing a State on (`parallel.gathered_attention`).
    """

    num_queries: ClassVar[int]

    @abstractmethod
    def attend(self, queries: Inputs, gathered: Inputs, pos: Tensor | None) -> tuple[Tensor, Inputs]:
        """Outputs of the last T of N + T tokens, outside of autograd, and what the backward pass reads besides.

        queries: [batch, T, ...]; gathered: [batch, N + T, ...], of all tokens read; pos: of the queries, [batch, T].
        """

    @abstractmethod
    def attend_backward(
        self, queries: Inputs, gathered: Inputs, pos: Tensor | None, y: Tensor, saved: Inputs, dy: Tensor
    ) -> tuple[Inputs, Inputs]:
        """Gradients of queries and gathered inputs for the gradient dy of `attend`'s outputs y."""

    @abstractmethod
    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Outputs of one token a sequence, [batch, 1, ...], without gradients. What grows in the State has room: a row for every
        position of the document, of which pos is the one that this token's is written to."""

    @abstractmethod
    def span_state(self, inputs: Inputs, pos: Tensor | None) -> State:
        """What a span of tokens adds to the State."""


class LinearRecurrence(Recurrence):
    """A recurrence whose final State is an affine function of the entering State.

    By default (layout.context_comm=ring) it runs as any other recurrence does: a context rank receives the State, calls `run`, and
    sends the final State. Only with context_comm=early or all_gather are the phases below used: States are sent, or gathered,
    before the outputs are computed.

    Phases of a span in the forward pass: `begin` without the entering State, then the transition is applied to it and the result
    sent, then `finish`. In the backward pass: `begin_backward` without the gradient of the final State, then the transition of
    gradients is applied and the result sent to the previous rank, then `finish_backward`. The defaults derive all phases from `run`
    and `transition_matrix`; override them where less work suffices.
    """

    @abstractmethod
    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The span's transition matrix for each tensor of the State, or its diagonal as a broadcastable decay; 0 if a document
        starts in the span."""

    def state_transition(self, transition: State, add: State) -> StateTransition:
        """The transition made of a transition matrix and of the State that the span reaches from zero."""
        return Affine(transition, add)

    def adjoint(self, transition: State) -> State:
        """The transition matrix of gradients."""
        return transition

    @torch.no_grad()
    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """The span's transition matrix, which `begin_backward` takes again, and its state transition. No outputs, no gradient."""
        transition = self.transition_matrix(inputs, pos)
        _, add = self.run(inputs, pos, None)
        return transition, self.state_transition(transition, add)

    @torch.no_grad()
    def finish(self, inputs: Inputs, pos: Tensor | None, state: State) -> Tensor:
        """The outputs, given the entering State."""
        return self.forward_no_state(inputs, pos, state)

    def begin_backward(self, inputs: Inputs, pos: Tensor | None, transition: State, state: State, dy: Tensor) -> StateTransition:
        """The transition of gradients: the adjoint matrix, and the entering State's gradient from dy alone."""
        _, add = self.vjp(inputs, pos, state, dy, None)
        return self.state_transition(self.adjoint(transition), add)

    def finish_backward(self, inputs: Inputs, pos: Tensor | None, state: State, dy: Tensor, dstate: State) -> tuple[Tensor, ...]:
        """Gradients of the inputs, given the final State's gradient."""
        return self.vjp(inputs, pos, state, dy, dstate)[0]


class SequentialRecurrence(Recurrence):
    """A recurrence that is not linear in its State. Work that does not need the State is done before it arrives."""

    def prepare(self, inputs: Inputs, pos: Tensor | None) -> Any:
        """Everything that does not depend on the State. Default: nothing."""
        return inputs, pos

    def run_prepared(self, context: Any, state: State) -> tuple[Tensor, State]:
        """As `run`, with the result of `prepare`."""
        inputs, pos = context
        return self.run(inputs, pos, state)


class StateFirstRecurrence(Recurrence):
    """A recurrence whose final State is not linear in the entering one, but cheap compared with the outputs.

    The final State is therefore computed and sent first: `final_state`, send, `forward_no_state`. In the backward pass the
    gradients of `forward_no_state` are computed before the final State's gradient arrives, then those of `final_state` with it, and
    both are added. `run` is both.
    """

    @abstractmethod
    def initial(self, inputs: Inputs) -> State:
        """The initial State, which `run` uses for None."""

    @abstractmethod
    def final_state(self, inputs: Inputs, pos: Tensor | None, state: State) -> State:
        """The final State alone, bitwise equal to that of `run`; plain autograd with exact gradients to inputs and state."""
