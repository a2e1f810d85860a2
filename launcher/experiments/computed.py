"""Figures that follow from a run's settings: parameters, State, memory. Torch-free."""

import math

from baton.launcher.experiments.cells import Trial
from baton.launcher.experiments.config import Measure
from baton.launcher.planner.memory import Arithmetic

GIB = 1 << 30


def figure(measure: Measure, trial: Trial) -> float:
    """See ExperimentConfig.measure. Raises ConfigError if model.vocab_size is not known."""
    config, arithmetic = trial.config, Arithmetic(trial.config)
    if measure == "parameters":
        return arithmetic.parameter_count / 1e6
    if measure == "memory":
        return arithmetic.memory().peak / GIB
    model, tokens, numbers = config.model, config.training.sequence_length, 0
    for layer in model.layers:
        for name in layer:
            for leaf in model.mixers[name].all_state(model.d_model):
                if leaf.grad and not leaf.name.rpartition(".")[2].startswith("conv"):
                    numbers += math.prod((tokens, *leaf.shape[1:]) if leaf.grows else leaf.shape)
    return numbers / model.n_layers
