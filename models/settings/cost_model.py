"""What a sub-block takes, by arithmetic and without torch: parameters, what autograd keeps, what is carried, what ranks exchange.

The one thing to know: this says again what the modules say, for a machine that cannot build them (a login node; 2.8B parameters on
a laptop). So it is compared with the modules, parameter by parameter and leaf by leaf, for every kind there is; what autograd keeps
is compared with what it was seen to keep. A mixer's file and its `footprint` change together.

All widths are of all tensor ranks together. "compute" is the type of matmuls and of the activations between them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from baton.models.settings.eager import Eager

Dtype = Literal["compute", "float32", "int64", "bool"]

# Tokens per chunk of the recurrences' chunked forms, which import torch; tests/launcher/test_plan.py compares them with those.
LINEAR_ATTENTION_CHUNK = 64
DELTA_RULE_CHUNK = 64
SCORES_SHARE = 8  # of linear attention's kernels
LATTICE_STEPS_CHUNK, LATTICE_SPAN_CHUNK = 32, 16
LATTICE_BORDER = 32  # of the kernels on a GPU, which run what has no thresholds
WINDOW_BLOCK = 64
EIDETIC_BLOCK = 128
SCAN_CHUNKS = (16, 32)
SCAN_CHUNK_ELEMENTS = 1 << 19
SCAN_BORDER = 16  # of the scans' kernels on a GPU

# Bytes that every leaf of a message is rounded up to.
MESSAGE_ALIGNMENT = 16

# An exponential runs on units of an eighth of the rate of multiply-adds, each of which counts 2.
EXP_FLOPS = 16


@dataclass(frozen=True)
class Work:
    """What one rank does in one pass.

    batch: sequences. length: tokens of each on this rank. tensor: ranks of the tensor group. compute_bytes: of the compute type, 2
    or 4. gpu: whether kernels that only a GPU has fused keep less. segment: whether the tokens are a segment of a sequence, whose
    States come from another rank or from the segment before. again: whether linear recurrences are run again for their gradient,
    as where sequence ranks exchange effects. sequence_parallel: whether tensor ranks share the residual stream, each a part of the
    tokens. selective: whether what costs little is not kept.
    """

    batch: int
    length: int
    tensor: int = 1
    compute_bytes: int = 2
    gpu: bool = True
    segment: bool = False
    again: bool = False
    sequence_parallel: bool = False
    selective: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def stream_tokens(self) -> int:
        """Of which this rank has the residual stream; where ranks do not divide the tokens, with rows that are no token."""
        return -(-self.tokens // self.tensor) if self.sequence_parallel else self.tokens

    def nbytes(self, dtype: Dtype) -> int:
        """Bytes of one number."""
        return {"compute": self.compute_bytes, "float32": 4, "int64": 8, "bool": 1}[dtype]


@dataclass(frozen=True)
class Parameter:
    """One parameter by the name that its module gives it.

    split: the dimension that is split over the tensor group; None: every rank has all of it. uses: how often a token is multiplied
    with it; 0: no matmul reads it, so it has no copy in the compute type. partial: every tensor rank has a part of its gradient,
    and the parts are added up once per step. Where ranks share the residual stream, that is so of all that are not split.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    uses: int = 0
    partial: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local(self, tensor: int) -> int:
        """Numbers on one tensor rank."""
        return self.numel if self.split is None else self.numel // tensor


@dataclass(frozen=True)
class Kept:
    """A tensor that autograd keeps from forward to backward, by its width: numbers per token.

    split: whether the width is divided over the tensor group. cast: a copy in the other type, so it is there only where the compute
    type is not float32. device: which one's form keeps it, where they differ; ranks: the same for one tensor rank and several.
    once: `width` numbers in all, not per token. stream: of the residual stream, so of this rank's part of it; gathered: there only
    where ranks share the stream, of which what is kept otherwise is gathered. inside: of a linear
    recurrence, which a GPU has a fused kernel for and which may be run again for its gradient: "graph", what autograd keeps where
    neither is so; "input", what both keep instead; "kernel", what the fused kernel keeps besides. cheap: made again where
    recomputation is selective, but in a segment.
    """

    name: str
    width: int
    dtype: Dtype
    split: bool = True
    cast: bool = False
    device: Literal["cpu", "gpu"] | None = None
    ranks: Literal["one", "several"] | None = None
    once: bool = False
    stream: bool = False
    gathered: bool = False
    inside: Literal["graph", "input", "kernel"] | None = None
    cheap: bool = False

    def nbytes(self, work: Work) -> int:
        kept = {
            "graph": not work.gpu and not work.again,
            "input": work.gpu or work.again,
            "kernel": work.gpu and not work.again,
        }
        if self.inside is not None and not kept[self.inside]:
            return 0
        if (self.cheap and work.selective and not work.segment) or (self.gathered and not work.sequence_parallel):
            return 0
        device, ranks = "gpu" if work.gpu else "cpu", "several" if work.tensor > 1 else "one"
        if (self.cast and work.compute_bytes == 4) or self.device not in (None, device) or self.ranks not in (None, ranks):
            return 0
        width = self.width // work.tensor if self.split else self.width
        tokens = work.stream_tokens if self.stream else work.tokens
        return width * (1 if self.once else tokens) * work.nbytes(self.dtype)


@dataclass(frozen=True)
class StateLeaf:
    """One tensor of a State, as baton.kernels.protocol.StateSpec. tp: the dimension split over the tensor group. grad: whether a
    cotangent comes back for it. grows: dimension 0 is as long as the document."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    tp: int | None
    grad: bool = True
    grows: bool = False

    def nbytes(self, work: Work, *, leaving: bool = False) -> int:
        """Of a micro-batch on one tensor rank; leaving: after the rank's tokens."""
        shape = (self.shape[0] + work.length, *self.shape[1:]) if self.grows and leaving else self.shape
        numel = math.prod(shape) // (1 if self.tp is None else work.tensor)
        return work.batch * numel * work.nbytes(self.dtype)


@dataclass(frozen=True)
class Carrier:
    """A recurrence in the sub-block: what it carries, and how often it keeps that on the way.

    chunk: tokens between the States that are kept for backward; 0: none is kept; None: one, where the piece begins. remade: whether
    a GPU's kernels keep the first alone and make the others again. copied: whether the first is another tensor than what entered.
    border: their chunk, where it is another. elements: a diagonal scan's d_inner x d_state, from which its chunk follows. messages:
    how often the State travels to the next rank of a sequence. transition: of a linear recurrence, the shape of what a span of
    tokens multiplies each leaf by, split as the leaf is; (): it is not linear. eager: why a GPU has no kernel for it; None: it has.
    """

    name: str
    leaves: tuple[StateLeaf, ...]
    chunk: int | None = None
    remade: bool = False
    copied: bool = False
    border: int | None = None
    elements: int = 0
    messages: int = 1
    transition: tuple[tuple[int, ...], ...] = ()
    eager: Eager | None = None

    def kept_bytes(self, work: Work) -> int:
        """What is kept of the States on the way."""
        state, arrived = sum(leaf.nbytes(work) for leaf in self.leaves), self.arriving_bytes(work)
        if work.again and self.transition:
            # the chunks' States come back when the recurrence is run again
            return arrived + sum(leaf.nbytes(work) for leaf in self.factors)
        if not self.chunk or (self.remade and work.gpu):
            return arrived or (0 if self.chunk == 0 else state)
        chunks = -(-work.length // self.tokens_per_chunk(work))
        return arrived + (chunks if self.copied or not arrived else chunks - 1) * state

    @property
    def factors(self) -> tuple[StateLeaf, ...]:
        """A span's transition, leaf by leaf; () where it is not linear."""
        pairs = zip(self.leaves, self.transition, strict=True) if self.transition else ()
        return tuple(replace(leaf, shape=shape) for leaf, shape in pairs)

    def arriving_bytes(self, work: Work) -> int:
        """The State that arrives from the rank or the segment before, as often as it travels."""
        return self.messages * sum(leaf.nbytes(work) for leaf in self.leaves) if work.segment else 0

    def decided_bytes(self, work: Work) -> int:
        """What its first run alone decides. A carrier without any cotangent makes scores, a number per token, and what is chosen
        hangs on their last bit: so they are kept."""
        return 0 if not self.leaves or any(leaf.grad for leaf in self.leaves) else 4 * work.tokens

    def tokens_per_chunk(self, work: Work) -> int:
        if not self.elements:
            return (self.border if work.gpu else None) or self.chunk or work.length
        if work.gpu:
            return SCAN_BORDER
        step = work.batch * self.elements // work.tensor
        return max((n for n in SCAN_CHUNKS if n * step <= SCAN_CHUNK_ELEMENTS), default=SCAN_CHUNKS[0])

    def message_bytes(self, work: Work, *, backward: bool) -> int:
        """What a rank in the middle of a sequence hands on: the State to the right, or its cotangent to the left."""
        return self.messages * _aligned(leaf.nbytes(work) for leaf in self.leaves if leaf.grad or not backward)

    def effect_bytes(self, work: Work) -> int:
        """What a rank gives, either way, where States of linear recurrences are gathered: its span's transition, and what the span
        adds."""
        return _aligned(leaf.nbytes(work) for leaf in (*self.factors, *self.leaves))


def _aligned(sizes: Iterable[int]) -> int:
    return sum(-(-nbytes // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT for nbytes in sizes)


@dataclass(frozen=True)
class Reduction:
    """An all-reduce over the tensor group in every micro-batch: `width` numbers per token.

    residual: of what is added to the residual stream, or of the gradient of what is read from it. Where ranks share the stream
    there is none: a mixer's input is gathered once, whoever reads it, and its output scattered.
    """

    name: str
    width: int
    dtype: Dtype
    direction: Literal["forward", "backward"]
    residual: bool = False


@dataclass(frozen=True)
class Footprint:
    """Of one sub-block.

    matrix_flops, vector_flops: of the recurrence, per token, forwards; those on matrix units, and those that are not. attended:
    (width of all queries, tokens that a query sees at most; None: all before it) of each softmax attention.
    masks: whether a mask over all pairs of a sequence's tokens exists on a CPU while its gradients are computed.
    """

    parameters: tuple[Parameter, ...]
    kept: tuple[Kept, ...]
    carriers: tuple[Carrier, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    matrix_flops: int = 0
    vector_flops: int = 0
    attended: tuple[tuple[int, int | None], ...] = ()
    masks: bool = False

    @property
    def leaves(self) -> tuple[StateLeaf, ...]:
        return tuple(leaf for carrier in self.carriers for leaf in carrier.leaves)

    def kept_bytes(self, work: Work) -> int:
        """What autograd keeps of a micro-batch, parameters and their copies not counted."""
        return sum(kept.nbytes(work) for kept in self.kept) + sum(carrier.kept_bytes(work) for carrier in self.carriers)

    def state_bytes(self, work: Work) -> int:
        """The State that leaves."""
        return sum(leaf.nbytes(work, leaving=True) for leaf in self.leaves)

    def arriving_bytes(self, work: Work) -> int:
        """The State that arrives from the rank or the segment before."""
        return sum(carrier.arriving_bytes(work) for carrier in self.carriers)

    def decided_bytes(self, work: Work) -> int:
        """What is kept of a first run though everything is run again."""
        return sum(carrier.decided_bytes(work) for carrier in self.carriers)

    def message_bytes(self, work: Work) -> int:
        """The State that leaves, in a message of all recurrences together."""
        return _aligned(leaf.nbytes(work) for leaf in self.leaves)

    def mask_bytes(self, work: Work) -> int:
        """A truth value and a number in the compute type for every pair of tokens, the later one's half of them."""
        return work.batch * work.length * (work.length + 1) // 2 * (1 + work.compute_bytes) if self.masks and not work.gpu else 0

    def recurrence_flops(self, sequence_length: int) -> tuple[float, float]:
        """Per token, forwards, on matrix units and elsewhere; a context is taken for one document."""
        pairs = 0.0
        for width, window in self.attended:
            seen = (
                (sequence_length + 1) / 2
                if window is None or window >= sequence_length
                else window - window * (window - 1) / (2 * sequence_length)
            )
            pairs += 4 * width * seen
        return self.matrix_flops + pairs, float(self.vector_flops)

    def behind_norm(self, d_model: int) -> "Footprint":
        """With the sub-block's norm: x + mixer(norm(x)). A GPU's norm keeps its result alone, which is the mixer's input, unless
        that is gathered."""
        return replace(
            self,
            parameters=(Parameter("norm.weight", (d_model,)), *(replace(p, name=f"mixer.{p.name}") for p in self.parameters)),
            kept=(
                Kept("norm input", d_model, "float32", split=False, stream=True, device="cpu"),
                Kept("norm result", d_model, "compute", split=False, stream=True, device="gpu", gathered=True),
                Kept("norm scale", 1, "float32", split=False, stream=True),
                Kept("norm normalised", d_model, "float32", split=False, stream=True, device="cpu"),
                *self.kept,
            ),
        )


def column(name: str, d_in: int, d_out: int, *, uses: int = 1) -> Parameter:
    """A projection to features that are split over the tensor group."""
    return Parameter(f"{name}.weight", (d_out, d_in), split=0, uses=uses)


def row(name: str, d_in: int, d_out: int) -> Parameter:
    """A projection from features that are split over the tensor group."""
    return Parameter(f"{name}.weight", (d_out, d_in), split=1, uses=1)


def split(name: str, *shape: int) -> Parameter:
    """A parameter with a row per channel or head; it stays float32."""
    return Parameter(name, shape, split=0)


def column_gradient(name: str, d_model: int) -> Reduction:
    """Every rank's features give a part of a column projection's input gradient; its input is the mixer's."""
    return Reduction(name, d_model, "compute", "backward", residual=True)


def row_sum(name: str, d_model: int) -> Reduction:
    """Every rank's features give a part of a row projection's output; its output is the mixer's."""
    return Reduction(name, d_model, "compute", "forward", residual=True)


def replicated_gradient(name: str, width: int) -> Reduction:
    """Every rank's heads give a part of the gradient of what all ranks compute alike from the mixer's input."""
    return Reduction(name, width, "compute", "backward", residual=True)


def rms_norm(name: str, width: int, *, rows: int) -> tuple[Kept, ...]:
    """What a norm over width / rows keeps: its input, in float32 or on a GPU as it came, a number per row, and on a CPU also the
    normalised input."""
    return (*scaled(name, width, rows=rows), Kept(f"{name} normalised", width, "float32", device="cpu"))


def scaled(name: str, width: int, *, rows: int) -> tuple[Kept, ...]:
    """The same of one without a weight to learn, models.norm.unit: nothing else needs what is normalised."""
    return (
        Kept(f"{name} input", width, "float32", device="cpu"),
        Kept(f"{name} input", width, "compute", device="gpu"),
        Kept(f"{name} scale", rows, "float32"),
    )


def split_norm(name: str, width: int) -> tuple[tuple[Kept, ...], tuple[Reduction, ...]]:
    """What models.norm.SplitRMSNorm keeps and exchanges: over several ranks it is written out, so it keeps the normalised input on
    any device."""
    kept = (
        *(replace(kept, ranks="one") for kept in rms_norm(name, width, rows=1)),
        Kept(f"{name} input", width, "float32", ranks="several"),
        Kept(f"{name} scale", 1, "float32", split=False, ranks="several"),
        Kept(f"{name} normalised", width, "float32", ranks="several"),
    )
    return kept, (Reduction(name, 1, "float32", "forward"), Reduction(name, 1, "float32", "backward"))


def activated(name: str, width: int) -> tuple[Kept, ...]:
    """A gate's activation in float32, which a GPU's kernel makes again; elsewhere the projected gate (of which a float32 copy is
    kept) and the result, both factors' gradients need it."""
    return (
        Kept(f"{name} input", width, "float32", cast=True, device="cpu"),
        Kept(f"{name} activated", width, "float32", device="cpu"),
    )


def log_sigmoid(name: str, width: int, *, view: bool = True) -> tuple[Kept, ...]:
    """What logsigmoid keeps: its float32 input (view: of a projection, then a copy where that is not float32); on a CPU its
    exponential too."""
    return Kept(f"{name} input", width, "float32", cast=view), Kept(f"{name} exponential", width, "float32", device="cpu")


def scores_kept(heads: int, *widths: int) -> tuple[Kept, ...]:
    """What linear attention's kernels keep of scores among a chunk's tokens: all, where they are few beside q, k and v. widths: of
    those."""
    few = SCORES_SHARE * heads * LINEAR_ATTENTION_CHUNK <= sum(widths)
    return (Kept("scores among tokens", heads * LINEAR_ATTENTION_CHUNK, "compute", inside="kernel"),) if few else ()


def linear_attention_flops(heads: int, d_key: int, d_value: int, chunk: int) -> int:
    """Of a chunked form: scores and values within the chunk, the state read and written."""
    return heads * (2 * chunk * (d_key + d_value) + 4 * d_key * d_value)
