"""The recurrences as loops over tokens, in float32. On a GPU with Baton installed its kernels compute them.

pos [batch, tokens]: position of each token in its document; a state is reset before position 0. State None: of a document's start.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from baton.kernels.delta_rule.reference import delta_rule_reference
from baton.kernels.gated_linear_attention.reference import gla_reference
from baton.kernels.gated_slot_attention.reference import gsa_reference
from baton.kernels.generalized_delta_rule.reference import generalized_delta_rule_reference
from baton.kernels.lattice.reference import lattice_reference
from baton.kernels.lattice.variant import UpdateRule
from baton.kernels.longhorn.reference import longhorn_reference
from baton.kernels.mamba3.reference import mamba3_reference
from baton.kernels.mamba3_mimo.reference import mamba3_mimo_reference
from baton.kernels.mlstm.reference import mlstm_reference
from baton.kernels.rg_lru.reference import rg_lru_reference
from baton.kernels.s4d.reference import s4d_reference
from baton.kernels.selective_scan.reference import selective_scan_reference
from baton.kernels.ttt.reference import ttt_reference
from baton.kernels.wkv6.reference import wkv6_reference


def lattice_loop(*inputs: Tensor, variant: Any, project: bool, **others: Any) -> tuple[Tensor, Tensor]:
    """`lattice_reference` with the arguments of the kernels' function."""
    return lattice_reference(*inputs, rule=UpdateRule(variant, project), **others)


LOOPS: dict[str, Callable[..., Any]] = {
    "delta_rule": delta_rule_reference,
    "gated_linear_attention": gla_reference,
    "gated_slot_attention": gsa_reference,
    "generalized_delta_rule": generalized_delta_rule_reference,
    "lattice": lattice_loop,
    "longhorn": longhorn_reference,
    "mamba3": mamba3_reference,
    "mamba3_mimo": mamba3_mimo_reference,
    "mlstm": mlstm_reference,
    "rg_lru": rg_lru_reference,
    "s4d": s4d_reference,
    "selective_scan": selective_scan_reference,
    "ttt": ttt_reference,
    "wkv6": wkv6_reference,
}


def run(name: str, *inputs: Tensor, **others: Any) -> Any:
    """A recurrence of LOOPS: outputs [batch, tokens, ...] and the final state."""
    if inputs[0].is_cuda and _kernels_are_installed():
        return getattr(import_module(f"baton.kernels.{name}.op"), name)(*inputs, **others)
    return LOOPS[name](*inputs, **others)


def _kernels_are_installed() -> bool:
    try:
        return find_spec("baton.kernels") is not None and torch.version.cuda is not None
    except ModuleNotFoundError:
        return False
