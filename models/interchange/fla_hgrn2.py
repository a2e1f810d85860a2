"""flash-linear-attention's HGRN2, whose layers' lower bounds are one parameter: sums over the layers of a softmax over the layers.

Baton's layers have a logit each, so that none has to know another's (models/mixers/hgrn2.py). The bounds are the same to a
rounding; written again, the softmax's logits of a channel have mean 0, which the softmax does not see. fla's output norm has an
epsilon of 1e-5, whatever config.json says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.interchange.family import required
from baton.models.interchange.fla import QKV, Fla
from baton.models.interchange.mapping import InterchangeError, TensorMap, checked
from baton.models.settings import MixerConfig
from baton.models.settings.hgrn2 import HGRN2Config
from baton.models.settings.swiglu import SwiGLUConfig
from baton.models.weight_shapes import parameters

FIRST = "hgrn2_first"
"""Name of the first layer's mixer, which has no bound where the others learn theirs."""


@dataclass(frozen=True)
class LowerBounds(TensorMap):
    """x [layers, width], of which the bound of layer n is softmax(x)_1 + ... + softmax(x)_n; and the bounds' logits of all layers
    but the first, which are ours. theirs and parts are TensorMap's.

    width: channels.
    """

    width: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts) + 1, self.width

    def to_ours(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = checked(self.theirs, theirs, self.shape).double()
        below = x[1:].logcumsumexp(0)
        above = torch.cat((x[:1], x[2:].flip(0))).logcumsumexp(0).flip(0)  # the first layer's share, and those of later layers
        return {name: row.float() for (name, _), row in zip(self.parts, below - above, strict=True)}

    def to_theirs(self, ours: Mapping[str, Tensor]) -> Tensor:
        """Of bounds that increase from layer to layer (`FlaHGRN2.holds`)."""
        x = self.shares(ours).log()
        return (x - x.mean(0)).float()

    def shares(self, ours: Mapping[str, Tensor]) -> Tensor:
        """The softmax [layers, width] that gives our bounds, in float64."""
        logits = torch.stack([checked(name, ours, shape).double() for name, shape in self.parts])
        bounds = torch.sigmoid(logits)
        return torch.cat((torch.sigmoid(-logits[-1:]), bounds[:1], bounds[1:] - bounds[:-1]))


class FlaHGRN2(Fla):
    library = "flash-linear-attention, HGRN2ForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("HGRN2ForCausalLM",)
    model_type = "hgrn2"
    kinds = ("hgrn2", "swiglu")
    float32_only = ("lower_bounds",)
    needed: ClassVar[dict[str, tuple[Any, Any]]] = {
        "use_short_conv": (False, False),
        "elementwise_affine": (True, True),
        "norm_eps": (1e-5, 1e-6),
    }
    names: ClassVar[dict[str, str]] = {
        **QKV,
        "in_proj.f.weight": "f_proj.weight",
        "in_proj.v.weight": "i_proj.weight",
        "norm.weight": "g_norm.weight",
    }

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        found = super().model(config)
        if not config.get("use_lower_bound", True):
            return found
        if (layers := found["n_layers"]) < 2:
            raise InterchangeError("config.json: use_lower_bound=True with num_hidden_layers=1: the first layer has no bound")
        settings, swiglu = found["mixers"]["hgrn2"], found["mixers"]["swiglu"]
        learned = settings | {"bounds": "learned", "lower_bound": 0.5}
        found["mixers"] = {FIRST: settings, "swiglu": swiglu, "hgrn2": learned}
        found["pattern"] = [f"{FIRST}+swiglu", f"hgrn2+swiglu*{layers - 1}"]
        return found

    def config(self, model: ModelConfig) -> dict[str, Any]:
        return {**super().config(model), "use_lower_bound": bool(_learned(model))}

    def fits(self, model: ModelConfig) -> bool:
        """No layer has a bound, or all but the first learn theirs."""
        layers = [tuple(model.mixers[name] for name in layer) for layer in model.layers]
        if {tuple(settings.kind for settings in layer) for layer in layers} != {self.kinds}:
            return False
        said = all(self._says(mixer, model.d_model, model.norm_eps) for mixer, _ in layers)
        hidden = {one.width(model.d_model) for _, one in layers if isinstance(one, SwiGLUConfig)}
        return said and len(hidden) == 1 and _learned(model) in ([], list(range(1, model.n_layers)))

    def holds(self, model: ModelConfig, weights: Mapping[str, Tensor]) -> bool:
        return all((one.shares(weights) > 0).all() for one in _bounds(model))

    def maps(self, model: ModelConfig) -> list[TensorMap]:
        return [*super().maps(model), *_bounds(model)]

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        d_key: int | None = config.get("expand_ratio", 128)
        if d_key is None:
            d_key = width // required(config, "num_heads")
        if width % d_key:
            raise InterchangeError(f"config.json: expand_ratio={d_key} does not divide hidden_size={width}")
        return {"heads": width // d_key, "d_key": d_key, "d_value": d_key, "scale_queries": True}

    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        assert isinstance(mixer, HGRN2Config)
        return {"num_heads": width // mixer.d_key, "expand_ratio": mixer.d_key}

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        assert isinstance(mixer, HGRN2Config)
        heads, d_key, d_value = mixer.head_sizes(width)
        unbounded = mixer.bounds == "learned" or mixer.lower_bound == 0
        return mixer.scale_queries and heads * d_key == heads * d_value == width and norm_eps == 1e-5 and unbounded

    def _tensors(self, mixer: MixerConfig, width: int) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
        for own, shape, _ in parameters(mixer, width):
            if own != "bound":
                yield self.names[own], own, shape, None


def _learned(model: ModelConfig) -> list[int]:
    """Layers that learn their bounds."""
    mixers = [model.mixers[names[0]] for names in model.layers]
    return [number for number, mixer in enumerate(mixers) if isinstance(mixer, HGRN2Config) and mixer.bounds == "learned"]


def _bounds(model: ModelConfig) -> list[LowerBounds]:
    """The map of the bounds, if there are any."""
    parts = tuple((f"layers.{n}.{model.layers[n][0]}.mixer.bound", (model.d_model,)) for n in _learned(model))
    return [LowerBounds("model.lower_bounds", parts, width=model.d_model)] if parts else []
