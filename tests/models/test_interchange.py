"""Models in other libraries' formats: transformers' own random models are imported, compared with theirs, exported, and loaded
again."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.interchange import HEADS, assert_import_is_theirs, logits_of, ours_of, transformers_model

from baton.launcher.cli import main
from baton.launcher.interchange import _save, import_model
from baton.models.config import ModelConfig
from baton.models.interchange.mapping import to_theirs
from baton.models.interchange.registry import FAMILIES, family_of_config, family_of_model

# contexts so short that 19 tokens are further than that, and some of a head's six pairs fast, some slow and some between
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "beta_fast": 2.0, "original_max_position_embeddings": 16}
CASES = {
    "mamba": ("Mamba", {"state_size": 5, "time_step_rank": 3, "use_mambapy": False, "residual_in_fp32": True}),
    "mamba, a head of its own": ("Mamba", {"state_size": 4, "tie_word_embeddings": False}),
    "falcon_mamba": ("FalconMamba", {"state_size": 5, "time_step_rank": 3, "use_mambapy": False, "mixer_rms_eps": 1e-3}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 1, "expand": 2, "chunk_size": 8}),
    "mamba2, tied": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 1, "expand": 2, "chunk_size": 8, "tie_word_embeddings": True},
    ),
    "mamba2, groups": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "expand": 2, "chunk_size": 8}),
    "mamba2, groups, tied": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 4, "expand": 2, "chunk_size": 8, "tie_word_embeddings": True},
    ),
    "llama, grouped heads": ("Llama", {**HEADS, "rope_theta": 500.0, "rms_norm_eps": 1e-4}),
    "llama, tied": ("Llama", {**HEADS, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral, a window": ("Mistral", {**HEADS, "sliding_window": 7, "attn_implementation": "eager"}),
    "mistral": ("Mistral", {**HEADS, "sliding_window": None, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}}),
    "qwen2": ("Qwen2", {**HEADS, "rope_parameters": YARN}),
    "qwen2, tied": ("Qwen2", {**HEADS, "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**HEADS, "rms_norm_eps": 1e-4}),
    "qwen3, tied": ("Qwen3", {**HEADS, "num_key_value_heads": 1, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_imported_model_is_theirs(case, tmp_path):
    """Logits, and the gradients of the embedding and of everything else, by one scalar of all of them."""
    name, changes = CASES[case]
    assert_import_is_theirs(transformers_model(name, **changes), tmp_path)


@pytest.mark.parametrize(
    "case", [case if number % 2 == 0 else pytest.param(case, marks=pytest.mark.long) for number, case in enumerate(CASES)]
)
def test_what_is_written_is_what_was_read_and_loads_there(case, tmp_path):
    """To the bit; as several files; and transformers finds no tensor missing or too many."""
    import transformers

    name, changes = CASES[case]
    theirs = transformers_model(name, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    model, _ = import_model(tmp_path / "theirs", tmp_path / "ours")
    family = family_of_model(model)
    written = to_theirs(family.maps(model), load_file(tmp_path / "ours.safetensors"))
    for key, x in load_file(tmp_path / "theirs" / "model.safetensors").items():
        assert torch.equal(written[key], x), key
    (tmp_path / "again").mkdir()
    _save(written, tmp_path / "again", limit=20_000)
    assert len(list((tmp_path / "again").glob("model-*.safetensors"))) > 1
    config = family.config(model) | {"torch_dtype": "float32"}
    (tmp_path / "again" / "config.json").write_text(json.dumps(config))
    cls = getattr(transformers, f"{name}ForCausalLM")
    loaded, report = cls.from_pretrained(tmp_path / "again", output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative_error(loaded.eval()(tokens).logits, theirs(tokens).logits) <= 1e-6
    assert import_model(tmp_path / "again", tmp_path / "twice")[0] == model
    one, two = (load_file(tmp_path / f"{name}.safetensors") for name in ("ours", "twice"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_pytorchs_own_files_are_read_as_well(tmp_path):
    theirs = transformers_model("Mamba", state_size=4)
    theirs.save_pretrained(tmp_path / "theirs")
    expected, _ = import_model(tmp_path / "theirs", tmp_path / "one")
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "theirs" / "pytorch_model.bin")
    assert import_model(tmp_path / "theirs", tmp_path / "two")[0] == expected
    one, two = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("Mamba", {"state_size": 5}, {"d_state": 5}),
        ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 1, "expand": 2, "tie_word_embeddings": True},
         {"layer": "Mamba2", "d_state": 6, "headdim": 8}),
        ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "expand": 2, "tie_word_embeddings": True},
         {"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2}),
    ],
    ids=["mamba", "mamba2", "mamba2, groups"],
)  # fmt: skip
def test_released_files_of_mamba_ssm_are_read(name, changes, layers, tmp_path):
    """Their names, a padded embedding, the tied head stored again, and the settings of layers that are not defaults."""
    theirs = transformers_model(name, **changes)
    tensors = {key: x.detach().clone() for key, x in theirs.state_dict().items() if key != "lm_head.weight"}
    embedding = torch.cat((tensors.pop("backbone.embeddings.weight"), torch.randn(3, 32)))
    (tmp_path / "released").mkdir()
    torch.save(
        {**tensors, "backbone.embedding.weight": embedding, "lm_head.weight": embedding},
        tmp_path / "released" / "pytorch_model.bin",
    )
    config = {"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": layers, "rms_norm": True, "residual_in_fp32": True}
    (tmp_path / "released" / "config.json").write_text(json.dumps(config | {"fused_add_norm": True, "pad_vocab_size_multiple": 8}))
    model, library = import_model(tmp_path / "released", tmp_path / "ours")
    assert library.startswith("mamba_ssm")
    tokens = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = logits_of(ours_of(model, tmp_path / "ours.safetensors"), tokens)
        assert relative_error(found, theirs(tokens).logits) <= 1e-5


@pytest.fixture
def folder(tmp_path):
    """A folder of transformers' Mamba, to be damaged."""
    transformers_model("Mamba", state_size=4).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


class Runs:
    def __reduce__(self):
        return print, ("a pickle has run code",)


def changed(folder, **values):
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def weights(folder, change):
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


def indexed(folder):
    """Weights in two files, the second of which is missing."""
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"{number % 2}.safetensors" for number, name in enumerate(found)}
    save_file({name: x for name, x in found.items() if places[name] == "0.safetensors"}, folder / "0.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def in_a_folder(folder):
    indexed(folder)
    (folder / "1.safetensors").mkdir()


def in_two_files(folder):
    """The second file has a tensor of the first one too."""
    found = load_file(folder / "model.safetensors")
    indexed(folder)
    save_file(found, folder / "1.safetensors")


def named_twice(folder):
    indexed(folder)
    path = folder / "model.safetensors.index.json"
    path.write_text(
        path.read_text().replace(
            '{"weight_map": {', '{"weight_map": {"lm_head.weight": "0.safetensors", "lm_head.weight": "0.safetensors", '
        )
    )


def header(folder, change):
    """The JSON of its header changed, and the length in front of it."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    new = change(content[8 : 8 + size])
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])


def pickled(folder, protocol=2):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Runs()}, protocol))


def as_bin(folder, change=lambda x: x, content=lambda x: x, **how):
    """The weights as a file of PyTorch's. change: of the tensors; content: of the file's bytes."""
    path = folder / "pytorch_model.bin"
    torch.save(change(load_file(folder / "model.safetensors")), path, **how)
    path.write_bytes(content(path.read_bytes()))
    (folder / "model.safetensors").unlink()


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


D = "backbone.layers.1.mixer.D"


def absent(x):
    del x[D]


def another(x):
    x["lm_head.weight"] = torch.ones(61, 32)


def only_head(x):
    x["lm_head.weight"] = x.pop("backbone.embeddings.weight")


DAMAGE = {
    "unknown architecture": (
        lambda f: changed(f, architectures=["GPT2LMHeadModel"]),
        "architectures=['GPT2LMHeadModel']: not read; known: ",
    ),
    "another width": (
        lambda f: changed(f, hidden_size=48, intermediate_size=96),
        "has shape (61, 32), and the configuration promises (61, 48)",
    ),
    "a bias": (lambda f: changed(f, use_bias=True), "config.json: use_bias=True: Baton's model has use_bias=False alone"),
    "missing shard": (indexed, "1.safetensors is missing, which model.safetensors.index.json names"),
    "a folder in a shard's place": (in_a_folder, "1.safetensors is missing, which model.safetensors.index.json names"),
    "a tensor in two files": (in_two_files, "is in this file, and model.safetensors.index.json has it in 0.safetensors"),
    "a name twice": (named_twice, "index.json: lm_head.weight is there twice"),
    "Git LFS": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "model.safetensors: the file that Git LFS would put there is not there yet; run `git lfs pull`",
    ),
    "no header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 200), "model.safetensors: cannot be read"),
    "another size in the header": (
        lambda f: header(f, lambda text: text.replace(b"[32]", b"[33]", 1)),
        "model.safetensors: cannot be read",
    ),
    "unknown type": (lambda f: header(f, lambda text: text.replace(b'"F32"', b'"F33"', 1)), "model.safetensors: cannot be read"),
    "integers": (lambda f: weights(f, lambda x: x.update({D: x[D].int()})), f"{D} is of int32; Baton reads float32, bfloat16"),
    "not finite": (lambda f: weights(f, lambda x: x[D][3:5].fill_(torch.nan)), f"2 of 64 values of {D} are not finite"),
    "code": (pickled, "pytorch_model.bin: a pickle that would run code (print); give safetensors files"),
    "code, hidden in frames": (lambda f: pickled(f, 4), "pytorch_model.bin: damaged, or a pickle that would run code; download it"),
    "a page": (lambda f: as_bin(f, content=lambda _: b"<html>"), "pytorch_model.bin: damaged, or a pickle that would run code"),
    "an empty .bin": (lambda f: as_bin(f, content=lambda _: b""), "pytorch_model.bin: cannot be read"),
    "a .bin cut off": (lambda f: as_bin(f, content=lambda x: x[:-1000]), "pytorch_model.bin: cannot be read"),
    "an old .bin cut off": (
        lambda f: as_bin(f, content=lambda x: x[:300], _use_new_zipfile_serialization=False),
        "pytorch_model.bin: cannot be read",
    ),
    "no names": (lambda f: as_bin(f, lambda x: dict(enumerate(x.values()))), "not a dictionary of tensors by name"),
    "a training state": (lambda f: as_bin(f, lambda x: {"state_dict": x}), "save the model's state_dict alone"),
    "a sparse tensor": (lambda f: as_bin(f, lambda x: x | {D: x[D].to_sparse()}), f"{D} is a sparse_coo tensor; save all weights"),
    "no numbers": (lambda f: as_bin(f, lambda x: x | {D: x[D].to("meta")}), f"{D} is without its numbers; save all weights"),
    "too large": (lambda f: weights(f, lambda x: x.update({D: x[D].double() * 1e99})), f"64 of 64 values of {D} are not finite"),
    "the head alone": (lambda f: weights(f, only_head), "there is no tensor backbone.embeddings.weight"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").touch(), "tokenizer.json is damaged or not a SentencePiece model"),
    "cut off": (cut, "model.safetensors: cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights; none of model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: cannot be read"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    "tensor missing": (lambda f: weights(f, absent), "there is no tensor backbone.layers.1.mixer.D"),
    "tensor too many": (
        lambda f: weights(f, lambda x: x.update(extra=torch.ones(1))),
        "extra has no counterpart in Baton's model",
    ),
    "another head": (lambda f: weights(f, another), "is true, but lm_head.weight is not"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_folder_that_cannot_be_read_is_one_line_and_nothing_is_written(how, folder, tmp_path, capsys):
    damage, needle = DAMAGE[how]
    damage(folder)
    assert main(["import", str(folder), "--out", str(tmp_path / "out" / "model")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert needle in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words", "needle"),
    [
        ("", [], "--out .: names no file"),
        ("..", [], "names no file"),
        ("mine", [], "mine.yaml is there already; give another name with --out, or delete it"),
        ("dangling", [], "dangling.safetensors is there already"),
        ("new", ["--keep-attention", "1/2"], "--keep-attention 1/2 is for a conversion; name the mixer with --to as well"),
    ],
)
def test_what_is_there_is_never_overwritten(name, words, needle, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("a run file")
    (tmp_path / "dangling.safetensors").symlink_to("elsewhere")
    before = sorted(tmp_path.iterdir())
    assert main(["import", "theirs", "--out", name, *words]) == 2
    assert needle in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "mine.yaml").read_text() == "a run file"


@pytest.mark.parametrize(
    ("name", "changes", "needle"),
    [
        ("Llama", {**HEADS, "attention_bias": True}, "attention_bias=True"),
        ("Llama", {**HEADS, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='dynamic'"),
        ("Llama", {**HEADS, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "time_step_limit": (0.0, 0.1), "expand": 2}, "time_step_limit"),
        ("Qwen2", {**HEADS, "use_sliding_window": True, "sliding_window": 7}, "use_sliding_window=True"),
        ("Qwen2", {**HEADS, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("Qwen3", {**HEADS, "attention_bias": True}, "attention_bias=True"),
    ],
)
def test_what_baton_has_not_is_refused_by_name(name, changes, needle, tmp_path, capsys):
    transformers_model(name, **changes).save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 2
    assert needle in capsys.readouterr().err


def test_a_norm_over_other_channels_than_a_groups_is_exported_with_code():
    sizes = {"d_model": 32, "n_layers": 2, "vocab_size": 61, "pattern": ["mamba2"]}
    libraries = [
        family_of_model(ModelConfig(**sizes, mixers={"mamba2": {"head_dim": 8, "n_groups": 2, **norm}})).library
        for norm in ({}, {"norm_group_size": 32}, {"norm_group_size": 64})
    ]
    assert [library.split(",")[0] for library in libraries] == ["transformers"] * 2 + ["transformers with trust_remote_code=True"]


def test_what_other_libraries_formats_cannot_say_is_exported_with_code():
    """Mamba's other blocks, and a soft cap of attention's scores."""
    sizes = {"d_model": 32, "n_layers": 2, "vocab_size": 61}

    def library(pattern, **settings):
        mixers = {pattern.split("+")[0]: settings}
        return family_of_model(ModelConfig(**sizes, pattern=[pattern], mixers=mixers)).library.split(",")[0]

    assert library("mamba") == library("attention+swiglu", head_dim=8) == "transformers"
    others = [library("mamba", block=block) for block in ("no_gate", "h3")]
    others += [library("attention+swiglu", head_dim=8, score_soft_cap=50.0)]
    assert others == ["transformers with trust_remote_code=True"] * 3


def test_every_family_has_its_architecture_once():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    assert all(family_of_config({"architectures": [name]}) is family for family in FAMILIES for name in family.architectures)
