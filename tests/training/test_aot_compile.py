"""`baton compile`: a run's kernels are in the cache before it starts, also for GPUs of other machines; and its errors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models import micro_batches

from baton.launcher import cli
from baton.models.settings import kinds

RUN = {
    "name": "small",
    "model": {"d_model": 64, "n_layers": 2, "pattern": ["swiglu"], "vocab_size": 64},
    "data": {"path": "nowhere", "tokenizer": "nowhere.model"},
    "training": {
        "steps": 2,
        "sequence_length": 64,
        "global_batch_tokens": 128,
        "micro_batch_size": 2,
        "compute_dtype": "bfloat16",
        "optimizer": {"lr": 1e-3},
    },
}
HOPPER = ("--capability", "9.0")


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    return tmp_path / "run.yaml"


COMMAND = """
import sys
from baton.launcher.cli import main
sys.exit(main(sys.argv[1:]))
"""


def compiled(programs, run_file, *words):
    """How many kernels, how many of them compiled, and how many were there, as the command says."""
    cache = str(run_file.parent / "cache")
    found = programs.run(COMMAND, "compile", str(run_file), *words, TRITON_CACHE_DIR=cache)
    said = re.fullmatch(r"(\d+) kernels for (?:.+, )?sm_\d+: (\d+) compiled, (\d+) were there, in \d+ s; (.+)", found.strip())
    assert said[4] == cache
    return tuple(int(n) for n in said.groups()[:3])


BEFORE_A_RUN = """
import json, sys
import baton.kernels.compile.aot as kernels
from baton.launcher import ahead
from baton.launcher.config import load

config, later = load(sys.argv[1], []), load(sys.argv[1], ["training.seed=1"])

def compile(say):
    kernels.Target.asked = classmethod(lambda cls: kernels.Target(90))  # no GPU is needed
    ahead.compile_run(config, say)

def fail(say):
    raise ValueError("no\\nGPU of\\nthat kind")

found = {"before": ahead.is_compiled(config), "lines": [], "failed": []}
ahead.Ahead(compile).wait(found["lines"].append)
files = json.loads(ahead.listing(config).read_text())
found |= {"kernels": len(files), "after": ahead.is_compiled(config), "other settings": ahead.is_compiled(later)}
gone = ahead.listing(config).parent / files[0]
gone.rename(f"{gone}.away")
found["gone"] = ahead.is_compiled(config)
gone.with_name(f"{gone.name}.away").rename(gone)
ahead.Ahead(fail).wait(found["failed"].append)
print(json.dumps(found))
"""


def before_a_run(programs, run_file):
    """What the process that compiles while ranks start does."""
    return json.loads(programs.run(BEFORE_A_RUN, str(run_file), TRITON_CACHE_DIR=str(run_file.parent / "cache")))


@pytest.mark.timeout(600)  # it compiles, where other things run
def test_kernels_are_compiled_once_for_each_kind_of_call(programs, run_file):
    """By the process that a run forks as it starts, and what is there then is all that `baton compile` asks for."""
    found = before_a_run(programs, run_file)
    kernels, lines = found["kernels"], found["lines"]
    assert (found["before"], found["after"], found["other settings"], found["gone"]) == (False, True, False, False)
    assert re.fullmatch(rf"compiling {kernels} kernels for sm_90 in \d+ process(es)?, which takes about \d+ s", lines[0])
    assert re.fullmatch(rf"compiled {kernels} kernels for sm_90 in \d+ s", lines[-1])
    (failed,) = found["failed"]
    assert failed.startswith(
        "kernels cannot be compiled ahead (no GPU of that kind): kernels are compiled when they are first launched"
    )
    binaries = {path.stem for path in (run_file.parent / "cache").glob("*/*.cubin")}
    expected = {
        "rms_norm_forward_kernel",
        "rms_norm_backward_kernel",
        "gate_forward_kernel",
        "gate_backward_kernel",
        "cross_entropy_sums_kernel",
        "cross_entropy_gradient_kernel",
        "embedding_sum_runs_kernel",
        "embedding_sum_borders_kernel",
        "adamw_kernel",
    }
    assert binaries == expected, "norm, gate, loss, embedding and update: those of all mixers take minutes to compile"
    # a rank's share of the gate has another width; norms and loss are the same
    split, new, there = compiled(programs, run_file, *HOPPER, "layout.tensor=2")
    assert 0 < new < split, "what the process has compiled is found"
    assert new + there == split == kernels


EVERY_MIXER = """
import json, sys, torch
from triton.runtime import JITFunction
from baton.kernels.compile.aot import Target
from baton.models.config import ModelConfig
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.config import LayoutConfig
from baton.training.kernel_tools.aot_compile import compile_run_kernels
from baton.training.config import TrainingConfig

def note(self, key, signature, device, constexprs, options, attrs, warmup):
    launched.append(self.fn.__name__)
    self.device_caches[device][0][key] = self
    return self
JITFunction._do_compile = note  # nothing is compiled here

CASES = (
    ("whole", None, {}),
    ("ranks", None, {"tensor": 2, "context": 2}),
    ("early", None, {"context": 2, "context_comm": "early"}),
    ("exact", {"mode": "exact", "segment": 16}, {}),
    ("truncated", {"mode": "truncated", "segment": 16, "gradient_segments": 2}, {"context": 2}),
)
found = {}
OFTEN = "attention", "bmojo", "delta_net", "gla", "gsa", "lattice", "mamba", "mamba3", "rwkv7", "s4d", "swiglu"
for number, (name, settings) in enumerate(kinds().items()):
    if name not in OFTEN and sys.argv[1] == "1":
        continue
    model = ModelConfig(d_model=SMALL_WIDTH, n_layers=1, vocab_size=64, pattern=[name], mixers={name: settings.small()})
    first = 0 if name == "mamba" else number % len(CASES)
    count = len(CASES) if name == "mamba" else int(sys.argv[1])
    for case, bptt, layout in (CASES + CASES)[first : first + count]:
        values = {"steps": 1, "sequence_length": 64, "global_batch_tokens": 128, "micro_batch_size": 2, "compute_dtype": "bfloat16"}
        values["recompute"] = "auto" if (name, case) == ("mamba", "whole") else "none"  # auto: all three forms, one after the other
        launched = []
        compile_run_kernels(model, TrainingConfig(**values, bptt=bptt, optimizer={"lr": 1e-3}), LayoutConfig(**layout), Target(90))
        found[f"{name}, {case}"] = sorted(set(launched))
print(json.dumps(found))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", [1, pytest.param(5, marks=pytest.mark.long)])
def test_every_mixer_goes_through_in_every_layout(programs, cases):
    """All cases with mamba, with each other mixer as many as are asked for; if one, with a mixer of each kind of recurrence."""
    found = {name: set(kernels) for name, kernels in json.loads(programs.run(EVERY_MIXER, str(cases))).items()}
    assert len(found) == (5 * len(kinds()) if cases == 5 else 5 + 10)
    for name, kernels in found.items():
        assert kernels >= {
            "rms_norm_forward_kernel",
            "rms_norm_backward_kernel",
            "cross_entropy_sums_kernel",
            "cross_entropy_gradient_kernel",
            "embedding_sum_runs_kernel",
            "embedding_sum_borders_kernel",
        }, name
    assert found["mamba, whole"] >= {
        "diagonal_scan_forward_kernel",
        "diagonal_scan_backward_kernel",
        "short_conv_forward_kernel",
        "short_conv_backward_kernel",
    }
    for case in ("ranks", "exact", "truncated"):
        assert found[f"mamba, {case}"] == found["mamba, whole"], f"{case}: a span is run as a whole sequence is"
    begun = found["mamba, early"] - found["mamba, whole"]
    assert "diagonal_scan_transition_kernel" in begun, "what a span does to a State is asked before the State is there"


DEEPER = """
import json, torch
from triton.runtime import JITFunction
import baton.training.kernel_tools.aot_compile as compiling
from baton.kernels.compile.aot import Target
from baton.models.config import ModelConfig
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.config import LayoutConfig
from baton.training.config import TrainingConfig

def note(self, key, signature, device, constexprs, options, attrs, warmup):
    launched.add((self.fn.__name__, str(key)))
    self.device_caches[device][0].pop(key, None)
    return self
JITFunction._do_compile = note  # nothing is compiled here

found = {}
for depth in (None, 5):
    if depth is not None:
        compiling.min = lambda *_: depth  # as many layers as a model has
    for pattern in (["gsa+swiglu"], ["mamba", "attention"]):
        launched = set()
        mixers = {name: kinds()[name].small() for layer in pattern for name in layer.split("+")}
        model = ModelConfig(d_model=SMALL_WIDTH, n_layers=6, vocab_size=64, pattern=pattern, mixers=mixers)
        values = {"steps": 1, "sequence_length": 64, "global_batch_tokens": 128, "micro_batch_size": 2, "compute_dtype": "bfloat16"}
        values["recompute"] = "none"
        compiling.compile_run_kernels(model, TrainingConfig(**values, optimizer={"lr": 1e-3}), LayoutConfig(), Target(90))
        found.setdefault(str(pattern), []).append(sorted(launched))
print(json.dumps({name: [few == many, len(few)] for name, (few, many) in found.items()}))
"""


def test_a_deeper_model_launches_nothing_else(programs):
    found = json.loads(programs.run(DEEPER))
    assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(found, True)
    assert all(count > 4 for _, count in found.values())


TOO_LARGE = """
import json
from pathlib import Path
import torch
from baton.kernels.compile.aot import META, Target, compiling
from baton.kernels.compile.fitting import exactly
from baton.kernels.eidetic_attention.joint_attention_launch import history_attention
from baton.kernels.eidetic_attention.launch_config import LaunchConfig

q, limit = torch.empty(1, 128, 2, 128, dtype=torch.bfloat16, device=META), torch.empty(1, 128, dtype=torch.int32, device=META)
config = LaunchConfig(queries=64, keys=64, stages=4)

def found():
    with compiling(Target(89), 2) as compiled:
        history_attention(q, q, q, limit, scale=1.0, config=config)
    assert not compiled.failures
    known = [json.loads((Path(compiled.folder) / file.replace("__grp__", "")).read_text()) for file in compiled.files]
    return [(one["shared"], one["num_stages"]) for one in known]

attempts = found()
with exactly():
    print(json.dumps([attempts, found()]))
"""


def test_what_is_launched_instead_of_what_does_not_fit_is_compiled_too(programs, tmp_path):
    """Every attempt, to the first that fits the card that is not here."""
    found, exactly = json.loads(programs.run(TOO_LARGE, TRITON_CACHE_DIR=str(tmp_path)))
    (first, stages), (last, fewer) = found
    assert first > 99 * 1024 >= last
    assert (stages, fewer) == (4, 3)
    assert exactly == found[:1]


KEYS = """
import sys
from baton.kernels.common.launch_utils import LazyModule
scan, convolution = (LazyModule(f"baton.kernels.{name}") for name in ("diagonal_scan.triton_forward", "short_conv.triton_kernels"))
kernels = {"scan": lambda: scan.diagonal_scan_forward_kernel, "convolution": lambda: convolution.short_conv_forward_kernel}
print(*sorted((name, kernels[name]().cache_key) for name in sys.argv[1:]))
"""


def test_a_kernel_has_one_key_whatever_was_launched_before(programs):
    """Both call a function with a constant, whose key is made with the first's."""
    assert programs.run(KEYS, "scan", "convolution") == programs.run(KEYS, "convolution", "scan")


def test_what_cannot_be_compiled_is_said(run_file, capsys, monkeypatch):
    if not torch.cuda.is_available():
        assert cli.main(["compile", str(run_file)]) == 2
        said = "baton: there is no GPU here: say which to compile for, e.g. --capability 9.0"
        assert capsys.readouterr().err.splitlines() == [said]
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    assert cli.main(["compile", str(run_file), "--capability", "9.0"]) == 2
    assert capsys.readouterr().err.splitlines() == ["baton: TRITON_INTERPRET is set, so that nothing is compiled: unset it"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", str(run_file), "--capability", "hopper"])
    assert ended.value.code == 2
    assert "argument --capability: invalid" in capsys.readouterr().err


def launched(programs, form, *mixers):
    """By mixer, what tests/support/launch_trace.py notes."""
    program = Path(__file__).parents[1] / "support" / "launch_trace.py"
    return json.loads(programs.run(program.read_text(), form, *mixers).splitlines()[-1])


@pytest.mark.parametrize(
    "mixers",
    [
        ("mamba", "gsa", "kda", "attention"),
        pytest.param(("mamba", "gsa", "lattice", "kda", "retnet", "attention"), marks=pytest.mark.long),
        pytest.param(("longhorn", "mamba2", "gla", "delta_net", "gated_delta_net"), marks=pytest.mark.long),
    ],
    ids=len,
)
def test_what_is_launched_is_what_was_compiled(programs, mixers):
    """Not B'MOJO's: where a CPU is taken for a GPU, what is checked of it is made by the kernels that are checked."""
    real, ahead = launched(programs, "real", *mixers), launched(programs, "ahead", *mixers)
    for mixer in mixers:
        assert len(real[mixer]) > 10
        assert set(real[mixer]) <= set(ahead[mixer]), mixer


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mixer",
    ["mamba", "longhorn", "gsa", "gla", "mamba2", "delta_net", "gated_delta_net", "kda", "lattice", "bmojo", "retnet", "attention"],
)
def test_a_step_on_a_gpu_compiles_nothing_more(mixer, tmp_path, monkeypatch):
    """Nor does the check before it."""
    from triton import knobs

    from baton.data_pipeline.packing import Batch
    from baton.models.config import ModelConfig
    from baton.models.settings import SMALL_WIDTH
    from baton.parallel import mesh as meshes
    from baton.parallel.config import LayoutConfig
    from baton.training.build import build
    from baton.training.config import TrainingConfig
    from baton.training.kernel_tools.doctor import check_kernels
    from baton.training.step.executor import StepExecutor

    model = {"d_model": SMALL_WIDTH, "n_layers": 2, "vocab_size": 61, "pad_vocab_to": 4, "pattern": [mixer]}
    model["mixers"] = {mixer: kinds()[mixer].small().model_dump()}
    settings = {**RUN["training"], "sequence_length": 24, "global_batch_tokens": 192}
    (tmp_path / "run.yaml").write_text(json.dumps({**RUN, "model": model, "training": settings}))
    training = TrainingConfig(**settings)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    # a process of its own asks CUDA for the GPU: no fork of one that may have asked before
    subprocess.run([sys.executable, "-P", "-m", "baton.launcher.cli", "compile", str(tmp_path / "run.yaml")], check=True)
    missed = []

    def note(*, src, cache_hit, **_):
        missed.extend([] if cache_hit else [src.name])

    monkeypatch.setattr(knobs.compilation, "listener", note)
    mesh = meshes.initialize(LayoutConfig(), device=torch.device("cuda", 0), rank=0, store=torch.distributed.HashStore())
    try:
        train_state = build(ModelConfig(**model), training, mesh)
        check_kernels(train_state, training)
        batches = [
            Batch(b.tokens.to(mesh.device), b.labels.to(mesh.device), b.pos.to(mesh.device)) for b in micro_batches(0, 0, 1, 2)
        ]
        StepExecutor(train_state.model, train_state.engine, mesh).step(batches, 1e-3)
    finally:
        meshes.shutdown()
    assert missed == []
