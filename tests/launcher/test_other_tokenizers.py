"""A paper's run file, reduced in size, with other projects' tokenizers: it is killed, resumed, and generates text."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from support.forks import NURSERY
from support.runs import DEADLINE_S, kill
from support.tokenizers import MAKERS

from baton.data_pipeline.tokenizer import load_tokenizer
from baton.training.monitoring.metrics import read_metrics

RUN = Path(str(files("baton.configs"))) / "runs/papers/mamba-130m-pile.yaml"
SMALL = (
    "device=cpu", "layout.data=1", "model.d_model=16", "model.n_layers=1", "model.vocab_size=null", "data.unit_documents=4",
    "training.steps=12", "training.sequence_length=32", "training.global_batch_tokens=128", "training.micro_batch_size=2",
    "training.compute_dtype=float32", "training.log_every=1", "training.schedule.warmup_steps=4", "training.checkpoint.every=2",
    "training.evaluation.every=6", "training.evaluation.tokens=400",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name == "llama-3" else pytest.param(name, marks=pytest.mark.long) for name in MAKERS if name != "llama-2-json"],
)
def test_a_run_is_killed_resumed_and_writes(inputs, launch, tmp_path, name):
    make, file, eod_token = MAKERS[name]
    make(tmp_path / file)
    words = (str(RUN), *SMALL, f"data.path={inputs.shards}", f"data.tokenizer={tmp_path / file}")
    words += () if eod_token is None else (f"data.eod_token='{eod_token}'",)  # else YAML's [ ]
    whole = launch(tmp_path / "whole", *words, where=tmp_path)
    running = launch(tmp_path / "killed", *words, where=tmp_path)
    ranks = running.wait_for_steps(1, 4)
    running.freeze_between_checkpoints(ranks)
    kill(ranks)
    assert running.end().status != 0
    resumed, whole = launch(tmp_path / "killed", *words, where=tmp_path).end(), whole.end()
    assert (whole.status, resumed.status) == (0, 0), whole.err + resumed.err
    losses = [[(row["step"], row["loss"]) for row in ended.rows if row["kind"] == "train"] for ended in (whole, resumed)]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, 13))
    assert losses[0][-1][1] < losses[0][0][1], "it learns"
    lossy = load_tokenizer(tmp_path / file, eod_token).lossy
    assert ("the tokenizer is lossy" in (tmp_path / "whole/attempts/0001/rank-0.log").read_text()) == bool(lossy)
    evaluated = [row["bits_per_byte"] for row in read_metrics(tmp_path / "whole/metrics.jsonl") if row["kind"] == "evaluation"]
    assert evaluated
    assert evaluated[0] > evaluated[-1] > 0
    out, err = tmp_path / "out", tmp_path / "err"
    out.touch(), err.touch()
    generate = [json.dumps(["generate", str(tmp_path / "killed"), "--prompt", "def main(", "--tokens", "8"])]
    assert NURSERY.fork("commands", generate, where=tmp_path, out=str(out), err=str(err)).wait(DEADLINE_S) == 0, err.read_text()
    status, text, said = json.loads(next(line for line in out.read_text().splitlines() if line.startswith("[")))
    assert status == 0, said
    assert text.startswith("def main(")
    assert len(text) > len("def main(\n")
