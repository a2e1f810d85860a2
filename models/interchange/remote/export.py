"""The format of models that no other library has: config.json, tensors under Baton's names, and the code that reads them."""

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from baton.models.config import ModelConfig, with_settings_of_once
from baton.models.interchange.family import Family, required
from baton.models.interchange.mapping import InterchangeError, TensorMap, one
from baton.models.settings import kinds
from baton.models.weight_shapes import layer_shapes, parameters, shared_shapes

ARCHITECTURE = "BatonForCausalLM"
FILES = (
    "configuration_baton.py", "layers_baton.py", "mixers_baton.py", "modeling_baton.py", "recurrences_baton.py",
    "rwkv_baton.py", "state_spaces_baton.py",
)  # fmt: skip
AUTO = {"AutoConfig": "configuration_baton.BatonConfig", "AutoModelForCausalLM": f"modeling_baton.{ARCHITECTURE}"}
MATRICES = ("column", "low_rank_column", "row", "output", "replicated", "whole")
"""Layers whose weights are cast to the compute dtype; every other parameter of a mixer is used in float32."""

PACKAGE = "baton.models.interchange.remote."
"""The exported files import each other by relative names."""

TYPES = "State = dict[str, Tensor]\nInputs = tuple[Tensor, ...]"
"""What the recurrences read of baton.kernels.protocol."""


class BatonFamily(Family):
    """Every mixer of Baton's in any pattern. Mixers of a user's own have no code here and are refused."""

    library = "transformers with trust_remote_code=True, BatonForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    model_type = "baton"
    kinds = ("any pattern of Baton's mixers",)
    embedding = "embedding.weight"
    final_norm = "norm.weight"
    head = "head.weight"
    parallel = True
    shared = True

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return dict(with_settings_of_once(required(config, "baton")))

    def config(self, model: ModelConfig) -> dict[str, Any]:
        mixers = {}
        for name, settings in model.mixers.items():
            shapes = {key: list(shape) for key, shape, _ in parameters(settings, model.d_model)}
            mixers[name] = settings.model_dump(mode="json") | {"parameters": shapes}
        return {
            **self.sizes(model),
            "auto_map": AUTO,
            "norm_eps": model.norm_eps,
            "layers": [["|".join(names) for names in layer] for layer in model.sub_blocks],
            "shared": model.shared_blocks,
            "mixers": mixers,
            "baton": model.model_dump(mode="json"),
        }

    def fits(self, model: ModelConfig) -> bool:
        return {settings.kind for settings in model.mixers.values()} <= set(kinds())

    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        for name, shape in layer_shapes(model, number).items():
            yield one(name, name, *shape)

    def maps(self, model: ModelConfig) -> list[TensorMap]:
        return super().maps(model) + [one(name, name, *shape) for name, shape in shared_shapes(model).items()]

    def code(self) -> dict[str, str]:
        return {name: _self_contained(Path(__file__).with_name(name)) for name in FILES}

    def keeps_float32(self, model: ModelConfig, name: str) -> bool:
        _, _, inner = name.partition(".mixer.")
        if not inner:
            return name.endswith("norm.weight")
        settings = model.mixers[name.removeprefix("shared.").split(".")[0 if name.startswith("shared.") else 2]]
        return next(d.layer not in MATRICES for key, _, d in parameters(settings, model.d_model) if key == inner)


def _self_contained(path: Path) -> str:
    """The text of a file, with the modules of Baton's that it imports in place of their imports."""
    imports: dict[str, None] = {}
    bodies: list[str] = []
    seen: set[str] = set()

    def take(source: str, inlined: bool) -> str:
        tree, lines = ast.parse(source), source.splitlines()
        first = 0
        for node in tree.body:
            is_docstring = isinstance(node, ast.Expr) and node is tree.body[0]
            if not (is_docstring or isinstance(node, ast.Import | ast.ImportFrom)):
                break
            first = node.end_lineno or 0
            if is_docstring:
                continue
            module = str(node.module) if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.ImportFrom) and module.startswith(PACKAGE):
                imports[ast.unparse(ast.ImportFrom(module.removeprefix(PACKAGE), node.names, level=1))] = None
            elif module.startswith("baton."):
                if module not in seen:
                    seen.add(module)
                    bodies.append(TYPES if module == "baton.kernels.protocol" else take(_source(module), True))
            else:
                imports["\n".join(lines[node.lineno - 1 : node.end_lineno])] = None
        rest = "\n".join(lines[first:]).strip()
        return rest if inlined else f"{ast.get_docstring(tree)}\0{rest}"

    docstring, _, rest = take(path.read_text(encoding="utf-8"), False).partition("\0")
    parts = [f'"""{docstring}\n"""' if "\n" in docstring else f'"""{docstring}"""', "\n".join(imports), *bodies, rest]
    return "\n\n\n".join(parts) + "\n"


def _source(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise InterchangeError(f"{module} is not installed as a file; install Baton from a wheel or its source")
    return Path(spec.origin).read_text(encoding="utf-8")
