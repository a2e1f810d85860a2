"""All-reduces over the tensor group that a sub-block's layers cost. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from baton.models.settings.declarations import Dtype, ParameterDeclaration


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of `width` elements per token over the tensor group, once per micro-batch.

    residual: of an output that is added to the residual stream, or of the gradient of an input that is read from it. With sequence
        parallelism an all-gather of the mixer's input and a reduce-scatter of its output replace these.
    """

    name: str
    width: int
    dtype: Dtype
    direction: Literal["forward", "backward"]
    residual: bool = False


def all_reduces_of(parameter: ParameterDeclaration) -> tuple[AllReduce, ...]:
    """The all-reduces of the layer that a parameter is the weight of."""
    name = parameter.name.removesuffix(".weight")
    match parameter.layer:
        case "column":
            return (AllReduce(name, parameter.shape[1], "compute", "backward", residual=True),)
        case "row" | "output":
            return (AllReduce(name, parameter.shape[0], "compute", "forward", residual=parameter.layer == "output"),)
        case "replicated":
            return (AllReduce(name, parameter.shape[0], "compute", "backward", residual=True),)
        case "split_norm" if parameter.groups == 1:
            return (AllReduce(name, 1, "float32", "forward"), AllReduce(name, 1, "float32", "backward"))
    return ()
