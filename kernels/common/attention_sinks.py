"""Softmax attention with sinks in plain PyTorch, whose fused attention has none. Exported models have this text in their code.

Shape suffixes: B batch, L queries, J keys, H query heads, G key heads, K dim.

Source: OpenAI 2025, "gpt-oss", whose sinks are learned logits; Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks", section 3.3, for the softmax with a larger sum.
"""

import torch
from torch import Tensor


def attention_with_sinks(
    q_BLHK: Tensor, k_BJGK: Tensor, v_BJGK: Tensor, seen_BLJ: Tensor, scale: float, sinks_BLH: Tensor
) -> Tensor:
    """Attention of each query to the keys in its row of the mask and to a sink, a logit without a value: [B, L, H, K] in q's dtype,
    computed in float32 at least."""
    dtype, group = torch.promote_types(q_BLHK.dtype, torch.float32), q_BLHK.shape[2] // k_BJGK.shape[2]
    k_BJHK, v_BJHK = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k_BJGK, v_BJGK))
    scores_BHLJ = torch.einsum("blhk,bjhk->bhlj", scale * q_BLHK.to(dtype), k_BJHK).masked_fill(~seen_BLJ[:, None], -torch.inf)
    logits = torch.cat((scores_BHLJ, sinks_BLH.to(dtype).transpose(1, 2).unsqueeze(-1)), dim=-1)
    return torch.einsum("bhlj,bjhk->blhk", logits.softmax(-1)[..., :-1], v_BJHK).to(q_BLHK.dtype)
