"""Small models and batches for distributed tests and their one-process references."""

import re
from functools import cache

import torch

from baton.data_pipeline.packing import Batch
from baton.models.config import ModelConfig
from baton.models.settings import SMALL_WIDTH, kinds
from baton.models.settings.rope_scaling import Llama3Scaling
from baton.training.config import TrainingConfig
from baton.training.optimizer_config import OptimizerConfig, ScheduleConfig

MODEL = ModelConfig(
    d_model=32, n_layers=3, vocab_size=61, pad_vocab_to=4, loss_chunk=16, mixers={"mamba": kinds()["mamba"](d_state=4)}
)
SEQUENCES, SEQUENCE_LENGTH = 8, 24


LLAMA3 = Llama3Scaling(factor=4.0, original_max_position_embeddings=16)
OPTIONS = {
    "bare": {"mamba": {"skip": False, "dt_init": "uniform", "block": "no_gate"}, "longhorn": {"skip": False, "beta_bias": False}},
    "ablated": {
        "mamba": {"selective": ("C",), "A_init": "random", "block": "h3"},
        "gsa": {"gate": "abc"},
        "lattice": {"conv_bias": True},
        "linear_attention": {"normalization": "rms"},
        "hgrn2": {"bounds": "learned", "scale_queries": True},
    },
    "static": {"gsa": {"gate": "data_independent"}},
    "baselines": {"rg_lru": {}, "s4d": {"block": "h3"}, "mamba3": {}},
    "added": {"bmojo": {"add_ssm_output": True, "fading_norm": False}},
    "falcon": {
        "several": {"kind": "mamba3", "mimo_rank": 2, "n_groups": 2},
        "mamba": {"projection_norm_eps": 1e-6, "projection_norm_weights": True},
    },
    "groups": {"mamba2": {"expand": 2, "n_groups": 4}, "gated_delta_net": {"v_heads": 8}, "kda": {"v_heads": 8, "gate_bias": True}},
    "rwkv": {"first": {"kind": "rwkv7", "value_residual": "first"}, "rwkv7": {"value_residual": "later"}, "channel_mix": {}},
    "finch": {"rwkv6": {}, "channel_mix": {"receptance": True}, "mlstm": {}},
    "qwen": {
        "attention": {
            "qkv_bias": True,
            "qk_norm": True,
            "output_gate": True,
            "rope_fraction": 0.7,
            "rope_scaling": LLAMA3,
            "sinks": True,
            "score_soft_cap": 0.5,
        }
    },
    "full_attention": {"attention": {"window": None, "sinks": True, "score_soft_cap": 0.5}, "longhorn": {}},
    "whole": {"attention": {"window": None}},
    "deltas": {"delta_net": {}, "gated_delta_net": {}},
    "decays": {"gla": {}, "retnet": {}},
    "gates": {"gsa": {}, "hgrn2": {}},
    "matrices": {"lattice": {}, "mamba2": {}},
    "t2r": {"gsa": {"feature_map": "identity", "value_activation": None, "output_activation": None}},
}
"""Models with other optional parts than by default: a layer of each mixer, and its settings; kind, where the name is another."""
NORM_EPS = {"rwkv6": 1e-3, "rwkv7": 1e-3}
"""Of models whose heads have a norm. A document's first token reads its value times a small number, of which with the default eps
the norm leaves little but the sign: training would grow a rounding of float32 tenfold a step."""


SHARED = {"hybrid": ("attention", "swiglu"), "full_attention": ("attention",)}
"""Names whose layers, the first and the last of three, have one set of weights."""


def model_of(mixer):
    """A small model of the mixer's `small` settings (`MixerConfig.small`), of two layers, or of one of each in its pattern. "mamba"
    and "hybrid" have three, which two stages share unequally. "hybrid": a layer with several sub-blocks, of which one has two
    mixers, and an untied head. Those in SHARED have three as well. Or a name in OPTIONS."""
    if mixer == "mamba":
        return MODEL
    options = OPTIONS.get(mixer, {})
    pattern = ["mamba|attention+swiglu", "longhorn"] if mixer == "hybrid" else list(options) or [mixer]
    names = [name for entry in pattern for name in re.split(r"[+|]", entry)]
    changes = {"d_model": SMALL_WIDTH, "pattern": pattern, "tie_embeddings": mixer != "hybrid"}
    if mixer != "hybrid":
        changes["n_layers"] = max(2, len(pattern))
    if mixer in SHARED:
        changes |= {"n_layers": 3, "shared": SHARED[mixer]}
    mixers = {
        name: kinds()[options.get(name, {}).get("kind", name)].small().model_copy(update=options.get(name, {})) for name in names
    }
    changes["norm_eps"] = NORM_EPS.get(mixer, MODEL.norm_eps)
    return ModelConfig(**MODEL.model_dump() | changes | {"mixers": mixers})


def training(**changes) -> TrainingConfig:
    """Settings with active gradient clipping and a changing learning rate."""
    values = {
        "steps": 5,
        "sequence_length": SEQUENCE_LENGTH,
        "global_batch_tokens": SEQUENCES * SEQUENCE_LENGTH,
        "micro_batch_size": 2,
        "compute_dtype": "float32",
        "optimizer": OptimizerConfig(lr=3e-3, clip_norm=0.25, eps=1e-6),
        "schedule": ScheduleConfig(kind="cosine", warmup_steps=2),
    }
    return TrainingConfig(**{**values, **changes})


def step_batch(step: int) -> Batch:
    """The global batch of a step: packed documents of different lengths, with a few ignored labels."""
    made = _step_batch(step)
    return Batch(made.tokens.clone(), made.labels.clone(), made.pos.clone())


@cache
def _step_batch(step: int) -> Batch:
    g = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(61, (SEQUENCES, SEQUENCE_LENGTH), generator=g)
    labels = torch.randint(61, (SEQUENCES, SEQUENCE_LENGTH), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.1] = -1
    pos = torch.empty(SEQUENCES, SEQUENCE_LENGTH, dtype=torch.int32)
    for row in range(SEQUENCES):
        at = int(torch.randint(9, (), generator=g))  # the row may begin inside a document
        for t in range(SEQUENCE_LENGTH):
            if torch.rand((), generator=g) < 0.15:
                at = 0
            pos[row, t] = at
            at += 1
    return Batch(tokens, labels, pos)


def micro_batches(
    step: int, data_rank: int, data_size: int, size: int, context_rank: int = 0, sequence_size: int = 1
) -> list[Batch]:
    """A data rank's share of the step's global batch, in micro-batches of `size` sequences, of which a sequence rank has a span."""
    whole = step_batch(step)
    rows = torch.arange(data_rank, SEQUENCES, data_size)
    span = slice(context_rank * SEQUENCE_LENGTH // sequence_size, (context_rank + 1) * SEQUENCE_LENGTH // sequence_size)
    return [Batch(whole.tokens[r, span], whole.labels[r, span], whole.pos[r, span]) for r in rows.split(size)]
