"""A parameter is declared in one place: added there in a scratch copy, it appears in the module, plan, checkpoint and equality
grid."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

DECLARATION = (
    "models/settings/mamba.py",
    "return (*super().parameters(d_model), A_log, *static, *norms)",
    'return (*super().parameters(d_model), A_log, *static, *norms, split("D_scale", inner, init=Constant(0.75)))',
)
USE = ("models/mixers/mamba.py", "-torch.exp(self.A_log), D_D, dt_bias_D", "-torch.exp(self.A_log), D_D * self.D_scale, dt_bias_D")

PLAN = ("tests/launcher/test_plan.py", "test_parameters_are_the_modules and mamba and not mamba2")
FOLLOWS = {
    "plan": PLAN,
    "mixer": ("tests/models/test_mixers.py", "mamba and not mamba2 and (split_equals or decoding)"),
    "checkpoint": ("tests/training/test_checkpoint.py", "any_layout and pipeline"),
    "grid": ("tests/training/test_grid.py", "other_sizes and mamba"),
}
"""Existing tests by what they hold: files, and words that choose tests in them. They read the parameter's declaration, so the copy
changes none of them."""

PROBE = """
import torch
from baton.models.config import ModelConfig
from baton.models.library import language_model
from baton.parallel.param_layout import named_layouts, parameter_count

model = ModelConfig(d_model=16, n_layers=3, pattern=["mamba"], vocab_size=8)
built = language_model(model)
(name, parameter, layout), *_ = [x for x in named_layouts(built) if x[0].endswith("D_scale")]
assert name == "layers.0.mamba.mixer.D_scale"
assert layout.local_shape(2) == (16,)
assert not layout.decay
assert torch.equal(parameter, torch.full((32,), 0.75))
planned = [p for p in model.mixers["mamba"].costs(16).parameters if p.name == "D_scale"]
print(parameter_count(built), sum(p.numel for p in planned))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages and tests of this repository, in which Mamba has one more parameter, imported as baton."""
    folder = tmp_path_factory.mktemp("copy")
    packages = folder / "packages" / "baton"
    for name in ("kernels", "models", "parallel", "configs", "data_pipeline", "training", "launcher", "slurm"):
        shutil.copytree(ROOT / name, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "__init__.py").touch()
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, old, new in (DECLARATION, USE):
        text = (packages / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} has no {old!r}"
        (packages / name).write_text(text.replace(old, new), encoding="utf-8")
    return folder


def run(copy, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(copy / "packages"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )


def counts(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(count) for count in done.stdout.split()]


def test_the_module_and_the_planner_have_it(copy):
    """With its shape, split, initial values and decay, and with three layers' 32 channels more than without."""
    probe = [line for line in PROBE.splitlines() if "D_scale" not in line and not line.startswith("assert")]
    before = "\n".join([*probe[:-1], "print(parameter_count(built), 0)"])
    done = subprocess.run([sys.executable, "-P", "-c", before], capture_output=True, text=True, check=False)
    without, _ = counts(done)
    count, planned = counts(run(copy, "-c", PROBE))
    assert (count - without, planned) == (3 * 32, 32)


@pytest.mark.long
def test_the_rest_follows(copy):
    """In one process, whose start takes longer than most of these tests."""
    paths, selections = zip(*FOLLOWS.values(), strict=True)
    chosen = " or ".join(f"({Path(path).stem} and {words})" for path, words in zip(paths, selections, strict=True))
    done = run(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", *paths, "-k", chosen)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = set(re.findall(r"^(tests/\S+\.py)::.* PASSED", done.stdout, re.MULTILINE))
    assert passed == set(paths), done.stdout[-4000:]


@pytest.mark.long
def test_a_parameter_that_only_the_module_had_would_be_seen(copy):
    """The planner's test fails when a module registers a parameter that its settings do not declare."""
    path = copy / "packages" / "baton" / "models" / "mixers" / "mamba.py"
    text = path.read_text(encoding="utf-8")
    extra = (
        "    def __init__(self, config, context):\n"
        "        super().__init__(config, context)\n"
        "        from baton.models.initializers import Constant\n"
        "        from baton.models.settings.declarations import split\n"
        '        self.extra = context.parameter(split("extra", len(self.conv_bias), init=Constant(0.0)))\n\n'
    )
    path.write_text(text.replace("    A_log: nn.Parameter\n", "    A_log: nn.Parameter\n\n" + extra, 1), encoding="utf-8")
    path, selection = PLAN
    done = run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, "-k", selection)
    (copy / "packages" / "baton" / "models" / "mixers" / "mamba.py").write_text(text, encoding="utf-8")
    assert done.returncode == 1
    assert "1 failed" in done.stdout
