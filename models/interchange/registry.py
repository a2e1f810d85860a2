"""All families of models that are read and written."""

from collections.abc import Mapping
from typing import Any

from baton.models.config import ModelConfig
from baton.models.interchange.family import Family
from baton.models.interchange.llama import Llama, Mistral
from baton.models.interchange.mamba import Mamba, Mamba2
from baton.models.interchange.mamba_ssm import ReleasedMamba, ReleasedMamba2
from baton.models.interchange.mapping import InterchangeError

FAMILIES: tuple[Family, ...] = (Mamba(), Mamba2(), Llama(), Mistral(), ReleasedMamba(), ReleasedMamba2())


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family that a config.json names. Raises InterchangeError for an unknown one, with those that are known."""
    for family in FAMILIES:
        if family.reads(config):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise InterchangeError(f"config.json: architectures={config.get('architectures')}: not read; known: {known}, and mamba_ssm's")


def family_of_model(model: ModelConfig) -> Family:
    """The family in whose format a model can be written. Raises InterchangeError where there is none."""
    for family in FAMILIES:
        if family.fits(model):
            return family
    kinds = ", ".join(dict.fromkeys(settings.kind for settings in model.mixers.values()))
    known = ", ".join("+".join(family.kinds) for family in FAMILIES)
    raise InterchangeError(f"no other library's format has layers of {kinds}; written are stacks of {known}")
