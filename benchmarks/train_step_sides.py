"""The two other sides of train_step.py, each in its own process: the loss of the reference implementations, and other libraries'
models.

The reference side is the same model with the same initial values in float64, for which no Triton kernel of ours is used:
recurrences, norms and loss are PyTorch operators. Other libraries' models get every advantage: bfloat16 weights and moments, no
master copy, batches that are on the GPU already, no gradient clip, no checks, no metrics.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_step_transformer import Transformer

from baton.data_pipeline.packing import Batch
from baton.data_pipeline.run_source import open_source
from baton.launcher.config import RunConfig
from baton.launcher.run_directory import read_config
from baton.models.config import ModelConfig
from baton.models.interchange.family import Family
from baton.models.interchange.registry import FAMILIES
from baton.models.lm import LanguageModel
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.context_parallel import ContextLink
from baton.parallel.param_layout import initialize_parameters
from baton.training.config_checks import with_vocabulary
from baton.training.evaluation.evaluate import forward_segments
from baton.training.run import RunProgress, RunSettings
from baton.training.run_setup import open_stream
from baton.training.step import batch_distribution


def first_step(config: RunConfig, mesh: meshes.Mesh) -> tuple[ModelConfig, list[Batch[Tensor]]]:
    """The resolved model and the micro-batches of the run's first step, as the loop reads them."""
    training, source = config.training, open_source(config.data)
    source.fingerprint(seed=training.seed, lanes=training.lane_count)
    settings = RunSettings(config.folder, config.model, config.data, training, "")
    with open_stream(source, settings, mesh, RunProgress(0, 0, {})) as stream:
        batches = next(batch_distribution.StepReader(stream, mesh, training)).batches
    return with_vocabulary(config.model, source.vocab_size, None), batches


def alone(config: RunConfig) -> meshes.Mesh:
    """A world of this process."""
    device = meshes.local_device(0, 1, config.device)
    return meshes.initialize(LayoutConfig(), device=device, rank=0, store=torch.distributed.HashStore())


@torch.no_grad()
def reference_loss(config: RunConfig, seed: int, mesh: meshes.Mesh) -> float:
    """Nats per label of the run's first step, in float64. seed: of the initial values."""
    settings, batches = first_step(config, mesh)
    segments = config.training.segments
    link = ContextLink(0, [mesh.rank], mesh.device) if segments > 1 else None
    with mesh.device:
        model = LanguageModel(settings, compute_dtype=torch.float64, link=link)
    initialize_parameters(model, seed, 0, 1)
    model.double()
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        parts = (batch.segment(s, segments) for s in range(segments))
        for part, hidden, _ in forward_segments(model, parts, segments, model.forward_context):
            assert hidden is not None
            total += model.loss(hidden, part.labels)
    return float(total) / sum(int(batch.count_labels()) for batch in batches)


def reference_main(config_file: str, found: str, with_other: bool) -> None:
    """Writes {loss, others: with_other: that of another seed's initial values, to see what the comparison can tell apart}."""
    config = read_config(Path(config_file))
    mesh, seed = alone(config), config.training.seed
    others = [reference_loss(config, seed + 1, mesh)] if with_other else []
    Path(found).write_text(json.dumps({"loss": reference_loss(config, seed, mesh), "others": others}))
    meshes.shutdown()


Step = Callable[[Tensor, Tensor], Tensor]
"""Tokens and labels, int64 [B, T], to the mean loss."""


Make = Callable[[ModelConfig, int], tuple[nn.Module, Step]]
"""A model of another library for a model of ours and sequences of a length, on the GPU, and a step's passes."""


def mamba_ssm(model: ModelConfig, sequence_length: int) -> tuple[nn.Module, Step]:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    (own,) = model.mixers.values()
    layer: dict[str, Any] = {name: getattr(own, name) for name in ("d_state", "d_conv", "expand")}
    if own.kind == "mamba2":
        layer |= {"layer": "Mamba2", "headdim": own.head_dim, "ngroups": own.n_groups}  # type: ignore[attr-defined]
    config = MambaConfig(
        d_model=model.d_model,
        n_layer=model.n_layers,
        vocab_size=model.padded_vocab_size,
        ssm_cfg=layer,
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=True,
    )
    theirs = MambaLMHeadModel(config, device="cuda", dtype=torch.bfloat16)
    return theirs, lambda x, y: F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())


def fla_family(model: ModelConfig) -> Family | None:
    """fla's models of the same layers, though constants and bounds that cost nothing may differ."""
    kinds = tuple(model.mixers[name].kind for name in model.layers[0])
    alike = (family for family in FAMILIES if family.library.startswith("flash-linear-attention") and family.kinds == kinds)
    return next(alike, None) if len(set(model.layers)) == 1 else None


def fla(model: ModelConfig, sequence_length: int) -> tuple[nn.Module, Step]:
    """By the config.json that an export of the model would have."""
    import fla.models  # noqa: F401  makes its classes known to transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    family = fla_family(model)
    assert family is not None
    words = {**family.config(model), "vocab_size": model.padded_vocab_size, "use_cache": False}
    config = AutoConfig.for_model(**words, max_position_embeddings=sequence_length)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    # it shifts its labels by itself
    return theirs.train(), lambda x, y: theirs(input_ids=x, labels=x).loss


def compiled_pytorch(model: ModelConfig, sequence_length: int) -> tuple[nn.Module, Step]:
    with torch.device("cuda"):
        theirs = Transformer(model, sequence_length).to(torch.bfloat16)
    loss_of = torch.compile(theirs)
    return theirs, lambda x, y: loss_of(x, y)


def peer_of(model: ModelConfig) -> tuple[str, Make] | None:
    """The other library's model that is ours, with the library's name; None: there is none."""
    kinds = {settings.kind for settings in model.mixers.values()}
    if kinds in ({"mamba"}, {"mamba2"}):
        return "mamba_ssm", mamba_ssm
    if Transformer.has(model):
        return "compiled PyTorch", compiled_pytorch
    return None if fla_family(model) is None else ("fla", fla)


def time_peer(
    make: Make, model: ModelConfig, batch: Batch[Tensor], counts: Sequence[int], warm_up: int, steps: int
) -> dict[str, Any]:
    """{parameters, loss, timed: {number of micro-batches, which are all the same: {seconds: of each timed step, bytes}}}. Raises
    OutOfMemoryError."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    theirs, loss_of = make(model, batch.tokens.shape[1])
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    first, timed = 0.0, {}
    for count in counts:
        seconds = []
        for _ in range(warm_up + steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            total = torch.zeros((), device="cuda")
            for _ in range(count):
                loss = loss_of(batch.tokens, batch.labels) / count
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            first = first or float(total)
        timed[count] = {"seconds": seconds[warm_up:], "bytes": torch.cuda.max_memory_allocated()}
    return {"parameters": sum(p.numel() for p in theirs.parameters()), "loss": first, "timed": timed}


def peer_main(config_file: str, found: str, counts: Sequence[int], warm_up: int, steps: int) -> None:
    """Writes what `time_peer` finds, on the run's own first batch, with tokens: of a sequence, the run's or the longest half,
    quarter, ... that fits; or {absent: why}."""
    config = read_config(Path(config_file))
    if not torch.cuda.is_available():
        Path(found).write_text(json.dumps({"absent": "it needs a GPU"}))
        return
    mesh = alone(config)
    model, (batch, *_) = first_step(config, mesh)
    found_peer = peer_of(model)
    assert found_peer is not None
    tokens, result = config.training.sequence_length, None
    while result is None:
        try:
            result = time_peer(found_peer[1], model, batch, counts, warm_up, steps) | {"tokens": tokens}
        except ImportError as error:
            result = {"absent": " ".join(str(error).split())}
        except torch.cuda.OutOfMemoryError:
            tokens //= 2
            if tokens < 1024:
                result = {"absent": "out of memory at any length"}
        gc.collect()
        torch.cuda.empty_cache()
        batch = Batch(*(x[:, :tokens].contiguous() for x in (batch.tokens, batch.labels, batch.pos)))
    Path(found).write_text(json.dumps(result))
    meshes.shutdown()
