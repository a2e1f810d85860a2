"""The fingerprint by which a checkpoint knows its model: another model has another, a later version's same model has the same."""

import json
import os
from pathlib import Path
from typing import Literal

import pytest
from support.presets import presets

from baton.models import settings
from baton.models.config import ModelConfig
from baton.models.settings import SMALL_WIDTH, kinds
from baton.training.build import model_fingerprint

KNOWN = Path(__file__).with_name("model_fingerprints.json")


def test_checkpoints_of_shipped_models_can_still_be_resumed():
    """A setting that is new has the default that models had before it. If a model is to become another one, or is new:
    BATON_GOLDEN=1 pytest tests/training/test_model_fingerprint.py, and say so to those who have checkpoints of it."""
    found = {name: model_fingerprint(model) for name, model in presets().items()}
    if os.environ.get("BATON_GOLDEN"):
        KNOWN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(KNOWN.read_text())


def test_a_model_of_before_a_default_changed_has_the_fingerprint_that_it_had():
    small = kinds()["bmojo"].small()

    def fingerprint(fading_norm):
        mixers = {"bmojo": small.model_copy(update={"fading_norm": fading_norm})}
        return model_fingerprint(ModelConfig(d_model=SMALL_WIDTH, n_layers=2, vocab_size=64, pattern=["bmojo"], mixers=mixers))

    # as they were when false was the default
    assert fingerprint(False).startswith("31a66bf285fc066b")
    assert fingerprint(True).startswith("d0faaeed0090a451")


def test_a_kind_of_ones_own_made_of_batons_has_the_fingerprint_that_it_had(monkeypatch):
    """All its settings are in it, also those that mean what they meant once."""
    monkeypatch.setattr(settings, "_KINDS", {**kinds(), **settings._KINDS})

    class Mine(kinds()["bmojo"]):
        kind: Literal["mine"] = "mine"

    def fingerprint(fading_norm):
        mixers = {"mine": {"fading_norm": fading_norm, "head_dim": 4}}
        return model_fingerprint(ModelConfig(d_model=16, n_layers=2, vocab_size=32, pattern=["mine"], mixers=mixers))

    assert fingerprint(False).startswith("cd7e398a2eedfae7")
    assert fingerprint(True).startswith("f12b1f6357a32f90")


def other_value(value):
    """None: there is none that is certainly valid."""
    if isinstance(value, bool):
        return not value
    return (2 * value or 1) if isinstance(value, int | float) else None


@pytest.mark.parametrize("kind", kinds())
def test_another_setting_is_another_model(kind):
    def fingerprint(**changes):
        mixer = kinds()[kind].small().model_copy(update=changes)
        return model_fingerprint(ModelConfig(d_model=SMALL_WIDTH, n_layers=2, vocab_size=64, pattern=[kind], mixers={kind: mixer}))

    small, seen = kinds()[kind].small(), {fingerprint()}
    values = {name: other_value(getattr(small, name)) for name in type(small).model_fields}
    for name, value in values.items():
        if value is not None:
            try:
                found = fingerprint(**{name: value})
            except ValueError:
                continue  # not on its own
            assert found not in seen, name
            seen.add(found)
    assert len(seen) > 1


def test_kinds_under_one_name_and_sizes_are_told_apart():
    def fingerprint(kind="mamba", **changes):
        values = {"d_model": SMALL_WIDTH, "n_layers": 2, "vocab_size": 64, "pattern": ["x"], "mixers": {"x": {"kind": kind}}}
        return model_fingerprint(ModelConfig(**values | changes))

    found = [fingerprint(), fingerprint("longhorn"), fingerprint(n_layers=3), fingerprint(norm_eps=1e-3)]
    found.append(fingerprint(tie_embeddings=False))
    assert len(set(found)) == len(found)
    assert fingerprint(loss_chunk=8) == fingerprint() == fingerprint(norm_eps=ModelConfig.model_fields["norm_eps"].default)
