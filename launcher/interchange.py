"""`baton import` and `baton export`: models in the folders of other libraries, read and written as files.

Nothing is written before everything was read and checked.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.errors import UnknownEodError
from baton.data_pipeline.files import write_atomically
from baton.data_pipeline.sentencepiece_tokenizer import SentencePieceTokenizer
from baton.data_pipeline.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer, tokenizer_files
from baton.data_pipeline.tokenizer_json import as_tokenizer_json, tokenizer_config
from baton.data_pipeline.written_by import by_another, own_version
from baton.launcher.config import IMPORTED
from baton.launcher.errors import ConfigError
from baton.launcher.inputs import with_known_vocabulary
from baton.launcher.model_card import model_card
from baton.launcher.model_folder import INDEXES, check_numbers, read_object, read_tensors
from baton.launcher.run_directory import read_config
from baton.models.config import ModelConfig, padding_to_rows
from baton.models.interchange.conversion import convert
from baton.models.interchange.kinds import check_kinds
from baton.models.interchange.mapping import InterchangeError, to_ours, to_theirs
from baton.models.interchange.registry import family_of_config, family_of_model
from baton.training.checkpoint.tools import newest_whole, whole_weights, write_weights

SHARD_BYTES = 5 << 30
"""Bytes of an exported file at most; larger models are written as several with an index."""

EXPORTED_BY = "baton_version"
"""Key of config.json in Baton's own format: the version that wrote it."""


@dataclass(frozen=True)
class ReadModel:
    """A model in another library's folder. weights: float32, with Baton's names. rows: of the embedding in the file. dtype: that
    most weights are stored in."""

    model: ModelConfig
    weights: dict[str, Tensor]
    rows: int
    dtype: torch.dtype
    library: str


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer: 0 <= id < size. path: its file."""

    path: str
    size: int


def read_model(folder: Path, vocabulary: Vocabulary | None = None) -> ReadModel:
    """Reads a model from another library's folder.

    vocabulary: its tokenizer's. The embedding's rows beyond it are padding: they are read and have no part in the loss.

    Raises ConfigError for a folder that is none, an unknown architecture, tensors that are missing, unknown, of other shapes,
    of other types than DTYPES, or not finite, and for a tokenizer with more ids than the embedding has rows.
    """
    config = read_object(folder / "config.json")
    try:
        check_kinds(config)
        family = family_of_config(config)
        model = ModelConfig.model_validate(family.model(config))
        theirs = read_tensors(folder)
        check_numbers(theirs)
        head, embedding = family.head, theirs.get(family.embedding)
        if model.tie_embeddings and head in theirs and embedding is not None and not torch.equal(theirs[head], embedding):
            raise InterchangeError(f"tie_word_embeddings is true, but {head} is not {family.embedding}")
        ours = to_ours(family.maps(model), theirs, [head] if model.tie_embeddings else [])
        ours = {name: x.float() for name, x in ours.items()}
    except InterchangeError as error:
        raise ConfigError(f"{folder}: {error}{by_another(config.get(EXPORTED_BY))}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}." for part in first["loc"])[:-1]
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{folder}: config.json: {place}{': ' if place else ''}{said}{by_another(config.get(EXPORTED_BY))}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{folder}: config.json: {error}") from None
    assert embedding is not None  # `to_ours` has read it
    if vocabulary is not None:
        require_rows(vocabulary, len(embedding), folder)
        padding = padding_to_rows(vocabulary.size, model.padded_vocab_size, model.pad_vocab_to)
        model = model.model_copy(update={"vocab_size": vocabulary.size, "pad_vocab_to": padding})
    return ReadModel(model, ours, len(embedding), embedding.dtype, family.library)


def require_rows(vocabulary: Vocabulary, rows: int, model: Path) -> None:
    """Raises ConfigError for a tokenizer with ids that a model's embedding has no rows for."""
    if vocabulary.size > rows:
        raise ConfigError(
            f"{model}: the tokenizer {vocabulary.path} has {vocabulary.size} ids, and the embedding has {rows} rows; give the "
            f"model's own tokenizer, or remove the added tokens with ids from {rows} on"
        )


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a model's folder; None where there is none. Raises DataError."""
    return load_tokenizer(folder) if tokenizer_files(folder) else None


def _folder_vocabulary(folder: Path) -> tuple[Vocabulary | None, str]:
    """The ids of a folder's tokenizer, which are known though it may not say which token ends a document; and a remark on it."""
    try:
        tokenizer = folder_tokenizer(folder)
    except UnknownEodError as error:
        remark = "; it does not say which token ends a document: name it with data.eod_token"
        return Vocabulary(error.path, error.vocab_size), remark
    if tokenizer is None:
        return None, ""
    last = max(_added_ids(folder), default=-1)
    remark = f"; tokens added up to id {last} are not in it: save the folder's tokenizer as tokenizer.json to have them"
    return Vocabulary(tokenizer.path, tokenizer.vocab_size), remark if last >= tokenizer.vocab_size else ""


def _added_ids(folder: Path) -> list[int]:
    """Ids that are added to a tokenizer by the files beside it. Raises ConfigError for a file that cannot be read."""
    found: list[int] = []
    if (path := folder / "added_tokens.json").is_file():
        found += [number for number in read_object(path).values() if isinstance(number, int)]
    if (path := folder / "tokenizer_config.json").is_file():
        found += [int(number) for number in read_object(path).get("added_tokens_decoder") or () if str(number).isdecimal()]
    return found


def import_model(
    folder: Path, out: Path, *, to: str | None = None, keep_attention: int = 0, say: Callable[[str], None] = lambda _: None
) -> tuple[ModelConfig, str]:
    """Read a model from another library's folder; write out.yaml, a model's settings for a run file, and out.safetensors, weights
    for training.initial_weights. Returns the settings, and whose format it was.

    to, keep_attention: write a recurrent model instead, and a part of its weights (models.interchange.conversion).
    say: called with a line about the vocabulary, which is that of the folder's tokenizer.

    Raises ConfigError for what `read_model` and a conversion refuse, for files that are there already, and a place that cannot be
    written; DataError for a damaged tokenizer.
    """
    if keep_attention and to is None:
        raise ConfigError(f"--keep-attention 1/{keep_attention} is for a conversion; name the mixer with --to as well")
    if out.name in ("", ".."):
        raise ConfigError(f"--out {out}: names no file; give NAME or FOLDER/NAME")
    weights, section = out.with_name(f"{out.name}.safetensors"), out.with_name(f"{out.name}.yaml")
    if there := [path for path in (weights, section) if os.path.lexists(path)]:
        raise ConfigError(f"{there[0]} is there already; give another name with --out, or delete it")
    vocabulary, remark = _folder_vocabulary(folder)
    read = read_model(folder, vocabulary)
    model, library, weights_of_model = read.model, read.library, read.weights
    if to is not None:
        try:
            model, weights_of_model = convert(model, weights_of_model, to, keep_attention)
        except InterchangeError as error:
            raise ConfigError(f"{folder}: {error}") from None
    text = f"# {library}, read from {folder.resolve().name} {IMPORTED}\n"
    text += yaml.safe_dump(model.model_dump(mode="json"), sort_keys=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out.parent}: cannot be made ({error.strerror}); choose another place") from None
    write_weights(weights_of_model, weights, {"from": library})
    try:
        write_atomically(section, text.encode())
    except Exception:
        weights.unlink()
        raise
    say(_vocabulary_line(read, vocabulary) + remark)
    return model, library


def _vocabulary_line(read: ReadModel, vocabulary: Vocabulary | None) -> str:
    model = read.model
    if vocabulary is None:
        files = " or ".join(TOKENIZER_FILES)
        return f"vocabulary: vocab_size is that of config.json, {model.vocab_size}, because the folder has no {files}"
    name = Path(vocabulary.path).name
    if vocabulary.size == read.rows:
        return f"vocabulary: vocab_size is the {vocabulary.size} ids of {name}, one for each row of the embedding"
    return (
        f"vocabulary: vocab_size is the {vocabulary.size} ids of {name}; pad_vocab_to={model.pad_vocab_to} keeps the embedding's "
        f"{read.rows} rows, the last {read.rows - vocabulary.size} as padding without a part in the loss"
    )


def export_model(
    place: Path, out: Path, *, step: int | None = None, dtype: torch.dtype | None = None, licence: str | None = None
) -> tuple[Path, str]:
    """Write a run's checkpoint as a folder that another library loads; returns the checkpoint and whose format it is.

    Args:
        place: a run directory, or a checkpoint's folder in one.
        out: a folder that does not exist.
        step: of the checkpoint; None: the newest whole one.
        dtype: of the tensors; None: float32. Those that a recurrence needs in float32 stay so.
        licence: of the weights, an SPDX identifier for the model card; None: not stated.

    A model that no other library has is written with the code that reads it (models/interchange/remote).

    Raises ConfigError for mixers that are not Baton's own, a folder that exists, or weights that `dtype` does not have; DataError
    for a tokenizer that cannot be read; CheckpointError where no checkpoint is whole.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; give the name of a new folder")
    checkpoint = newest_whole(place, step)
    run = checkpoint.parent.parent
    config, tokenizer = read_config(run / "config.yaml"), None
    if isinstance(config.data, ShardsConfig):
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod_token)
    model = with_known_vocabulary(config).model
    try:
        weights = whole_weights(checkpoint)
        family = family_of_model(model, weights)
        values = family.config(model)
        theirs = to_theirs(family.maps(model), weights)
    except InterchangeError as error:
        raise ConfigError(f"{run}: {error}") from None
    if dtype is not None:
        theirs = {name: x if family.keeps_float32(model, name) else _rounded(name, x, dtype) for name, x in theirs.items()}
    if family.code():  # another library's formats have their own keys
        values[EXPORTED_BY] = own_version()
    values |= {"torch_dtype": str(dtype or torch.float32).removeprefix("torch."), "use_cache": True}
    if "attention" in family.kinds:
        values["max_position_embeddings"] = config.training.sequence_length
    generation = dict[str, int | None]()
    if tokenizer is not None:
        # a document begins behind the end of the one before. No token pads: transformers would not train its embedding
        generation = {"bos_token_id": tokenizer.eod_id, "eos_token_id": tokenizer.eod_id}
        values |= {**generation, "pad_token_id": None}
    aside = out.with_name(f".{out.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _save(theirs, aside)
        (aside / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (aside / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        _write_tokenizer(tokenizer, aside)
        for name, text in family.code().items():
            (aside / name).write_text(text, encoding="utf-8")
        (aside / "README.md").write_text(model_card(run, checkpoint, model, family.library, licence), encoding="utf-8")
        os.replace(aside, out)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ConfigError(f"{out}: cannot be written ({error.strerror}); choose another place") from None
    return checkpoint, family.library


# ---------------------------------------------------------------------------------------------------------------------- writing


def _rounded(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Raises ConfigError for numbers that only become infinite in a dtype."""
    found = x.to(dtype)
    if not torch.equal(found.isfinite(), x.isfinite()):
        raise ConfigError(f"{name} has numbers up to {x.abs().max():.3g}, which {str(dtype)[6:]} does not have; export in bfloat16")
    return found


def _save(tensors: dict[str, Tensor], folder: Path, limit: int = SHARD_BYTES) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    for name, x in tensors.items():
        if shards[-1] and sum(y.nbytes for y in shards[-1].values()) + x.nbytes > limit:
            shards.append({})
        shards[-1][name] = x
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEXES[0]).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Its own file, and as tokenizer.json, which transformers reads, where that gives the same ids."""
    if tokenizer is None:
        return
    content = Path(tokenizer.path).read_bytes()
    if isinstance(tokenizer, SentencePieceTokenizer):
        (folder / "tokenizer.model").write_bytes(content)
        converted = as_tokenizer_json(tokenizer, content)
    else:
        converted = content.decode()
    if converted is None:
        if tokenizer.eod_token is not None:  # what reads the folder again would take the model's own
            (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": tokenizer.eod_token}) + "\n", encoding="utf-8")
    else:
        (folder / "tokenizer.json").write_text(converted, encoding="utf-8")
        named = tokenizer_config(converted, tokenizer.eod_id)
        (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
