"""On a GPU: a profile's table of a real trace adds up, and knows every kernel that the mixers launch."""

import json

import pytest
import yaml

from baton.launcher.cli import main

pytestmark = pytest.mark.gpu
MIXERS = {
    "mamba": {},
    "longhorn": {},
    "gsa": {"heads": 2, "head_dim": 128, "slots": 64},
    "lattice": {"variant": "dec", "heads": 4, "head_dim": 64, "slots": 64},
    "bmojo": {"window": 64, "eidetic": 16},
    "attention": {"heads": 4, "head_dim": 64},
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_table_adds_up_and_knows_every_kernel(mixer, tmp_path):
    run = {
        "name": mixer,
        "device": "cuda",
        "model": {"d_model": 256, "n_layers": 2, "pattern": [mixer], "mixers": {mixer: MIXERS[mixer]}, "pad_vocab_to": 8},
        "data": {"kind": "mqar", "length": 256, "pairs": 16, "vocab_size": 512},
        "training": {
            "steps": 6,
            "sequence_length": 512,
            "global_batch_tokens": 4096,
            "micro_batch_size": 4,
            "optimizer": {"lr": 1e-3},
        }
        | {"evaluation": {"every": 0}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    words = [f"directory={tmp_path / 'run'}", "profile.skip_steps=3", "profile.steps=2"]
    assert main(["train", str(tmp_path / "run.yaml"), *words]) == 0
    table = json.loads((tmp_path / "run" / "profile" / "step-00000004-rank-0.json").read_text())["profiled"]
    found = {name: of["ms"] for name, of in table["categories"].items()}
    assert sum(found.values()) == pytest.approx(table["ms"], rel=1e-6)
    assert table["categories"]["unclassified"]["largest"] == []
    for name in ("matmul", "scan", "norm", "loss", "optimizer", "data", "elementwise", "idle"):
        assert found[name] > 0, name
