"""The checkpoint commands, and exporting weights from a run and starting another run from them."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import tensors
from support.models import MODEL, micro_batches, training

from baton.data_pipeline import file_io
from baton.launcher.cli import main
from baton.training.build import build
from baton.training.checkpoint.files import CheckpointFiles
from baton.training.checkpoint.manifest import Manifest, checksum
from baton.training.checkpoint.resume import load_initial_weights
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore
from baton.training.checkpoint.tools import differences, load_weights, problems
from baton.training.config import InitialWeightsConfig
from baton.training.errors import CheckpointError
from baton.training.step.executor import StepExecutor


def write(mesh, folder):
    train_state = build(MODEL, training(), mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    store = CheckpointStore(Path(folder) / "checkpoints", mesh, keep_last=9)
    for step in range(1, 4):
        executor.step(micro_batches(step, mesh.data_rank, mesh.layout.data, 2), 3e-3)
        manifest = Manifest(
            step=step,
            tokens=100 * step,
            adam_steps=step,
            cursors={"0": {"example": step}},
            fingerprints={"model": "m"},
            layout=mesh.layout.sizes(),
            versions={},
            validation={1: 3.0, 2: 2.5}.get(step),
        )
        assert store.save(optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=True), manifest)


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """The same three checkpoints, written by different layouts."""
    folder = tmp_path_factory.mktemp("runs")
    pool.run(write, str(folder / "one"), data=2)
    pool.run(write, str(folder / "other"), tensor=2, zero=0)
    return folder


def ask(capsys, *words):
    status = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_list_tells_what_there_is(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "one", tmp_path / "run")
    os.truncate(run / "checkpoints" / "step-00000003" / "manifest.json", 100)
    status, out, _ = ask(capsys, "list", run)
    lines = out.splitlines()
    assert status == 0
    assert len(lines) == 4
    assert lines[2].split()[:3] == ["step-00000002", "2", "200"]
    assert "2.5000" in lines[2]
    assert lines[2].endswith("data 2, zero 1")
    assert "damaged" in lines[3]
    assert "not readable" in lines[3]
    status, _, err = ask(capsys, "list", tmp_path)
    assert status == 2
    assert err == f"baton: {tmp_path}: no checkpoint there; give a run directory, or a checkpoint's own folder\n"


def test_verify_looks_at_files_and_at_tensors(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "one", tmp_path / "run")
    status, out, _ = ask(capsys, "verify", run)
    assert status == 0
    assert out.count(": whole\n") == 3
    victim = run / "checkpoints" / "step-00000002"
    file = victim / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    status, out, _ = ask(capsys, "verify", run)
    assert status == 1
    assert out.count(": whole\n") == 2
    assert "step-00000002: rank-00001.safetensors does not match its checksum" in out
    # a file that was written wrong, and whose checksum is that of what was written
    document = json.loads((victim / "manifest.json").read_text())["manifest"]
    document["files"][file.name] = checksum(file)
    Manifest(**document).write(victim)
    (problem,) = problems(victim)
    assert "does not match its checksum: it was written otherwise than it was in memory" in problem


def test_a_diff_does_not_see_layouts_and_sees_a_bit(runs, tmp_path, capsys):
    one, other = (runs / name / "checkpoints" / "step-00000002" for name in ("one", "other"))
    assert ask(capsys, "diff", one, one)[0] == 0
    ours, theirs = tensors(one), tensors(other)
    found = differences(one, other)
    assert all(key in ours for line in found for key in [line.partition(":")[0]]), "only roundings of tensors may differ"
    assert len(found) == sum(not torch.equal(ours[key], theirs[key]) for key in ours)
    status, out, _ = ask(capsys, "diff", runs / "one" / "checkpoints" / "step-00000001", one)
    assert status == 1
    assert "step: 1 -> 2\n" in out
    assert "cursors of 1 lanes, the first lane 0\n" in out
    assert f"{ours['master.embedding.weight'].numel():,} elements differ, by " in out


def test_prune_deletes_what_need_not_stay(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "one", tmp_path / "run")
    words = ["prune", run, "--keep-last", "1", "--keep-best", "1"]
    _, out, _ = ask(capsys, *words, "--dry-run")
    assert out.endswith("1 checkpoints would be deleted\n")
    assert len(os.listdir(run / "checkpoints")) == 3
    _, out, _ = ask(capsys, *words)
    assert out.startswith(f"deleted {run / 'checkpoints' / 'step-00000001'}\n")
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002", "step-00000003"]


def test_what_cannot_be_read_at_present_is_one_line_and_not_called_damaged(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(file_io, "PAUSES_S", ())
    run = shutil.copytree(runs / "one", tmp_path / "run")
    for victim in (run / "checkpoints" / "step-00000003" / name for name in ("rank-00001.safetensors", "manifest.json")):
        victim.unlink()
        victim.symlink_to("/proc/self/mem")  # reading its first byte fails with EIO
        status, out, _ = ask(capsys, "verify", run)
        assert status == 74
        assert out.count(": whole\n") == 2
        assert out.splitlines()[2].startswith(f"{victim}: cannot be read at present (Input/output error)")
        assert ask(capsys, "export", run, tmp_path / "w")[::2] == (74, f"baton: {out.splitlines()[2]}\n"), "and no older one"
    assert "damaged" not in ask(capsys, "list", run)[1]
    assert "step-00000003" not in ask(capsys, "prune", run)[1], "it stays"
    assert os.listdir(run / "checkpoints").count("step-00000003") == 1


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_listed_or_counted(runs, tmp_path, capsys, monkeypatch):
    run = shutil.copytree(runs / "one", tmp_path / "run")
    read = Manifest.read

    def deleted_by_another_process(folder):
        if folder.name == "step-00000002":
            shutil.rmtree(folder, ignore_errors=True)
        return read(folder)

    monkeypatch.setattr(Manifest, "read", deleted_by_another_process)
    status, out, _ = ask(capsys, "list", run)
    assert (status, [line.split()[0] for line in out.splitlines()]) == (0, ["checkpoint", "step-00000001", "step-00000003"])
    shutil.copytree(runs / "one" / "checkpoints" / "step-00000002", run / "checkpoints" / "step-00000002")
    status, out, _ = ask(capsys, "verify", run)
    assert (status, out.count(": whole\n"), out.count("\n")) == (0, 2, 2)
    shutil.copytree(runs / "one" / "checkpoints" / "step-00000002", run / "checkpoints" / "step-00000002")
    assert ask(capsys, "prune", run)[1].endswith("1 checkpoints deleted\n")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_leave_whole_and_begin_another_run(runs, tmp_path, capsys, single_mesh, dtype):
    out = tmp_path / "weights.safetensors"
    run = shutil.copytree(runs / "one", tmp_path / "run")
    os.truncate(run / "checkpoints" / "step-00000003" / "rank-00000.safetensors", 100)  # the newest whole one is taken
    status, said, _ = ask(capsys, "export", run, out, "--dtype", dtype)
    assert status == 0
    assert said.endswith("step-00000002\n")
    masters = {k.removeprefix("master."): x for k, x in tensors(run / "checkpoints" / "step-00000002").items() if "master." in k}
    exported = load_file(out)
    assert exported.keys() == masters.keys()
    assert all(torch.equal(exported[name], masters[name].to(getattr(torch, dtype))) for name in masters)
    train_state = build(MODEL, training(seed=9), single_mesh)
    load_initial_weights(train_state, str(out))
    held = optimizer_boxes(train_state.model, train_state.engine, single_mesh, for_save=False)
    for name, boxes in ((name, held[f"master.{name}"]) for name in masters):
        for box in boxes:
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.data.shape))
            assert torch.equal(box.data, exported[name][place].float()), name
    assert all(
        torch.equal(dict(train_state.model.named_parameters())[n], x.float()) for n, x in exported.items() if n == "norm.weight"
    )


def test_a_part_of_the_weights_begins_a_run_and_the_rest_is_named(runs, tmp_path, capsys, single_mesh):
    """Parts of a fused projection and whole parameters; the new ones are as in a run without the file."""
    out = tmp_path / "weights.safetensors"
    assert ask(capsys, "export", runs / "one", out)[0] == 0
    weights = load_file(out)
    names = ("norm.weight", next(name for name in weights if "in_proj.z" in name))
    part = {name: x for name, x in weights.items() if name not in names}
    save_file(part, out)
    train_state = build(MODEL, training(seed=9), single_mesh)
    load_initial_weights(train_state, InitialWeightsConfig(file=str(out), missing="initialise"))
    said = capsys.readouterr().out.splitlines()
    assert said == [f"beginning with the weights of {out}", *(f"not in it, and initialised: {name}" for name in sorted(names))]
    held = optimizer_boxes(train_state.model, train_state.engine, single_mesh, for_save=False)
    fresh = optimizer_boxes((other := build(MODEL, training(seed=9), single_mesh)).model, other.engine, single_mesh, for_save=False)
    for name in weights:
        for box, new in zip(held[f"master.{name}"], fresh[f"master.{name}"], strict=True):
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.data.shape))
            assert torch.equal(box.data, part[name][place] if name in part else new.data), name
    with pytest.raises(CheckpointError, match=r"it has no tensor .* \(2 are missing\); .*missing: initialise"):
        load_initial_weights(train_state, str(out))
    save_file({**weights, "extra": torch.zeros(2)}, out)
    for chosen in (str(out), InitialWeightsConfig(file=str(out), missing="initialise")):
        with pytest.raises(CheckpointError, match=r"the model has no extra \(1 such tensors\); it is of another model"):
            load_initial_weights(train_state, chosen)


def test_weights_of_another_model_are_refused(runs, tmp_path, capsys, single_mesh):
    train_state = build(MODEL, training(), single_mesh)
    held = optimizer_boxes(train_state.model, train_state.engine, single_mesh, for_save=False)
    whole = CheckpointFiles(p := runs / "one" / "checkpoints" / "step-00000001", Manifest.read(p).tensors)
    weights = {key.removeprefix("master."): whole.whole(key) for key in held if key.startswith("master.")}
    cases = {
        "it has no tensor norm.weight; it is of another model": {k: x for k, x in weights.items() if k != "norm.weight"},
        "norm.weight has shape (33,), the model's (32,)": {**weights, "norm.weight": torch.zeros(33)},
    }
    for sentence, content in cases.items():
        save_file(content, tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match=re.escape(sentence)):
            load_weights(tmp_path / "w.safetensors", held)
    (tmp_path / "w.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_weights(tmp_path / "w.safetensors", held)
    status, _, err = ask(capsys, "export", runs / "one", tmp_path / "nowhere" / "w.safetensors")
    assert status == 2
    assert "cannot be written" in err
