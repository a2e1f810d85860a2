"""`baton generate`: generates text from a run's newest checkpoint in a single process, whatever layout wrote it."""

import sys
from pathlib import Path

import torch

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.launcher.errors import ConfigError
from baton.launcher.run_directory import read_config
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.training.build import build_model, model_fingerprint
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.shard_boxes import parameter_boxes
from baton.training.checkpoint.store import CheckpointStore
from baton.training.config_checks import with_vocabulary
from baton.training.errors import CheckpointError
from baton.training.evaluation.generation import generate


def generate_text(
    folder: Path, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int, device: str = "auto"
) -> str:
    """Generates text that continues `prompt`. Raises CheckpointError if the run has no valid checkpoint, and ConfigError if it was
    not trained on text."""
    _check_prompt(prompt)
    config = read_config(folder / "config.yaml")
    if not isinstance(config.data, ShardsConfig):
        raise ConfigError(
            f"{folder}: the run learns the synthetic task {config.data.kind}, which has no text to write; give a run on "
            f"data.kind=shards (this one's accuracy is in its metrics.jsonl)"
        )
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod_token)
    model_config = with_vocabulary(config.model, tokenizer.vocab_size, config.data.tokenizer)
    mesh = meshes.initialize(LayoutConfig(), device=meshes.local_device(0, 1, device), rank=0, store=torch.distributed.HashStore())
    try:
        model = build_model(model_config, config.training, mesh.device)
        store = CheckpointStore(folder / "checkpoints", mesh, keep_last=1, say=lambda text: print(text, file=sys.stderr))

        def accept(manifest: Manifest) -> None:
            if manifest.fingerprints.get("model") != model_fingerprint(model_config):
                raise CheckpointError(f"{folder}: the checkpoint is not of the model that config.yaml describes")

        found = store.load_newest(accept, cleanup=False)
        if found is None:
            raise CheckpointError(f"{folder}: no checkpoint yet; train first with `baton train`")
        store.read(found[0], parameter_boxes(model, mesh))
        before = [tokenizer.eod_id, *tokenizer.encode(prompt).tolist()]
        ids = generate(
            model,
            before,
            tokens=tokens,
            vocab_size=tokenizer.vocab_size,
            stop=tokenizer.eod_id,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
    finally:
        meshes.shutdown()
    return tokenizer.continuation(before, ids)


def _check_prompt(prompt: str) -> None:
    """Raises ConfigError for a prompt that was not UTF-8 on the command line; Python passes invalid bytes on as lone surrogates."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        byte, position = ord(prompt[error.start]), len(prompt[: error.start].encode("utf-8"))
        what = f"byte 0x{byte - 0xDC00:02x}" if 0xDC80 <= byte <= 0xDCFF else f"the lone surrogate U+{byte:04X}"
        raise ConfigError(
            f"--prompt: {what} at byte {position} is not UTF-8; give the text in UTF-8, as `iconv -t UTF-8` makes it"
        ) from None
