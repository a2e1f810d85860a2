"""The checkpoint commands, and exporting weights from a run and starting another run from them."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import add_unknown_keys, make_newer, rewrite, tensors
from support.models import MODEL, micro_batches, training

from baton.data_pipeline import file_io
from baton.data_pipeline.written_by import own_version
from baton.launcher.cli import main
from baton.training.build import build
from baton.training.checkpoint.files import CheckpointFiles
from baton.training.checkpoint.manifest import Manifest, checksum
from baton.training.checkpoint.resume import load_initial_weights
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore
from baton.training.checkpoint.tools import differences, load_weights, names_in, newest_whole, problems
from baton.training.config import InitialWeightsConfig
from baton.training.errors import CheckpointError, OtherFormatError
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


def test_a_checkpoint_with_keys_of_a_later_version_is_read(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "one", tmp_path / "run")
    before = Manifest.read(run / "checkpoints" / "step-00000003")
    rewrite(run / "checkpoints" / "step-00000003", add_unknown_keys)
    found = Manifest.read(run / "checkpoints" / "step-00000003")
    assert (found.cursors, found.tensors.keys(), found.writer) == (before.cursors, before.tensors.keys(), "Baton 9.8.7")
    status, out, _ = ask(capsys, "verify", run)
    assert (status, out.count(": whole\n")) == (0, 3)
    assert "step-00000003" in ask(capsys, "list", run)[1]
    assert ask(capsys, "export", run, tmp_path / "w.safetensors")[0] == 0


def test_a_checkpoint_in_a_later_format_is_not_called_damaged_and_stays(runs, tmp_path, capsys):
    """One line says which version wrote it; nothing older is taken in its place, unless it is named."""
    run = shutil.copytree(runs / "one", tmp_path / "run")
    newest = run / "checkpoints" / "step-00000003"
    rewrite(newest, make_newer)
    of_formats = f"format 3, which Baton 9.8.7 wrote; this is Baton {own_version()}, which reads format 2"
    sentence = f"{newest / 'manifest.json'}: {of_formats}; use the version that wrote it"
    whole = "".join(f"{run}/checkpoints/step-0000000{n}: whole\n" for n in (1, 2))
    assert ask(capsys, "verify", run)[:2] == (2, f"{whole}{sentence}\n")
    status, out, _ = ask(capsys, "list", run)
    assert (status, out.splitlines()[-1]) == (0, f"step-00000003    {sentence}")
    for words in (["export", run, tmp_path / "w"], ["diff", newest, run / "checkpoints" / "step-00000002"]):
        assert ask(capsys, *words) == (2, "", f"baton: {sentence}\n")
    assert newest_whole(run, step=2).name == "step-00000002"
    assert "step-00000003" not in ask(capsys, "prune", run, "--keep-last", "1")[1]
    assert newest.is_dir()


@pytest.mark.parametrize("form", [1, "2.1", None, [2], {}])
def test_any_format_but_its_own_is_another_versions(runs, tmp_path, form):
    checkpoint = shutil.copytree(runs / "one" / "checkpoints" / "step-00000003", tmp_path / "c")
    rewrite(checkpoint, lambda body: body.update(format=form, versions=None))
    with pytest.raises(OtherFormatError, match=re.escape(f"format {form}, which another version of Baton wrote; ")):
        Manifest.read(checkpoint)


@pytest.mark.parametrize("body", [[], "text", None, 3])
def test_a_manifest_that_is_no_object_or_lacks_a_key_is_damaged(runs, tmp_path, body):
    checkpoint = shutil.copytree(runs / "one" / "checkpoints" / "step-00000003", tmp_path / "c")
    text = json.dumps(body, sort_keys=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": body}))
    with pytest.raises(CheckpointError, match="not readable"):
        Manifest.read(checkpoint)
    shutil.copy(runs / "one" / "checkpoints" / "step-00000003" / "manifest.json", checkpoint)
    rewrite(checkpoint, lambda body: body.pop("adam_steps"))
    with pytest.raises(CheckpointError, match=r"not what a checkpoint has \(adam_steps: Field required\)"):
        Manifest.read(checkpoint)
    rewrite(checkpoint, lambda body: body.update(adam_steps=1, cursors=[1]))
    with pytest.raises(CheckpointError, match=r"not what a checkpoint has \(cursors: Input should be a valid dictionary\)"):
        Manifest.read(checkpoint)


def search(mesh, folder):
    try:
        CheckpointStore(Path(folder), mesh, keep_last=3).load_newest(lambda manifest: None)
    except OtherFormatError as error:
        return error.exit_status, str(error)


@pytest.mark.parametrize("newest_is_damaged", [False, True])
def test_a_run_does_not_go_on_before_a_checkpoint_in_a_later_format(pool, runs, tmp_path, newest_is_damaged):
    """On any rank; and nothing is set aside."""
    folder = shutil.copytree(runs / "one" / "checkpoints", tmp_path / "c")
    rewrite(folder / "step-00000003", make_newer)
    if newest_is_damaged:
        os.rename(folder / "step-00000003", folder / "step-00000002.new")
        shutil.rmtree(folder / "step-00000002")
        os.rename(folder / "step-00000002.new", folder / "step-00000002")
        shutil.copytree(runs / "one" / "checkpoints" / "step-00000003", folder / "step-00000003")
        os.truncate(folder / "step-00000003" / "rank-00000.safetensors", 10)
    before = sorted(os.listdir(folder))
    (status, said), other = pool.run(search, str(folder), data=2)
    assert (status, said) == other
    assert status == 2
    assert "which Baton 9.8.7 wrote" in said
    assert sorted(os.listdir(folder)) == before


def test_weights_say_which_version_wrote_them_and_those_in_a_later_format_are_refused(runs, tmp_path, capsys):
    path = tmp_path / "w.safetensors"
    assert ask(capsys, "export", runs / "one", path)[0] == 0
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    assert (about["format"], about["baton-lm"]) == ("baton-weights-1", own_version())
    content = load_file(path)
    save_file(content, path, metadata=about | {"format": "baton-weights-2", "baton-lm": "9.8.7"})
    sentence = f"{path}: format baton-weights-2, which Baton 9.8.7 wrote; this is Baton {own_version()}, which reads"
    with pytest.raises(OtherFormatError, match=re.escape(sentence)):
        load_weights(path, {})
    with pytest.raises(OtherFormatError, match=re.escape(sentence)):
        names_in(path)
    for metadata in (None, {"format": "pt"}, about | {"weather": "fine"}):
        save_file(content, path, metadata=metadata)
        assert names_in(path) == content.keys(), "others' files, and keys of a later version"
