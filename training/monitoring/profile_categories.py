"""Which category of a profile a kernel or an operator belongs to: the table, and how it is read. Torch-free.

The one thing to know: a kernel's own name says little (it is that of a library's template, or shared by several operators), so a
rule may also look at what the kernel was launched in: the operators and spans around its launch and, of a backward pass, around
the forward operator whose gradient it is. The first rule that applies counts, so what is above is what is more certain.
"""

import re
from dataclasses import dataclass
from functools import cache

IDLE, UNCLASSIFIED = "idle", "unclassified"
PHASE = "phase: "
"""How the name of a part of the step begins, which is around everything in it: PHASE + one of step_timer.PARTS."""


@dataclass(frozen=True)
class Rule:
    """named: pattern of its own name; inside: of a name around it. Either will do."""

    category: str
    name: str | None = None
    scope: str | None = None


_MATMUL = r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|dot|matmul|linear|_scaled_mm)$"
RULES = (
    Rule(
        "exchange",
        name=r"nccl|^(c10d|gloo|nccl)::?|^record_param_comms|^_(Copy|Reduce|Gather|Scatter)\w*Region(Backward)?$",
        scope=r"^exchange: |^(c10d|gloo|nccl)::?",
    ),
    Rule("data", scope=rf"^{PHASE}data$"),
    # from the last backward pass to the end of the update: the finite check, the norm, the clip, AdamW, and copies for all of it
    Rule("optimizer", scope=rf"^{PHASE}optimizer$|^Optimizer\.step"),
    Rule(
        "convolution",
        name=r"^short_conv_|causal_conv1d|^aten::(_?conv|.*convolution)",
        scope=r"^recurrence: short_conv|^_ShortConv",
    ),
    # whatever mixes tokens: scans, matrix states, attention
    Rule(
        "scan",
        name=r"^diagonal_scan_|selective_scan|flash_|fmha|sdpa|attention",
        scope=r"^recurrence: |^_(SendState|SendStateEarly|TransitionScan)(Backward)?$"
        r"|^_(Scan|DiagonalScan|InChunks|Gla|Gsa|DeltaRule|Lattice|Joint)(Backward)?$"
        r"|^aten::_?scaled_dot_product|^baton::innovation",
    ),
    Rule("norm", name=r"rms_?norm|layer_?norm", scope=r"^_RMSNorm|^aten::_?(fused_)?(rms|layer|native_layer)_norm"),
    Rule(
        "matmul",
        name=rf"gemm|nvjet|cutlass|cublas|xmma|gemv|split_?k|^{_MATMUL}|^LinearWith",
        scope=rf"^{_MATMUL}|^_Linear(Backward)?$",
    ),
    Rule("loss", name=r"^(sums|gradient)_kernel", scope=r"^_LinearCrossEntropy|cross_entropy|^aten::_?(log_softmax|nll_loss)"),
    Rule(
        "elementwise",
        name=r"^(aten|prims|torch|autograd)::|at::native|at_cuda_detail|elementwise|^Mem(cpy|set)|^triton_(poi|red|per)_"
        r"|Backward\d*$|^detach_?$",
        scope=r"^_(Activated|Embedding|HeadScale|Gate|Rotary)(Backward)?$",
    ),
)
CATEGORIES = ("matmul", "scan", "convolution", "norm", "loss", "optimizer", "exchange", "data", "elementwise", UNCLASSIFIED, IDLE)
"""In the order of the table."""

_NAME_PATTERNS = tuple(re.compile(rule.name, re.IGNORECASE) if rule.name else None for rule in RULES)
_SCOPE_PATTERNS = tuple(re.compile(rule.scope) if rule.scope else None for rule in RULES)


@cache
def name_rules(name: str) -> int:
    """The rules that apply to something of this name, a bit each."""
    return sum(1 << n for n, pattern in enumerate(_NAME_PATTERNS) if pattern is not None and pattern.search(name))


@cache
def scope_rules(name: str) -> int:
    """The rules that apply to whatever is inside something of this name, a bit each."""
    return sum(1 << n for n, pattern in enumerate(_SCOPE_PATTERNS) if pattern is not None and pattern.search(name))


def category(rules: int) -> str:
    """Of something that these rules apply to."""
    return RULES[(rules & -rules).bit_length() - 1].category if rules else UNCLASSIFIED
