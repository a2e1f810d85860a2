"""The learning rate as a pure function of the step; it has no state to save."""

import math

from baton.training.config import TrainingConfig


def learning_rates(step: int, training: TrainingConfig) -> dict[str, float]:
    """Learning rates of the step-th update: of each pattern of optimizer.lr_overrides, and "" for all other parameters."""
    return {"": learning_rate(step, training)} | {
        pattern: learning_rate(step, training, peak) for pattern, peak in training.optimizer.lr_overrides.items()
    }


def learning_rate(step: int, training: TrainingConfig, peak: float | None = None) -> float:
    """Learning rate of the step-th update, from 0. peak: None for optimizer.lr."""
    schedule, peak = training.schedule, training.optimizer.lr if peak is None else peak
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "cosine":
        span = max(1, training.steps - 1 - schedule.warmup_steps)
        progress = min(1.0, (step - schedule.warmup_steps) / span)
        return schedule.final_lr + (peak - schedule.final_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.kind == "wsd" and step >= training.steps - schedule.decay_steps:
        progress = (step - (training.steps - schedule.decay_steps) + 1) / schedule.decay_steps
        fallen = min(1.0, progress) if schedule.decay_shape == "linear" else math.sqrt(min(1.0, progress))
        return peak + (schedule.final_lr - peak) * fallen
    return peak


def equal_lr_steps(training: TrainingConfig, steps: int) -> float:
    """Number of first steps whose learning rates stay equal if `steps` replaces training.steps; inf: all."""
    schedule = training.schedule
    if schedule.kind == "constant" or steps == training.steps or (schedule.kind == "wsd" and not schedule.decay_steps):
        return math.inf
    if schedule.kind == "wsd":
        return min(steps, training.steps) - schedule.decay_steps
    return schedule.warmup_steps + 1  # the first step after the warm-up has the peak
