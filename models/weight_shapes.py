"""Names and shapes of the tensors in a file of weights (`baton import`, `baton checkpoint export`), from a model's settings alone:
whole tensors, with fused projections in their parts. Torch-free."""

from collections.abc import Iterator

from baton.models.config import ModelConfig, places
from baton.models.settings import MixerConfig
from baton.models.settings.declarations import ParameterDeclaration


def weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors of a model whose vocab_size is known."""
    vocabulary = model.padded_vocab_size, model.d_model
    found: dict[str, tuple[int, ...]] = {"embedding.weight": vocabulary, "norm.weight": (model.d_model,)}
    if not model.tie_embeddings:
        found["head.weight"] = vocabulary
    for number in range(model.n_layers):
        found |= layer_shapes(model, number)
    return found | shared_shapes(model)


def layer_shapes(model: ModelConfig, number: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer, without those that it shares with others."""
    found: dict[str, tuple[int, ...]] = {}
    for name, first in places(model.sub_blocks[number]):
        if name not in model.shared:
            found |= _block_shapes(model, model.place(number, name), name, first)
    return found


def shared_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the blocks that layers share."""
    found: dict[str, tuple[int, ...]] = {}
    for name, first in model.shared_blocks.items():
        found |= _block_shapes(model, f"shared.{name}", name, first)
    return found


def _block_shapes(model: ModelConfig, place: str, name: str, first: bool) -> dict[str, tuple[int, ...]]:
    found = {f"{place}.norm.weight": (model.d_model,)} if first else {}
    return found | {f"{place}.mixer.{key}": shape for key, shape, _ in parameters(model.mixers[name], model.d_model)}


def parameters(settings: MixerConfig, d_model: int) -> Iterator[tuple[str, tuple[int, ...], ParameterDeclaration]]:
    """Names, shapes and declarations of a mixer's tensors."""
    for declared in settings.parameters(d_model):
        if not declared.fused_splits:
            yield declared.name, declared.shape, declared
        module, _, last = declared.name.rpartition(".")
        for part, rows in declared.fused_splits:
            yield f"{module}.{part}.{last}", (rows, *declared.shape[1:]), declared
    for name, inner in settings.nested.items():
        for key, shape, declared in parameters(inner, d_model):
            yield f"{name}.{key}", shape, declared
