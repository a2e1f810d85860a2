"""Settings of gated slot attention."""

from typing import Literal

from pydantic import Field

from baton.models.settings.attention import HeadsConfig
from baton.models.settings.cost_model import (
    LINEAR_ATTENTION_CHUNK,
    Carrier,
    Footprint,
    Kept,
    StateLeaf,
    column,
    column_gradient,
    linear_attention_flops,
    row,
    row_sum,
    scores_kept,
    split,
    split_norm,
)


class GSAConfig(HeadsConfig):
    """Attention over a few slots that are written by gated averages (Zhang et al., "Gated Slot Attention")."""

    kind: Literal["gsa"] = "gsa"
    head_dim: int = Field(512, ge=1, description="width of a head; 512 in the paper's 1.3B and 2.7B models")
    slots: int = Field(64, ge=1, description="slots of keys and values per head; 64 in the paper")
    gate_logit_normalizer: float = Field(
        8.0, gt=0, description="a slot keeps sigmoid^(1 / gate_logit_normalizer): more begins with a longer memory; the paper's 8"
    )
    slot_activation: Literal["softmax", "identity", "silu", "relu", "relu2"] = Field(
        "softmax", description="what makes weights of slots out of scores; the others are the paper's ablations"
    )

    def footprint(self, d_model: int) -> Footprint:
        heads, kv_heads = self.head_counts(d_model)
        dim, slots, chunk = self.head_dim, self.slots, LINEAR_ATTENTION_CHUNK
        width, kv_width, gates = heads * dim, kv_heads * dim, kv_heads * slots
        norm, norm_sums = split_norm("norm", width)
        return Footprint(
            parameters=(
                column("in_proj", d_model, width + 2 * kv_width + gates),
                split("norm.weight", width),
                row("out_proj", width, d_model),
            ),
            kept=(
                Kept("in_proj input", d_model, "compute", split=False),
                Kept("q, k, v and gates", width + 2 * kv_width + gates, "compute"),
                # which a CPU makes again, chunk by chunk
                Kept("activated q, k and v", width + 2 * kv_width, "compute", device="gpu", inside="kernel", cheap=True),
                Kept("gates", gates, "float32", inside="kernel"),
                Kept("scores of slots", heads * slots, "float32", inside="kernel"),
                *scores_kept(heads, width, kv_width, gates),
                *scores_kept(heads, heads * slots, gates, kv_width),
                Kept("output", width, "compute"),
                # which on one rank a GPU's norm reads itself, and whose norm it makes again
                *(kept for kept in norm if not (kept.device == "gpu" and kept.width == width)),
                Kept("out_proj input", width, "compute", device="gpu", ranks="one", cheap=True),
                Kept("out_proj input", width, "compute", device="gpu", ranks="several"),
                Kept("out_proj input", width, "compute", device="cpu"),
            ),
            carriers=(
                Carrier(
                    "gated_slot_attention",
                    (
                        StateLeaf("k", (kv_heads, dim, slots), "float32", tp=0),
                        StateLeaf("v", (kv_heads, slots, dim), "float32", tp=0),
                    ),
                    chunk=chunk,
                    remade=True,
                    transition=((kv_heads, 1, slots), (kv_heads, slots, 1)),
                ),
            ),
            reductions=(column_gradient("in_proj", d_model), *norm_sums, row_sum("out_proj", d_model)),
            # two passes, with the slots for values and for keys
            matrix_flops=linear_attention_flops(heads, dim, slots, chunk) + linear_attention_flops(heads, slots, dim, chunk),
        )

    @classmethod
    def small(cls) -> "GSAConfig":
        return cls(head_dim=7, heads=8, kv_heads=4, slots=5)
