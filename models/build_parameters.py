"""Builds a mixer's parameters from their declarations (models.settings.declarations), tensor-parallel layers included."""

from collections.abc import Iterable

from torch import nn

from baton.models.mixer_context import MixerContext
from baton.models.norm import HeadRMSNorm, RMSNorm, SplitRMSNorm
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.declarations import ParameterDeclaration
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


def build_parameters(module: nn.Module, declarations: Iterable[ParameterDeclaration], context: MixerContext) -> None:
    """Register a parameter, or the layer whose weight it is, for each declaration, in order, under the declared name.

    `conv_weights.q` becomes an entry of an nn.ParameterDict `conv_weights`. Raises LayoutError for sizes that the tensor group does
    not divide.
    """
    for declaration in declarations:
        if declaration.layer is not None:
            module.add_module(declaration.name.removesuffix(".weight"), _layer(declaration, context))
            continue
        group, _, name = declaration.name.rpartition(".")
        parameter = context.parameter(declaration)
        if not group:
            module.register_parameter(name, parameter)
            continue
        if not hasattr(module, group):
            module.add_module(group, nn.ParameterDict())
        parameters = module.get_submodule(group)
        assert isinstance(parameters, nn.ParameterDict)
        parameters[name] = parameter


def _layer(declaration: ParameterDeclaration, context: MixerContext) -> nn.Module:
    declaration = declaration.nested() if context.is_nested else declaration
    layer = declaration.layer
    if layer in ("rms_norm", "head_norm", "split_norm"):
        norms = {"rms_norm": RMSNorm, "head_norm": HeadRMSNorm, "split_norm": SplitRMSNorm}
        return norms[layer](declaration, context)
    if layer in ("replicated", "whole"):
        return ReplicatedLinear(declaration, context)
    d_out, d_in = declaration.shape
    init, megatron, dtype = context.initializer(declaration.init), context.megatron, context.compute_dtype
    if layer in ("row", "output"):
        scatter = layer == "output" and context.sequence_parallel
        return RowParallelLinear(d_in, d_out, init, megatron, compute_dtype=dtype, scatter=scatter)
    # where ranks share the residual stream, gathering the mixer's input sums its gradient
    disable_grad_reduce = layer == "low_rank_column" or context.sequence_parallel
    splits = declaration.fused_splits
    return ColumnParallelLinear(
        d_in, d_out, init, megatron, compute_dtype=dtype, fused_splits=splits, disable_grad_reduce=disable_grad_reduce
    )
