"""The category of a kernel or operator in a profile. Torch-free.

`RULES` is the table. A rule looks at the kernel's own name, and at the names of what it was launched in: the operators and ranges
around its launch and, in a backward pass, around the forward operator whose gradient it computes. Names alone do not suffice:
PyTorch's elementwise kernels have the same names in the optimizer and in the model. The first rule that applies decides, so rules
are ordered from the most to the least specific.
"""

import re
from dataclasses import dataclass
from functools import cache

IDLE, UNCLASSIFIED = "idle", "unclassified"
PHASE = "phase: "
"""Prefix of the range around each part of a step: PHASE + one of step_timer.PARTS."""


@dataclass(frozen=True)
class Rule:
    """One row of the table; it applies if any of its fields does.

    Attributes:
        kernels: prefixes of the names of Baton's Triton kernels ("gla" for gla_scores_kernel).
        functions: Baton's autograd functions; also what runs inside of them, forward and backward.
        name: pattern of the names of other kernels and operators.
        scope: pattern of the names of operators and ranges; what runs inside of them.
    """

    category: str
    kernels: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    name: str | None = None
    scope: str | None = None


_MATMUL = r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|dot|matmul|linear|_scaled_mm)$"
RULES = (
    Rule(
        "exchange",
        name=r"nccl|^(c10d|gloo|nccl)::?|^record_param_comms|^_(Copy|Reduce|Gather|AllGather|Scatter)\w*Region(Backward)?$",
        scope=r"^exchange: |^(c10d|gloo|nccl)::?",
    ),
    Rule("data", scope=rf"^{PHASE}data$"),
    # from the last backward pass to the end of the update: finite check, gradient norm, clipping, AdamW, and their copies
    Rule("optimizer", kernels=("adamw",), scope=rf"^{PHASE}optimizer$|^Optimizer\.step"),
    Rule(
        "convolution",
        kernels=("short_conv",),
        functions=("_ShortConv",),
        name=r"causal_conv1d|^aten::(_?conv|.*convolution)",
        scope=r"^recurrence: short_conv",
    ),
    # everything that mixes tokens: scans, matrix states, attention
    Rule(
        "scan",
        kernels=(
            "channel", "chunk_h", "diagonal_scan", "generalized_delta_rule", "gla", "gsa", "innovation", "joint_attention",
            "lattice", "mamba3", "matrix_step", "memory_copy", "mimo", "pair", "topk_memory", "wy",
        ),
        functions=(
            "_AsScanInputs", "_DeltaRule", "_DiagonalScan", "_Gathered", "_GeneralizedDeltaRule", "_GeneralizedDeltaRuleChunks",
            "_Gla", "_Gsa", "_Joint", "_Lattice", "_Mamba3Output", "_MimoInputs", "_MimoOutput", "_Mixed", "_QRChunk", "_RecvState",
            "_Rotated", "_RunChunked", "_Scan", "_SendState", "_SendStateFirst",
            "_Sequential", "_TransitionScan", "_WithSinks",
        ),
        name=r"selective_scan|flash_|fmha|sdpa|attention",
        scope=r"^recurrence: |^aten::_?scaled_dot_product|^baton::innovation",
    ),
    Rule(
        "norm",
        kernels=("gated_norm", "rms_norm"),
        functions=("_GatedNorm", "_RMSNorm", "_SplitRMSNorm"),
        name=r"rms_?norm|layer_?norm",
        scope=r"^aten::_?(fused_)?(rms|layer|native_layer)_norm",
    ),
    Rule(
        "matmul",
        functions=("_Linear", "_Sum"),
        name=rf"gemm|nvjet|cutlass|cublas|xmma|gemv|split_?k|^{_MATMUL}",
        scope=rf"^{_MATMUL}",
    ),
    Rule(
        "loss",
        kernels=("cross_entropy",),
        functions=("_LinearCrossEntropy",),
        scope=r"cross_entropy|^aten::_?(log_softmax|nll_loss)",
    ),
    Rule(
        "elementwise",
        kernels=("embedding", "gate", "gated_sum", "head_scale", "rotary"),
        functions=("_Embedding", "_ForgetGate", "_Gate", "_GatedSum", "_HeadScale", "_LogSigmoid", "_Rotary"),
        name=r"^(aten|prims|torch|autograd)::|at::native|at_cuda_detail|elementwise|^Mem(cpy|set)|^triton_(poi|red|per)_"
        r"|Backward\d*$|^detach_?$",
    ),
)  # fmt: skip
CATEGORIES = ("matmul", "scan", "convolution", "norm", "loss", "optimizer", "exchange", "data", "elementwise", UNCLASSIFIED, IDLE)
"""In the order in which a profile's table shows them."""


def _pattern(alternatives: list[str], flags: int = 0) -> re.Pattern[str] | None:
    return re.compile("|".join(alternatives), flags) if alternatives else None


_NAME_PATTERNS = tuple(_pattern([*(rf"^{prefix}_" for prefix in r.kernels), *filter(None, [r.name])], re.IGNORECASE) for r in RULES)
_SCOPE_PATTERNS = tuple(_pattern([*(rf"^{name}(Backward)?$" for name in r.functions), *filter(None, [r.scope])]) for r in RULES)


@cache
def name_rules(name: str) -> int:
    """Bit mask of the rules that apply to a kernel or operator of this name."""
    return sum(1 << n for n, pattern in enumerate(_NAME_PATTERNS) if pattern is not None and pattern.search(name))


@cache
def scope_rules(name: str) -> int:
    """Bit mask of the rules that apply to everything inside an operator or range of this name."""
    return sum(1 << n for n, pattern in enumerate(_SCOPE_PATTERNS) if pattern is not None and pattern.search(name))


def category(rules: int) -> str:
    """Category of the first rule of a bit mask; UNCLASSIFIED for 0."""
    return RULES[(rules & -rules).bit_length() - 1].category if rules else UNCLASSIFIED
