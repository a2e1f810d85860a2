"""Custom callbacks: loaded by module path or entry point, called at the documented points, refused with one line."""

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
from support.models import MODEL, training

from baton.data_pipeline.task_config import MqarConfig
from baton.models.config import ModelConfig
from baton.training import loop
from baton.training.callbacks import callback as callbacks
from baton.training.checkpoint.config import CheckpointConfig
from baton.training.errors import RunError
from baton.training.evaluation.config import EvaluationConfig
from baton.training.monitoring.metrics import read_metrics
from baton.training.run import RunSettings

MODULE = """
from baton.training.callbacks.callback import Callback

CALLS = []


class Norms(Callback):
    def __init__(self, context, every):
        self.context, self.every = context, every

    def on_train_start(self, progress):
        CALLS.append(("start", progress.step))

    def after_step(self, progress, result):
        CALLS.append(("step", progress.step))
        if progress.step % self.every == 0:
            squares = sum(float(p.detach().square().sum()) for p in self.context.train_state.model.parameters())
            self.context.metrics.log_scalars(progress.step, progress.tokens, {"norm/parameters": squares**0.5})

    def on_train_end(self, progress):
        CALLS.append(("end", progress.step))


class NoCallback:
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The module `user_callbacks`, importable as an installed one would be."""
    (tmp_path / "user_callbacks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import user_callbacks

    yield user_callbacks
    del sys.modules["user_callbacks"]


def test_a_callback_of_the_run_file_is_called_at_every_hook_and_logs_scalars(single_mesh, tmp_path, module):
    task = MqarConfig(length=12, pairs=2, vocab_size=36)
    config = training(
        sequence_length=12,
        global_batch_tokens=2 * 12,
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=0),
        callbacks={"user_callbacks:Norms": {"every": 2}},
    )
    model = ModelConfig(d_model=16, n_layers=1, pad_vocab_to=4, mixers=MODEL.mixers)
    (tmp_path / "run").mkdir()
    loop.train(RunSettings(tmp_path / "run", model, task, config, "name: test"), single_mesh)
    steps, calls = config.steps, module.CALLS
    assert calls == [("start", 0), *(("step", n) for n in range(1, steps + 1)), ("end", steps)]
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "scalars"]
    assert [row["step"] for row in rows] == list(range(2, steps + 1, 2))
    assert all(row["values"]["norm/parameters"] > 0 for row in rows)


def test_a_callback_is_found_by_its_entry_point(module, monkeypatch):
    entry = importlib.metadata.EntryPoint("norms", "user_callbacks:Norms", callbacks.ENTRY_POINTS)
    monkeypatch.setattr(
        callbacks, "entry_points", lambda group, name=None: [entry] if group == entry.group and name in (None, entry.name) else []
    )
    (made,) = callbacks.load_callbacks({"norms": {"every": 3}}, SimpleNamespace())
    assert type(made) is module.Norms
    assert made.every == 3
    with pytest.raises(RunError, match=r"no package has a callback 'normes' \(entry points baton.callbacks: norms\)"):
        callbacks.load_callbacks({"normes": {}}, SimpleNamespace())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Norms", "no_such_module:Norms cannot be loaded .No module named 'no_such_module'"),
        ("user_callbacks:Norm", "user_callbacks:Norm cannot be loaded .* has no attribute 'Norm'"),
        ("user_callbacks:NoCallback", "user_callbacks:NoCallback is not a subclass of baton.training.callbacks.callback.Callback"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_its_name(module, name, message):
    with pytest.raises(RunError, match=message) as refused:
        callbacks.load_callbacks({name: {}}, SimpleNamespace())
    assert "\n" not in str(refused.value)
