"""Making what a run drives: the model with its initial values, AdamW, and the ZeRO engine."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.parallel import zero
from baton.parallel.layout import initialize_parameters
from baton.parallel.mesh import Mesh
from baton.parallel.sequence import SequenceLink
from baton.training.checkpoint.rectangles import create_adam_state
from baton.training.config import TrainingConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """A model, its engine, and the mesh they live on."""

    model: LanguageModel
    engine: Any
    mesh: Mesh


def build(config: ModelConfig, training: TrainingConfig, mesh: Mesh) -> Built:
    """Model, optimizer and engine with the values that (seed, name) give each parameter."""
    model = build_model(config, training, mesh.device, tensor_size=mesh.layout.tensor, link=mesh.link)
    initialize_parameters(model, training.seed, mesh.tensor_rank, mesh.layout.tensor)
    optimizer = torch.optim.AdamW(
        zero.parameter_groups(model, training.optimizer.weight_decay, tuple(training.optimizer.rates)),
        lr=training.optimizer.lr,
        betas=training.optimizer.betas,
        eps=training.optimizer.eps,
        fused=mesh.device.type == "cuda",
    )
    engine = zero.build_engine(model, optimizer, mesh, training.optimizer.clip_norm)
    create_adam_state(engine)
    return Built(model, engine, mesh)


def build_model(
    config: ModelConfig, training: TrainingConfig, device: torch.device, tensor_size: int = 1, link: SequenceLink | None = None
) -> LanguageModel:
    """The model alone, with memory but without values."""
    with device:
        return LanguageModel(
            config,
            tensor_size=tensor_size,
            compute_dtype=DTYPES[training.precision],
            recompute=training.recompute,
            # F.embedding's backward adds in no fixed order on a GPU
            deterministic_embedding=training.deterministic and device.type == "cuda",
            link=link,
        )


def model_fingerprint(config: ModelConfig) -> str:
    """A digest of what the model computes (not of how: loss_chunk is left out)."""
    return hashlib.sha256(config.model_dump_json(exclude={"loss_chunk"}).encode()).hexdigest()


def make_deterministic(training: TrainingConfig) -> None:
    """Refuse kernels whose result varies. Before anything touches the GPU: cuBLAS reads its workspace setting once."""
    import os

    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
