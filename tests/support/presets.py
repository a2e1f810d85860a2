"""The models of configs/models, as they are shipped."""

from functools import cache
from importlib.resources import files

import yaml

from baton.models.config import ModelConfig


@cache
def presets() -> dict[str, ModelConfig]:
    """By name, in the order of names."""
    paths = sorted((files("baton.configs") / "models").iterdir(), key=lambda path: path.name)
    return {path.name.removesuffix(".yaml"): ModelConfig(**yaml.safe_load(path.read_text())) for path in paths}
