"""Tensor-parallel layers: megatron-core's, with fp32 parameters, a layout each, and matmuls in the compute dtype
(`cast_weights`)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.parallel.cast_weights import CastWeightCache
from baton.parallel.config import divisors
from baton.parallel.embedding import embedding
from baton.parallel.errors import LayoutError
from baton.parallel.linear import linear
from baton.parallel.megatron import ModelParallelConfig, tensor_parallel
from baton.parallel.param_layout import Init, ParameterLayout, declare
from baton.parallel.tensor_group import pad_to_parts, sum_over_tensor_group, tensor_size


def megatron_config(tensor_size: int) -> ModelParallelConfig:
    """megatron-core's settings of a layer. Values are initialised by parallel.param_layout, not by megatron-core."""
    return ModelParallelConfig(
        tensor_model_parallel_size=tensor_size,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )


def require_divisible(name: str, size: int, tensor_size: int) -> None:
    """Raise LayoutError unless `size` divides over the tensor group."""
    if size % tensor_size:
        raise LayoutError(f"layout.tensor={tensor_size} does not divide {name}={size}; sizes that do: {divisors(size)}")


class ColumnParallelLinear(CastWeightCache, tensor_parallel.ColumnParallelLinear):
    """y = x W^T with W split by output rows: x [B, T, in] on every rank, y [B, T, out / tensor ranks].

    parts: named parts of a fused projection (each split on its own). own_input: the input is already this rank's business
    (its gradient is summed elsewhere, by copy_to_tensor_group or gather_tokens). Source of the splitting: Megatron-LM.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init: Init,
        config: ModelParallelConfig,
        *,
        compute_dtype: torch.dtype,
        fused_splits: Sequence[tuple[str, int]] = (),
        disable_grad_reduce: bool = False,
    ) -> None:
        for part, rows in fused_splits or (("out_features", out_features),):
            require_divisible(part, rows, config.tensor_model_parallel_size)
        super().__init__(
            in_features, out_features, config=config, init_method=lambda w: w, bias=False, disable_grad_reduce=disable_grad_reduce
        )
        self.compute_dtype = compute_dtype
        self.local_splits = tuple(rows // config.tensor_model_parallel_size for _, rows in fused_splits)
        declare(self.weight, ParameterLayout((out_features, in_features), init, split=0, fused_splits=tuple(fused_splits)))

    def forward(
        self, x: Tensor, split_sizes: Sequence[int] | None = None, return_input: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """split_sizes: columns of this rank per part of y; the parts' gradients need not be concatenated. return_input: also return
        x in the compute dtype, before the parts, for other readers of it, see `linear`."""
        x, group = x.to(self.compute_dtype), self.tp_group if self.allreduce_dgrad else None
        # a gradient that is summed over the group must not begin with another one, which every rank has whole
        fused = return_input and group is None
        found = linear(x, self.weight, self.cast_weight(), split_sizes=split_sizes, group=group, return_input=fused)
        if return_input:
            return found if fused else (x, *found)
        return found if split_sizes is not None else found[0]


class RowParallelLinear(CastWeightCache, tensor_parallel.RowParallelLinear):
    """y = x W^T with W split by input columns: x [B, T, in / tensor ranks], y [B, T, out] summed over the tensor group.

    scatter: each rank has the sum for its part of the tokens only, y [tokens_per_rank(B T), out].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init: Init,
        config: ModelParallelConfig,
        *,
        compute_dtype: torch.dtype,
        scatter: bool = False,
    ) -> None:
        require_divisible("in_features", in_features, config.tensor_model_parallel_size)
        super().__init__(
            in_features,
            out_features,
            config=dataclasses.replace(config, sequence_parallel=scatter),
            init_method=lambda w: w,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        self.compute_dtype = compute_dtype
        declare(self.weight, ParameterLayout((out_features, in_features), init, split=1))

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (y,) = linear(input, self.weight, self.cast_weight())  # where y is scattered: megatron-core's forward sums it
        return y

    def forward(self, x: Tensor, return_input: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """return_input: also return x in the compute dtype, for other readers of it, see `linear`. Not where y is scattered."""
        x, ranks = x.to(self.compute_dtype), self.config.tensor_model_parallel_size
        if self.sequence_parallel and not return_input:
            y, _ = super().forward(pad_to_parts(x.flatten(0, 1), ranks))
            return y
        group = self.tp_group if ranks > 1 else None
        *before, y = linear(x, self.weight, self.cast_weight(), sum_group=group, return_input=return_input)
        return (before[0], y) if return_input else y


class VocabParallelEmbedding(CastWeightCache, tensor_parallel.VocabParallelEmbedding):
    """Token embedding split by vocabulary rows: ids [B, T] int64 to [B, T, d_model] on every rank.

    scatter: to this rank's part of the tokens only, [tokens_per_rank(B T), d_model]; and the head's input comes from gather_tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        init: Init,
        config: ModelParallelConfig,
        *,
        compute_dtype: torch.dtype,
        decay: bool,
        scatter: bool = False,
    ) -> None:
        require_divisible("vocab_size", vocab_size, config.tensor_model_parallel_size)
        super().__init__(vocab_size, d_model, init_method=lambda w: w, config=config, reduce_scatter_embeddings=scatter)
        self.compute_dtype = compute_dtype
        declare(self.weight, ParameterLayout((vocab_size, d_model), init, split=0, decay=decay))

    def forward(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """dtype: of the result; None: fp32."""
        ranks = tensor_size()
        first = self.vocab_start_index if ranks > 1 else None
        if not self.reduce_scatter_embeddings:
            x = embedding(ids, self.weight, first, dtype=dtype)
            return sum_over_tensor_group(x)
        # no rank has id -1, so its row is zero
        x = embedding(pad_to_parts(ids.flatten(), ranks, value=-1), self.weight, first, dtype=dtype)
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(x, group=self.tp_group)

    def head(self, h: Tensor) -> Tensor:
        """Logits of this rank's vocabulary shard with the tied weight: [.., d_model] to [.., vocab / tensor ranks]."""
        several = self.tp_group is not None and self.tp_group.size() > 1 and not self.reduce_scatter_embeddings
        group = self.tp_group if several else None
        (logits,) = linear(h.to(self.compute_dtype), self.weight, self.cast_weight(), group=group)
        return logits


class VocabParallelHead(ColumnParallelLinear):
    """An untied head: logits of this rank's share of the vocabulary, [.., d_model] to [.., vocab / tensor ranks].

    own_input: as in ColumnParallelLinear.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        init: Init,
        config: ModelParallelConfig,
        *,
        compute_dtype: torch.dtype,
        decay: bool,
        disable_grad_reduce: bool = False,
    ) -> None:
        super().__init__(d_model, vocab_size, init, config, compute_dtype=compute_dtype, disable_grad_reduce=disable_grad_reduce)
        declare(self.weight, ParameterLayout((vocab_size, d_model), init, split=0, decay=decay))
