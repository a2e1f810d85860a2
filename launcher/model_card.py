"""README.md of an exported model: what the run's files say of it, in the form of the Hugging Face Hub's model cards."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from baton.launcher.config import RunConfig
from baton.launcher.run_directory import read_config
from baton.models.config import ModelConfig
from baton.training.checkpoint.manifest import Manifest
from baton.training.monitoring.metrics import read_metrics

LAST_STEPS = 100
"""Training losses that are averaged."""


def model_card(run: Path, checkpoint: Path, model: ModelConfig, library: str, licence: str | None) -> str:
    """library: whose format the folder has. licence: of the weights, an SPDX identifier; None: not stated."""
    manifest, config = Manifest.read(checkpoint), read_config(run / "config.yaml")
    kinds = list(dict.fromkeys(settings.kind for settings in model.mixers.values()))
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", f"tags: [baton, {', '.join(kinds)}]"]
    front += ([] if licence is None else [f"license: {licence.lower()}"]) + ["---"]
    table = [("step", f"{manifest.step:,} of {config.training.steps:,}"), ("tokens", f"{manifest.tokens:,}")]
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] <= manifest.step]
    table += [*_losses(rows), *_settings(config)]
    stated = f"{licence}." if licence is not None else "not stated; to be filled in by whoever publishes it."
    return "\n".join(
        [
            *front,
            f"# {config.name}",
            "",
            f"A language model of {model.n_layers} layers of {', '.join(kinds)}, d_model {model.d_model}, vocabulary "
            f"{model.vocab_size}, trained with {_baton()}. Its format is that of {library}.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in table),
            "",
            f"Licence: {stated}",
            "",
            "Intended use and limitations: to be filled in by whoever publishes it.",
            "",
            "## To be cited",
            "",
            *(f"- {name}: {said}" for name, said in _sources(model).items()),
            "",
        ]
    )


def _losses(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Up to the checkpoint's step. rows: of metrics.jsonl."""
    found = list[tuple[str, str]]()
    losses = [row["loss"] for row in rows if row.get("kind") == "train"][-LAST_STEPS:]
    if losses:
        found += [("training loss", f"{sum(losses) / len(losses):.4f} nats a token, mean of the last {len(losses)} steps")]
    for row in [row for row in rows if row.get("kind") == "evaluation" and row.get("bits_per_byte") is not None][-1:]:
        said = f"{row['loss']:.4f} nats a token, {row['bits_per_byte']:.4f} bits a byte"
        found += [("validation loss", f"{said}, after {row['step']:,} steps")]
    return found


def _settings(config: RunConfig) -> list[tuple[str, str]]:
    data, training = config.data.model_dump(mode="json"), config.training
    return [
        ("sequence length", f"{training.sequence_length:,}"),
        ("data", str(data.get("path") or ", ".join(data.get("sources") or {}) or data.get("kind"))),
        ("optimizer", f"AdamW, peak learning rate {training.optimizer.lr:g}, {training.schedule.kind} schedule"),
        ("layout", ", ".join(f"{name} {size}" for name, size in config.layout.sizes().items())),
    ]


def _sources(model: ModelConfig) -> dict[str, str]:
    """What the layers are, with the papers they are from, by kind: the first paragraphs of their settings' descriptions."""
    described = {settings.kind: (type(settings).__doc__ or "").partition("\n\n")[0] for settings in model.mixers.values()}
    return {kind: " ".join(text.split()) for kind, text in described.items()}


def _baton() -> str:
    try:
        return f"Baton {version('baton-lm')}"
    except PackageNotFoundError:  # run from a folder of its source
        return "Baton"
