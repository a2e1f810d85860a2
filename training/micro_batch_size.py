"""Fits the micro-batch size to a rank's sequences; a smaller size does not change what is learned. Torch-free."""

from baton.parallel.config import divisors
from baton.training.config import TrainingConfig


def fit_micro_batch_size(training: TrainingConfig, data_size: int) -> TrainingConfig:
    """The settings with the largest micro-batch, at most their own, that divides a data rank's sequences in every step.

    data_size: data-parallel ranks. If no size divides, as for a batch that is no multiple of the sequence length, the
    settings are returned unchanged, and `TrainingConfig.check` says why.
    """
    for size in reversed(divisors(training.sequences_per_step // data_size)):
        if size > training.micro_batch_size:
            continue
        candidate = training.model_copy(update={"micro_batch_size": size})
        if all(_divides(settings, data_size) for _, settings in candidate.phases):
            return candidate
    return training


def _divides(training: TrainingConfig, data_size: int) -> bool:
    """Of steps of one length and one batch."""
    tokens_of_rank, rest = divmod(training.global_batch_tokens, data_size)
    tokens_of_pass = training.micro_batch_size * training.sequence_length
    return not rest and tokens_of_pass > 0 and tokens_of_rank % tokens_of_pass == 0
