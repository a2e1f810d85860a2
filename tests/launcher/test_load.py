"""`baton.load` opens runs, checkpoints and exported folders; `baton generate` decodes batches of prompts."""

import json
import math
import os
import re

import pytest
import torch
from support.compare import relative_error
from support.snippets import blocks, needs_a_run

import baton
from baton.launcher.cli import main
from baton.launcher.errors import ConfigError
from baton.launcher.generate import generate_text
from baton.models.config import ModelConfig
from baton.models.library import language_model
from baton.training.errors import CheckpointError, RunError
from baton.training.evaluation import loaded_model
from baton.training.evaluation.generation import Sampling, choose, generate
from baton.training.evaluation.prompts import PREFILL_TOKENS

PROMPTS = ["", "def main(", "import os\nimport sys\n\n\nclass A:\n    x = 1\n", "x", "return self"]


@pytest.fixture(scope="module")
def exported(inputs, undisturbed, tmp_path_factory):
    """The undisturbed run as a folder of transformers."""
    folder, before = tmp_path_factory.mktemp("exported") / "out", os.getcwd()
    os.chdir(inputs.run.parent)  # where the run's tokenizer is
    try:
        assert main(["export", str(undisturbed), "--out", str(folder)]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def loaded(undisturbed, inputs, monkeypatch):
    monkeypatch.chdir(inputs.run.parent)
    return baton.load(undisturbed, device="cpu")


def first_step(run):
    """Of the checkpoints that a run has kept."""
    return min(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def plain(loaded, ids):
    """Logits by the module without States, all tokens at once."""
    pos = torch.arange(len(ids), dtype=torch.int32)[None]
    with torch.no_grad():
        return loaded.model.logits(loaded.model(torch.tensor([ids]), pos)[0])[0, :, : loaded.vocab_size]


def test_a_run_a_checkpoint_and_an_exported_folder_are_one_model(undisturbed, exported, loaded):
    import transformers

    ids = [loaded.tokenizer.eod_id, *loaded.tokenizer.encode(PROMPTS[2])]
    newest = sorted((undisturbed / "checkpoints").iterdir())[-1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        for place in (undisturbed, newest, exported):
            found = baton.load(str(place), device="cpu")
            assert relative_error(found(torch.tensor([ids]))[0][0], expected) <= 1e-5, place
            assert found.tokenizer.encode(PROMPTS[2]).tolist() == ids[1:], place
        before = baton.load(undisturbed, device="cpu", step=first_step(undisturbed))
        assert relative_error(before(torch.tensor([ids]))[0][0], expected) > 1e-3


def test_states_go_on_where_the_text_ended(loaded):
    tokens = torch.randint(loaded.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))
    whole, states = loaded(tokens)
    first, between = loaded(tokens[:, :6])
    second, after = loaded(tokens[:, 6:], between)
    assert relative_error(torch.cat((first, second), dim=1), whole) <= 1e-6
    assert torch.equal(states.pos, after.pos)
    with pytest.raises(ValueError, match="give pos"):
        loaded(tokens, dict(between))


def test_the_loss_of_text_is_that_of_its_tokens(loaded, monkeypatch):
    """Also in pieces."""
    text, end = "déf main():\n    pass\n", loaded.tokenizer.eod_id
    ids = [end, *loaded.tokenizer.encode(text), end]
    losses = -torch.log_softmax(plain(loaded, ids[:-1]).double(), dim=-1)[range(len(ids) - 1), ids[1:]]
    monkeypatch.setattr("baton.training.evaluation.loaded_model.SCORED_TOKENS", 5)
    found = loaded.loss(text)
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found.tokens == len(ids) - 1
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / math.log(2) / len(text.encode()))
    assert loaded.loss(ids).loss == pytest.approx(found.loss, rel=1e-6)
    assert loaded.loss(ids).bits_per_byte is None
    with pytest.raises(RunError, match="fewer than two ids"):
        loaded.loss([end])


def test_prompts_of_unequal_length_are_decoded_as_each_alone(loaded):
    """Against all tokens from the start for each further one; whatever else is in the batch, and for samples too."""
    end = loaded.tokenizer.eod_id
    expected = []
    for prompt in PROMPTS:
        ids = [end, *loaded.tokenizer.encode(prompt)]
        start = len(ids)
        while len(ids) < start + 9:
            best = int(plain(loaded, ids)[-1].argmax())
            if best == end:
                break
            ids.append(best)
        expected.append(loaded.tokenizer.continuation(ids[:start], ids[start:]))
    greedy = {"max_new_tokens": 9, "temperature": 0}
    assert loaded.generate(PROMPTS, **greedy) == expected
    assert loaded.generate(PROMPTS[2], **greedy) == [expected[2]]
    assert loaded.generate(PROMPTS, batch_size=2, **greedy) == expected
    assert loaded.generate(PROMPTS, top_p=1e-6, temperature=1.0, max_new_tokens=9) == expected
    samples = loaded.generate(PROMPTS, seed=3, max_new_tokens=9)
    assert loaded.generate(PROMPTS, seed=3, max_new_tokens=9, batch_size=2) == samples
    assert loaded.generate(PROMPTS, seed=4, max_new_tokens=9) != samples
    assert len(set(loaded.generate(["x"] * 6, seed=3, temperature=1.0, max_new_tokens=9))) > 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: give 0"),
        ({"temperature": math.nan}, "temperature=nan: give 0"),
        ({"top_k": -5}, "top_k=-5: give 0"),
        ({"top_p": 0.0}, "top_p=0.0: give a probability"),
        ({"top_p": 1.1}, "top_p=1.1: give a probability"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: give 0"),
        ({"batch_size": 0}, "batch_size=0: give 1"),
        ({"batch_size": -1}, "batch_size=-1: give 1"),
        ({"prompts": b"de"}, "prompts: expected a string or strings, found [100, 101]"),
        ({"prompts": ["def", 3]}, "prompts: expected a string or strings, found ['def', 3]"),
        ({"prompts": 3}, "prompts: expected a string or strings, found [3]"),
    ],
    ids=str,
)
def test_an_argument_that_is_none_is_refused(loaded, wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        loaded.generate(**({"prompts": "def", "max_new_tokens": 2} | wrong))


def test_what_is_nearly_an_argument_is_one(loaded):
    """No tokens and no prompts; temperatures near 0; seeds of any size."""
    assert loaded.generate(["def", ""], max_new_tokens=0) == ["", ""]
    assert loaded.generate([]) == []
    greedy = loaded.generate(PROMPTS, max_new_tokens=9, temperature=0)
    for nearly in (1e-36, 1e-45, 1e-300):
        assert loaded.generate(PROMPTS, max_new_tokens=9, temperature=nearly) == greedy
    assert loaded.generate(PROMPTS, max_new_tokens=9, temperature=1.0, top_p=1e-30) == greedy
    assert loaded.generate((prompt for prompt in PROMPTS), max_new_tokens=9, temperature=0) == greedy
    assert loaded.generate("def", max_new_tokens=9, seed=-1) == loaded.generate("def", max_new_tokens=9, seed=2**64 - 1)
    assert loaded.generate("def", max_new_tokens=9, seed=2**70 + 3) == loaded.generate("def", max_new_tokens=9, seed=3)


def test_ids_outside_the_vocabulary_are_refused(loaded):
    size = loaded.model.vocab_size
    for ids, said in (([1, size], f"id {size} is outside"), ([1, -1], "id -1 is outside")):
        with pytest.raises(ValueError, match=said):
            loaded.loss(ids)
        with pytest.raises(ValueError, match=said):
            loaded(torch.tensor([ids]))
    with pytest.raises(ValueError, match="tokens: no token"):
        loaded(torch.zeros(1, 0, dtype=torch.int64))


@pytest.mark.parametrize("window", [None, 5])
def test_a_state_that_grows_or_is_cut_is_that_of_the_prompt_alone(window, monkeypatch):
    monkeypatch.setattr("baton.training.evaluation.prompts.PREFILL_TOKENS", 8)
    attention = {"kind": "attention", "head_dim": 8, "heads": 2, "window": window}
    values = {"d_model": 16, "n_layers": 2, "vocab_size": 40, "pattern": ["attention"], "mixers": {"attention": attention}}
    model = language_model(ModelConfig(**values))
    prompts = [[1, 2, 3], [1], [4, 5, 6, 7, 8, 9, 10], [7, 7, 7], [1]]
    words = {"tokens": 8, "vocab_size": 40, "stop": None, "sampling": Sampling(0)}
    together = generate(model, prompts, **words)
    assert together == [generate(model, [prompt], **words)[0] for prompt in prompts]
    assert all(len(ids) == 8 for ids in together)
    assert PREFILL_TOKENS > 8


def test_samples_are_of_what_top_k_and_top_p_leave():
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).repeat(400, 1)
    draws = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for sampling, left in ((Sampling(1.0, 0, 0.65), {0, 1}), (Sampling(1.0, 3), {0, 1, 2}), (Sampling(1.0, 0, 0.71), {0, 1, 2})):
        assert set(choose(probabilities.log(), sampling, draws).tolist()) == left, sampling
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400  # each token has its part of the draws, exactly
    for temperature, expected in ((1.0, [160, 120, 80, 40]), (0.5, [213, 120, 54, 13])):
        counts = torch.bincount(choose(probabilities.log(), Sampling(temperature), grid), minlength=4)
        assert counts.tolist() == expected, temperature
    last = torch.tensor([1 - 2**-53] * 400, dtype=torch.float64)
    assert set(choose(probabilities.log(), Sampling(1.0, 2), last).tolist()) == {1}


def test_prompts_from_a_file(undisturbed, inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(inputs.run.parent)
    (tmp_path / "prompts.jsonl").write_text('"x"\n{"prompt": "def main(", "id": 3}\n')
    words = ["--tokens", "6", "--samples", "2", "--batch", "3", "--top-p", "0.9", "--step", str(first_step(undisturbed))]
    assert main(["generate", str(undisturbed), "--prompts", str(tmp_path / "prompts.jsonl"), *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [("x", 0), ("x", 1), ("def main(", 0), ("def main(", 1)]
    calls = []
    monkeypatch.setattr(loaded_model, "generate", lambda *a, **k: (calls.append(k["seeds"]), generate(*a, **k))[1])
    settings = {"tokens": 3, "temperature": 0, "seed": 0, "batch": 2, "device": "cpu"}
    written = generate_text(undisturbed, ["x", "y", "z"], **settings)
    assert [(next(written).prompt, len(calls)) for _ in range(3)] == [("x", 1), ("y", 1), ("z", 2)]
    (tmp_path / "prompts.txt").write_text("x\n")
    assert main(["generate", str(undisturbed), "--prompts", str(tmp_path / "prompts.txt"), *words[:2], *words[6:]]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == rows[0]["text"], "its first sample is that of the batch"


@pytest.mark.parametrize(
    ("text", "name", "needle"),
    [
        (b"{}\n", "a.jsonl", "line 1 is neither a JSON string nor an object with"),
        (b"\xff\n", "a.txt", "byte 0 is not UTF-8"),
        (b"", "a.txt", "no prompt in it; write one a line"),
        (None, "a.txt", "cannot be read (No such file or directory)"),
    ],
)
def test_a_file_without_prompts_is_one_line(text, name, needle, undisturbed, tmp_path, capsys):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    assert main(["generate", str(undisturbed), "--prompts", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert needle in err


def test_places_that_are_no_model_are_refused(undisturbed, exported, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        baton.load(tmp_path)
    with pytest.raises(ConfigError, match="leave step out"):
        baton.load(exported, step=3)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        baton.load(undisturbed, step=3)


@pytest.mark.parametrize("code", [block for block in blocks("python") if needs_a_run(block.values[0])])
def test_examples_that_open_a_run(code, undisturbed, exported, inputs, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my-run").symlink_to(undisturbed)
    (tmp_path / "my-model").symlink_to(exported)
    for path in inputs.run.parent.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})
