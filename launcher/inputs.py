"""Checks the data and the tokenizer of a run before a folder is created or a process started. Torch-free.

The number of tokens in a text is not known from its size. If it is not certain that there are enough for a batch, the text is
tokenized until there are.
"""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError, StorageError, is_transient
from baton.data_pipeline.file_io import retry_transient
from baton.data_pipeline.packing import check_tokenizer, token_chunks
from baton.data_pipeline.run_source import open_datasets
from baton.data_pipeline.storage import Location
from baton.data_pipeline.tokenizer import Tokenizer, load_tokenizer
from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.models.config import ModelConfig, padding_to_rows
from baton.models.weight_shapes import weight_shapes
from baton.training.checkpoint.weights_format import check_format
from baton.training.config_checks import with_vocabulary
from baton.training.monitoring.wandb_writer import check_wandb

EMBEDDING = "embedding.weight"
"""The embedding in a file of weights."""
DEMO_TOKENIZER = Path("demo/tokenizer.model")
"""The tokenizer of the demo and of experiments with its text."""
BYTES_PER_TOKEN = 16
"""Bytes per token that no corpus exceeds. A text with this many bytes per token of a batch is not tokenized for the check."""


def check_inputs(config: RunConfig) -> None:
    """Checks that the data exists and fits and that needed packages are installed. Raises ConfigError, DataError or RunError."""
    check_wandb(config.training.monitoring.wandb)
    if not isinstance(config.data, ShardsConfig):
        _check_initial_weights(config, with_vocabulary(config.model, config.data.vocab_size, None))
        return  # a synthetic task has no files; its settings are checked with all others
    path = config.data.tokenizer
    if not Path(path).exists():
        makes = "`make demo` makes it" if Path(path) == DEMO_TOKENIZER else "train one with `baton tokenizer train`"
        raise ConfigError(f"data.tokenizer={path}: no such file; {makes}")
    tokenizer = load_tokenizer(path, config.data.eod_token)
    model = with_vocabulary(config.model, tokenizer.vocab_size, path)
    config.model_copy(update={"model": model}).check()
    _check_initial_weights(config, model)
    datasets = open_datasets(config.data)
    for place, dataset in zip(config.data.places.values(), datasets.values(), strict=True):
        check_tokenizer(dataset, tokenizer)
        dataset.require("train")
        if config.training.evaluation.every and "validation" not in dataset.splits:
            raise ConfigError(
                f"the dataset {place} has no documents in its split 'validation'; prepare it with a larger "
                f"validation fraction, or set training.evaluation.every=0"
            )
    wanted = config.training.global_batch_tokens
    found = _tokens(list(datasets.values()), tokenizer, wanted)
    if found < wanted:
        raise ConfigError(
            f"the training documents of {', '.join(config.data.places.values())} have {found:,} tokens, fewer than one batch "
            f"(training.global_batch_tokens={wanted:,}); prepare more, or lower that"
        )


def _check_initial_weights(config: RunConfig, model: ModelConfig) -> None:
    """Raises ConfigError for initial weights of a new run that are no file, or not the model's, whose vocabulary is known."""
    chosen = config.training.initial_weights
    if chosen is None or any(config.folder.glob("checkpoints/step-*/manifest.json")):
        return
    path, missing = (chosen, "refuse") if isinstance(chosen, str) else (chosen.file, chosen.missing)
    try:
        retry_transient(lambda: Path(path).open("rb").close())  # safe_open calls every failure a missing file
        with safe_open(path, framework="numpy") as file:
            check_format(Path(path), file.metadata())
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (OSError, SafetensorError) as error:
        if is_transient(error):
            raise
        reason, what = getattr(error, "strerror", None) or error, "give a file of `baton import` or `baton checkpoint export`"
        raise ConfigError(f"training.initial_weights: {path}: cannot be read as safetensors ({reason}); {what}") from None
    if (wrong := _unlike(found, model, missing)) is not None:
        raise ConfigError(f"training.initial_weights: {path}: {wrong}")


def _unlike(found: dict[str, tuple[int, ...]], model: ModelConfig, missing: str) -> str | None:
    """Why tensors of these names and shapes are not a model's initial weights; None: they are."""
    wanted = weight_shapes(model)
    rows, size, padding = model.padded_vocab_size, model.vocab_size or 0, model.pad_vocab_to
    if (first := found.get(EMBEDDING, (rows,))[:1]) != (rows,):
        there = first[0] if first else 0
        fits = f"set model.pad_vocab_to={padding_to_rows(size, there, padding)}" if size <= there else "it is of another model"
        return (
            f"the embedding has {there} rows, and model.vocab_size={size} padded to a multiple of model.pad_vocab_to={padding} has "
            f"{rows}; {fits}"
        )
    if unknown := sorted(found.keys() - wanted.keys()):
        return f"the model has no {unknown[0]} ({len(unknown)} such tensors); it is of another model"
    if (absent := sorted(wanted.keys() - found.keys())) and missing == "refuse":
        remedy = "set training.initial_weights={file: ..., missing: initialise}"
        return f"it has no tensor {absent[0]} ({len(absent)} are missing); it is of another model, or {remedy}"
    if other := [name for name, shape in found.items() if shape != wanted[name]]:
        return f"{other[0]} has shape {found[other[0]]}, the model's {wanted[other[0]]}; it is of another model"
    return None


def with_known_vocabulary(config: RunConfig) -> RunConfig:
    """The configuration with its task's or tokenizer's vocabulary size. If model.vocab_size is set, no tokenizer is needed.

    Raises ConfigError if the vocabulary size is unknown.
    """
    if not isinstance(config.data, ShardsConfig):
        model = with_vocabulary(config.model, config.data.vocab_size, None)
    elif Path(config.data.tokenizer).exists():
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod_token)
        model = with_vocabulary(config.model, tokenizer.vocab_size, config.data.tokenizer)
    elif config.model.vocab_size is None:
        raise ConfigError(
            f"model.vocab_size is not known, and data.tokenizer={config.data.tokenizer}: no such file; "
            f"set model.vocab_size=N to plan without it"
        )
    else:
        return config
    resolved = config.model_copy(update={"model": model})
    resolved.check()
    return resolved


def missing_inputs(config: RunConfig) -> list[str]:
    """One line for each missing input file. A run can be planned without them, but not started.

    Only local folders are checked: a plan contacts no server and runs no command of a pipe.
    """
    if not isinstance(config.data, ShardsConfig):
        return []
    found = []
    if not Path(config.data.tokenizer).exists():
        found.append(f"data.tokenizer={config.data.tokenizer}: no such file; train one with `baton tokenizer train`")
    for name, place in config.data.places.items():
        if Location(place).folder is None:
            continue
        try:
            Dataset.open(place)
        except (DataError, StorageError) as error:
            found.append(f"{'data.path' if len(config.data.places) == 1 else f'data.sources.{name}'}={place}: {error}")
    return [f"not there yet, so `baton train` would refuse: {line}" for line in found]


def _tokens(datasets: Sequence[Dataset], tokenizer: Tokenizer, wanted: int) -> int:
    """Number of tokens in the training documents including EOD tokens, counted up to `wanted` or slightly more."""
    found = 0
    for dataset in datasets:
        shards = dataset.require("train")
        if all(shard.tokens is not None for shard in shards):
            found += sum((shard.tokens or 0) + shard.documents for shard in shards)
        elif sum(shard.text_bytes for shard in shards) >= BYTES_PER_TOKEN * wanted:
            return wanted
    for dataset in datasets if found < wanted else ():
        if dataset.content != "text":
            continue
        for shard, sample, payload in dataset.samples_short("train"):
            found += 1 + sum(map(len, token_chunks(dataset, tokenizer, shard, sample, payload)))
            if found >= wanted:
                return found
    return found


def read_text(path: Path, option: str) -> str:
    """The text of a file that `option` names. Raises ConfigError for a file that cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path}: byte {error.start} is not UTF-8; give the text in UTF-8") from None
    except OSError as error:
        if is_transient(error):
            raise
        raise ConfigError(f"{option}: {path}: cannot be read ({error.strerror}); give a text file") from None
