"""`baton eval`: prepared data in windows of any length, and tasks of lm-evaluation-harness, compared with lm_eval's own backend."""

import json
import math
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
import yaml
from support.gone_rank import ended
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import baton
from baton.launcher import evaluate_model
from baton.launcher.cli import main
from baton.launcher.cli.evaluate import check_evaluations
from baton.training.evaluation import generation, long_context_scores, prompts, windows
from baton.training.monitoring import evaluation_tensorboard

TEXTS = ["def main(args):\n    return 0\n", "import os, sys\n", "class A:\n    x = 1\n\n    def f(self):\n        return self.x\n"]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluated(place, tmp_path, *words):
    out = tmp_path / "found.jsonl"
    out.unlink(missing_ok=True)
    assert main(["eval", str(place), "--device", "cpu", "--out", str(out), *words]) == 0
    (row,) = rows_of(out)
    return row


@pytest.fixture
def here(inputs, monkeypatch):
    monkeypatch.chdir(inputs.run.parent)  # where the run's tokenizer is
    return inputs


def test_data_is_scored_as_training_scores_it(here, undisturbed, tmp_path, capsys, monkeypatch):
    """On its own validation set the loss of `baton eval` without --data; a longer window in pieces; and of an exported folder."""
    own = evaluated(undisturbed, tmp_path)
    found = evaluated(undisturbed, tmp_path, "--data", str(here.shards), "--tokens", "600", "--by-position")
    assert (found["step"], found["length"], found["split"]) == (own["step"], 32, "validation")
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(own["bits_per_byte"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    of_positions = found["by_position"]
    assert [one["from"] for one in of_positions] == [1, 2, 4, 8, 16, 32]
    assert sum(one["labels"] for one in of_positions) == found["tokens"]
    assert sum(one["loss"] * one["labels"] for one in of_positions) == pytest.approx(found["loss"] * found["tokens"])

    words = "--data", str(here.elsewhere), "--split", "train", "--tokens", "900", "--length", "150", "--batch", "2"
    whole = evaluated(undisturbed, tmp_path, *words)
    monkeypatch.setattr(windows, "SCORED_TOKENS", 80)
    pieces = evaluated(undisturbed, tmp_path, *words)
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    parts = evaluated(undisturbed, tmp_path, *words, "--ranks", "2", "--by-position")
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert {name: parts[name] for name in ("tokens", "documents")} == {name: whole[name] for name in ("tokens", "documents")}
    assert sum(one["labels"] for one in parts["by_position"]) == parts["tokens"]
    assert main(["export", str(undisturbed), "--out", str(tmp_path / "out")]) == 0
    exported = evaluated(tmp_path / "out", tmp_path, *words)
    assert exported["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert "step" not in exported
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "out"), "--data", str(here.shards)]) == 2
    assert "does not say the length of training; give --length" in capsys.readouterr().err


def test_a_run_that_names_no_tokens_is_evaluated_on_as_many_as_in_training(here, undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    text = (run / "config.yaml").read_text()
    assert "\n    tokens: 600\n" in text
    (run / "config.yaml").write_text(text.replace("\n    tokens: 600\n", "\n    tokens: null\n"))
    of_training = evaluated(run, tmp_path, "--data", str(here.shards), "--tokens", str(10 * 128 // 10))
    assert evaluated(run, tmp_path)["loss"] == pytest.approx(of_training["loss"], rel=1e-6)


def test_a_process_that_is_ended_leaves_no_row(here, undisturbed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_model, "_share", ended)
    out = tmp_path / "rows.jsonl"
    assert main(["eval", str(undisturbed), "--device", "cpu", "--data", str(here.shards), "--ranks", "2", "--out", str(out)]) == 1
    assert capsys.readouterr().err == "baton: a process was ended, maybe for lack of memory; give fewer --ranks\n"
    assert not out.exists()


def test_loss_by_position_is_that_of_tokens_seen_before(here, undisturbed, tmp_path):
    """Of whole documents in one window, against each document's logits alone."""
    from baton.data_pipeline.dataset import Dataset
    from baton.data_pipeline.evaluation import evaluation_batches

    loaded = baton.load(undisturbed, device="cpu")
    row = evaluated(undisturbed, tmp_path, "--data", str(here.shards), "--length", "4000", "--tokens", "1500", "--by-position")
    chosen = evaluation_batches(
        Dataset.open(str(here.shards)), loaded.tokenizer, sequence_length=4000, micro_batch_size=1, max_tokens=1500, data_rank=0,
        data_size=1,
    )  # fmt: skip
    sums = {}
    for batch in chosen.batches:
        tokens, labels, pos = (torch.from_numpy(x[0]) for x in (batch.tokens, batch.labels, batch.pos))
        starts = [*(pos == 0).nonzero()[:, 0].tolist(), len(pos)]
        for first, last in pairwise(starts):
            with torch.no_grad():
                losses = -torch.log_softmax(loaded(tokens[None, first:last])[0][0].double(), dim=-1)
            for place, label in enumerate(labels[first:last].tolist()):
                if label >= 0:
                    bucket = sums.setdefault(1 << ((place + 1).bit_length() - 1), [])
                    bucket.append(float(losses[place, label]))
    found = {one["from"]: (one["loss"], one["labels"]) for one in row["by_position"]}
    assert found.keys() == sums.keys()
    for first, expected in sums.items():
        assert found[first] == (pytest.approx(sum(expected) / len(expected), rel=1e-5), len(expected))


def test_tensorboard_shows_the_results_of_a_run(here, undisturbed, tmp_path, capsys):
    """By the step of the checkpoint; a place that cannot be written is said, and the row is there."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    (tmp_path / "text.txt").write_text("".join(TEXTS) * 20)
    assert main(["eval", str(run), "--device", "cpu", "--data", str(here.shards), "--tokens", "200", "--by-position"]) == 0
    words = ["--text", str(tmp_path / "text.txt"), "--lengths", "300", "--depths", "2", "--samples", "1"]
    assert main(["eval", str(run), "--device", "cpu", "--long-context", "niah_single", *words]) == 0
    one, two = rows_of(run / "evaluations.jsonl")
    events = EventAccumulator(str(run / "tensorboard" / "evaluations")).Reload()
    shown = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    name = f"{here.shards.name}.validation"
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert shown[f"{name}/{key}"] == [(one["step"], pytest.approx(one[key], rel=1e-6))]
    assert shown[f"{name} by position/from_0000004"] == [(one["step"], pytest.approx(one["by_position"][2]["loss"], rel=1e-6))]
    mean = sum(score["score"] for score in two["long_context"]) / 2
    assert shown["niah_single/300_tokens"] == [(two["step"], pytest.approx(mean))]

    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("")
    capsys.readouterr()
    assert main(["eval", str(run), "--device", "cpu", "--data", str(here.shards), "--tokens", "200"]) == 0
    assert "TensorBoard does not show this row (" in capsys.readouterr().err
    assert len(rows_of(run / "evaluations.jsonl")) == 3


def test_the_metrics_of_tasks_have_the_tasks_names():
    row = {"step": 5, "tasks": {"some_task": {"acc,none": 0.5, "acc_stderr,none": 0.1}}, "shots": None}
    assert dict(evaluation_tensorboard.scalars(row)) == {"some_task/acc": 0.5, "some_task/acc_stderr": 0.1}


def test_questions_about_long_texts(here, undisturbed, tmp_path, capsys, monkeypatch):
    """Scores are of the texts that are generated: here by a model, and by one that finds what lies in the last third."""
    (tmp_path / "text.txt").write_text("".join(TEXTS) * 60)
    words = ["--long-context", "niah_single,qa1", "--text", str(tmp_path / "text.txt"), "--lengths", "700,400", "--depths", "3"]
    words += ["--samples", "2"]
    row = evaluated(undisturbed, tmp_path, *words)
    kinds = [(one["task"], one["length"], one["depth"]) for one in row["long_context"]]
    needles = [("niah_single", n, depth) for n in (400, 700) for depth in (0.0, 0.5, 1.0)]
    assert kinds == [*needles, ("qa1", 400, None), ("qa1", 700, None)]
    assert all(0 <= one["score"] <= 1 and one["samples"] == 2 for one in row["long_context"])
    assert (tmp_path / f"long_context-step-{row['step']:08d}.png").read_bytes().startswith(b"\x89PNG")

    tokenizer = baton.load(undisturbed, device="cpu").tokenizer

    def answer(_, prompts, **words):
        found = []
        for ids in prompts:
            text = tokenizer.decode(np.array(ids[1:]))
            number = re.search(r"The number of the .+ is (\d+)\.", text)
            late = number is None or number.start() > len(text) / 3 * 2
            found.append(tokenizer.encode(f" {number[1]}, I think" if number and late else " nowhere").tolist())
            assert words["tokens"] > len(found[-1]) / 2
        return found

    monkeypatch.setattr(long_context_scores, "generate", answer)
    scores = {(one["task"], one["depth"]): one["score"] for one in evaluated(undisturbed, tmp_path, *words)["long_context"]}
    assert scores == {("niah_single", 0.0): 0, ("niah_single", 0.5): 0, ("niah_single", 1.0): 1, ("qa1", None): 0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["niah"], "--long-context: niah: no such task; there are niah_single, "),
        (["qa1"], "give a file of it with --text"),
        (["qa1", "--text", "nowhere.txt"], "--text: nowhere.txt: cannot be read (No such file or directory)"),
        (["qa1", "--text", "binary.txt"], "--text: binary.txt: byte 1 is not UTF-8"),
        (["qa1", "--text", "empty.txt"], "--long-context: no text in it; give other --lengths, or another --text"),
        (["qa1", "--text", "text.txt", "--lengths", "10"], "a length of 9 tokens has no room for what is asked"),
        (["qa1", "--text", "text.txt", "--lengths", "1k"], "--lengths: '1k' is not a number of tokens"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_long_texts_that_cannot_be_made_are_one_line(words, said, here, undisturbed, tmp_path, capsys, monkeypatch):
    for name, content in (("binary.txt", b"a\xff"), ("empty.txt", b"\n"), ("text.txt", b"Some text. And more.")):
        (here.run.parent / name).write_bytes(content)
    out = tmp_path / "found.jsonl"
    assert main(["eval", str(undisturbed), "--device", "cpu", "--out", str(out), "--long-context", *words]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


# ------------------------------------------------------------------------------------------------------------------------ lm_eval

CHOICE = {
    "task": "local_choice", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
ROLLING = {
    "task": "local_text", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip
WRITING = {
    "task": "local_writing", "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{target}}",
    "generation_kwargs": {"until": ["\n", "ret"], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """A random Mamba of transformers with a tokenizer, and a folder of three tasks."""
    import datasets
    import tokenizers
    import transformers

    root = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(TEXTS * 4, trainer)
        torch.manual_seed(5)
        config = transformers.MambaConfig(
            hidden_size=32, num_hidden_layers=2, vocab_size=tokenizer.get_vocab_size(), state_size=5, use_mambapy=False,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model = transformers.MambaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(root / "model")
        tokenizer.save(str(root / "model" / "tokenizer.json"))
        (root / "tasks").mkdir()
        g = torch.Generator().manual_seed(0)

        def cut():
            text = TEXTS[int(torch.randint(3, (1,), generator=g))]
            at = int(torch.randint(1, len(text) - 1, (1,), generator=g))
            return text[:at], text[at:]

        rows = []
        for n in range(12):
            (question, target), others = cut(), [cut()[1] for _ in range(3)]
            question = question.rstrip() if n % 3 else question
            rows.append(
                {"question": question or "x", "target": target, "choices": [target, *others], "answer": 0, "text": target * 3}
            )
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(root / "rows.jsonl")}}, "test_split": "test"}
        for task in (CHOICE, ROLLING, WRITING):
            (root / "tasks" / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **where}))
        (root / "tasks" / "no_field.yaml").write_text(
            yaml.safe_dump({**CHOICE, **where, "task": "no_field", "doc_to_choice": "{{choice}}"})
        )
        where["dataset_kwargs"] = {"data_files": {"test": str(root / "none.jsonl")}}
        (root / "tasks" / "no_data.yaml").write_text(yaml.safe_dump({**CHOICE, **where, "task": "no_data"}))
        yield root, model, tokenizer


@pytest.fixture(scope="module")
def theirs(harness):
    """lm_eval's backend for transformers."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    _, model, tokenizer = harness
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    return HFLM(pretrained=model, tokenizer=fast, batch_size=1, device="cpu")


@pytest.mark.long
def test_tasks_have_the_numbers_of_lm_evals_own_backend(harness, theirs, tmp_path, capsys):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    root, *_ = harness
    names = ["local_choice", "local_text", "local_writing"]
    words = ["--tasks", ",".join(names), "--include", str(root / "tasks"), "--batch", "5"]
    found = evaluated(root / "model", tmp_path, *words)["tasks"]
    manager = TaskManager(include_path=str(root / "tasks"))
    expected = simple_evaluate(theirs, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=False)["results"]
    for name in names:
        numbers = {key: x for key, x in expected[name].items() if isinstance(x, int | float) and "stderr" not in key}
        assert numbers, name
        for key, value in numbers.items():
            assert found[name][key] == pytest.approx(value, rel=1e-5), (name, key)
    assert 0 < found["local_choice"]["acc,none"] < 1, "neither all nor nothing"


def test_requests_are_answered_as_lm_evals_own_backend_answers_them(harness, theirs, monkeypatch):
    """Scores, whether greedy decoding gives a continuation, and text, request by request; shared contexts, in small pieces."""
    from lm_eval.api.instance import Instance

    from baton.training.evaluation import lm_harness

    root, *_ = harness
    monkeypatch.setattr(lm_harness, "SCORED_TOKENS", 7)
    monkeypatch.setattr(prompts, "PREFILL_TOKENS", 7)
    ours = lm_harness.HarnessModel(baton.load(root / "model", device="cpu"), batch=5)

    def ask(kind, *arguments):
        return [Instance(kind, {}, one, n) for n, one in enumerate(arguments)]

    contexts = ["", "def main(", "import os ", "class A:\n    x = 1\n\n    def f(self):"]
    pairs = ask("loglikelihood", *((c, x) for c in contexts for x in (" self", "\n    return self.x\n" * 3, "0")))
    for a, b in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True), strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-5)
        assert a[1] == b[1]
    context = ours.tok_encode("import os")
    likely = generation.generate(
        ours.loaded.model, [context], tokens=4, vocab_size=ours.loaded.vocab_size, stop=None, sampling=generation.Sampling(0)
    )[0]
    for ids, same in ((likely, True), ([*likely[:2], likely[3] ^ 1], False)):
        found = [one._loglikelihood_tokens([(("a", "b"), context, ids)], disable_tqdm=True)[0] for one in (ours, theirs)]
        assert [greedy for _, greedy in found] == [same, same]
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    texts = ask("loglikelihood_rolling", *((text,) for text in TEXTS))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-5)
    for options in (
        {"until": ["\n"], "max_gen_toks": 9},
        {"until": ["e", "ab"], "max_tokens": 20},
        {"until": [], "max_new_tokens": 5},
    ):
        asked = ask("generate_until", *((context, options) for context in contexts[1:]))
        assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True), options


def test_samples_are_of_their_request_whatever_is_beside_it(harness):
    from lm_eval.api.instance import Instance

    from baton.training.evaluation.lm_harness import HarnessModel

    root, *_ = harness
    loaded, options = baton.load(root / "model", device="cpu"), {"until": [], "max_gen_toks": 6, "temperature": 1.0}
    asked = [Instance("generate_until", {}, (context, options), n) for n, context in enumerate(["x"] * 4 + ["import os"])]
    found = [HarnessModel(loaded, batch).generate_until(asked) for batch in (2, 5)]
    assert found[0] == found[1]
    assert len(set(found[0][:4])) > 1, "a temperature without do_sample samples, as in lm_eval"


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        pytest.param(
            ["--tasks", "no_such_task"], "--tasks: no_such_task: no such task; see `lm-eval ls tasks`", marks=pytest.mark.long
        ),
        (["--tasks", "local_text", "--include", "/nowhere"], "--include: /nowhere: not a folder"),
        (["--tasks", "no_data", "--include", "tasks"], "--tasks no_data: lm_eval cannot use them (FileNotFoundError: "),
        (["--tasks", "no_field", "--include", "tasks"], "lm_eval cannot use them (UndefinedError: 'choice' is undefined); correct"),
        (["--data", "/nowhere", "--length", "8"], "/nowhere"),
        (["--by-position"], "--by-position has no effect without --data; give --data, or leave it out"),
        (["--data", "/nowhere", "--limit", "8"], "--limit has no effect without --tasks; "),
        (["--tasks", "x", "--plot", "a.png"], "--plot has no effect without --long-context; "),
    ],
)
def test_what_is_not_there_is_one_line(words, needle, harness, capsys, monkeypatch):
    root, *_ = harness
    monkeypatch.chdir(root)
    assert main(["eval", str(root / "model"), "--device", "cpu", *words]) == 2
    err = capsys.readouterr().err
    assert needle in err.splitlines()[-1]
    assert not (root / "model" / "evaluations.jsonl").exists()


def test_without_lm_eval_the_way_to_it_is_said(harness, monkeypatch, capsys):
    import sys

    root, *_ = harness
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(root / "model"), "--tasks", "x"]) == 2
    assert "is not installed; pip install 'baton-lm[eval]'" in capsys.readouterr().err


REFUSED = {
    "arc_easy": "unrecognized arguments: arc_easy",
    "--batch 0": "argument --batch: 0 is not positive",
    "--tasks arc_easy --data here": "argument --data: not allowed with argument --tasks",
    "--text 'a book": "No closing quotation",
    "--help": "it asks for help, and evaluates nothing",
    "--length 131072": "--length has no effect without --data; give --data, or leave it out",
    "--step 3": "--step is the new checkpoint's; leave it out",
    "--data no/where": "no/where: no such file or folder",
    "--long-context needle --text away.txt": "away.txt: no such file or folder",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_an_evaluation_job_could_not_do_is_refused_with_the_run(line, here, capsys):
    """Not hours later, when there is a checkpoint."""
    words = ["jobs.evaluate=true", f"jobs.evaluations={json.dumps(['', line])}"]
    assert main(["submit", str(here.run), *words, "--cluster", "sandbox", "--dry-run"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"baton: jobs.evaluations: {line!r}: ")
    assert REFUSED[line] in said


@pytest.mark.parametrize("place", ["https://data.example.org/pg19", "pipe:cat /data/{}"])
def test_data_from_elsewhere_is_not_looked_for_when_a_run_is_submitted(place, here):
    check_evaluations(["", f"--data '{place}' --length 64"])
