"""Checkpoints read by the safetensors library alone, without our reader."""

import json
from pathlib import Path

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
