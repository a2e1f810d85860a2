"""What autograd saves in parts that several kinds of sub-blocks have. Torch-free."""

from dataclasses import replace
from functools import partial

from baton.models.settings.cost_model import LINEAR_ATTENTION_CHUNK, SCORES_SHARE, SavedTensor


def saved_by_norm(name: str, width: int, *, rows: int) -> tuple[SavedTensor, ...]:
    """Saved tensors of RMSNorm over rows of width / rows elements: its input, a scale per row and, on a CPU, the normalized input.
    A CPU saves the input in float32, a GPU in the input's dtype."""
    return (*saved_by_unit(name, width, rows=rows), SavedTensor(f"{name} normalised", width, "float32", device="cpu"))


def saved_by_unit(name: str, width: int, *, rows: int) -> tuple[SavedTensor, ...]:
    """Saved tensors of models.norm.unit. It has no weight, so its gradient does not need the normalized input."""
    return (
        SavedTensor(f"{name} input", width, "float32", device="cpu"),
        SavedTensor(f"{name} input", width, "compute", device="gpu"),
        SavedTensor(f"{name} scale", rows, "float32"),
    )


def saved_by_split_norm(name: str, width: int, *, groups: int = 1) -> tuple[SavedTensor, ...]:
    """Saved tensors of models.norm.SplitRMSNorm. Over several ranks it consists of PyTorch operators on every device, so that the
    normalized input is saved on a GPU too; so is that of several groups, whose weight is multiplied afterwards."""
    if groups > 1:
        return (*saved_by_unit(name, width, rows=groups), SavedTensor(f"{name} normalised", width, "float32"))
    return (
        *(replace(saved, ranks="one") for saved in saved_by_norm(name, width, rows=1)),
        SavedTensor(f"{name} input", width, "float32", ranks="several"),
        SavedTensor(f"{name} scale", 1, "float32", split=False, ranks="several"),
        SavedTensor(f"{name} normalised", width, "float32", ranks="several"),
    )


def saved_by_gate(name: str, width: int) -> tuple[SavedTensor, ...]:
    """Saved tensors of y * activation(gate) on a CPU: the gate in float32, and activation(gate) for the gradient of y. The GPU
    kernel recomputes both."""
    return (
        SavedTensor(f"{name} input", width, "float32", cast=True, device="cpu"),
        SavedTensor(f"{name} activated", width, "float32", device="cpu"),
    )


def saved_before_gate(width: int, *, split_norm: bool = False) -> tuple[SavedTensor, ...]:
    """A norm's output, which a gate multiplies. On a GPU one kernel does both and saves nothing between them, unless what is
    normalised is split over ranks (split_norm: it is, over several)."""
    normalised = SavedTensor("normalised output", width, "float32", device="cpu")
    return (normalised, replace(normalised, device="gpu", ranks="several")) if split_norm else (normalised,)


def saved_by_log_sigmoid(name: str, width: int, *, bias: bool = False, view: bool = True) -> tuple[SavedTensor, ...]:
    """Saved tensors of kernels.gate.log_sigmoid. A GPU's kernel saves its input as it is; view: a view of a projection, which is
    saved anyway. A CPU saves the input in float32, with the bias added if there is one, and the exponential."""
    return (
        SavedTensor(f"{name} input", width, "float32", cast=view and not bias, device="cpu"),
        *(() if view else (SavedTensor(f"{name} input", width, "compute", device="gpu"),)),
        SavedTensor(f"{name} exponential", width, "float32", device="cpu"),
    )


def saved_decays(reads: int, writes: int) -> tuple[SavedTensor, ...]:
    """What linear attention's kernels keep of decays by key where they keep states: their sums, and the queries and keys, of these
    widths, times decays."""
    kept = partial(SavedTensor, in_recurrence="kernel", with_states=True)
    # the sums have twice the bytes of what is multiplied
    return kept("sums of decays", 2 * writes, "compute"), kept("decayed queries and keys", reads + writes, "compute")


def saved_scores(heads: int, *widths: int) -> tuple[SavedTensor, ...]:
    """Scores between a chunk's tokens, which linear attention's kernels save if they are small compared with q, k and v, of the
    given widths."""
    few = SCORES_SHARE * heads * LINEAR_ATTENTION_CHUNK <= sum(widths)
    # of float32 chunks have half as many tokens
    scores = SavedTensor("scores in chunks", heads * LINEAR_ATTENTION_CHUNK // 2, "float32", in_recurrence="kernel")
    return (scores,) if few else ()
