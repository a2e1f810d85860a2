"""Tensor-parallel layers: megatron-core's, with fp32 parameters, a layout each, and matmuls in the compute type.

A parameter stays fp32 (ZeRO's master copy is cut from it) and is cast for the matmul once per optimizer step, not once per
micro-batch: `drop_compute_copies` after every change of the parameters makes the next forward cast anew.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import ModelParallelConfig, tensor_parallel
from torch import Tensor, nn

from baton.parallel.config import divisors
from baton.parallel.errors import LayoutError
from baton.parallel.layout import Init, ParameterLayout, declare

copy_to_tensor_group = tensor_parallel.copy_to_tensor_model_parallel_region
"""Identity whose backward sums the gradient over the tensor group: for a replicated input of split channels."""


def megatron_config(tensor_size: int, deterministic: bool) -> ModelParallelConfig:
    """megatron-core's settings of a layer. Values are initialised by parallel.layout, not by megatron-core."""
    return ModelParallelConfig(
        tensor_model_parallel_size=tensor_size,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=deterministic,
    )


class _CopyGradient(torch.autograd.Function):
    """Use `copy` in place of the fp32 `parameter`; the gradient goes to the parameter, in fp32."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


class ComputeCopy:
    """Mixin: the low-precision copy of `self.weight` that matmuls read."""

    weight: nn.Parameter
    compute_dtype: torch.dtype = torch.float32
    _compute_copy: Tensor | None = None

    def compute_weight(self) -> Tensor:
        """The weight in the compute type, [out, in]; cast at most once between two `drop_compute_copies`."""
        if self.compute_dtype == self.weight.dtype:
            return self.weight
        if self._compute_copy is None:
            self._compute_copy = self.weight.detach().to(self.compute_dtype)
        return _CopyGradient.apply(self.weight, self._compute_copy)


def drop_compute_copies(module: nn.Module) -> None:
    """Forget every low-precision copy. Call after the parameters change: an optimizer step, a load, an edit by hand."""
    for child in module.modules():
        if isinstance(child, ComputeCopy):
            child._compute_copy = None


def require_divisible(name: str, size: int, tensor_size: int) -> None:
    """Raise LayoutError unless `size` divides over the tensor group."""
    if size % tensor_size:
        raise LayoutError(f"layout.tensor={tensor_size} does not divide {name}={size}; sizes that do: {divisors(size)}")


class ColumnParallelLinear(ComputeCopy, tensor_parallel.ColumnParallelLinear):
    """y = x W^T with W split by output rows: x [B, T, in] on every rank, y [B, T, out / tensor ranks].

    parts: named parts of a fused projection (each split on its own). own_input: the input is already this rank's business
    (its gradient is summed elsewhere, by copy_to_tensor_group). Source of the splitting: Megatron-LM.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init: Init,
        config: ModelParallelConfig,
        *,
        compute_dtype: torch.dtype,
        parts: Sequence[tuple[str, int]] = (),
        own_input: bool = False,
    ) -> None:
        for part, rows in parts or (("out_features", out_features),):
            require_divisible(part, rows, config.tensor_model_parallel_size)
        super().__init__(
            in_features, out_features, config=config, init_method=lambda w: w, bias=False, disable_grad_reduce=own_input
        )
        self.compute_dtype = compute_dtype
        declare(self.weight, ParameterLayout((out_features, in_features), init, split=0, parts=tuple(parts)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.compute_dtype), weight=self.compute_weight())[0]


class RowParallelLinear(ComputeCopy, tensor_parallel.RowParallelLinear):
    """y = x W^T with W split by input columns: x [B, T, in / tensor ranks], y [B, T, out] summed over the tensor group."""

    def __init__(
        self, in_features: int, out_features: int, init: Init, config: ModelParallelConfig, *, compute_dtype: torch.dtype
    ) -> None:
        require_divisible("in_features", in_features, config.tensor_model_parallel_size)
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=lambda w: w,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        self.compute_dtype = compute_dtype
        declare(self.weight, ParameterLayout((out_features, in_features), init, split=1))

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super()._forward_impl(input, self.compute_weight(), *args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.compute_dtype))[0]


class VocabParallelEmbedding(ComputeCopy, tensor_parallel.VocabParallelEmbedding):
    """Token embedding split by vocabulary rows: ids [B, T] int64 to [B, T, d_model] in fp32 on every rank."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        init: Init,
        config: ModelParallelConfig,
        *,
        compute_dtype: torch.dtype,
        decay: bool,
    ) -> None:
        require_divisible("vocab_size", vocab_size, config.tensor_model_parallel_size)
        super().__init__(vocab_size, d_model, init_method=lambda w: w, config=config)
        self.compute_dtype = compute_dtype
        declare(self.weight, ParameterLayout((vocab_size, d_model), init, split=0, decay=decay))

    def head(self, h: Tensor) -> Tensor:
        """Logits of this rank's share of the vocabulary with the tied weight: [.., d_model] to [.., vocab / tensor ranks]."""
        return tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(
            input=h.to(self.compute_dtype),
            weight=self.compute_weight(),
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=self.tp_group is not None and self.tp_group.size() > 1,
            sequence_parallel=False,
            tp_group=self.tp_group,
        )


class VocabParallelHead(ColumnParallelLinear):
    """An untied head: logits of this rank's share of the vocabulary, [.., d_model] to [.., vocab / tensor ranks]."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        init: Init,
        config: ModelParallelConfig,
        *,
        compute_dtype: torch.dtype,
        decay: bool,
    ) -> None:
        super().__init__(d_model, vocab_size, init, config, compute_dtype=compute_dtype)
        declare(self.weight, ParameterLayout((vocab_size, d_model), init, split=0, decay=decay))
