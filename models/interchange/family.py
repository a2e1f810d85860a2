"""A family of models in another library's format: which configurations it has, and how they and the tensors are mapped."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.interchange.mapping import InterchangeError, TensorMap


class Family(ABC):
    """Reads and writes one format.

    Attributes:
        library: whose format it is, with the class, for messages and model cards.
        architectures, model_type: what config.json names it.
        kinds: the sub-blocks of each layer, by kind of mixer.
        float32_only: ends of names whose tensors stay float32 in an export of a lower precision, for the recurrences' sake.
        embedding, final_norm, head: names of tensors outside the layers.
        final_norm_offset: what is added to that norm's weight.
        parallel: whether it has sub-blocks of several mixers.
        shared: whether it has blocks that several layers share.
    """

    library: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    model_type: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    float32_only: ClassVar[tuple[str, ...]] = ()
    embedding: ClassVar[str]
    final_norm: ClassVar[str]
    final_norm_offset: ClassVar[float] = 0.0
    head: ClassVar[str] = "lm_head.weight"
    parallel: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        return bool(set(config.get("architectures") or []) & set(self.architectures))

    @abstractmethod
    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section of a run file. Raises InterchangeError for what Baton's model cannot be."""

    @abstractmethod
    def config(self, model: ModelConfig) -> dict[str, Any]:
        """config.json of a model of this family. Raises InterchangeError for settings that the format cannot say."""

    def sizes(self, model: ModelConfig) -> dict[str, Any]:
        """What every config.json says under the same names."""
        return {
            "architectures": list(self.architectures),
            "model_type": self.model_type,
            "hidden_size": model.d_model,
            "num_hidden_layers": model.n_layers,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
        }

    @abstractmethod
    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        """The tensors of a layer."""

    def fits(self, model: ModelConfig) -> bool:
        """Whether every layer of a model has this family's sub-blocks, all with the same settings."""
        layers = {tuple(model.mixers[name].kind for name in layer) for layer in model.layers}
        return layers == {self.kinds} and len(model.mixers) == len(self.kinds)

    def holds(self, model: ModelConfig, weights: Mapping[str, Tensor]) -> bool:
        """Whether the format has a model of this family with these weights, by Baton's names."""
        return True

    def keeps_float32(self, model: ModelConfig, name: str) -> bool:
        """Whether a tensor of theirs stays float32 in an export of a lower precision."""
        return name.endswith(self.float32_only) if self.float32_only else False

    def code(self) -> dict[str, str]:
        """Python files by name that the folder has to have, because the library has no class for the model."""
        return {}

    def maps(self, model: ModelConfig) -> list[TensorMap]:
        """All tensors of a model whose vocab_size is known."""
        rows, shape = model.vocab_size, (model.padded_vocab_size, model.d_model)
        found = [TensorMap(self.embedding, (("embedding.weight", shape),), rows=rows)]
        for number in range(model.n_layers):
            found += self.layer(model, number)
        found.append(TensorMap(self.final_norm, (("norm.weight", (model.d_model,)),), offset=self.final_norm_offset))
        if not model.tie_embeddings:
            found.append(TensorMap(self.head, (("head.weight", shape),), rows=rows))
        return found


def required(config: Mapping[str, Any], key: str) -> Any:
    """A value of config.json. Raises InterchangeError where it is not there: nothing is guessed."""
    if config.get(key) is None:
        raise InterchangeError(f"config.json has no {key}")
    return config[key]


def only(config: Mapping[str, Any], key: str, value: Any, default: Any) -> None:
    """Refuse a configuration with another value of `key`. default: what the library takes where there is none."""
    found = config.get(key, default)
    if found != value:
        raise InterchangeError(f"config.json: {key}={found!r}: Baton's model has {key}={value!r} alone")
