"""Models that no other library has: transformers loads the exported folder with the code in it, and computes the same."""

import json
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.long_form import some
from support.recurrences import positions, seeded

from baton.launcher.interchange import import_model
from baton.models.config import ModelConfig
from baton.models.interchange.mapping import to_theirs
from baton.models.interchange.registry import family_of_model
from baton.models.interchange.remote.export import BatonFamily
from baton.models.library import language_model
from baton.models.settings import kinds
from baton.parallel.param_layout import named_layouts
from baton.training.evaluation.generation import Sampling, generate

CASES = {kind: [kind] for kind in kinds()} | {
    "attention, whole document": ["attention"],
    "attention, biases and norms": ["attention"],
    "attention, gated, partly rotated by yarn": ["attention"],
    "bmojo, sliding": ["bmojo"],
    "channel mixing with a gate": ["channel_mix"],
    "gla, without a gate": ["gla"],
    "gsa, converted": ["gsa"],
    "lattice, all options": ["lattice"],
    "longhorn, as printed": ["longhorn"],
    "mamba, as printed": ["mamba"],
    "mamba, as printed, normalised projections": ["mamba"],
    "mamba2, groups": ["mamba2"],
    "mamba3, groups, norm, several inputs": ["mamba3", "several"],
    "gated_delta_net, grouped values": ["gated_delta_net"],
    "retnet, without a gate": ["retnet"],
    "static B, fixed gates, bias": ["mamba", "gsa", "kda"],
    "time-invariant, abc, learned bounds": ["mamba", "gsa", "hgrn2"],
    "hybrid": ["mamba", "lattice+swiglu", "bmojo"],
    "other blocks": ["mamba", "s4d", "real"],
    "another hybrid": ["gated_delta_net*2", "attention|mamba2+swiglu"],
    "value residual": ["first+channel_mix", "rwkv7+channel_mix*2"],
}
pytestmark = pytest.mark.usefixtures("remote_code")

SETTINGS = {
    "attention, whole document": {"window": None, "rope_theta": None},
    "attention, biases and norms": {"qkv_bias": True, "qk_norm": True, "score_soft_cap": 1.5},
    "attention, gated, partly rotated by yarn": {
        "output_gate": True, "sinks": True, "rope_fraction": 0.7, "score_soft_cap": 0.3,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0},
    },
    "bmojo, sliding": {"fading": "sliding", "predictor_weights": "uniform", "innovation_norm": "l1", "d_conv": None,
                       "fading_norm": False, "add_ssm_output": True},
    "gla, without a gate": {"feature_map": "relu", "output_gate": False},
    "retnet, without a gate": {"output_gate": False},
    "gsa, converted": {"feature_map": "identity", "value_activation": None, "output_activation": None},
    "lattice, all options": {
        "variant": "enc", "project": False, "forget": True, "sparsity": 0.01, "initial_slots": "learned", "step_max": 2.0,
        "conv_activation": "silu", "unit_queries": True, "value_scale": 0.3, "output_norm": False, "conv_bias": True,
    },
    "longhorn, as printed": {"skip": False, "beta_bias": False},
    "mamba, as printed": {"skip": False, "discretization": "zoh"},
    "mamba2, groups": {"n_groups": 4, "norm_group_size": 6},
    "mamba3, groups, norm, several inputs": {
        "mamba3": {"n_groups": 4, "output_norm": True, "rope_fraction": 1.0},
        "several": {"kind": "mamba3", "mimo_rank": 3, "n_groups": 2, "output_norm": True},
    },
    "gated_delta_net, grouped values": {"heads": 2, "v_heads": 4},
    "mamba, as printed, normalised projections": {
        "skip": False,
        "discretization": "zoh",
        "projection_norm_eps": 1e-3,
        "projection_norm_weights": True,
    },
    "static B, fixed gates, bias": {
        "mamba": {"selective": ("dt", "C"), "A_init": "random"}, "gsa": {"gate": "data_independent"},
        "kda": {"gate_bias": True, "heads": 2, "v_heads": 4},
    },
    "time-invariant, abc, learned bounds": {
        "mamba": {"selective": ()}, "gsa": {"gate": "abc"}, "hgrn2": {"bounds": "learned", "scale_queries": True},
    },
    "other blocks": {
        "mamba": {"block": "h3"}, "s4d": {"block": "no_gate"},
        "real": {"kind": "mamba", "block": "h3", "selective": (), "discretization": "zoh"},
    },
    "value residual": {"first": {"kind": "rwkv7", "value_residual": "first"}, "rwkv7": {"value_residual": "later"}},
    "channel mixing with a gate": {"receptance": True},
}  # fmt: skip
SHARED = {"another hybrid": ("gated_delta_net",), "value residual": ("rwkv7", "channel_mix")}
"""Names whose layers have one set of weights."""
VOCAB = 61


def model_of(case):
    names = {name: None for entry in CASES[case] for name in re.split(r"[+|]", entry.split("*")[0])}
    settings = SETTINGS.get(case, {})
    own = {name: settings if len(names) == 1 else settings.get(name, {}) for name in names}
    mixers = {name: kinds()[own[name].get("kind", name)].small().model_dump() | own[name] for name in names}
    return ModelConfig(
        d_model=48,
        n_layers=2 if len(CASES[case]) == 1 else 3,
        vocab_size=VOCAB,
        pattern=CASES[case],
        mixers=mixers,
        shared=SHARED.get(case, ()),
        tie_embeddings=case != "another hybrid",
    )


def ours_of(model):
    """A random model, and its weights by name."""
    built, g, weights = language_model(model), torch.Generator().manual_seed(3), {}
    with torch.no_grad():
        for parameter in built.parameters():  # norms begin at 1, biases at 0
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    for name, parameter, layout in named_layouts(built):
        for block in layout.shard_boxes(name, 0, 1):
            weights[block.name] = parameter.detach()[block.local_row : block.local_row + block.extent[0]].clone()
    return built, weights


def write(model, weights, folder, dtype=torch.float32):
    family = BatonFamily()
    folder.mkdir()
    theirs = to_theirs(family.maps(model), weights)
    theirs = {name: x if family.keeps_float32(model, name) else x.to(dtype) for name, x in theirs.items()}
    save_file(theirs, folder / "model.safetensors", metadata={"format": "pt"})
    values = family.config(model) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(values))
    for name, text in family.code().items():
        (folder / name).write_text(text)


def loaded(folder, **words):
    import transformers

    found, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **words
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return found.eval()


# layers of ten kinds; a folder of each kind is loaded and compared, in bfloat16, below
OFTEN = ["hybrid", "another hybrid", "value residual"]


@pytest.mark.parametrize("case", some(CASES, OFTEN))
def test_logits_and_gradients_are_ours(case, tmp_path):
    """With documents packed into rows; in one piece, and in two with the cache between them. And what is read again is the same."""
    model = model_of(case)
    ours, weights = ours_of(model)
    write(model, weights, tmp_path / "out")
    theirs, g = loaded(tmp_path / "out"), seeded(1)
    tokens, pos = torch.randint(VOCAB, (2, 25), generator=g), positions(g, 2, 25, 0.08).to(torch.int32)
    expected = ours.logits(ours(tokens, pos)[0])[..., :VOCAB]
    found = theirs(tokens, position_ids=pos).logits
    assert relative_error(found, expected) <= 1e-5
    first = theirs(tokens[:, :14], position_ids=pos[:, :14])
    second = theirs(tokens[:, 14:], position_ids=pos[:, 14:], past_key_values=first.past_key_values)
    assert relative_error(torch.cat((first.logits, second.logits), dim=1), expected) <= 1e-5

    cotangent = torch.randn(expected.shape, generator=g)
    expected.backward(cotangent)
    found.backward(cotangent)
    gradients = dict(theirs.named_parameters())
    for name, parameter, layout in named_layouts(ours):
        for block in layout.shard_boxes(name, 0, 1):
            rows = parameter.grad[block.local_row : block.local_row + block.extent[0]]
            gradient = gradients[block.name].grad
            if gradient is None:  # of scores, which only select
                assert rows.count_nonzero() == 0, block.name
            else:
                assert relative_error(gradient, rows[: len(gradient)]) <= 2e-5, block.name

    assert import_model(tmp_path / "out", tmp_path / "again")[0] == model
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == weights.keys()
    for name, x in weights.items():
        rows = slice(VOCAB if x.shape[0] == model.padded_vocab_size else None)
        assert torch.equal(again[name][rows], x[rows]), name


GENERATING = ["lattice", "longhorn", "hybrid", "another hybrid", "attention, whole document"]


def test_positions_that_skip_tokens_are_refused(tmp_path):
    """A State cannot skip tokens: of two forms of a recurrence each would compute something else. Padding has no position."""
    model = model_of("hybrid")
    write(model, ours_of(model)[1], tmp_path / "out")
    theirs = loaded(tmp_path / "out")
    tokens = torch.randint(VOCAB, (2, 6), generator=seeded(1))
    rising = torch.arange(6)[None]
    first = theirs(tokens, position_ids=rising)
    assert torch.equal(first.logits, theirs(tokens).logits)
    for pos, past, message in (
        ([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 3, 4]], None, "row 1, token 4 has position 3 after 1"),
        ([[0, 1, 2, 2, 3, 4]] * 2, None, "row 0, token 3 has position 2 after 2"),
        ([[7, 8, 9, 10, 11, 12]] * 2, first.past_key_values, "row 0, token 0 has position 7 after 5"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(tokens, position_ids=torch.tensor(pos), past_key_values=past)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    padded = theirs(tokens, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 1, 0, 1, 2, 3]]))
    assert torch.equal(padded.logits, theirs(tokens, attention_mask=mask).logits)


@pytest.mark.parametrize("case", some(GENERATING, ["hybrid", "another hybrid"]))
def test_generation_of_padded_prompts_is_ours(case, tmp_path):
    """One prompt and eight of unequal length, token by token; with a beam search, whose rows change places."""
    model = model_of(case)
    ours, weights = ours_of(model)
    write(model, weights, tmp_path / "out")
    theirs, g = loaded(tmp_path / "out"), seeded(2)
    prompts = [torch.randint(VOCAB, (length,), generator=g).tolist() for length in (11, 3, 1, 7, 17, 5, 2, 9)]
    expected = generate(ours, prompts, tokens=12, vocab_size=VOCAB, stop=None, sampling=Sampling(0))
    width = max(map(len, prompts))
    ids = torch.tensor([[5] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    words = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert theirs.generate(ids, attention_mask=mask, **words)[:, width:].tolist() == expected
    alone = theirs.generate(torch.tensor([prompts[0]]), **words)
    assert alone[0, len(prompts[0]) :].tolist() == expected[0]
    beams = [theirs.generate(ids, attention_mask=mask, num_beams=3, use_cache=cached, **words) for cached in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("case", CASES)
def test_the_list_of_what_stays_in_float32_is_that_of_the_declarations(case):
    """transformers is told by names, which the code in a folder lists: that of a parameter which is declared may be forgotten."""
    from baton.models.interchange.remote.modeling_baton import BatonForCausalLM

    model, family = model_of(case), BatonFamily()
    listed = set(BatonForCausalLM._keep_in_fp32_modules_strict)
    for name in ours_of(model)[1]:
        assert bool(listed & set(name.split("."))) == family.keeps_float32(model, name), name


def test_a_bfloat16_folder_keeps_in_float32_what_recurrences_need(tmp_path):
    """In the files and once loaded, for every kind of mixer."""
    for case in (*kinds(), "attention, biases and norms", "lattice, all options"):
        model = model_of(case)
        ours, weights = ours_of(model)
        write(model, weights, tmp_path / case, torch.bfloat16)
        theirs, family = loaded(tmp_path / case, dtype="auto"), BatonFamily()
        for name, parameter in theirs.named_parameters():
            expected = torch.float32 if family.keeps_float32(model, name) else torch.bfloat16
            assert parameter.dtype == expected, (case, name)
        tokens = torch.randint(VOCAB, (2, 9), generator=seeded(4))
        with torch.no_grad():
            expected = ours.logits(ours(tokens, torch.arange(9, dtype=torch.int32).expand(2, -1))[0])[..., :VOCAB]
            assert relative_error(theirs(tokens).logits, expected) <= 4e-2, case


ALONE = """
import sys

for name in ("baton", "deepspeed", "megatron", "triton", "fla", "pydantic"):
    sys.modules[name] = None  # as if it were not installed
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model(torch.arange(20)[None] % 61).logits.detach(), sys.argv[2])
"""


def test_neither_baton_nor_what_it_trains_with_is_needed(tmp_path):
    model = model_of("hybrid")
    ours, weights = ours_of(model)
    write(model, weights, tmp_path / "out")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "alone")}
    command = [sys.executable, "-P", "-c", ALONE, tmp_path / "out", tmp_path / "logits.pt"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    with torch.no_grad():
        expected = ours.logits(ours(torch.arange(20)[None] % VOCAB, torch.arange(20, dtype=torch.int32)[None])[0])[..., :VOCAB]
    assert relative_error(torch.load(tmp_path / "logits.pt"), expected) <= 1e-5


FRESH = """
import json, sys

import torch
from transformers import AutoModelForCausalLM

given, found = json.load(open(sys.argv[1])), {}
for case, folder in given["folders"].items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    ids, mask = torch.tensor(given["ids"]), torch.tensor(given["mask"])
    words = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        logits = model(torch.tensor(given["tokens"])).logits
    many = model.generate(ids, attention_mask=mask, **words)[:, ids.shape[1]:].tolist()
    one = torch.tensor([given["one"]])
    found[case] = {"logits": logits, "many": many, "one": model.generate(one, **words)[0, one.shape[1]:].tolist()}
torch.save(found, sys.argv[2])
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_in_an_environment_of_its_own_a_model_needs_torch_transformers_and_safetensors(tmp_path):
    """Which pip installs beside nothing else: logits, and greedy text of one prompt and of eight that are padded."""
    g, built = seeded(2), {}
    prompts = [torch.randint(VOCAB, (length,), generator=g).tolist() for length in (11, 3, 1, 7, 17, 5, 2, 9)]
    tokens, width = torch.randint(VOCAB, (2, 25), generator=g), max(map(len, prompts))
    for number, case in enumerate(CASES):
        model = model_of(case)
        built[case], weights = ours_of(model)
        write(model, weights, tmp_path / str(number))
    given = {
        "folders": {case: str(tmp_path / str(number)) for number, case in enumerate(CASES)},
        "tokens": tokens.tolist(),
        "one": prompts[0],
        "ids": [[5] * (width - len(prompt)) + prompt for prompt in prompts],
        "mask": [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts],
    }
    (tmp_path / "given.json").write_text(json.dumps(given))
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    wanted = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers", "safetensors")]
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-P", "-c", FRESH, tmp_path / "given.json", tmp_path / "found.pt"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment | {"HF_HOME": str(tmp_path / "hub")})
    assert ended.returncode == 0, ended.stderr
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == CASES.keys()
    for case, ours in built.items():
        with torch.no_grad():
            expected = ours.logits(ours(tokens, torch.arange(25, dtype=torch.int32).expand(2, -1))[0])[..., :VOCAB]
        assert relative_error(found[case]["logits"], expected) <= 1e-5, case
        texts = generate(ours, prompts, tokens=12, vocab_size=VOCAB, stop=None, sampling=Sampling(0))
        assert (found[case]["many"], found[case]["one"]) == (texts, texts[0]), case


def test_installed_kernels_take_the_same_arguments(monkeypatch, tmp_path):
    """On a GPU they compute the recurrences; here their CPU form does, in place of the loops."""
    from importlib import import_module

    from baton.models.interchange.remote import recurrences_baton

    for case in ("hybrid", "longhorn", "gla", "gsa", "delta_net", "lattice, all options", "mamba2"):
        model = model_of(case)
        ours, weights = ours_of(model)
        write(model, weights, tmp_path / case)
        theirs = loaded(tmp_path / case)
        recurrences = sys.modules[type(theirs).__module__.replace("modeling_baton", "recurrences_baton")]
        called = []

        def kernel(name, called=called):
            def call(*words, **others):
                called.append(name)
                return getattr(import_module(f"baton.kernels.{name}.op"), name)(*words, **others)

            return call

        assert recurrences.LOOPS.keys() == recurrences_baton.LOOPS.keys()
        monkeypatch.setattr(recurrences, "LOOPS", {name: kernel(name) for name in recurrences.LOOPS})
        tokens = torch.randint(VOCAB, (2, 21), generator=seeded(5))
        with torch.no_grad():
            expected = ours.logits(ours(tokens, torch.arange(21, dtype=torch.int32).expand(2, -1))[0])[..., :VOCAB]
            assert relative_error(theirs(tokens).logits, expected) <= 1e-5, case
        assert called, case


def test_every_models_format_is_known():
    assert isinstance(family_of_model(model_of("hybrid")), BatonFamily)
    assert not isinstance(family_of_model(model_of("mamba")), BatonFamily)
    mixers = {"attention": {"heads": 4, "head_dim": 12, "window": None}, "swiglu": {}}
    llama, beside = (
        ModelConfig(d_model=48, n_layers=2, vocab_size=VOCAB, pattern=[f"attention{sign}swiglu"], mixers=mixers) for sign in "+|"
    )
    assert (type(family_of_model(llama)).__name__, type(family_of_model(beside))) == ("Llama", BatonFamily)
