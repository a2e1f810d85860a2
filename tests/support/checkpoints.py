"""Checkpoints read by the safetensors library alone, without our reader."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole; an element that no rank wrote would be NaN (of integers: -1)."""
    described = json.loads((checkpoint / "manifest.json").read_text())["manifest"]["tensors"]
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, part in load_file(path).items():
            key, _, offset = name.rpartition("@")
            fill = torch.nan if part.is_floating_point() else part.dtype is not torch.bool and -1
            whole = found.setdefault(key, torch.full(described[key]["shape"], fill, dtype=part.dtype))
            whole[tuple(slice(int(o), int(o) + n) for o, n in zip(offset.split(","), part.shape, strict=True))] = part
    assert found.keys() == described.keys()
    return found


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as another version of Baton may have written it: with a checksum that is its own."""
    body = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": body}))


def make_newer(body: dict[str, Any]) -> None:
    """A manifest of a format that this version does not know."""
    body |= {"format": 3, "lanes": {"0": {"of": "another form"}}, "versions": {"baton-lm": "9.8.7"}}
    del body["cursors"], body["adam_steps"]


def add_unknown_keys(body: dict[str, Any]) -> None:
    """What a later version may add without another meaning of the rest."""
    body |= {"weather": [1, 2], "versions": {**body["versions"], "baton-lm": "9.8.7", "numpy": "9"}}
    for entry in (*body["files"].values(), *body["tensors"].values()):
        entry["compressed"] = None
    body["layout"]["expert"] = 1
    body["fingerprints"]["weather"] = "fine"
