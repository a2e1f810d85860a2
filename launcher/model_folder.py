"""Reads the files of another library's model: config.json, and the weights as model.safetensors, several files with
model.safetensors.index.json, or PyTorch's .bin files.

Files are downloaded, copied and cut off, so that each may hold anything: what is wrong with one is said in a line.
"""

import json
import re
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from baton.data_pipeline.errors import is_transient, unreadable
from baton.data_pipeline.files import LFS_POINTER
from baton.launcher.errors import ConfigError
from baton.models.interchange.mapping import InterchangeError

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of weights that are read."""


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, without two values of one name. Raises ConfigError, and StorageError where it may be read later."""

    def named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
            raise ConfigError(f"{path}: {twice} is there twice; download it again")
        return found

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=named)
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from error
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a folder with config.json and weights") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not an object; download it again")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name. Raises ConfigError for a file that is missing, damaged, or runs code, and for an index that
    is not of its files; StorageError for a file that may be read later."""
    files = next((name for name in SINGLE if (folder / name).exists()), None)
    if files is not None:
        return _file(folder / files)
    index = next((name for name in INDEXES if (folder / name).exists()), None)
    if index is None:
        raise ConfigError(f"{folder}: no weights; none of {', '.join((*SINGLE, *INDEXES))} is there")
    places = read_object(folder / index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) and Path(name).name == name for name in places.values()):
        raise ConfigError(f"{folder / index}: no weight_map from tensors to files of this folder; download it again")
    if missing := sorted({name for name in places.values() if not (folder / name).is_file()}):
        raise ConfigError(f"{folder}: {missing[0]} is missing, which {index} names; download it again")
    tensors = dict[str, Tensor]()
    for name in dict.fromkeys(places.values()):
        found = _file(folder / name)
        if others := [key for key in found if places.get(key) != name]:
            where = places.get(others[0])
            said = f"has it in {where}" if where else "does not name it"
            raise ConfigError(f"{folder / name}: {others[0]} is in this file, and {index} {said}; download all files again")
        if absent := [key for key, where in places.items() if where == name and key not in found]:
            raise ConfigError(f"{folder / name}: no tensor {absent[0]}, which {index} says is there; download all files again")
        tensors |= found
    return tensors


def check_numbers(tensors: dict[str, Tensor]) -> None:
    """Raises InterchangeError for numbers that are no weights, or none in float32."""
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InterchangeError(
                f"{name} is of {str(x.dtype).removeprefix('torch.')}; Baton reads {known}, which are not quantised"
            )
        if x.is_meta or x.layout != torch.strided:
            form = "without its numbers" if x.is_meta else f"a {str(x.layout).removeprefix('torch.')} tensor"
            raise InterchangeError(f"{name} is {form}; save all weights as plain tensors")
        if (others := x.numel() - int(x.float().isfinite().sum())) > 0:
            raise InterchangeError(f"{others} of {x.numel()} values of {name} are not finite; take the weights of an earlier step")


def _file(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ConfigError(
                    f"{path}: the file that Git LFS would put there is not there yet; run `git lfs pull` in its folder"
                )
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the refusal below says it in one line
            found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        # a global that it names is the code; of damaged files, and of pickles of later protocols, PyTorch knows no more than this
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ConfigError(f"{path}: a pickle that would run code ({named[1]}); give safetensors files") from None
        raise ConfigError(
            f"{path}: damaged, or a pickle that would run code; download it again, or give safetensors files"
        ) from None
    except ConfigError:
        raise
    except Exception as error:  # readers of damaged files fail in all ways: with IndexError, KeyError, ...
        if is_transient(error):
            raise unreadable(path, error) from error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{path}: cannot be read ({reason}); download it again") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) and isinstance(x, Tensor) for name, x in found.items()):
        raise ConfigError(f"{path}: not a dictionary of tensors by name; save the model's state_dict alone")
    return found
