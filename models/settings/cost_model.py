"""Costs of a sub-block: saved activations, saved States, collectives, FLOPs. Torch-free.

Parameters and States are declared once (models.settings.declarations). In addition, a settings class states only what follows from
the operators that its mixer calls: the tensors that autograd saves, and how often a recurrence saves its State. Tests compare these
figures with measurements of what autograd saves, for every kind of mixer.

All widths are global, over all tensor ranks. "compute" is training.compute_dtype, the dtype of matmuls and activations.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from baton.models.settings.all_reduces import AllReduce, all_reduces_of
from baton.models.settings.declarations import Dtype, ParameterDeclaration, StateDeclaration, prefixed
from baton.models.settings.eager import Eager

# Copies of constants in kernels/, mostly tokens per chunk, because importing them imports torch. tests/launcher/test_plan.py
# compares them with the originals.
LINEAR_ATTENTION_CHUNK = 64
DELTA_RULE_CHUNK = GENERALIZED_DELTA_RULE_CHUNK = 64
MAMBA3_MOST_INPUTS = 4  # of a head, for which a GPU has kernels
SCORES_SHARE = 6  # linear attention saves scores if they are at most 1 / SCORES_SHARE of q, k and v
LATTICE_SEQUENTIAL_CHUNK, LATTICE_QR_CHUNK = 32, 16
LATTICE_GPU_CHUNK = 32  # without sparsity, which the GPU kernels do not support
WINDOW_BLOCK, EIDETIC_BLOCK = 64, 128
SCAN_CHUNKS = (16, 32)
SCAN_CHUNK_ELEMENTS, SCAN_GPU_CHUNK = 1 << 19, 16

# Each tensor of a message is padded to a multiple of this, in bytes.
MESSAGE_ALIGNMENT = 16

# The special function units compute exponentials at 1/8 of the rate of multiply-adds, which count as 2 FLOPs.
EXP_FLOPS = 16


@dataclass(frozen=True)
class Workload:
    """What one rank computes in one forward and backward pass.

    batch: number of sequences.
    length: tokens per sequence on this rank.
    tensor: number of tensor ranks.
    compute_bytes: bytes per element of the compute dtype, 2 or 4.
    gpu: whether the fused kernels run, which save less.
    segment: whether the tokens are a part of a sequence whose initial State comes from another rank or from the previous segment.
    rerun: whether linear recurrences run again in the backward pass, as where context-parallel ranks exchange transitions.
    sequence_parallel: whether the residual stream is split by tokens over the tensor ranks.
    selective: whether cheap activations are recomputed (training.recompute=selective).
    keeps_states: whether a GPU keeps states between chunks, and what is made for them, that it recomputes otherwise
        (training.recompute=none).
    context: number of context ranks that share a sequence.
    """

    batch: int
    length: int
    tensor: int = 1
    compute_bytes: int = 2
    gpu: bool = True
    segment: bool = False
    rerun: bool = False
    sequence_parallel: bool = False
    selective: bool = False
    keeps_states: bool = False
    context: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def stream_tokens(self) -> int:
        """Rows of the residual stream on this rank, including padding if the ranks do not divide the tokens."""
        return -(-self.tokens // self.tensor) if self.sequence_parallel else self.tokens

    def itemsize(self, dtype: Dtype) -> int:
        """Bytes of one element."""
        return {"compute": self.compute_bytes, "float32": 4, "int64": 8, "bool": 1}[dtype]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saves in the forward pass for the backward pass.

    width: elements per token; if per_token is false, elements in total.
    split: whether the width is divided over the tensor group.
    cast: a copy in another dtype, which is saved only if the compute dtype is not float32.
    device: the device on which it is saved; None: both.
    ranks: whether it is saved with one or with several tensor ranks; None: both.
    residual_stream: a tensor of the residual stream, which sequence parallelism splits by tokens.
    sequence_parallel: saved only with sequence parallelism, where the tensor that is saved otherwise is gathered again.
    in_recurrence: saved inside a linear recurrence. Either autograd records its operators ("graph"), or a fused kernel runs on a
        GPU or the recurrence runs again in the backward pass, and both of these save only the input ("input"). "kernel": saved
        only by the fused kernel.
    recomputed: not saved with selective recomputation, except in a segment.
    with_states: saved only where a GPU keeps states between chunks.
    dealt: saved only with context parallelism, where other ranks attend with a part of this one's queries.
    """

    name: str
    width: int
    dtype: Dtype
    split: bool = True
    cast: bool = False
    device: Literal["cpu", "gpu"] | None = None
    ranks: Literal["one", "several"] | None = None
    per_token: bool = True
    residual_stream: bool = False
    sequence_parallel: bool = False
    in_recurrence: Literal["graph", "input", "kernel"] | None = None
    recomputed: bool = False
    with_states: bool = False
    dealt: bool = False

    def nbytes(self, work: Workload) -> int:
        forms = {
            "graph": not work.gpu and not work.rerun,
            "input": work.gpu or work.rerun,
            "kernel": work.gpu and not work.rerun,
        }
        if self.in_recurrence is not None and not forms[self.in_recurrence]:
            return 0
        if (self.dealt and work.context == 1) or (self.with_states and not work.keeps_states):
            return 0
        if (self.recomputed and work.selective and not work.segment) or (self.sequence_parallel and not work.sequence_parallel):
            return 0
        device, ranks = "gpu" if work.gpu else "cpu", "several" if work.tensor > 1 else "one"
        if (self.cast and work.compute_bytes == 4) or self.device not in (None, device) or self.ranks not in (None, ranks):
            return 0
        width = self.width // work.tensor if self.split else self.width
        tokens = work.stream_tokens if self.residual_stream else work.tokens
        return width * (tokens if self.per_token else 1) * work.itemsize(self.dtype)


def state_bytes(state: StateDeclaration, work: Workload) -> int:
    """Bytes of one tensor of a micro-batch's State on one tensor rank; of one that grows, of the rows of the rank's tokens."""
    shape = (state.shape[0] + work.length, *state.shape[1:]) if state.grows else state.shape
    numel = math.prod(shape) // (1 if state.tp is None else work.tensor)
    return work.batch * numel * work.itemsize(state.dtype)


@dataclass(frozen=True)
class RecurrenceCosts:
    """A recurrence of a sub-block: its State, and how often it saves the State.

    chunk: tokens between the States that are saved for the backward pass; 0: no State is saved; None: only the initial State.
    recomputed_on_gpu: the GPU kernels save only the initial State and recompute the others; kept: unless these are to be kept, in
        this dtype, of float32 twice as many as of half the size. None: they are never kept.
    factors_kept: tensors of the State whose factors over each chunk are kept with the States.
    between_chunks: tensors of the State that are saved between chunks; None: all.
    copied: the first saved State is a copy of the initial State.
    gpu_chunk: the GPU kernels' chunk, if it differs.
    scan_elements: d_inner * d_state of a diagonal scan, from which its chunk follows; 0: not a diagonal scan.
    messages: number of messages that send the State to the next context rank.
    transition: for a linear recurrence, the shape of the factor by which a span of tokens multiplies each tensor of the State,
        split over the tensor group as that tensor is; (): the recurrence is not linear.
    gradients_read: tensors of the entering State that the transition of gradients has besides.
    eager: the cost without a kernel for the GPU; None: there is a kernel.
    """

    name: str
    state: tuple[StateDeclaration, ...]
    chunk: int | None = None
    recomputed_on_gpu: bool = False
    kept: Dtype | None = None
    factors_kept: tuple[str, ...] = ()
    between_chunks: tuple[StateDeclaration, ...] | None = None
    copied: bool = False
    gpu_chunk: int | None = None
    scan_elements: int = 0
    messages: int = 1
    transition: tuple[tuple[int, ...], ...] = ()
    gradients_read: tuple[StateDeclaration, ...] = ()
    eager: Eager | None = None

    @property
    def gathers(self) -> bool:
        """Whether its State grows with every token: ranks and segments then gather it instead of passing it on."""
        return any(state.grows for state in self.state)

    def key_bytes(self, work: Workload) -> int:
        """Bytes of the keys and values of a rank's tokens, if they are gathered."""
        return sum(state_bytes(s, work) for s in self.state if s.grows)

    def saved_bytes(self, work: Workload) -> int:
        """Bytes of the States that are saved for the backward pass."""
        if self.gathers:
            return 0
        state, arrived = sum(state_bytes(s, work) for s in self.between_chunks or self.state), self.initial_state_bytes(work)
        if work.rerun and self.transition:
            # the chunks' States are recomputed when the recurrence runs again
            return arrived + sum(state_bytes(s, work) for s in self.factors)
        if self.chunk and self.kept and work.gpu and work.keeps_states:
            itemsize = work.itemsize(self.kept)
            chunks = -(-work.length * itemsize // (2 * self.chunk))
            factors = sum(state_bytes(s, work) for s in self.factors if s.name in self.factors_kept)
            return arrived + chunks * (state * itemsize // 4 + factors)
        if not self.chunk or (self.recomputed_on_gpu and work.gpu):
            return arrived or (0 if self.chunk == 0 else state)
        chunks = -(-work.length // self.tokens_per_chunk(work))
        return arrived + (chunks if self.copied or not arrived else chunks - 1) * state

    @property
    def factors(self) -> tuple[StateDeclaration, ...]:
        """The transition of a span, one factor per tensor of the State; () if the recurrence is not linear."""
        pairs = zip(self.state, self.transition, strict=True) if self.transition else ()
        return tuple(replace(state, shape=shape) for state, shape in pairs)

    def initial_state_bytes(self, work: Workload) -> int:
        """Bytes of the initial State from the previous rank or segment, for each message."""
        return self.messages * sum(state_bytes(s, work) for s in self.state) if work.segment and not self.gathers else 0

    def score_bytes(self, work: Workload) -> int:
        """Bytes of scores that are saved even with full recomputation: one float32 per token of a recurrence whose State has no
        gradient. They are not recomputed because the selection of tokens depends on their last bit."""
        return 0 if not self.state or any(s.grad for s in self.state) else 4 * work.tokens

    def tokens_per_chunk(self, work: Workload) -> int:
        if not self.scan_elements:
            return (self.gpu_chunk if work.gpu else None) or self.chunk or work.length
        if work.gpu:
            return SCAN_GPU_CHUNK
        elements = work.batch * self.scan_elements // work.tensor
        return max((n for n in SCAN_CHUNKS if n * elements <= SCAN_CHUNK_ELEMENTS), default=SCAN_CHUNKS[0])

    def message_bytes(self, work: Workload, *, backward: bool) -> int:
        """Bytes that a context rank sends: the State to the next rank or, backward, its gradient to the previous one."""
        if self.gathers:
            return 0
        return self.messages * _aligned(state_bytes(s, work) for s in self.state if s.grad or not backward)

    def transition_bytes(self, work: Workload, *, backward: bool) -> int:
        """Bytes that a rank sends where transitions are exchanged: its span's, and the State that it computes from zero."""
        read = self.gradients_read if backward else ()
        return _aligned(state_bytes(s, work) for s in (*self.factors, *read, *self.state))


def _aligned(sizes: Iterable[int]) -> int:
    return sum(-(-nbytes // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT for nbytes in sizes)


@dataclass(frozen=True)
class MixerCosts:
    """Costs of one sub-block.

    all_reduces: in `MixerConfig.activation_costs`, only those that do not follow from a declared layer.
    matrix_flops, vector_flops: FLOPs of the recurrence per token and forward pass, on matrix units and on other units.
    attended: for each softmax attention the width of all queries and the maximum number of tokens that a query attends to (None:
        all tokens up to it).
    masks: whether the CPU implementation holds a mask over all pairs of a sequence's tokens while gradients are computed.
    handed_on: elements per token, in the compute dtype, that later layers read: of `saved`, what full recomputation keeps too.
    """

    saved: tuple[SavedTensor, ...]
    recurrences: tuple[RecurrenceCosts, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()
    matrix_flops: int = 0
    vector_flops: int = 0
    attended: tuple[tuple[int, int | None], ...] = ()
    masks: bool = False
    handed_on: int = 0
    parameters: tuple[ParameterDeclaration, ...] = ()

    def of(self, parameters: Iterable[ParameterDeclaration]) -> "MixerCosts":
        """A copy with parameters and the all-reduces of their layers."""
        parameters = tuple(parameters)
        derived = tuple(x for parameter in parameters for x in all_reduces_of(parameter))
        return replace(self, parameters=parameters, all_reduces=(*derived, *self.all_reduces))

    def plus_nested(self, name: str, nested: "MixerCosts") -> "MixerCosts":
        """A copy with a nested mixer's costs added. Its parameters are added by `of`."""
        return replace(
            self,
            saved=(*nested.saved, *self.saved),
            recurrences=(*(replace(r, state=prefixed(name, r.state)) for r in nested.recurrences), *self.recurrences),
            all_reduces=(*nested.all_reduces, *self.all_reduces),
            matrix_flops=nested.matrix_flops + self.matrix_flops,
            vector_flops=nested.vector_flops + self.vector_flops,
            attended=(*nested.attended, *self.attended),
            masks=nested.masks or self.masks,
        )

    @property
    def state(self) -> tuple[StateDeclaration, ...]:
        """Of recurrences that pass it on."""
        return tuple(state for recurrence in self.recurrences if not recurrence.gathers for state in recurrence.state)

    def key_bytes(self, work: Workload) -> int:
        """Bytes of the keys and values of a rank's tokens that ranks and segments gather."""
        return sum(r.key_bytes(work) for r in self.recurrences)

    def query_bytes(self, work: Workload) -> int:
        """Bytes of the queries of a rank's tokens whose keys and values are gathered, or of the outputs of full attention."""
        width = sum(width for width, window in self.attended if window is None)
        return work.tokens * width // work.tensor * work.compute_bytes

    def saved_bytes(self, work: Workload) -> int:
        """Bytes that autograd saves for a micro-batch, without parameters and their copies in the compute dtype."""
        return sum(saved.nbytes(work) for saved in self.saved) + sum(r.saved_bytes(work) for r in self.recurrences)

    def final_state_bytes(self, work: Workload) -> int:
        """Bytes of the State after this rank's tokens."""
        return sum(state_bytes(state, work) for state in self.state)

    def initial_state_bytes(self, work: Workload) -> int:
        """Bytes of the initial State from the previous rank or segment."""
        return sum(r.initial_state_bytes(work) for r in self.recurrences)

    def score_bytes(self, work: Workload) -> int:
        """Bytes that full recomputation saves besides the sub-block's input."""
        return work.tokens * self.handed_on // work.tensor * work.compute_bytes + sum(r.score_bytes(work) for r in self.recurrences)

    def message_bytes(self, work: Workload) -> int:
        """Bytes of the final State of all recurrences in one message."""
        return _aligned(state_bytes(state, work) for state in self.state)

    def mask_bytes(self, work: Workload) -> int:
        """Bytes of attention masks: a bool and an element of the compute dtype for each causal pair of tokens."""
        return work.batch * work.length * (work.length + 1) // 2 * (1 + work.compute_bytes) if self.masks and not work.gpu else 0

    def recurrence_flops(self, sequence_length: int) -> "RecurrenceFlops":
        """FLOPs per token and forward pass, where each sequence is one document."""
        attention = 0.0
        for width, window in self.attended:
            if window is None or window >= sequence_length:
                seen = (sequence_length + 1) / 2
            else:
                seen = window - window * (window - 1) / (2 * sequence_length)
            attention += 4 * width * seen
        return RecurrenceFlops(float(self.matrix_flops), attention, float(self.vector_flops))


class RecurrenceFlops(NamedTuple):
    """FLOPs of sub-blocks beside their projections: on matrix units in recurrences and in softmax attention, and on other units."""

    matrix: float = 0.0
    attention: float = 0.0
    vector: float = 0.0


def linear_attention_costs(S: StateDeclaration, *, per_key: bool, kept: Dtype | None = None) -> RecurrenceCosts:
    """Costs of linear attention with the state S [heads, d_key, d_value]. per_key: the decay is per key channel, else per head.
    kept: as in RecurrenceCosts; "compute" for `GatedLinearAttention(..., keep_states=context.keep_states)`."""
    factor = S.shape[0], S.shape[1] if per_key else 1, 1
    return RecurrenceCosts(
        "gated_linear_attention",
        (S,),
        chunk=LINEAR_ATTENTION_CHUNK,
        recomputed_on_gpu=True,
        kept=kept,
        factors_kept=(S.name,) if per_key else (),
        transition=(factor,),
    )


def linear_attention_flops(heads: int, d_key: int, d_value: int) -> int:
    """FLOPs of the chunked form per token: scores and outputs within the chunk, reading and updating the state."""
    return heads * (2 * LINEAR_ATTENTION_CHUNK * (d_key + d_value) + 4 * d_key * d_value)
