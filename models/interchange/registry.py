"""All families of models that are read and written."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.interchange.family import Family
from baton.models.interchange.fla import FlaGLA, FlaGSA, FlaRetNet, FlaTransformer
from baton.models.interchange.fla_delta_rule import FlaDeltaNet, FlaGatedDeltaNet, FlaKDA
from baton.models.interchange.fla_hgrn2 import FlaHGRN2
from baton.models.interchange.llama import Llama, Mistral, Qwen2, Qwen3
from baton.models.interchange.mamba import FalconMamba, Mamba, Mamba2
from baton.models.interchange.mamba_ssm import ReleasedMamba, ReleasedMamba2
from baton.models.interchange.mapping import InterchangeError
from baton.models.interchange.qwen3_next import Qwen3Next
from baton.models.interchange.remote.export import BatonFamily

FAMILIES: tuple[Family, ...] = (
    Mamba(),
    FalconMamba(),
    Mamba2(),
    Llama(),
    Mistral(),
    Qwen2(),
    Qwen3(),
    Qwen3Next(),
    ReleasedMamba(),
    ReleasedMamba2(),
    FlaGLA(),
    FlaGSA(),
    FlaRetNet(),
    FlaHGRN2(),
    FlaDeltaNet(),
    FlaGatedDeltaNet(),
    FlaKDA(),
    FlaTransformer(),
    BatonFamily(),
)
"""In the order in which they are asked: a model is written in the first one's format that has it."""


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family that a config.json names. Raises InterchangeError for an unknown one, with those that are known."""
    for family in FAMILIES:
        if family.reads(config):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise InterchangeError(f"config.json: architectures={config.get('architectures')}: not read; known: {known}, and mamba_ssm's")


def family_of_model(model: ModelConfig, weights: Mapping[str, Tensor] | None = None) -> Family:
    """The family in whose format a model can be written. weights: by Baton's names; None: weights that every format of such models
    has. Raises InterchangeError where there is none."""
    for family in FAMILIES:
        has_form = (family.parallel or not model.is_parallel) and (family.shared or not model.shared) and family.fits(model)
        if has_form and (weights is None or family.holds(model, weights)):
            return family
    kinds = ", ".join(dict.fromkeys(settings.kind for settings in model.mixers.values()))
    raise InterchangeError(
        f"a model with {kinds} cannot be exported: mixers that are not Baton's own have no form for other libraries"
    )
