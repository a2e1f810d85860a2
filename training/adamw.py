"""torch.optim.AdamW without TorchDynamo.

Methods of PyTorch's optimizers are decorated so that torch.compile leaves them alone, and the decorators import TorchDynamo
at the first call (1.3 s of processor time in every process, and 130 MiB). Nothing here compiles an optimizer.
"""

import inspect

import torch

_Base = torch.optim.AdamW


class AdamW(_Base):
    """torch.optim.AdamW: the same methods, undecorated. An update is made without a graph (differentiable=False)."""

    add_param_group = inspect.unwrap(_Base.add_param_group)
    load_state_dict = inspect.unwrap(_Base.load_state_dict)
    state_dict = inspect.unwrap(_Base.state_dict)
    step = torch.no_grad()(inspect.unwrap(_Base.step))
    zero_grad = inspect.unwrap(_Base.zero_grad)
