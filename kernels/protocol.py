"""What is carried between pieces of a sequence, a State, and what carries it, a Recurrence.

The one thing to know: a State is a plain dict of tensors whose leading dimension is the batch (a lane each). What is in it is
the layer's own business; everybody else only ships, detaches, saves or zeroes it, with the functions of this file. A Recurrence
maps (inputs, State) to (outputs, State); how early its leaving State can be known decides which phases it has.
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

# Every leaf starts at a multiple of this in a flat message: views need their own itemsize, and 16 serves every dtype.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class StateSpec:
    """One tensor of a State.

    Attributes:
        name: its key in the State.
        shape: without the leading batch dimension.
        dtype: of the tensor wherever it is: in memory, in a message and in a file.
        tp: the dimension of `shape` (batch not counted) that is split over the tensor group; None if every rank holds all of it.
        grad: whether a gradient flows through it (indices and flags have none).
        grows: whether dimension 0 grows with every token read, from the size in `shape`: full attention's keys. Such a State cannot
            be shipped in messages of a known size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tp: int | None
    grad: bool
    grows: bool = False

    def __post_init__(self) -> None:
        if self.tp is not None and not 0 <= self.tp < len(self.shape):
            raise KernelError(f"StateSpec: {self.name} has tp {self.tp}, expected None or a dimension of its shape {self.shape}")
        if self.grad and not self.dtype.is_floating_point:
            raise KernelError(f"StateSpec: {self.name} has dtype {self.dtype} and grad, expected a floating dtype or grad=False")

    def nbytes(self, batch: int) -> int:
        """Bytes of this leaf for `batch` lanes."""
        return batch * math.prod(self.shape) * self.dtype.itemsize


def zeros(leaves: Sequence[StateSpec], batch: int, device: torch.device | str) -> State:
    """The State of nothing read yet, for recurrences that begin from zero."""
    return {leaf.name: torch.zeros(batch, *leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves}


def detach(state: State) -> State:
    """The same values with the gradient cut: truncated backpropagation through time."""
    return {name: leaf.detach() for name, leaf in state.items()}


class _AbsentTensor:
    """In the place of a leaf that nobody wants. Whatever is asked of it is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"not made: {self._name}"

    def __getattr__(self, asked: str) -> NoReturn:
        if asked.startswith("__"):
            raise AttributeError(asked)  # what Python looks for in anything
        raise KernelError(f"state: {self._name} was not made: the pass that it leaves was told that no State is wanted of it")


def absent_state(leaves: Sequence[StateSpec]) -> State:
    """In the place of a leaving State that nobody wants: its names, and no tensors. Whoever takes a leaf for one gets an error."""
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


def flat_nbytes(leaves: Sequence[StateSpec], batch: int) -> int:
    """Bytes of the message that `to_flat` makes: what a receiver must have ready."""
    return sum(_padded(leaf.nbytes(batch)) for leaf in leaves)


def to_flat(state: State, leaves: Sequence[StateSpec]) -> Tensor:
    """One contiguous message for a whole State: uint8 [flat_nbytes], each leaf in its own dtype, in the order of `leaves`.

    The message is a copy and carries no gradient: whoever sends it also sends the cotangents back. Padding is zero, so equal
    States make equal bytes.

    Raises:
        KernelError: the State is not what `leaves` describe.
    """
    batch = next(iter(state.values())).shape[0] if state else 0
    check(state, leaves, batch)
    device = next(iter(state.values())).device if state else torch.device("cpu")
    message = torch.zeros(flat_nbytes(leaves, batch), dtype=torch.uint8, device=device)
    for leaf, view in zip(leaves, _views(message, leaves, batch), strict=True):
        view.copy_(state[leaf.name].detach())
    return message


def from_flat(message: Tensor, leaves: Sequence[StateSpec], batch: int) -> State:
    """The State in a message of `to_flat`. The leaves are views of `message`: no copy, so do not reuse its memory while they live.

    Raises:
        KernelError: the message is not uint8, contiguous and of `flat_nbytes(leaves, batch)` bytes.
    """
    expected = flat_nbytes(leaves, batch)
    if message.dtype != torch.uint8 or tuple(message.shape) != (expected,) or not message.is_contiguous():
        raise KernelError(
            f"state: message has shape {tuple(message.shape)} and dtype {message.dtype}, expected ({expected},) of contiguous "
            f"uint8 for {batch} lanes of {[leaf.name for leaf in leaves]}"
        )
    return {leaf.name: view for leaf, view in zip(leaves, _views(message, leaves, batch), strict=True)}


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _views(message: Tensor, leaves: Sequence[StateSpec], batch: int) -> list[Tensor]:
    views, start = [], 0
    for leaf in leaves:
        nbytes = leaf.nbytes(batch)
        views.append(message[start : start + nbytes].view(leaf.dtype).view(batch, *leaf.shape))
        start += _padded(nbytes)
    return views


Inputs = tuple[Tensor, ...]
"""What a recurrence reads: `num_time_inputs` tensors [batch, T, ...], then the parameters that all tokens share."""


class StateTransition(ABC):
    """What a span of tokens does to the State that enters it, known without that State."""

    @abstractmethod
    def apply(self, state: State) -> State:
        """The State that leaves the span when `state` enters it."""

    @abstractmethod
    def compose(self, later: "StateTransition") -> "StateTransition":
        """The effect of this span followed by `later`."""


@dataclass(frozen=True)
class Affine(StateTransition):
    """S -> decay S + add, elementwise, leaf by leaf. decay broadcasts against its leaf; a start in the span makes it 0.

    The order of operations is fixed, multiply then add, so equal spans make equal bits wherever they are folded.
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
    """One recurrence as everybody outside its folder sees it. Instances hold its options and nothing else.

    Attributes:
        name: of the recurrence with its options, for messages and tests.
        input_names: of its inputs in order, as errors call them.
        num_time_inputs: how many of the inputs, the first ones, run along time.
        needs_pos: whether `run` must be told positions also where no document starts.
        differentiable: whether anything it returns has a gradient.
        error_amplifying: whether an error in a last bit grows from token to token until it is all there is.
        bfloat16_limit: relative error that outputs and gradients may have with inputs in bfloat16.
        split_bitwise_exact: whether the forms in PyTorch keep every bit of outputs and states wherever a sequence is cut; all keep
            them to rounding.
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
        """Why a GPU computes the recurrence with PyTorch's operators, several for each token; None: Triton kernels compute it.

        The op asks the same function. Inputs in float64, which no run has, are never computed by kernels. Settings of mixers say it
        again without torch (models.settings.cost_model.RecurrenceCosts.eager), for `baton plan` and `baton train`'s first lines.
        """
        return None

    @abstractmethod
    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        """What is carried, for inputs of these shapes and dtypes."""

    @abstractmethod
    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """Outputs [batch, T, ...] and the leaving State, with exact gradients to inputs and state. state None: nothing read yet."""

    def forward_no_state(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> Tensor:
        """The outputs alone, every bit as `run` returns them, and gradients too, for passes that drop the leaving State.

        To be overridden where making that costs something.
        """
        return self.run(inputs, pos, state)[0]

    @abstractmethod
    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """The definition, a loop over tokens, in the inputs' dtype and with plain autograd."""

    @abstractmethod
    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """Random inputs and an entering State that reach the corners: gates near 0 and 1, distinct values per head, odd sizes.

        Tests and checks on the machine compare the forms on them. wide: larger than one vector or tile.
        """

    def tail_state(self, inputs: Inputs, pos: Tensor | None) -> State | None:
        """The leaving State where it does not depend on the entering one, as a tail of enough tokens; else None. Differentiable."""
        return None

    def smooth(self, inputs: Inputs) -> Inputs:
        """An example's inputs moved to where finite differences are accurate."""
        return inputs

    def vjp(
        self, inputs: Inputs, pos: Tensor | None, state: State | None, dy: Tensor, dstate: State | None
    ) -> tuple[tuple[Tensor, ...], State]:
        """Gradients of inputs and entering state ({} for None) for the cotangents dy and dstate; what dstate leaves out is zero."""
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


class LinearRecurrence(Recurrence):
    """A recurrence whose leaving State is affine in the entering one, so that it can be sent before any output exists.

    The phases of a span, forwards: `begin` without the State that arrives, then advance(effect) leaves, then `finish`. Backwards:
    `begin_backward` without the cotangent that arrives from the right, then advance(effect) leaves to the left, then
    `finish_backward`. The definitions here derive all of them from `run` and `transition`; a recurrence that can do less work
    overrides them.
    """

    @abstractmethod
    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The span's decay, or matrix, of each leaf, as `effect` takes it; 0 where a document starts in the span."""

    def state_transition(self, transition: State, add: State) -> StateTransition:
        """The effect made of a transition and of what the span adds to a State of zeros."""
        return Affine(transition, add)

    def adjoint(self, transition: State) -> State:
        """The transition that cotangents see."""
        return transition

    @torch.no_grad()
    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """States only, from nothing: the span's transition, which `begin_backward` is given again, and its effect."""
        transition = self.transition_matrix(inputs, pos)
        _, add = self.run(inputs, pos, None)
        return transition, self.state_transition(transition, add)

    @torch.no_grad()
    def finish(self, inputs: Inputs, pos: Tensor | None, state: State) -> Tensor:
        """Outputs, given the State that entered."""
        return self.forward_no_state(inputs, pos, state)

    def begin_backward(self, inputs: Inputs, pos: Tensor | None, transition: State, state: State, dy: Tensor) -> StateTransition:
        """The effect on cotangents: what dy alone adds to the entering State's cotangent, and the adjoint transition."""
        _, add = self.vjp(inputs, pos, state, dy, None)
        return self.state_transition(self.adjoint(transition), add)

    def finish_backward(self, inputs: Inputs, pos: Tensor | None, state: State, dy: Tensor, dstate: State) -> tuple[Tensor, ...]:
        """Gradients of the inputs, given the leaving State's cotangent."""
        return self.vjp(inputs, pos, state, dy, dstate)[0]


class SequentialRecurrence(Recurrence):
    """A recurrence that is not linear in its State: what does not need the State is prepared before it arrives."""

    def prepare(self, inputs: Inputs, pos: Tensor | None) -> Any:
        """Everything that does not depend on the State. Here: nothing."""
        return inputs, pos

    def run_prepared(self, context: Any, state: State) -> tuple[Tensor, State]:
        """As `run`, on what `prepare` returned."""
        inputs, pos = context
        return self.run(inputs, pos, state)


class StateFirstRecurrence(Recurrence):
    """A recurrence whose leaving State, though not linear in the entering one, costs little beside the outputs.

    So it is computed and sent first: `leave`, send, `outputs`. Backwards `outputs` is pulled back before the leaving State's
    cotangent arrives, then `leave` with that cotangent, and the gradients are added. `run` is both.
    """

    @abstractmethod
    def initial(self, inputs: Inputs) -> State:
        """The State of nothing read, which `run` takes None for."""

    @abstractmethod
    def final_state(self, inputs: Inputs, pos: Tensor | None, state: State) -> State:
        """The leaving State alone, every bit as `run` returns it; by plain autograd, with exact gradients to inputs and state."""
