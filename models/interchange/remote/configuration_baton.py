"""Configuration of a language model trained with Baton, as `config.json` of an exported folder has it."""

from typing import Any

from transformers import PretrainedConfig


class BatonConfig(PretrainedConfig):
    """A stack of layers, each of sub-blocks x + mixer(norm(x)), or of several mixers, x + the sum of what they make of norm(x).

    Args:
        vocab_size, hidden_size: rows and columns of the embedding.
        layers: the sub-blocks of each layer: the mixers' names, joined by "|".
        shared: names of mixers that have one set of weights in all layers, and whether each has its sub-block's norm.
        mixers: by name: its `kind`, its settings, and `parameters`, their shapes by name.
        norm_eps: added to the mean square in every RMSNorm.
        tie_word_embeddings: whether the head is the embedding.
    """

    model_type = "baton"

    def __init__(
        self,
        vocab_size: int = 8,
        hidden_size: int = 8,
        layers: list[list[str]] | None = None,
        shared: dict[str, bool] | None = None,
        mixers: dict[str, dict[str, Any]] | None = None,
        norm_eps: float = 1e-5,
        tie_word_embeddings: bool = True,
        **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.norm_eps = vocab_size, hidden_size, norm_eps
        self.layers, self.shared, self.mixers = layers or [], shared or {}, mixers or {}
        self.num_hidden_layers = len(self.layers)
        others.pop("num_hidden_layers", None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)
