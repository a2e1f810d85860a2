"""Mamba and Mamba-2: transformers' classes, and the files of mamba_ssm, from which both come."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from baton.models.config import ModelConfig
from baton.models.interchange.family import Family, only, required
from baton.models.interchange.mapping import InterchangeError, TensorMap, one
from baton.models.settings.mamba import MambaConfig
from baton.models.settings.mamba2 import Mamba2Config


def _number(value: Any) -> float:
    """A number of config.json; transformers 5 writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


class _StateSpace(Family):
    """What the two have in common."""

    float32_only = ("A_log", "dt_bias", "dt_proj.bias", ".D")
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"

    def _common(self, config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
        only(config, "use_bias", False, False)
        only(config, "use_conv_bias", True, True)
        only(config, "hidden_act", "silu", "silu")
        return {
            "d_model": required(config, "hidden_size"),
            "n_layers": required(config, "num_hidden_layers"),
            "vocab_size": required(config, "vocab_size"),
            "tie_embeddings": config.get("tie_word_embeddings", tied),
            "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        }

    def _config(self, model: ModelConfig, settings: MambaConfig | Mamba2Config) -> dict[str, Any]:
        return {
            **self.sizes(model),
            "layer_norm_epsilon": model.norm_eps,
            "state_size": settings.d_state,
            "conv_kernel": settings.d_conv,
            "expand": settings.expand,
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "residual_in_fp32": True,
        }


class Mamba(_StateSpace):
    library = "transformers, MambaForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("MambaForCausalLM",)
    model_type = "mamba"
    kinds = ("mamba",)

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        rank, width = config.get("time_step_rank", "auto"), required(config, "hidden_size")
        mamba = {
            "kind": "mamba",
            "d_state": config.get("state_size", 16),
            "d_conv": config.get("conv_kernel", 4),
            "expand": config.get("expand", 2),
            "dt_rank": -(-width // 16) if rank == "auto" else rank,
        }
        if "intermediate_size" in config and config["intermediate_size"] != mamba["expand"] * width:
            raise InterchangeError(f"config.json: intermediate_size={config['intermediate_size']} is not expand x hidden_size")
        return {**self._common(config, True), "pattern": ["mamba"], "mixers": {"mamba": mamba}}

    def config(self, model: ModelConfig) -> dict[str, Any]:
        (mamba,) = model.mixers.values()
        assert isinstance(mamba, MambaConfig)
        return self._config(model, mamba) | {
            "time_step_rank": mamba.step_rank(model.d_model),
            "intermediate_size": mamba.expand * model.d_model,
        }

    def fits(self, model: ModelConfig) -> bool:
        return super().fits(model) and all(self._says(mamba) for mamba in model.mixers.values())

    def _says(self, mamba: Any) -> bool:
        """Whether the format has a form for these settings."""
        plain = mamba.block == "mamba" and mamba.skip and mamba.discretization == "euler" and mamba.projection_norm_eps is None
        return plain and not mamba.projection_norm_weights and len(mamba.selective) == 3

    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        (name,) = model.layers[number]
        mamba = model.mixers[name]
        assert isinstance(mamba, MambaConfig)
        width, inner, state, rank = model.d_model, mamba.expand * model.d_model, mamba.d_state, mamba.step_rank(model.d_model)
        theirs, ours = f"backbone.layers.{number}", f"layers.{number}.{name}"
        yield one(f"{theirs}.norm.weight", f"{ours}.norm.weight", width)
        theirs, ours = f"{theirs}.mixer", f"{ours}.mixer"
        yield TensorMap(f"{theirs}.in_proj.weight", tuple((f"{ours}.in_proj.{part}.weight", (inner, width)) for part in ("x", "z")))
        yield one(f"{theirs}.conv1d.weight", f"{ours}.conv_weight", inner, mamba.d_conv, axis=1)
        yield one(f"{theirs}.conv1d.bias", f"{ours}.conv_bias", inner)
        yield one(f"{theirs}.x_proj.weight", f"{ours}.x_proj.weight", rank + 2 * state, inner)
        yield one(f"{theirs}.dt_proj.weight", f"{ours}.dt_proj.weight", inner, rank)
        yield one(f"{theirs}.dt_proj.bias", f"{ours}.dt_bias", inner)
        yield one(f"{theirs}.A_log", f"{ours}.A_log", inner, state)
        yield one(f"{theirs}.D", f"{ours}.D", inner)
        yield one(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", width, inner)


class FalconMamba(Mamba):
    library = "transformers, FalconMambaForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("FalconMambaForCausalLM",)
    model_type = "falcon_mamba"

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        found = super().model(config)
        found["mixers"]["mamba"]["projection_norm_eps"] = config.get("mixer_rms_eps", 1e-6)
        return found

    def config(self, model: ModelConfig) -> dict[str, Any]:
        (mamba,) = model.mixers.values()
        assert isinstance(mamba, MambaConfig)
        return super().config(model) | {"mixer_rms_eps": mamba.projection_norm_eps}

    def _says(self, mamba: Any) -> bool:
        return mamba.projection_norm_eps is not None and super()._says(mamba.model_copy(update={"projection_norm_eps": None}))


class Mamba2(_StateSpace):
    library = "transformers, Mamba2ForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("Mamba2ForCausalLM",)
    model_type = "mamba2"
    kinds = ("mamba2",)

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        only(config, "rms_norm", True, True)
        low, high = map(_number, config.get("time_step_limit", (0.0, float("inf"))))
        if (low, high) != (0.0, float("inf")):
            raise InterchangeError(f"config.json: time_step_limit={[low, high]}: Baton's step sizes have no limits")
        width, heads, head_dim = required(config, "hidden_size"), required(config, "num_heads"), required(config, "head_dim")
        mamba = {
            "kind": "mamba2",
            "d_state": config.get("state_size", 128),
            "d_conv": config.get("conv_kernel", 4),
            "expand": config.get("expand", 2),
            "head_dim": head_dim,
            "n_groups": config.get("n_groups", 8),
        }
        if heads * head_dim != mamba["expand"] * width:
            raise InterchangeError(f"config.json: num_heads x head_dim = {heads * head_dim} is not expand x hidden_size")
        return {**self._common(config, False), "pattern": ["mamba2"], "mixers": {"mamba2": mamba}}

    def config(self, model: ModelConfig) -> dict[str, Any]:
        (mamba,) = model.mixers.values()
        assert isinstance(mamba, Mamba2Config)
        return self._config(model, mamba) | {
            "num_heads": mamba.head_count(model.d_model),
            "head_dim": mamba.head_dim,
            "n_groups": mamba.n_groups,
            "rms_norm": True,
            "chunk_size": 256,
        }

    def fits(self, model: ModelConfig) -> bool:
        return super().fits(model) and all(
            isinstance(mamba, Mamba2Config) and mamba.norm_group_count(model.d_model) == mamba.n_groups
            for mamba in model.mixers.values()
        )

    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        (name,) = model.layers[number]
        mamba = model.mixers[name]
        assert isinstance(mamba, Mamba2Config)
        width, inner, heads, shared = (
            model.d_model,
            mamba.expand * model.d_model,
            mamba.head_count(model.d_model),
            2 * mamba.n_groups * mamba.d_state,
        )
        theirs, ours = f"backbone.layers.{number}", f"layers.{number}.{name}"
        yield one(f"{theirs}.norm.weight", f"{ours}.norm.weight", width)
        theirs, ours = f"{theirs}.mixer", f"{ours}.mixer"
        bc = "bc_proj" if mamba.n_groups == 1 else "in_proj.bc"
        parts = (("in_proj.z", inner), ("in_proj.x", inner), (bc, shared), ("in_proj.dt", heads))
        projections = tuple((f"{ours}.{part}.weight", (rows, width)) for part, rows in parts)
        conv = ((f"{ours}.conv_weight", (inner, mamba.d_conv)), (f"{ours}.bc_conv_weight", (shared, mamba.d_conv)))
        biases = ((f"{ours}.conv_bias", (inner,)), (f"{ours}.bc_conv_bias", (shared,)))
        fused = (("in_proj.weight", projections, 2, None), ("conv1d.weight", conv, 1, 1), ("conv1d.bias", biases, 1, None))
        for name, pieces, place, axis in fused:
            yield TensorMap(f"{theirs}.{name}", pieces, axis, by_group=(pieces[place][0], mamba.n_groups))
        for parameter in ("A_log", "D", "dt_bias"):
            yield one(f"{theirs}.{parameter}", f"{ours}.{parameter}", heads)
        yield one(f"{theirs}.norm.weight", f"{ours}.norm.weight", inner)
        yield one(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", width, inner)
