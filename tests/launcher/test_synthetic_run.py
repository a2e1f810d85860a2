"""Runs on a synthetic task: started, resumed bit-exactly, evaluated case by case, and refused by commands that need text.

One run of two real ranks is made once; what resumes it lives in the pool, whose imports are paid.
"""

import gc
import json
import shutil
from pathlib import Path

import matplotlib.image
import pytest
import torch
import yaml
from support import checkpoints
from support.compare import relative_error
from support.long_form import some
from support.runs import published
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baton.data_pipeline.errors import DataError
from baton.launcher.changes import changes
from baton.launcher.cli import main
from baton.launcher.config import RunConfig, load
from baton.launcher.errors import ConfigError
from baton.launcher.run_directory import open_attempt, read_config
from baton.training.errors import CheckpointError, RunError
from baton.training.monitoring.metrics import read_metrics

STEPS = 8
CASES = ("length-16-pairs-2", "length-40-pairs-4")
RUN = {
    "name": "recall",
    "device": "cpu",
    "model": {"d_model": 16, "n_layers": 2, "pattern": ["mamba"], "mixers": {"mamba": {"d_state": 4}}, "pad_vocab_to": 8},
    "data": {"kind": "mqar", "length": 16, "pairs": 2, "vocab_size": 36, "cases": [{}, {"length": 40, "pairs": 4}]},
    "layout": {"data": 2},
    "training": {
        "steps": STEPS,
        "sequence_length": 32,
        "global_batch_tokens": 256,
        "micro_batch_size": 2,
        "compute_dtype": "float32",
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "constant"},
        "checkpoint": {"every": 2, "keep_last": 4},
        "evaluation": {"every": 4, "tokens": 600},
    },
}


def with_data(**settings):
    return RUN | {"data": RUN["data"] | settings}


@pytest.fixture
def run_file(tmp_path):
    """A function that writes a run file."""

    def write(values=RUN) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture(scope="module")
def undisturbed(launch, tmp_path_factory):
    """The run on two ranks, from its first step to its last in one go; not to be changed."""
    where = tmp_path_factory.mktemp("recall")
    (where / "run.yaml").write_text(yaml.safe_dump(RUN))
    assert launch(where / "run", str(where / "run.yaml"), where=where).end().status == 0
    return where / "run"


def train_in_pool(mesh, folder):
    """What `baton.launcher.worker` does, in a process that lives on; the sentence of a refusal."""
    from baton.training.loop import train
    from baton.training.run import RunSettings

    config = read_config(Path(folder) / "config.yaml")
    settings = RunSettings(
        folder=Path(folder), model=config.model, data=config.data, training=config.training, config_text=config.to_yaml()
    )
    try:
        train(settings, mesh)
    except (CheckpointError, DataError) as error:
        return str(error)
    finally:
        torch.set_deterministic_debug_mode("default")  # the pool serves other tests
        # DeepSpeed's engine imports modules when it is collected, which must not happen in the middle of another import
        gc.collect()


def learned(folder):
    """All rows without what depends on the clock."""
    drop = ("time", "seconds", "data_wait_s", "tokens_per_s", "memory_bytes")
    return [{k: v for k, v in row.items() if k not in drop} for row in read_metrics(folder / "metrics.jsonl")]


def as_if_killed(undisturbed, folder, step):
    """A copy of the run in which no checkpoint after `step` was published; its record is ahead of it, as after a kill."""
    shutil.copytree(undisturbed, folder)
    for later in published(folder):
        if later > step:
            shutil.rmtree(folder / "checkpoints" / f"step-{later:08d}")
    return folder


def tensors(folder):
    """Every tensor of the last checkpoint, whole."""
    return checkpoints.tensors(folder / "checkpoints" / f"step-{STEPS:08d}")


def manifest(folder):
    return json.loads((folder / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())["manifest"]


def test_the_record_has_loss_and_accuracy_of_every_case(undisturbed):
    rows = learned(undisturbed)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, STEPS + 1))
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    assert [row["step"] for row in evaluations] == [4, 8]
    for row in evaluations:
        assert set(row) == {"kind", "step", "tokens", "loss", "accuracy", "cases"}
        assert tuple(row["cases"]) == CASES
        for name in ("loss", "accuracy"):
            assert row[name] == pytest.approx(sum(row["cases"][case][name] for case in CASES) / 2)
        # 600 tokens: 37 examples with 2 labels, 15 with 4
        for case, labels in zip(CASES, (74, 60)):
            right = row["cases"][case]["accuracy"] * labels
            assert right == pytest.approx(round(right), abs=1e-9)


def test_the_record_is_shown_in_words_scalars_and_a_picture(undisturbed, tmp_path):
    last = [row for row in read_metrics(undisturbed / "metrics.jsonl") if row["kind"] == "evaluation"][-1]
    log = (undisturbed / "attempts" / "0001" / "rank-0.log").read_text()
    cases = "  ".join(f"{case} {last['cases'][case]['accuracy']:.2%}" for case in CASES)
    said = f"step {STEPS}  validation loss {last['loss']:.4f} nats/label  accuracy {last['accuracy']:.2%}  ({cases})\n"
    assert said in log
    board = EventAccumulator(str(undisturbed / "tensorboard"))
    board.Reload()
    expected = {f"{name}/{case}": last["cases"][case][name] for case in CASES for name in ("loss", "accuracy")}
    expected |= {f"validation/{name}": last[name] for name in ("loss", "accuracy")}
    for tag, value in expected.items():
        assert [(e.step, e.value) for e in board.Scalars(tag)][-1] == (STEPS, pytest.approx(value)), tag
    assert "validation/bits_per_byte" not in board.Tags()["scalars"]
    assert main(["plot", str(undisturbed), "--out", str(tmp_path / "picture.png")]) == 0
    pixels = matplotlib.image.imread(tmp_path / "picture.png")
    assert 0.5 < (pixels == 1).all(axis=2).mean() < 0.99


def test_a_killed_run_goes_on_bit_for_bit(undisturbed, pool, tmp_path):
    folder = as_if_killed(undisturbed, tmp_path / "run", 2)
    assert pool.run(train_in_pool, str(folder), data=2) == [None, None]
    assert learned(folder) == learned(undisturbed)
    ours, theirs = manifest(folder), manifest(undisturbed)
    assert ours["cursors"] == {str(lane): {"example": 2 * STEPS} for lane in range(8)}
    assert all(ours[name] == theirs[name] for name in ("cursors", "fingerprints", "tokens", "adam_steps"))
    ours, theirs = tensors(folder), tensors(undisturbed)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].isfinite().all() for key in ours)


@pytest.mark.parametrize(
    "layout", some([{"data": 1}, {"context": 2, "pipeline": 2}, {"tensor": 2, "data": 2}], [{"context": 2, "pipeline": 2}]), ids=str
)
def test_another_layout_reads_the_same_examples(undisturbed, pool, tmp_path, layout):
    folder = as_if_killed(undisturbed, tmp_path / "run", 2)
    assert set(pool.run(train_in_pool, str(folder), **layout)) == {None}
    assert manifest(folder)["cursors"] == manifest(undisturbed)["cursors"]
    for ours, theirs in zip(learned(folder), learned(undisturbed), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours.get("consumed") == theirs.get("consumed"), "the same rows, to the bit"
        assert ours.get("accuracy") == pytest.approx(theirs.get("accuracy"))


def test_a_change_of_the_task_is_refused_on_resuming(undisturbed, pool, tmp_path):
    """By the run directory; and by the checkpoint's fingerprint, should somebody edit the directory's own file."""
    values = with_data(pairs=3) | {"training": RUN["training"] | {"seed": 1}, "directory": str(undisturbed)}
    with pytest.raises(ConfigError, match=r"data.pairs: 2 -> 3; training.seed: 0 -> 1\. Use another name"):
        open_attempt(RunConfig.model_validate(values)).__enter__()
    folder = as_if_killed(undisturbed, tmp_path / "run", 2)
    (folder / "config.yaml").write_text(RunConfig.model_validate(with_data(power=0.5) | {"directory": str(folder)}).to_yaml())
    for text in pool.run(train_in_pool, str(folder), data=2):
        assert "was made with another stream" in text


def test_what_is_measured_may_change_on_resuming(undisturbed, pool, tmp_path):
    old, new = (RunConfig.model_validate(values) for values in (RUN, with_data(cases=[{"length": 12}], prefetch=1)))
    assert changes(old, new) == []
    folder = as_if_killed(undisturbed, tmp_path / "run", 6)
    (folder / "config.yaml").write_text(new.model_copy(update={"directory": str(folder)}).to_yaml())
    assert pool.run(train_in_pool, str(folder), data=2) == [None, None]
    before, after = ([row for row in learned(f) if row["kind"] == "train"] for f in (undisturbed, folder))
    assert after == before
    assert list(learned(folder)[-1]["cases"]) == ["length-12-pairs-2"]
    assert main(["plot", str(folder)]) == 0, "cases that came and went"


def test_there_is_no_text_to_generate(undisturbed, capsys):
    assert main(["generate", str(undisturbed)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"baton: {undisturbed}: the run learns the synthetic task mqar, which has no text to write; ")
    assert err.count("\n") == 1


REFUSALS = {
    # words -> what the line must say
    "unknown kind": (["data.kind=mqra"], ["data.kind=mqra", "mqar", "shards"]),
    "misspelt key": (["data.pair=2"], ["unknown key data.pair", "did you mean data.pairs?"]),
    "key of shards": (["data.path=shards"], ["unknown key data.path"]),
    "misspelt key of a case": (["data.cases=[{length: 32}, {pairz: 2}]"], ["data.cases.1.pairz", "did you mean data.cases.1.pair"]),
    "case that cannot be": (["data.cases=[{pairs: 5}]"], ["data", "case 0", "length=16 is too short", "20 tokens"]),
    "too short": (["data.length=7"], ["data", "length=7 is too short", "8 tokens"]),
    "too many pairs": (["data.pairs=18", "data.length=80"], ["pairs=18", "vocab_size=36 has 17"]),
    "sequence_length": (["training.sequence_length=24", "training.global_batch_tokens=192"],
                ["training.sequence_length=24 is not a multiple of data.length=16", "16 and 32",
                 "lengths that fill this one: 8, 12, 24"]),
    "vocabulary": (["model.vocab_size=40"], ["model.vocab_size=40", "the task has 36 tokens", "null to take the task's"]),
    "tensor ranks": (["layout.tensor=3", "model.pad_vocab_to=1"], ["layout.tensor=3 does not divide"]),
}  # fmt: skip


@pytest.mark.parametrize(("words", "needles"), REFUSALS.values(), ids=REFUSALS)
def test_settings_that_cannot_be(run_file, words, needles):
    with pytest.raises((ConfigError, DataError, RunError)) as caught:
        load(run_file(), words)
    assert "\n" not in str(caught.value)
    for needle in needles:
        assert needle in str(caught.value)


def test_a_run_file_without_a_kind_reads_shards(run_file):
    config = load(run_file(RUN | {"data": {"path": "elsewhere"}}))
    assert (config.data.kind, config.data.path) == ("shards", "elsewhere")
    values = {key: value for key, value in RUN.items() if key != "data"}
    assert load(run_file(values)).data.kind == "shards"
    resolved = load(run_file())
    assert RunConfig.model_validate(yaml.safe_load(resolved.to_yaml())) == resolved


VOCABULARY, WIDTH, EXAMPLES = 13, 6, 400


def answers_of_ranks(mesh):
    """What `greedy_tokens` finds on this layout, and the model's own whole logits."""
    from support.models import training

    from baton.models.config import ModelConfig
    from baton.training.build import build_model
    from baton.training.evaluation.evaluate import greedy_tokens

    config = ModelConfig(d_model=WIDTH, n_layers=1, vocab_size=VOCABULARY, pad_vocab_to=8, loss_chunk=64)
    model = build_model(config, training(), mesh.device, mesh)
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(-2, 3, (config.padded_vocab_size, WIDTH), generator=g).float()
    rows[VOCABULARY:] *= 100  # the padding would win nearly always
    share = rows.shape[0] // mesh.layout.tensor
    with torch.no_grad():
        model.embedding.weight.copy_(rows[mesh.tensor_rank * share :][:share])
    hidden = torch.randint(-1, 2, (EXAMPLES, WIDTH), generator=g).float()
    return greedy_tokens(model, hidden, mesh), hidden @ rows[:VOCABULARY].T


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_likeliest_token_is_the_first_of_the_greatest_on_any_layout(pool, tensor):
    """Small integers, so that ties abound, also between ranks."""
    for found, logits in pool.run(answers_of_ranks, tensor=tensor):
        ties = (logits == logits.max(dim=1, keepdim=True).values).sum(dim=1)
        assert (ties > 1).float().mean() > 0.1
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert found.tolist() == expected


def scores_of_ranks(mesh):
    """`score` on this rank's share of an evaluation set, and the same by plain PyTorch on the whole set."""
    from support.models import training

    from baton.data_pipeline.synthetic_stream import synthetic_evaluation_set
    from baton.data_pipeline.task_config import MqarConfig
    from baton.models.config import ModelConfig
    from baton.parallel.param_layout import gather_parameters
    from baton.training.build import build
    from baton.training.evaluation.evaluate import evaluate_task
    from baton.training.step.batch_distribution import distribute

    task = MqarConfig(length=16, pairs=2, vocab_size=12)
    train_state = build(ModelConfig(d_model=16, n_layers=1, vocab_size=12, loss_chunk=5), training(), mesh)

    def batches(data_rank, data_size):
        chosen = synthetic_evaluation_set(
            task, tokens=16 * 21, sequence_length=16, micro_batch_size=2, data_rank=data_rank, data_size=data_size
        )
        return chosen.labels, [distribute(b if mesh.tensor_rank == 0 else None, mesh, b.tokens.shape) for b in chosen.batches]

    labels, own = batches(mesh.data_rank, mesh.layout.data)
    found = evaluate_task(train_state.model, own, labels, mesh)
    weight = gather_parameters(train_state.model, mesh.tensor_group)["embedding.weight"][:12]
    log_p, right, asked = 0.0, 0, 0
    for batch in batches(0, 1)[1]:
        logits = train_state.model(batch.tokens, batch.pos)[0].detach() @ weight.T
        places = batch.labels != -1
        log_p -= torch.log_softmax(logits[places], -1)[range(int(places.sum())), batch.labels[places]].sum().item()
        right += (logits[places][:, :12].argmax(-1) == batch.labels[places]).sum().item()
        asked += int(places.sum())
    return torch.tensor([found.loss, found.accuracy]), torch.tensor([log_p / asked, right / asked]), asked


@pytest.mark.parametrize("layout", [{"data": 1}, {"data": 4}, {"tensor": 2, "data": 2}], ids=str)
def test_loss_and_accuracy_equal_plain_pytorch_on_any_layout(pool, layout):
    for found, expected, asked in pool.run(scores_of_ranks, **layout):
        assert asked == 42
        assert 0 < expected[1] < 1
        assert relative_error(found, expected) <= 1e-6
