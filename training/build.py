"""Builds what a run drives: the model with its initial values, AdamW, and the ZeRO engine."""

import hashlib
import json
from dataclasses import dataclass

import torch
import torch.distributed as dist

from baton.models import stages
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.models.settings import kinds
from baton.parallel import zero
from baton.parallel.context_parallel import ContextLink, add_gather
from baton.parallel.mesh import Mesh
from baton.parallel.param_layout import initialize_parameters, parameter_count
from baton.parallel.parameter_groups import parameter_groups
from baton.training.adamw import AdamW
from baton.training.config import TrainingConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainState:
    """A model, or this rank's pipeline stage of it, its engine (parameters, optimizer), and the mesh of ranks."""

    model: LanguageModel
    engine: zero.Engine
    mesh: Mesh

    def parameter_count(self) -> int:
        """Parameters of the whole model. Collective over the pipeline stages."""
        count = torch.tensor(parameter_count(self.model), device=self.mesh.device)
        return int(count if self.mesh.pipeline is None else self.mesh.pipeline.sum(count))


def build(config: ModelConfig, training: TrainingConfig, mesh: Mesh) -> TrainState:
    """Model, optimizer and engine, with initial values that are a function of (seed, parameter name)."""
    model = build_model(config, training, mesh.device, mesh)
    initialize_parameters(model, training.seed, mesh.tensor_rank, mesh.layout.tensor)
    settings = training.optimizer
    optimizer = AdamW(
        parameter_groups(model, settings.weight_decay, tuple(settings.lr_overrides), _names_elsewhere(model, mesh)),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=mesh.device.type == "cuda",
    )
    engine = zero.build_engine(model, optimizer, mesh, settings.clip_norm, DTYPES[settings.moments_dtype])
    engine.create_state()
    return TrainState(model, engine, mesh)


def _names_elsewhere(model: LanguageModel, mesh: Mesh) -> list[str]:
    """Names of the parameters of this pipeline's stages."""
    names = [[name for name, _ in model.named_parameters()]] * dist.get_world_size(mesh.model_group)
    if mesh.pipeline is not None:
        dist.all_gather_object(names, names[0], group=mesh.model_group)
    return [name for rank in names for name in rank]


def build_model(config: ModelConfig, training: TrainingConfig, device: torch.device, mesh: Mesh | None = None) -> LanguageModel:
    """The model alone, with memory but without initial values. mesh: None for the whole model on one rank."""
    with device:
        return LanguageModel(
            config,
            tensor_size=1 if mesh is None else mesh.layout.tensor,
            compute_dtype=DTYPES[training.compute_dtype_on(device.type)],
            residual_dtype=DTYPES[training.residual_dtype],
            # auto is chosen before a run starts (launcher.planner.automatic); without a run there is no device to fit
            recompute="none" if training.recompute == "auto" else training.recompute,
            link=None if mesh is None else _link(config, training, mesh),
            stage=None
            if mesh is None
            else stages.partition_layers(config, mesh.layout.pipeline, training.sequence_length)[mesh.pipeline_rank],
            pipeline=None if mesh is None else mesh.pipeline,
            sequence_parallel=mesh is not None and mesh.layout.sequence_parallel,
        )


def _link(config: ModelConfig, training: TrainingConfig, mesh: Mesh) -> ContextLink | None:
    """The links to neighbouring context ranks; a rank that runs segments on its own is its own neighbour."""
    link = mesh.link
    if link is None:
        if training.bptt is None:
            return None
        link = ContextLink(0, [mesh.rank], mesh.device)
    elif any(mixer.state_grows for mixer in config.mixers.values()):
        add_gather(link, mesh.layout)
    link.key_store.offload = training.offload_kv is True
    return link


def model_fingerprint(config: ModelConfig) -> str:
    """SHA-256 of the settings that decide what the model computes. loss_chunk is left out: it does not change results.

    So are settings with their default values, so that checkpoints can be resumed by later versions, which have more settings. Where
    a default is not what models meant once, the settings that mean the same as then are left out.
    """
    values = config.model_dump(mode="json", exclude={"loss_chunk"}, exclude_defaults=True)
    for name, settings in config.mixers.items():
        # of a kind of one's own all settings are there
        for setting, meant in settings.once.items() if settings.kind in kinds() else ():
            value = getattr(settings, setting)
            values["mixers"][name].pop(setting, None)
            values["mixers"][name] |= {} if value == meant else {setting: value}
    named = {name: settings.kind for name, settings in config.mixers.items()}
    return hashlib.sha256(json.dumps([named, values], sort_keys=True).encode()).hexdigest()


def make_deterministic(training: TrainingConfig) -> None:
    """With training.deterministic, make PyTorch refuse kernels whose results vary. Call before any use of the GPU: cuBLAS
    reads its workspace setting only once."""
    import os

    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # as use_deterministic_algorithms(True), which imports Inductor to tell it; it hears of it here if it is ever imported
        torch.set_deterministic_debug_mode("error")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
