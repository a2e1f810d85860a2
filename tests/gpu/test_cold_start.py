"""On a GPU: `baton train` with an empty cache of kernels compiles them before its first step, and only then."""

import re
from pathlib import Path

import pytest
import yaml
from support.hangs import RUN
from support.runs import Launch

pytestmark = pytest.mark.gpu
MODELS = {
    "mamba": RUN["model"],
    "attention": RUN["model"] | {"pattern": ["attention+swiglu"], "mixers": {"attention": {"heads": 4}}},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_cold_start_compiles_before_the_first_step_and_a_warm_one_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN | {"device": "cuda", "model": MODELS[model]}))

    def lines(name):
        words = ("training.steps=3", "training.evaluation.every=0")
        ended = Launch(tmp_path / name, str(file), *words, where=Path.cwd()).end()
        assert ended.status == 0, ended.err
        assert [line for line in ended.err.splitlines() if not line.startswith("note: auto: ")] == [], ended.out
        assert [row["step"] for row in ended.rows if row["kind"] == "train"] == [1, 2, 3]
        return ended.out.splitlines()

    cold = lines("cold")
    (kernels,) = {int(found[1]) for line in cold if (found := re.match(r"compiled (\d+) kernels for sm_\d+ in \d+ s$", line))}
    assert kernels > 10
    assert [line for line in cold if line.endswith("it was not compiled ahead")] == []
    assert len(list((tmp_path / "kernels").glob("*/*.cubin"))) == kernels, "nothing else was compiled"
    assert [path.name for path in (tmp_path / "kernels").glob("baton-run-*")]
    warm = lines("warm")
    assert [line for line in warm if line.startswith(("compiling", "compiled"))] == []
