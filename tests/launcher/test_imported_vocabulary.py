"""The vocabulary of an imported model is its tokenizer's; the embedding's further rows are padding. Tokenizers with more ids than
rows are refused, wherever a model and a tokenizer meet."""

import json
import shutil

import pytest
import sentencepiece
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.interchange import HEADS, SIZES, logits_of, ours_of, transformers_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import baton
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.launcher.cli import main
from baton.launcher.errors import ConfigError
from baton.launcher.interchange import _save, _write_tokenizer
from baton.models.config import ModelConfig, padding_to_rows
from baton.models.interchange.mapping import to_theirs
from baton.models.interchange.registry import family_of_model
from baton.models.weight_shapes import weight_shapes
from baton.training.config_checks import with_vocabulary
from baton.training.errors import RunError

ROWS = 64
MODELS = {
    "mamba": ("Mamba", {"state_size": 4}),
    "qwen3, a head of its own": ("Qwen3", {**HEADS}),
    "qwen3, tied": ("Qwen3", {**HEADS, "tie_word_embeddings": True}),
}


def tokenizer_json(folder, ids, special=("<|endoftext|>",)):
    """A word for each id, and special tokens from 0 on. ids: those that there are, with holes or without."""
    words = {f"w{number}": number for number in ids if number >= len(special)}
    made = Tokenizer(models.WordLevel({**{name: number for number, name in enumerate(special)}, **words}, unk_token="w9"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path):
    """Of transformers' Mamba with 64 rows, without a tokenizer."""
    return saved(tmp_path, *MODELS["mamba"])


def saved(tmp_path, name, changes, rows=ROWS):
    theirs = transformers_model(name, **changes)
    if rows != SIZES["vocab_size"]:
        theirs.resize_token_embeddings(rows)
    theirs.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def imported(folder, tmp_path, capsys):
    """The settings, and the line about the vocabulary. What an earlier import wrote is deleted."""
    for suffix in ("yaml", "safetensors"):
        (tmp_path / f"ours.{suffix}").unlink(missing_ok=True)
    assert main(["import", str(folder), "--out", str(tmp_path / "ours")]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("vocabulary: "))
    return ModelConfig.model_validate(yaml.safe_load((tmp_path / "ours.yaml").read_text())), line


def refused(words, capsys):
    """The one line of a command that is refused."""
    capsys.readouterr()  # transformers has drawn its progress
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


@pytest.mark.parametrize("case", MODELS)
def test_rows_beyond_the_tokenizers_ids_are_padding(case, tmp_path, capsys):
    """The weights are those of an import without a tokenizer; the ids' logits are transformers', and so is the folder `baton.load`
    opens."""
    import transformers

    folder = saved(tmp_path, *MODELS[case])
    imported(folder, tmp_path, capsys)
    whole = load_file(tmp_path / "ours.safetensors")
    tokenizer_json(folder, range(50))
    model, line = imported(folder, tmp_path, capsys)
    assert (model.vocab_size, model.pad_vocab_to, model.padded_vocab_size) == (50, 16, ROWS)
    assert "the 50 ids of tokenizer.json; pad_vocab_to=16 keeps the embedding's 64 rows, the last 14 as padding" in line
    found = load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(found[name], x) for name, x in whole.items())
    tokens = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(0))
    loaded = baton.load(folder, device="cpu")
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits[..., :50]
        assert relative_error(logits_of(ours_of(model, tmp_path / "ours.safetensors"), tokens), expected) <= 1e-5
        assert relative_error(loaded(tokens)[0], expected) <= 1e-5
    of_ids = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loaded.loss(tokens).loss == pytest.approx(float(of_ids), rel=1e-5)


@pytest.mark.parametrize("case", MODELS)
def test_an_export_has_the_ids_rows_and_is_read_again_to_the_bit(case, tmp_path, capsys):
    folder = saved(tmp_path, *MODELS[case])
    tokenizer_json(folder, range(50))
    model, _ = imported(folder, tmp_path, capsys)
    family, theirs = family_of_model(model), load_file(folder / "model.safetensors")
    written = to_theirs(family.maps(model), load_file(tmp_path / "ours.safetensors"))
    assert written.keys() == theirs.keys()
    for name, x in theirs.items():
        assert torch.equal(written[name], x[:50] if name in (family.embedding, family.head) else x), name
    again = tmp_path / "again"
    again.mkdir()
    _save(written, again)
    (again / "config.json").write_text(json.dumps(family.config(model)))
    tokenizer_json(again, range(50))
    twice, line = imported(again, tmp_path, capsys)
    assert "one for each row" in line
    assert twice == model.model_copy(update={"pad_vocab_to": 8})
    back = to_theirs(family.maps(twice), load_file(tmp_path / "ours.safetensors"))
    assert all(torch.equal(back[name], x) for name, x in written.items())


@pytest.mark.parametrize(
    ("ids", "expected", "said"),
    [
        (range(62), (62, 8, 64), "pad_vocab_to=8 keeps the embedding's 64 rows, the last 2 as padding"),
        (range(10), (10, 64, 64), "pad_vocab_to=64 keeps the embedding's 64 rows, the last 54 as padding"),
        (range(64), (64, 8, 64), "the 64 ids of tokenizer.json, one for each row of the embedding"),
        ([*range(12), 60], (61, 8, 64), "the 61 ids of tokenizer.json; pad_vocab_to=8"),  # a hole, as below Llama 3's special ids
    ],
)
def test_the_padding_is_what_gives_the_files_rows(ids, expected, said, folder, tmp_path, capsys):
    tokenizer_json(folder, ids)
    model, line = imported(folder, tmp_path, capsys)
    assert (model.vocab_size, model.pad_vocab_to, model.padded_vocab_size) == expected
    assert said in line


@pytest.mark.parametrize(
    ("rows", "vocab_size", "expected"),
    [(50280, 50277, 8), (151936, 151669, 1187), (152064, 151665, 512), (32064, 32011, 64), (50288, 50277, 16)],
)
def test_the_padding_of_published_models(rows, vocab_size, expected):
    assert padding_to_rows(vocab_size, rows, 8) == expected
    assert ModelConfig(d_model=16, n_layers=1, vocab_size=vocab_size, pad_vocab_to=expected).padded_vocab_size == rows


def test_without_a_tokenizer_the_rows_are_the_vocabulary(tmp_path, capsys):
    """And a run with one that has fewer ids is told which settings keep the rows."""
    model, line = imported(saved(tmp_path, *MODELS["mamba"], rows=61), tmp_path, capsys)
    assert (model.vocab_size, model.pad_vocab_to) == (61, 8)
    assert "that of config.json, 61, because the folder has no tokenizer.model or tokenizer.json" in line
    kept = r"set model\.vocab_size=50,.*; with model\.pad_vocab_to=16 the embedding keeps its 64 rows$"
    with pytest.raises(RunError, match=kept):
        with_vocabulary(model, 50, "t.json")
    with pytest.raises(RunError, match=r"null to take the tokenizer's$"):
        with_vocabulary(model, 58, "t.json")


def test_a_tokenizer_with_more_ids_than_rows_is_refused(tmp_path, capsys):
    """Also where Baton's own padding would have a row for them."""
    folder = saved(tmp_path, *MODELS["mamba"], rows=61)
    for beyond in (61, 63, 70):  # an added token
        tokenizer_json(folder, [*range(50), beyond])
        needle = f"tokenizer.json has {beyond + 1} ids, and the embedding has 61 rows; give the model's own tokenizer, or remove"
        assert needle in refused(["import", str(folder), "--out", str(tmp_path / "out" / "ours")], capsys)
        assert not (tmp_path / "out").exists()
    (tmp_path / "text.txt").write_text("w10 w11 " * 40)
    assert needle in refused(["generate", str(folder), "--prompt", "w10"], capsys)
    assert needle in refused(["eval", str(folder), "--long-context", "all", "--text", str(tmp_path / "text.txt")], capsys)
    shutil.move(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="has 71 ids, and the embedding has 61 rows"):
        baton.load(folder, device="cpu", tokenizer=tmp_path / "tokenizer.json")
    assert baton.load(folder, device="cpu").vocab_size == 61
    for words, needle in (
        (["generate"], "there is no tokenizer, so no text; put the model's tokenizer.model or tokenizer.json there"),
        (["eval", "--long-context", "all", "--text", str(tmp_path / "text.txt")], "no text can be scored; put the model's"),
        (["eval"], "a model's folder has no validation set; give --data SHARDS, --tasks or --long-context"),
    ):
        assert needle in refused([*words, str(folder)], capsys)


@pytest.mark.parametrize(("ids", "padding"), [(None, 16), (70, 16), (75, 16), (60, 40), (40, 80)])
def test_released_files_of_mamba_ssm_have_padded_rows(ids, padding, tmp_path, capsys):
    """Their configuration says 70 tokens, padded to a multiple of 16; all 80 rows have been trained."""
    theirs = transformers_model(*MODELS["mamba"][:1], **MODELS["mamba"][1])
    tensors = {key: x.detach().clone() for key, x in theirs.state_dict().items() if key != "lm_head.weight"}
    embedding = torch.cat((tensors.pop("backbone.embeddings.weight"), torch.randn(19, 32)))
    folder = tmp_path / "released"
    folder.mkdir()
    save_file({**tensors, "backbone.embedding.weight": embedding}, folder / "model.safetensors")
    config = {"d_model": 32, "n_layer": 2, "vocab_size": 70, "ssm_cfg": {"d_state": 4}, "pad_vocab_size_multiple": 16}
    (folder / "config.json").write_text(json.dumps(config))
    if ids is not None:
        tokenizer_json(folder, range(ids))
    model, _ = imported(folder, tmp_path, capsys)
    assert (model.vocab_size, model.pad_vocab_to, model.padded_vocab_size) == (ids or 70, padding, 80)
    assert torch.equal(load_file(tmp_path / "ours.safetensors")["embedding.weight"], embedding)


def test_a_configuration_with_other_rows_than_the_file_is_refused(folder, tmp_path, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    tokenizer_json(folder, range(50))
    needle = "backbone.embeddings.weight has shape (64, 32), and the configuration promises (50, 32)"
    assert needle in refused(["import", str(folder), "--out", str(tmp_path / "ours")], capsys)


@pytest.mark.parametrize(
    ("rows", "needle"),
    [
        (80, "the embedding has 80 rows, and model.vocab_size=61 padded to a multiple of model.pad_vocab_to=8 has 64; "
             "set model.pad_vocab_to=20"),
        (56, "the embedding has 56 rows, and model.vocab_size=61 padded to a multiple of model.pad_vocab_to=8 has 64; it is of"),
        ("x", "the model has no model.embed_tokens.weight (1 such tensors); it is of another model"),
        (64, "it has no tensor layers.0.mamba.mixer.A_log (12 are missing); it is of another model, or set "
             "training.initial_weights={file: ..., missing: initialise}"),
        ("norm.weight", "norm.weight has shape (3,), the model's (16,); it is of another model"),
        (None, "cannot be read as safetensors (No such file or directory); give a file of `baton import`"),
    ],
)  # fmt: skip
def test_initial_weights_of_another_model_are_refused_before_a_run_begins(rows, needle, tmp_path, capsys, monkeypatch):
    """Else the run's directory would be there, with settings that are to be corrected."""
    monkeypatch.chdir(tmp_path)
    if isinstance(rows, int):
        save_file({"embedding.weight": torch.zeros(rows, 16)}, "start.safetensors")
    elif rows is not None:
        names = weight_shapes(ModelConfig(d_model=16, n_layers=1, vocab_size=61))
        other = {"model.embed_tokens.weight": torch.zeros(1)} if rows == "x" else {rows: torch.zeros(3)}
        save_file({name: torch.zeros(shape) for name, shape in names.items()} | other, "start.safetensors")
    values = {
        "name": "run",
        "device": "cpu",
        "model": {"d_model": 16, "n_layers": 1},
        "data": {"kind": "mqar", "length": 32, "pairs": 2, "vocab_size": 61, "cases": []},
        "training": {"initial_weights": "start.safetensors", "steps": 1, "sequence_length": 32, "global_batch_tokens": 64},
    }
    values["training"] |= {"micro_batch_size": 2, "schedule": {"kind": "constant"}, "optimizer": {"lr": 1e-3}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert f"training.initial_weights: start.safetensors: {needle}" in refused(["train", "run.yaml"], capsys)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").touch()
    needle = "model: theirs is a model's folder; `baton import theirs --out NAME` makes a NAME.yaml of it"
    assert needle in refused(["train", "run.yaml", "model=theirs"], capsys)


def test_ids_count_though_no_token_is_known_to_end_a_document(folder, tmp_path, capsys):
    tokenizer_json(folder, range(50), special=("[PAD]", "[SEP]"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 2]}))  # transformers' may be several
    model, line = imported(folder, tmp_path, capsys)
    assert (model.vocab_size, model.pad_vocab_to) == (50, 16)
    assert line.endswith("it does not say which token ends a document: name it with data.eod_token")
    with pytest.raises(DataError, match=r"eos_token of a tokenizer_config\.json beside it \(special tokens: \[PAD\], \[SEP\]\)"):
        baton.load(folder, device="cpu")


def test_a_tokenizer_that_git_lfs_has_not_fetched_is_refused(folder, tmp_path, capsys):
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "run `git lfs pull`" in refused(["import", str(folder), "--out", str(tmp_path / "ours")], capsys)


def test_a_folder_has_one_tokenizer_for_every_command(folder, tmp_path, capsys):
    """Of a SentencePiece model and the tokenizer.json made of it the former, whose ids are its own; but the latter if tokens have
    been added to it. The EOD token is the named one, then config.json's if it is special."""
    words = {"vocab_size": 20, "model_type": "bpe", "hard_vocab_limit": False, "minloglevel": 2, "user_defined_symbols": ["a"]}
    with (folder / "tokenizer.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["abab cab", "bcab ab"] * 9), model_writer=model, **words)
    pieces = load_tokenizer(folder / "tokenizer.model").vocab_size
    tokenizer_json(folder, range(pieces), special=("<unk>", "<s>", "</s>"))
    assert load_tokenizer(folder).path.endswith("tokenizer.model")
    assert load_tokenizer(folder).fingerprint == baton.load(folder, device="cpu").tokenizer.fingerprint
    tokenizer_json(folder, range(pieces + 2), special=("<unk>", "<s>", "</s>"))
    assert load_tokenizer(folder).path.endswith("tokenizer.json")
    assert baton.load(folder, device="cpu").vocab_size == pieces + 2 == imported(folder, tmp_path, capsys)[0].vocab_size
    (folder / "tokenizer.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": pieces + 1}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"0": {"content": "<unk>"}}}))
    assert f"tokens added up to id {pieces + 1} are not in it" in imported(folder, tmp_path, capsys)[1]
    config = json.loads((folder / "config.json").read_text())
    own = load_tokenizer(folder / "tokenizer.model", "</s>").eod_id
    for eos, expected in ((own - 1, own - 1), (own + 1, own), (None, own)):  # <s>; a piece of text; none
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        assert load_tokenizer(folder).eod_id == expected, eos
    for eod_token in (None, "a"):
        shutil.rmtree(tmp_path / "written", ignore_errors=True)
        (tmp_path / "written").mkdir()
        _write_tokenizer(load_tokenizer(folder / "tokenizer.model", eod_token), tmp_path / "written")
        assert not (tmp_path / "written" / "tokenizer.json").exists(), "it has other ids"
        assert load_tokenizer(tmp_path / "written").eod_id == load_tokenizer(folder / "tokenizer.model", eod_token).eod_id
    for name in ("tokenizer.model", "added_tokens.json"):
        (folder / name).unlink()

    config = json.loads((folder / "config.json").read_text())
    for eos, named, expected in ((2, None, 2), (9, None, 0), (2, "<s>", 1), (None, None, 0)):
        tokenizer_json(folder, range(50), special=("<|endoftext|>", "<s>", "<|eot_id|>"))
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named} if named else {}))
        for tokenizer in (load_tokenizer(folder), load_tokenizer(folder / "tokenizer.json"), baton.load(folder).tokenizer):
            assert tokenizer.eod_id == expected, (eos, named)
