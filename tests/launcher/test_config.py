"""The run configuration: strict reading of YAML and key=value arguments into a typed RunConfig, and the learning-rate schedule."""

import json
import re
from importlib.resources import files

import pytest
import yaml

from baton.launcher.changes import changes
from baton.launcher.cli import main
from baton.launcher.config import RunConfig, load
from baton.launcher.errors import ConfigError
from baton.training.config import TrainingConfig
from baton.training.errors import RunError
from baton.training.lr_schedule import learning_rate
from baton.training.micro_batch_size import fit_micro_batch_size


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("training.optimizer.lr=1e-3", "training.optimizer.lr", 1e-3),  # a string, for YAML 1.1
        ("training.optimizer.lr=2.5E-4", "training.optimizer.lr", 2.5e-4),
        ("training.steps=1e3", "training.steps", 1000),
        ("training.lanes=null", "training.lanes", None),
        ("directory=null", "directory", None),
        ("training.optimizer.betas=[0.9, 0.98]", "training.optimizer.betas", [0.9, 0.98]),
        ("training.recompute=full", "training.recompute", "full"),
        ("layout={data: 4, tensor: 1}", "layout.data", 4),
        ("model.mixers.mamba.d_state=8", "model.mixers.mamba.d_state", 8),
        ("data.path=pipe:cat /a=b/{}", "data.path", "pipe:cat /a=b/{}"),
    ],
)
def test_words_are_read_as_yaml(inputs, word, key, value):
    found = load(inputs.run, [word]).model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "word",
    ["training.optimizer.lr=.inf", "training.guard.loss_spike=.inf", "model.norm_eps=.inf", "layout.timeout_s=.inf",
     "training.checkpoint.failures_per_rank_day=.inf", "jobs.hang_timeout_s=.inf"],
)  # fmt: skip
def test_a_number_that_is_not_finite_is_refused(inputs, word):
    with pytest.raises(ConfigError, match=f"{word.split('=')[0]}=inf: Input should be a finite number"):
        load(inputs.run, [word])


def test_the_last_word_on_a_key_counts(inputs):
    assert load(inputs.run, ["training.seed=1", "training.seed=2"]).training.seed == 2


def test_a_named_model_may_be_changed_by_words(inputs, tmp_path):
    values = inputs.settings() | {"model": "mamba-130m"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    config = load(tmp_path / "run.yaml", ["model.n_layers=2"])
    assert (config.model.d_model, config.model.n_layers, config.model.padded_vocab_size) == (768, 2, 50280)
    assert load(inputs.run, ["model=mamba-370m", "model.n_layers=3"]).model.d_model == 1024
    (tmp_path / "mine.yaml").write_text("{d_model: 24, n_layers: 1}")
    assert load(inputs.run, [f"model={tmp_path / 'mine.yaml'}"]).model.d_model == 24


def test_a_model_may_be_a_named_one_with_settings_over_it(inputs, tmp_path):
    values = inputs.settings() | {"model": {"base": "mamba-130m", "vocab_size": None, "n_layers": 3}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    model = load(tmp_path / "run.yaml").model
    assert (model.d_model, model.n_layers, model.vocab_size) == (768, 3, None)
    with pytest.raises(ConfigError, match="did you mean mamba-130m"):
        load(inputs.run, ["model={base: mamba-131m}"])


def test_the_resolved_configuration_reads_back_as_itself(inputs):
    config = load(inputs.run, ["training.optimizer.lr=1e-3", "training.lanes=8"])
    text = config.to_yaml()
    assert RunConfig.model_validate(yaml.safe_load(text)) == config
    assert "beta" in text, "defaults are written out"


def test_what_may_not_change_is_listed_and_what_may_is_not(inputs):
    old = load(inputs.run)
    assert changes(old, old) == []
    free = ["name=other", "directory=/elsewhere", "device=auto", "layout.data=1", "model.loss_chunk=7", "data.prefetch=5"]
    free += ["data.path=/moved", "training.log_every=9", "training.checkpoint.every=3", "training.evaluation.tokens=5"]
    free += ["training.recompute=full", "training.replica_check_every=7", "training.micro_batch_size=1"]
    assert changes(old, load(inputs.run, free)) == []
    fixed = ["training.seed=3", "model.mixers.mamba.d_state=8", "data.unit_documents=2", "training.optimizer.lr=1e-3"]
    assert [str(change) for change in changes(old, load(inputs.run, [*fixed, *free]))] == [
        "data.unit_documents: 4 -> 2",
        "model.mixers.mamba.d_state: 4 -> 8",
        "training.optimizer.lr: 0.01 -> 0.001",
        "training.seed: 0 -> 3",
    ]


def training(**values) -> TrainingConfig:
    return TrainingConfig(**{"steps": 10, "sequence_length": 8, "global_batch_tokens": 96, "optimizer": {"lr": 1.0}, **values})


@pytest.mark.parametrize("data_size", [1, 2, 3, 4, 5, 6, 12, 24])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 5])
def test_sizes_that_a_refusal_names_are_the_ones_that_work(data_size, micro_batch_size):
    """12 sequences per step: a refusal of a size lists every size that would pass the same test, and no other."""

    def problem(data: int, micro: int) -> str:
        try:
            training(micro_batch_size=micro).check(data)
        except RunError as error:
            return str(error)
        return ""

    text = problem(data_size, micro_batch_size)
    assert bool(text) == (12 % data_size != 0 or (12 // data_size) % micro_batch_size != 0)
    if text:
        named = {int(n) for n in re.search(r"\[(.*)\]", text)[1].split(",")}
        if "micro_batch_size" in text:
            assert named == {m for m in range(1, 13) if not problem(data_size, m)}
        else:
            assert text.startswith(f"layout.data={data_size} ")
            assert named == {d for d in range(1, 25) if not problem(d, 1)}


def rates(**schedule) -> list[float]:
    config = training(optimizer={"lr": 0.5}, schedule=schedule)
    return [learning_rate(step, config) for step in range(config.steps)]


def test_the_warm_up_is_linear_and_ends_at_the_peak():
    for kind in ("cosine", "constant", "wsd"):
        assert rates(kind=kind, warmup_steps=4)[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_cosine_falls_from_the_peak_to_its_end_value():
    found = rates(kind="cosine", warmup_steps=4, final_lr=0.1)
    assert found[4] == pytest.approx(0.5)
    assert found[9] == pytest.approx(0.1)
    assert sum(found[4:]) / 6 == pytest.approx(0.3), "it is symmetric about the middle"
    assert found[4:] == sorted(found[4:], reverse=True)
    assert learning_rate(99, training(optimizer={"lr": 0.5}, schedule={"final_lr": 0.1})) == pytest.approx(0.1)


def test_wsd_is_stable_and_then_falls_linearly_to_its_end_value():
    assert rates(kind="wsd", warmup_steps=2, decay_steps=4, final_lr=0.1) == pytest.approx(
        [0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1]
    )
    assert rates(kind="wsd") == [0.5] * 10


def test_wsd_falls_as_one_minus_the_square_root_where_that_is_chosen():
    wsd = {"kind": "wsd", "warmup_steps": 2, "final_lr": 0.1}
    found = rates(decay_steps=4, decay_shape="sqrt", **wsd)
    expected = [0.1 + 0.4 * (1 - (step / 4) ** 0.5) for step in (1, 2, 3, 4)]
    assert found == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5, 0.5, *expected])
    assert rates(decay_steps=4, decay_shape="linear", **wsd) == rates(decay_steps=4, **wsd), "linear is the default"
    assert rates(decay_shape="sqrt", **wsd) == rates(**wsd), "without decay_steps nothing falls"
    with pytest.raises(ValueError, match="decay_shape"):
        rates(decay_steps=4, decay_shape="exponential", **wsd)


def test_settings_of_a_bases_mixers_are_merged_by_name():
    """One setting of one mixer leaves the others as the base has them."""
    run = str(files("baton.configs") / "runs" / "demo.yaml")

    def mixers(*words):
        return load(run, ["model={base: retnet-1.3b, vocab_size: 64}", *words]).model.mixers

    base = mixers()
    assert base["swiglu"].hidden is not None
    changed = mixers("model.mixers.retnet.decay_exponent=4")
    assert changed == base | {"retnet": base["retnet"].model_copy(update={"decay_exponent": 4.0})}
    anew = mixers("model.mixers.retnet={kind: gla, heads: 8}")
    assert anew["retnet"].kind == "gla"
    assert anew["swiglu"] == base["swiglu"]
    other = mixers("model.pattern=[gla+swiglu]", "model.mixers.gla.heads=2")
    assert set(other) == {"gla", "swiglu"}
    assert other["swiglu"] == base["swiglu"]
    with pytest.raises(ConfigError, match=r"mixers\.other is not in pattern"):
        mixers("model.mixers.other={kind: gla, heads: 2}")


def test_settings_of_another_schedule_are_named():
    """`kind: cosine` is the default, so a decay_shape alone changes nothing."""
    run = str(files("baton.configs") / "runs" / "demo.yaml")
    (note,) = load(run, ["training.schedule={kind: cosine, decay_steps: 10, decay_shape: sqrt}"]).notes()
    assert note == "note: training.schedule.decay_steps=10 and decay_shape=sqrt without effect with kind=cosine; it is of kind=wsd"
    assert not list(load(run, ["training.schedule={kind: wsd, decay_steps: 10, decay_shape: sqrt}"]).notes())


def test_a_shared_block_of_one_layer_is_named():
    run = str(files("baton.configs") / "runs" / "demo.yaml")
    changes = ["model.pattern=[mamba, mamba+swiglu]", "model.mixers={}", "model.shared=[mamba, swiglu]"]
    assert list(load(run, [*changes, "model.n_layers=4"]).notes()) == []
    (note,) = load(run, [*changes, "model.n_layers=2"]).notes()
    assert note == "note: model.shared: swiglu without effect, because fewer than two of the layers have it"


def test_constant_is_constant():
    assert rates(kind="constant", warmup_steps=0) == [0.5] * 10


@pytest.mark.parametrize("text", ["[]", "5", "", "just words"])
def test_a_file_without_keys_is_no_run_file(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="expected keys and values"):
        load(tmp_path / "run.yaml")


def test_a_batch_ramp_keeps_the_lanes_and_the_length():
    """Together with shorter sequences, each with its own steps."""
    training = TrainingConfig(
        steps=100,
        sequence_length=64,
        global_batch_tokens=64 * 24,
        micro_batch_size=2,
        batch_size_warmup=[{"steps": 10, "global_batch_tokens": 64 * 12}],
        sequence_length_warmup=[{"steps": 4, "sequence_length": 32}],
        optimizer={"lr": 1e-3},
    )
    training.check(2)
    shapes = [
        (first, at.sequence_length, at.sequences_per_step, at.micro_batch_size, at.lane_count) for first, at in training.phases
    ]
    assert shapes == [(0, 32, 24, 4, 48), (4, 64, 12, 2, 48), (10, 64, 24, 2, 48)]
    with pytest.raises(RunError, match=r"from step 0: layout.data=5 does not divide the 24 sequences"):
        training.check(5)
    short = training.model_copy(update={"steps": 10})
    with pytest.raises(RunError, match=r"training.batch_size_warmup takes 10 steps, all of training.steps=10"):
        short.check(2)


@pytest.mark.parametrize(
    ("words", "given", "cut_to"),
    [
        # the run's step has 2 sequences of 32 tokens on each of 2 data ranks
        (["training.micro_batch_size=3"], 3, 2),
        (["training.micro_batch_size=1000000000"], 1000000000, 2),
        (["training.sequence_length=64"], 2, 1),
        (["layout.data=4"], 2, 1),
    ],
)
def test_a_micro_batch_that_does_not_divide_is_cut_and_said(inputs, capsys, words, given, cut_to):
    config = load(inputs.run, [f"training.micro_batch_size={given}", *words])
    out, err = capsys.readouterr()
    assert config.training.micro_batch_size == cut_to
    assert RunConfig.model_validate(yaml.safe_load(config.to_yaml())) == config
    assert (out, err.count("\n")) == ("", 1)
    assert f"training.micro_batch_size={given} does not divide" in err
    assert err.endswith(f"cut to {cut_to}\n")


def test_a_micro_batch_that_divides_stays_and_nothing_is_said(inputs, capsys):
    assert load(inputs.run, ["training.micro_batch_size=2"]).training.micro_batch_size == 2
    assert capsys.readouterr() == ("", "")


def test_a_cut_micro_batch_fits_every_length_and_batch_of_the_run():
    """The largest that does, by trying all of them against `check`."""
    lengths, batches = [{"steps": 4, "sequence_length": 16}], [{"steps": 10, "global_batch_tokens": 64 * 12}]
    for ramp, warmup, data, given in ((batches, lengths, 2, 9), (batches, [], 4, 5), ([], lengths, 3, 7), ([], [], 1, 25)):
        training = TrainingConfig(
            steps=100, sequence_length=64, global_batch_tokens=64 * 24, batch_size_warmup=ramp,
            sequence_length_warmup=warmup, optimizer={"lr": 1e-3},
            micro_batch_size=given,
        )  # fmt: skip

        def passes(size, training=training, data=data):
            try:
                training.model_copy(update={"micro_batch_size": size}).check(data)
            except RunError:
                return False
            return True

        assert not passes(given)
        fitting = fit_micro_batch_size(training, data)
        assert fitting.micro_batch_size == max(size for size in range(1, given) if passes(size))
    with pytest.raises(RunError, match=r"training\.micro_batch_size=25 does not divide the 24 sequences"):
        training.check(1)


def test_where_no_micro_batch_divides_the_settings_stay():
    for tokens, data in ((100, 1), (64, 3), (16, 1)):
        training = TrainingConfig(
            steps=1, sequence_length=32, global_batch_tokens=tokens, micro_batch_size=4, optimizer={"lr": 1e-3}
        )
        assert fit_micro_batch_size(training, data) == training


SHORT = {
    # settings, the documents' length, and whether B'MOJO's window of 64 tokens is never left
    "a task's examples": ({"data": {"kind": "mqar", "length": 64, "pairs": 8, "vocab_size": 36}}, "data.length=64", True),
    "longer examples": ({"data": {"kind": "mqar", "length": 128, "pairs": 8, "vocab_size": 36}}, "data.length=128", False),
    "a short context": ({"training.sequence_length": 64}, "training.sequence_length=64", True),
    "a longer context": ({}, "training.sequence_length=128", False),
    "a short context whose lanes carry their States": (
        {"training.sequence_length": 64, "training.bptt": {"mode": "truncated", "segment": 64}},
        "training.sequence_length=64",
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "documents", "noted"), SHORT.values(), ids=SHORT)
def test_documents_within_bmojos_window_are_noted_in_the_plan_and_at_the_start(tmp_path, capsys, settings, documents, noted):
    """The start is of a run whose folder belongs to something else, so that it ends there."""
    values = {
        "name": "short",
        "model": {"d_model": 16, "n_layers": 1, "vocab_size": 36, "pattern": ["bmojo"]},
        "training": {"steps": 1, "sequence_length": 128, "global_batch_tokens": 256, "optimizer": {"lr": 1e-3}},
    }
    values["model"]["mixers"] = {"bmojo": {"head_dim": 4, "window": 64, "eidetic": 4}}
    for key, value in settings.items():
        group, _, leaf = key.partition(".")
        if leaf:
            values[group][leaf] = value
        else:
            values[group] = value
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    line = f"note: model.mixers.bmojo with {documents}: its memory is first used 64 tokens after a document's start"
    assert main(["plan", str(path)]) == 0
    assert (line in capsys.readouterr().out) == noted
    assert main(["plan", str(path), "--json"]) == 0
    assert any(note.startswith(line) for note in json.loads(capsys.readouterr().out)["notes"]) == noted
    if "data" in settings:
        assert main(["train", str(path), f"directory={tmp_path}"]) == 2
        assert (line in capsys.readouterr().err) == noted


@pytest.mark.parametrize(
    ("evaluation", "batch", "tokens"),
    [
        ({}, 1 << 19, 1_000_000),
        ({}, 256, 25_600),
        ({"every": 3}, 256, 76),
        ({"every": 1}, 256, 64),
        ({"tokens": 7}, 1 << 19, 7),
        ({"every": 0}, 256, 1_000_000),
    ],
)
def test_an_evaluation_reads_at_most_a_tenth_of_what_is_trained_between_two(evaluation, batch, tokens):
    """A small run on a CPU would otherwise evaluate for minutes behind seconds of training."""
    values = {"sequence_length": 64, "global_batch_tokens": batch, "micro_batch_size": 1, "optimizer": {"lr": 1e-3}}
    for steps in (2, 2000):
        assert TrainingConfig(**values, steps=steps, evaluation=evaluation).evaluation_tokens == tokens
