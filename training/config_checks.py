"""Checks of training settings that need the model's settings too: long evaluation rows, and the vocabulary. Torch-free."""

from pathlib import Path

from baton.models.config import ModelConfig, padding_to_rows
from baton.training.config import TrainingConfig
from baton.training.errors import RunError


def check_long_evaluation(model: ModelConfig, training: TrainingConfig, ranks: int, *, documents: bool) -> None:
    """Refuse long-context evaluation without documents, or in segments too short for a mixer. Raises RunError.

    ranks: context ranks that share a sequence. documents: whether the run reads documents.
    """
    evaluation = training.evaluation
    asked = {
        "training.evaluation.long_tokens": ("a segment", training.segment if evaluation.long_tokens else 0),
        "training.evaluation.gradient_reach_segment_length": ("it", evaluation.gradient_reach_segment_length),
    }
    for setting, (what, tokens) in asked.items():
        if not evaluation.every or not tokens:
            continue
        if not documents:
            raise RunError(f"{setting}: a synthetic task has no documents; set it to 0, and add a longer case to data.cases")
        if tokens % ranks:
            raise RunError(
                f"{setting}: {what} has {tokens} tokens, which layout.context={ranks} does not divide; make it a multiple"
            )
        for name, mixer in model.mixers.items():
            if tokens // ranks < (tail := mixer.longest_tail):
                raise RunError(
                    f"{setting}: {what} leaves {tokens // ranks} tokens to a rank, and model.mixers.{name} passes on the last "
                    f"{tail}; make it {ranks * tail} tokens or more, or set {setting}=0"
                )


def with_vocabulary(config: ModelConfig, vocab_size: int, tokenizer: Path | str | None) -> ModelConfig:
    """The model's settings with the vocabulary of the tokenizer, or (None) of the synthetic task that the run reads.

    Raises RunError when they name different sizes.
    """
    if config.vocab_size not in (None, vocab_size):
        where, whose = ("the task", "the task's") if tokenizer is None else (f"the tokenizer {tokenizer}", "the tokenizer's")
        rows, kept = config.padded_vocab_size, ""
        if vocab_size <= rows and (padding := padding_to_rows(vocab_size, rows, config.pad_vocab_to)) != config.pad_vocab_to:
            kept = f"; with model.pad_vocab_to={padding} the embedding keeps its {rows} rows"
        raise RunError(
            f"model.vocab_size={config.vocab_size}, but {where} has {vocab_size} tokens; "
            f"set model.vocab_size={vocab_size}, or null to take {whose}{kept}"
        )
    return config.model_copy(update={"vocab_size": vocab_size})
