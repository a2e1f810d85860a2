"""Groups of parameters for an optimizer."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from baton.parallel.errors import LayoutError
from baton.parallel.param_layout import named_layouts


def parameter_groups(
    module: nn.Module, weight_decay: float, lr_overrides: Sequence[str] = (), elsewhere: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups from the layouts, in the module's order: decayed and not decayed, for each learning rate.

    lr_overrides: patterns of parameter names that have a learning rate of their own, the first match counts; a group's
    "lr_override" says which
    ("": none). An empty group is left out, and so is a parameter that is not trained, or not here. elsewhere: names of other
    stages' parameters, which patterns may match as well.

    Raises:
        LayoutError: a pattern that no parameter's name matches.
    """
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for rate in ("", *lr_overrides):
        for decay in (True, False):
            name = f"{'' if decay else 'no_'}decay{rate and f' {rate}'}"
            groups[rate, decay] = {"name": name, "lr_override": rate, "params": [], "weight_decay": weight_decay if decay else 0.0}
    unused = [rate for rate in lr_overrides if not any(fnmatchcase(name, rate) for name in elsewhere)]
    for name, parameter, layout in named_layouts(module):
        matching = [rate for rate in lr_overrides if fnmatchcase(name, rate)]
        unused = [rate for rate in unused if rate not in matching]
        if parameter.requires_grad and not layout.tied_replica:
            groups[matching[0] if matching else "", layout.decay]["params"].append(parameter)
    if unused:
        raise LayoutError(f"training.optimizer.lr_overrides: no parameter's name matches {unused[0]!r}")
    return [group for group in groups.values() if group["params"]]
