"""Softmax attention in plain PyTorch with what its fused attention lacks: sinks and a soft cap. Exported models have this text in
their code.

Shape suffixes: B batch, L queries, J keys, H query heads, G key heads, K dim.

Source: OpenAI 2025, "gpt-oss", whose sinks are learned logits; Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks", section 3.3, for the softmax with a larger sum; Gemma Team 2024, "Gemma 2", section 2, for the soft cap.
"""

import torch
from torch import Tensor


def explicit_attention(
    q_BLHK: Tensor, k_BJGK: Tensor, v_BJGK: Tensor, seen_BLJ: Tensor, scale: float, sinks_BLH: Tensor | None, soft_cap: float | None
) -> Tensor:
    """Attention of each query to the keys in its row of the mask and to its sink, a logit without a value: [B, L, H, K] in q's
    dtype, computed in float32 at least. sinks_BLH: None: there are none. soft_cap: scores s become soft_cap tanh(s / soft_cap),
    sinks do not; None: they stay what they are."""
    dtype, group = torch.promote_types(q_BLHK.dtype, torch.float32), q_BLHK.shape[2] // k_BJGK.shape[2]
    k_BJHK, v_BJHK = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k_BJGK, v_BJGK))
    logits_BHLJ = torch.einsum("blhk,bjhk->bhlj", scale * q_BLHK.to(dtype), k_BJHK)
    if soft_cap is not None:
        logits_BHLJ = soft_cap * torch.tanh(logits_BHLJ / soft_cap)
    logits_BHLJ = logits_BHLJ.masked_fill(~seen_BLJ[:, None], -torch.inf)
    if sinks_BLH is not None:
        logits_BHLJ = torch.cat((logits_BHLJ, sinks_BLH.to(dtype).transpose(1, 2).unsqueeze(-1)), dim=-1)
    weights_BHLJ = logits_BHLJ.softmax(-1)[..., : k_BJGK.shape[1]]
    return torch.einsum("bhlj,bjhk->blhk", weights_BHLJ, v_BJHK).to(q_BLHK.dtype)
