"""`baton export` of a real run: transformers loads it and computes the same, and a new run begins with it."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.compare import relative_error
from support.runs import published

from baton.data_pipeline.tokenizer import load_tokenizer
from baton.launcher.cli import main
from baton.launcher.errors import ConfigError
from baton.launcher.interchange import _rounded
from baton.training.monitoring.metrics import read_metrics


def test_an_exported_run_is_the_runs_model_and_a_new_run_begins_with_it(inputs, undisturbed, launch, tmp_path, capsys, monkeypatch):
    import transformers

    monkeypatch.chdir(inputs.run.parent)  # where the run's tokenizer is

    assert main(["export", str(undisturbed), "--out", str(tmp_path / "out")]) == 0
    assert "in the format of transformers, MambaForCausalLM" in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "out").iterdir()}
    of_tokenizer = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json"}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "README.md"} | of_tokenizer
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == inputs.tokenizer.read_bytes()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    end = load_tokenizer(inputs.tokenizer).eod_id
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (read.bos_token_id, read.eos_token_id) == (end, end)
    text = "def main(args):\n    return 0  # \u8a9e \U0001f680\n\n\nclass A:\n\tx = 1\n"
    assert read(text, add_special_tokens=False)["input_ids"] == load_tokenizer(inputs.tokenizer).encode(text).tolist()
    assert read.decode(read(text)["input_ids"]) == text
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id, theirs.config.pad_token_id) == (end, end, None)
    assert theirs.generation_config.eos_token_id == end

    # a run of one step that changes nothing, exported again
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "start")]) == 0
    values = inputs.settings()
    values["model"] = str(tmp_path / "start.yaml")
    values["training"] |= {"initial_weights": str(tmp_path / "start.safetensors"), "steps": 1, "schedule": {"kind": "constant"}}
    values["training"] |= {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "evaluation": {"every": 0}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    ended = launch(tmp_path / "run", str(tmp_path / "run.yaml"), where=tmp_path).end()
    assert ended.status == 0, ended.err
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)

    words = ("--dtype", "bfloat16", "--licence", "Apache-2.0")
    assert main(["export", str(undisturbed), "--out", str(tmp_path / "low"), *words]) == 0
    low = load_file(tmp_path / "low" / "model.safetensors")
    kept = {name.partition(".mixer.")[2] for name, x in low.items() if x.dtype == torch.float32}
    assert kept == {"A_log", "D", "dt_proj.bias"}
    tokens = torch.randint(300, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "low", dtype=torch.float32).eval()
        assert relative_error(again(tokens).logits, theirs(tokens).logits) <= 2e-2
    assert json.loads((tmp_path / "low" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_card_says_what_was_trained_and_what_to_cite(inputs, undisturbed, tmp_path, monkeypatch):
    """As the Hub's library reads it; of a checkpoint before the last, what was known then."""
    from huggingface_hub import ModelCard

    monkeypatch.chdir(inputs.run.parent)
    for step, licence in ((None, None), (min(published(undisturbed)), "Apache-2.0")):
        out = tmp_path / f"{step}"
        words = [] if step is None else ["--step", str(step), "--licence", licence]
        assert main(["export", str(undisturbed), "--out", str(out), *words]) == 0
        card = ModelCard.load(out / "README.md")
        assert card.data.license == (licence and licence.lower())
        assert (card.data.library_name, card.data.tags) == ("transformers", ["baton", "mamba"])
        rows = [row for row in read_metrics(undisturbed / "metrics.jsonl") if step is None or row["step"] <= step]
        losses = [row["loss"] for row in rows if row["kind"] == "train"]
        mean = sum(losses) / len(losses)
        assert f"| training loss | {mean:.4f} nats a token, mean of the last {len(losses)} steps |" in card.text
        found = [row for row in rows if row["kind"] == "evaluation"]
        assert found
        assert f"{found[-1]['loss']:.4f} nats a token, {found[-1]['bits_per_byte']:.4f} bits a byte" in card.text
        assert f"| step | {losses and rows[-1]['step']:,} of " in card.text
        assert "Gu & Dao 2023" in card.text
        assert ("Licence: not stated" in card.text) == (licence is None)


def test_a_model_that_no_other_library_has_takes_its_code_with_it(inputs, launch, remote_code, tmp_path, capsys, monkeypatch):
    """A run of a hybrid, in bfloat16; what was exported begins a new run as any imported model does."""
    import transformers

    monkeypatch.chdir(inputs.run.parent)
    values = inputs.settings()
    longhorn, attention = {"d_state": 4, "dt_rank": 3}, {"head_dim": 8, "window": 16}
    values["model"] |= {"pattern": ["longhorn", "attention"], "mixers": {"longhorn": longhorn, "attention": attention}}
    values["training"] |= {"steps": 1, "schedule": {"kind": "constant"}, "evaluation": {"every": 0}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    ended = launch(tmp_path / "run", str(tmp_path / "run.yaml"), where=inputs.run.parent).end()
    assert ended.status == 0, ended.err
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "trust_remote_code" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype="auto")
    assert theirs.embedding.weight.dtype == torch.bfloat16
    found = theirs.generate(torch.tensor([[3, 5, 8]]), max_new_tokens=4, do_sample=False)
    assert found.shape[0] == 1
    assert 4 <= found.shape[1] <= 7
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "start")]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "ours.safetensors")]) == 0
    one, two = load_file(tmp_path / "start.safetensors"), load_file(tmp_path / "ours.safetensors")
    assert one.keys() == two.keys()
    assert torch.equal(one["layers.0.longhorn.mixer.beta_bias"], two["layers.0.longhorn.mixer.beta_bias"])


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--step", "7"], "no checkpoint of step 7; `baton checkpoint list` shows what is there"),
        (["--out", "RUN"], "exists; give the name of a new folder"),
    ],
)
def test_refusals_are_one_line(undisturbed, tmp_path, capsys, words, needle):
    words = [str(undisturbed) if word == "RUN" else word for word in words]
    out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
    assert main(["export", str(undisturbed), *out, *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_whose_tokenizer_is_gone_is_refused_by_it(undisturbed, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["tokenizer"] = "gone.model"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "cannot read the tokenizer gone.model: No such file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_numbers_that_a_dtype_does_not_have_are_not_exported():
    x = torch.tensor([1.0, -7e4])
    assert torch.equal(_rounded("w", x, torch.bfloat16), x.bfloat16())
    with pytest.raises(ConfigError, match=r"w has numbers up to 7e\+04, which float16 does not have; export in bfloat16"):
        _rounded("w", x, torch.float16)
