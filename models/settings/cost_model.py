"""What a sub-block costs, by arithmetic and without torch: saved activations, States on the way, collectives, FLOPs.

Parameters and States are declared once (models.settings.declarations). Beside them a settings class writes only what follows from
the operators that its mixer calls: which tensors autograd saves, and how often a recurrence saves its State. Tests compare these
figures with what autograd was measured to save, for every kind of mixer.

All widths are whole: of all tensor ranks together. "compute" is the type of matmuls and of the activations between them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from baton.models.settings.declarations import Dtype, ParameterDeclaration, StateDeclaration, prefixed, sub_block_norm
from baton.models.settings.eager import Eager

# Tokens per chunk of the recurrences' chunked forms, which import torch; tests/launcher/test_plan.py compares them with those.
LINEAR_ATTENTION_CHUNK = 64
DELTA_RULE_CHUNK = 64
SCORES_SHARE = 8  # of linear attention's kernels
LATTICE_SEQUENTIAL_CHUNK, LATTICE_QR_CHUNK = 32, 16
LATTICE_GPU_CHUNK = 32  # of the kernels on a GPU, which have no thresholds
WINDOW_BLOCK = 64
EIDETIC_BLOCK = 128
SCAN_CHUNKS = (16, 32)
SCAN_CHUNK_ELEMENTS = 1 << 19
SCAN_GPU_CHUNK = 16

# Bytes that every tensor of a message is rounded up to.
MESSAGE_ALIGNMENT = 16

# An exponential runs on units of an eighth of the rate of multiply-adds, each of which counts 2.
EXP_FLOPS = 16


@dataclass(frozen=True)
class Workload:
    """What one rank computes in one pass.

    batch: sequences. length: tokens of each on this rank. tensor: ranks of the tensor group. compute_bytes: of the compute type, 2
    or 4. gpu: whether the fused kernels run, which save less. segment: whether the tokens are a segment of a sequence, whose States
    come from another rank or from the segment before. rerun: whether linear recurrences run again for their gradient, as where
    context-parallel ranks exchange transitions. sequence_parallel: tensor ranks share the residual stream, each a part of the
    tokens. selective: whether cheap activations are recomputed.
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

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def stream_tokens(self) -> int:
        """Rows of the residual stream on this rank; where ranks do not divide the tokens, padding included."""
        return -(-self.tokens // self.tensor) if self.sequence_parallel else self.tokens

    def itemsize(self, dtype: Dtype) -> int:
        """Bytes of one element."""
        return {"compute": self.compute_bytes, "float32": 4, "int64": 8, "bool": 1}[dtype]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saves from the forward to the backward pass.

    width: elements per token, or in all where per_token is false. split: the width is divided over the tensor group.
    cast: a copy in the other type, so it exists only where the compute type is not float32.
    device, ranks: the device, or number of tensor ranks, whose form of the mixer saves it, where they differ.
    residual_stream: in the residual stream, so this rank's part of it. sequence_parallel: exists only where tensor ranks share the
    stream, because what is saved otherwise is gathered there.
    in_recurrence: saved inside a linear recurrence, which a GPU has a fused kernel for and which may run again for its gradient:
    "graph", by autograd where neither is so; "input", by both of them instead; "kernel", by the fused kernel alone.
    recomputed: not saved where recomputation is selective, except in a segment.
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

    def nbytes(self, work: Workload) -> int:
        forms = {
            "graph": not work.gpu and not work.rerun,
            "input": work.gpu or work.rerun,
            "kernel": work.gpu and not work.rerun,
        }
        if self.in_recurrence is not None and not forms[self.in_recurrence]:
            return 0
        if (self.recomputed and work.selective and not work.segment) or (self.sequence_parallel and not work.sequence_parallel):
            return 0
        device, ranks = "gpu" if work.gpu else "cpu", "several" if work.tensor > 1 else "one"
        if (self.cast and work.compute_bytes == 4) or self.device not in (None, device) or self.ranks not in (None, ranks):
            return 0
        width = self.width // work.tensor if self.split else self.width
        tokens = work.stream_tokens if self.residual_stream else work.tokens
        return width * (tokens if self.per_token else 1) * work.itemsize(self.dtype)


def state_bytes(state: StateDeclaration, work: Workload, *, final: bool = False) -> int:
    """Bytes of one tensor of a State, of a micro-batch on one tensor rank. final: after the rank's tokens."""
    shape = (state.shape[0] + work.length, *state.shape[1:]) if state.grows and final else state.shape
    numel = math.prod(shape) // (1 if state.tp is None else work.tensor)
    return work.batch * numel * work.itemsize(state.dtype)


@dataclass(frozen=True)
class RecurrenceCosts:
    """A recurrence in the sub-block: its State, and how often it saves that on the way.

    chunk: tokens between the States that are saved for backward; 0: none is saved; None: one, the initial State.
    recomputed_on_gpu: a GPU's kernels save the first State alone and recompute the others. copied: the first saved State is another
    tensor than the one that arrived. gpu_chunk: the kernels' chunk, where it is another. scan_elements: a diagonal scan's
    d_inner x d_state, from which its chunk follows. messages: how often the State travels to the next rank of a sequence.
    transition: of a linear recurrence, the shape of the factor that a span of tokens multiplies each tensor of the State by, split
    as that tensor is; (): the recurrence is not linear. eager: why a GPU has no kernel for it; None: it has one.
    """

    name: str
    state: tuple[StateDeclaration, ...]
    chunk: int | None = None
    recomputed_on_gpu: bool = False
    copied: bool = False
    gpu_chunk: int | None = None
    scan_elements: int = 0
    messages: int = 1
    transition: tuple[tuple[int, ...], ...] = ()
    eager: Eager | None = None

    def saved_bytes(self, work: Workload) -> int:
        """Bytes of the States that are saved on the way."""
        state, arrived = sum(state_bytes(s, work) for s in self.state), self.initial_state_bytes(work)
        if work.rerun and self.transition:
            # the chunks' States come back when the recurrence runs again
            return arrived + sum(state_bytes(s, work) for s in self.factors)
        if not self.chunk or (self.recomputed_on_gpu and work.gpu):
            return arrived or (0 if self.chunk == 0 else state)
        chunks = -(-work.length // self.tokens_per_chunk(work))
        return arrived + (chunks if self.copied or not arrived else chunks - 1) * state

    @property
    def factors(self) -> tuple[StateDeclaration, ...]:
        """The transition of a span, one factor per tensor of the State; () where it is not linear."""
        pairs = zip(self.state, self.transition, strict=True) if self.transition else ()
        return tuple(replace(state, shape=shape) for state, shape in pairs)

    def initial_state_bytes(self, work: Workload) -> int:
        """The State that arrives from the rank or the segment before, as often as it travels."""
        return self.messages * sum(state_bytes(s, work) for s in self.state) if work.segment else 0

    def score_bytes(self, work: Workload) -> int:
        """Scores that full recomputation keeps. A recurrence whose State has no gradient computes scores, one float32 per token;
        which tokens are chosen depends on their last bit."""
        return 0 if not self.state or any(s.grad for s in self.state) else 4 * work.tokens

    def tokens_per_chunk(self, work: Workload) -> int:
        if not self.scan_elements:
            return (self.gpu_chunk if work.gpu else None) or self.chunk or work.length
        if work.gpu:
            return SCAN_GPU_CHUNK
        elements = work.batch * self.scan_elements // work.tensor
        return max((n for n in SCAN_CHUNKS if n * elements <= SCAN_CHUNK_ELEMENTS), default=SCAN_CHUNKS[0])

    def message_bytes(self, work: Workload, *, backward: bool) -> int:
        """Bytes that a rank in the middle of a sequence sends: the State to the next rank, or its gradient to the previous one."""
        return self.messages * _aligned(state_bytes(s, work) for s in self.state if s.grad or not backward)

    def transition_bytes(self, work: Workload) -> int:
        """Bytes that a rank sends, in either direction, where linear recurrences are gathered: its span's transition and the State
        that the span adds."""
        return _aligned(state_bytes(s, work) for s in (*self.factors, *self.state))


def _aligned(sizes: Iterable[int]) -> int:
    return sum(-(-nbytes // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT for nbytes in sizes)


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce over the tensor group in every micro-batch: `width` elements per token.

    residual: of an addition to the residual stream, or of the gradient of what is read from it. There is none where ranks share the
    stream: a mixer's input is gathered once, and its output is scattered.
    """

    name: str
    width: int
    dtype: Dtype
    direction: Literal["forward", "backward"]
    residual: bool = False


def all_reduces_of(parameter: ParameterDeclaration) -> tuple[AllReduce, ...]:
    """The all-reduces of the layer whose weight a parameter is."""
    name = parameter.name.removesuffix(".weight")
    match parameter.layer:
        case "column":
            return (AllReduce(name, parameter.shape[1], "compute", "backward", residual=True),)
        case "row" | "output":
            return (AllReduce(name, parameter.shape[0], "compute", "forward", residual=parameter.layer == "output"),)
        case "replicated":
            return (AllReduce(name, parameter.shape[0], "compute", "backward", residual=True),)
        case "split_norm":
            return (AllReduce(name, 1, "float32", "forward"), AllReduce(name, 1, "float32", "backward"))
    return ()


@dataclass(frozen=True)
class MixerCosts:
    """The costs of one sub-block.

    all_reduces: in `MixerConfig.activation_costs`, those that do not follow from a declared layer. matrix_flops, vector_flops: of
    the recurrence, per token and forward pass, on matrix units and elsewhere. attended: (width of all queries, tokens that a query
    sees at most, or None for all before it) of each softmax attention. masks: a mask over all pairs of a sequence's tokens exists
    on a CPU while gradients are computed.
    """

    saved: tuple[SavedTensor, ...]
    recurrences: tuple[RecurrenceCosts, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()
    matrix_flops: int = 0
    vector_flops: int = 0
    attended: tuple[tuple[int, int | None], ...] = ()
    masks: bool = False
    parameters: tuple[ParameterDeclaration, ...] = ()

    def of(self, parameters: Iterable[ParameterDeclaration]) -> "MixerCosts":
        """The same with parameters and the all-reduces of their layers."""
        parameters = tuple(parameters)
        derived = tuple(x for parameter in parameters for x in all_reduces_of(parameter))
        return replace(self, parameters=parameters, all_reduces=(*derived, *self.all_reduces))

    def plus_nested(self, name: str, nested: "MixerCosts") -> "MixerCosts":
        """The same with a nested mixer's costs; its parameters are left to `of`."""
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
        return tuple(state for recurrence in self.recurrences for state in recurrence.state)

    def saved_bytes(self, work: Workload) -> int:
        """What autograd saves of a micro-batch, parameters and their copies in the compute type not counted."""
        return sum(saved.nbytes(work) for saved in self.saved) + sum(r.saved_bytes(work) for r in self.recurrences)

    def final_state_bytes(self, work: Workload) -> int:
        """The State after this rank's tokens."""
        return sum(state_bytes(state, work, final=True) for state in self.state)

    def initial_state_bytes(self, work: Workload) -> int:
        """The State that arrives from the rank or the segment before."""
        return sum(r.initial_state_bytes(work) for r in self.recurrences)

    def score_bytes(self, work: Workload) -> int:
        """What full recomputation keeps of a first forward pass."""
        return sum(r.score_bytes(work) for r in self.recurrences)

    def message_bytes(self, work: Workload) -> int:
        """The final State in one message of all recurrences."""
        return _aligned(state_bytes(state, work) for state in self.state)

    def mask_bytes(self, work: Workload) -> int:
        """A bool and an element of the compute type for each pair of tokens in causal order."""
        return work.batch * work.length * (work.length + 1) // 2 * (1 + work.compute_bytes) if self.masks and not work.gpu else 0

    def recurrence_flops(self, sequence_length: int) -> tuple[float, float]:
        """FLOPs per token and forward pass, on matrix units and elsewhere; a sequence is taken for one document."""
        pairs = 0.0
        for width, window in self.attended:
            if window is None or window >= sequence_length:
                seen = (sequence_length + 1) / 2
            else:
                seen = window - window * (window - 1) / (2 * sequence_length)
            pairs += 4 * width * seen
        return self.matrix_flops + pairs, float(self.vector_flops)

    def behind_norm(self, d_model: int) -> "MixerCosts":
        """With the sub-block's norm: x + mixer(norm(x)). A GPU's norm saves its result alone, which is the mixer's input, unless
        that is gathered."""
        return replace(
            self,
            parameters=(sub_block_norm(d_model), *prefixed("mixer", self.parameters)),
            saved=(
                SavedTensor("norm input", d_model, "float32", split=False, residual_stream=True, device="cpu"),
                SavedTensor(
                    "norm result", d_model, "compute", split=False, residual_stream=True, device="gpu", sequence_parallel=True
                ),
                SavedTensor("norm scale", 1, "float32", split=False, residual_stream=True),
                SavedTensor("norm normalised", d_model, "float32", split=False, residual_stream=True, device="cpu"),
                *self.saved,
            ),
        )


def saved_by_norm(name: str, width: int, *, rows: int) -> tuple[SavedTensor, ...]:
    """What RMSNorm over width / rows saves: its input, in float32 or on a GPU as it came, a scale per row, and on a CPU also the
    normalised input."""
    return (*saved_by_unit(name, width, rows=rows), SavedTensor(f"{name} normalised", width, "float32", device="cpu"))


def saved_by_unit(name: str, width: int, *, rows: int) -> tuple[SavedTensor, ...]:
    """What models.norm.unit saves, which has no learned weight and so no use for the normalised input."""
    return (
        SavedTensor(f"{name} input", width, "float32", device="cpu"),
        SavedTensor(f"{name} input", width, "compute", device="gpu"),
        SavedTensor(f"{name} scale", rows, "float32"),
    )


def saved_by_split_norm(name: str, width: int) -> tuple[SavedTensor, ...]:
    """What models.norm.SplitRMSNorm saves: over several ranks it is written out, so it saves the normalised input on any device."""
    return (
        *(replace(saved, ranks="one") for saved in saved_by_norm(name, width, rows=1)),
        SavedTensor(f"{name} input", width, "float32", ranks="several"),
        SavedTensor(f"{name} scale", 1, "float32", split=False, ranks="several"),
        SavedTensor(f"{name} normalised", width, "float32", ranks="several"),
    )


def saved_by_gate(name: str, width: int) -> tuple[SavedTensor, ...]:
    """What a gate's activation saves on a CPU: the projected gate in float32 and the result, a factor of the other one's gradient.
    A GPU's kernel recomputes both."""
    return (
        SavedTensor(f"{name} input", width, "float32", cast=True, device="cpu"),
        SavedTensor(f"{name} activated", width, "float32", device="cpu"),
    )


def saved_by_log_sigmoid(name: str, width: int, *, view: bool = True) -> tuple[SavedTensor, ...]:
    """What logsigmoid saves: its float32 input (view: of a projection, then a copy where that is not float32), and on a CPU the
    exponential."""
    return (
        SavedTensor(f"{name} input", width, "float32", cast=view),
        SavedTensor(f"{name} exponential", width, "float32", device="cpu"),
    )


def saved_scores(heads: int, *widths: int) -> tuple[SavedTensor, ...]:
    """What linear attention's kernels save of scores between a chunk's tokens: all, where they are few compared with q, k and v.
    widths: of those."""
    few = SCORES_SHARE * heads * LINEAR_ATTENTION_CHUNK <= sum(widths)
    scores = SavedTensor("scores in chunks", heads * LINEAR_ATTENTION_CHUNK, "compute", in_recurrence="kernel")
    return (scores,) if few else ()


def linear_attention_costs(S: StateDeclaration, *, per_key: bool) -> RecurrenceCosts:
    """Linear attention with the state S [heads, d_key, d_value]. per_key: it decays by key channel; else by head."""
    heads, d_key, _ = S.shape
    return RecurrenceCosts(
        "gated_linear_attention",
        (S,),
        chunk=LINEAR_ATTENTION_CHUNK,
        recomputed_on_gpu=True,
        transition=((heads, d_key if per_key else 1, 1),),
    )


def linear_attention_flops(heads: int, d_key: int, d_value: int) -> int:
    """Of the chunked form, per token: scores and values within the chunk, the state read and written."""
    return heads * (2 * LINEAR_ATTENTION_CHUNK * (d_key + d_value) + 4 * d_key * d_value)
