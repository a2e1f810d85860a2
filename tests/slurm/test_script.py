"""The job scripts of all shipped clusters, compared with golden files, so that every change of a script is visible in a diff."""

import os
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from baton.launcher.cluster import Cluster, load_cluster
from baton.launcher.config import RunConfig, load
from baton.slurm import evaluation
from baton.slurm.elastic import nodes_for
from baton.slurm.script import Nodes, in_container, render

GOLDEN = Path(__file__).parent / "golden"
RUN = Path(str(files("baton.configs"))) / "runs" / "papers" / "mamba-1.4b-pile.yaml"
CLUSTERS = ("a100", "h100", "h200", "sandbox")


def variant(name: str, **changes) -> Cluster:
    cluster = load_cluster(name)
    return cluster.model_copy(update={"slurm": cluster.slurm.model_validate(cluster.slurm.model_dump() | changes)})


CASES = {name: load_cluster(name) for name in CLUSTERS} | {
    "h100-chain": variant("h100", restart="chain", partition="gpu", account="lm", qos="long", constraint="ib&nvme", spare_nodes=1),
    "h100-array": variant("h100", restart="array", gpu_type="h100", options=["--mail-type=FAIL"], interface="ib0"),
    "h100-container": variant(
        "h100",
        python="/opt/baton/bin/python",
        container={"image": "/images/baton 1.sqsh", "mounts": ["/shared:/shared", "/data:/data"]},
    ),
    "a100-apptainer": variant(
        "a100",
        python="python3",
        container={
            "runtime": "apptainer",
            "image": "/images/baton 1.sif",
            "mounts": ["/shared", "/data:/data:ro"],
            "options": ["--writable-tmpfs"],
        },
    ),
    "h200-venv": variant("h200", python="/shared/venvs/baton/bin/python", setup=["module load cuda/12.8"]),
    "sandbox-no-preflight": variant("sandbox", preflight={"enabled": False}),
}


PLACES = {"where": Path("/shared/home/ada"), "python": "/shared/home/ada/.venv/bin/python"}


def configuration(cluster: Cluster, *words: str) -> RunConfig:
    return load(RUN, [f"layout.data={2 * cluster.ranks_per_node}", "directory=/shared/runs/mamba 1.4b", *words])


def script(cluster: Cluster, *words: str) -> str:
    config = configuration(cluster, *words)
    count = nodes_for(config, cluster.ranks_per_node)
    return render(config, cluster, Nodes(count, count), **PLACES)


def of_checkpoint(cluster: Cluster, *words: str) -> str:
    return evaluation.render(configuration(cluster, *words), cluster, **PLACES, container=in_container(cluster.slurm))


SCRIPTS = {name: script(cluster) for name, cluster in CASES.items()}
SCRIPTS["h100-evaluate"] = script(CASES["h100"], "jobs.evaluate=true")
SCRIPTS |= {f"evaluation-{name}": of_checkpoint(CASES[name]) for name in ("h100", "h100-container", "a100-apptainer", "sandbox")}
SEVERAL = "jobs.evaluations=['', '--tasks arc_easy,piqa --shots 5', \"--data '/data/Project Gutenberg' --length 65536\"]"
SCRIPTS["evaluation-several"] = of_checkpoint(CASES["h100"], SEVERAL)


def test_every_shipped_cluster_has_a_golden_file():
    shipped = {p.name.removesuffix(".yaml") for p in (files("baton.configs") / "clusters").iterdir() if p.name.endswith(".yaml")}
    assert shipped == set(CLUSTERS)
    assert {p.stem for p in GOLDEN.glob("*.sbatch")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_its_golden_file(name):
    """To change them on purpose: BATON_GOLDEN=1 pytest tests/slurm/test_script.py, and read the difference."""
    path, text = GOLDEN / f"{name}.sbatch", SCRIPTS[name]
    if os.environ.get("BATON_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_is_clean(name, shellcheck):
    done = subprocess.run([shellcheck, GOLDEN / f"{name}.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_slurm_accepts_every_script(slurm_with_gpus, tmp_path):
    """Sixteen ranks of a few pretended GPUs; what a site names (partition, account, features) is its own."""
    for name, text in SCRIPTS.items():
        for option in ("--partition=", "--account=", "--qos=", "--constraint="):
            text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"#SBATCH {option}"))
        text = text.replace("--gres=gpu:h100:8", "--gres=gpu:8")
        path = tmp_path / f"{name}.sbatch"
        path.write_text(text)
        done = subprocess.run(["sbatch", "--test-only", path, "1"], capture_output=True, text=True, env=slurm_with_gpus)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "to start at" in done.stderr
