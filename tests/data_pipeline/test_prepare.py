"""Preparing loses no record silently, gives the same bytes on any number of processes, and survives being killed anywhere."""

import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import DEADLINE_S

from baton.data_pipeline import files
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError, StorageError
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.input_files import Document, Rejected, find_input_files
from baton.data_pipeline.input_pieces import read_piece, split_source
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.prepare_plan import PARTS
from baton.data_pipeline.verify import verify


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def jsonl(texts) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


@pytest.fixture
def make(tmp_path, quiet):
    """Prepare `tmp_path/in` into `tmp_path/NAME`, in this process and without a word."""

    def run(name="out", inputs=None, **arguments):
        defaults = {"shard_bytes": 20_000, "validation_fraction": 0.2, "workers": 1, "progress": quiet}
        return prepare(inputs or [tmp_path / "in"], tmp_path / name, **{**defaults, **arguments})

    return run


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


FORMATS = {
    "all.jsonl": jsonl,
    "all.jsonl.gz": lambda texts: gzip.compress(jsonl(texts)),
    "all.jsonl.zst": lambda texts: b"".join(zstandard.compress(jsonl(part)) for part in (texts[:40], texts[40:])),
}


@pytest.mark.parametrize("name", [*FORMATS, "all.parquet", "folder"])
def test_every_format_gives_the_same_documents(texts, make, tmp_path, name):
    folder = tmp_path / "in"
    if name == "folder":
        fill(folder, {f"sub/{i:03d}.txt": text.encode() for i, text in enumerate(texts)})
    elif name == "all.parquet":
        folder.mkdir()
        table = pyarrow.table({"other": list(range(len(texts))), "text": texts})
        pyarrow.parquet.write_table(table, folder / name, row_group_size=7)
    else:
        fill(folder, {name: FORMATS[name](texts)})
    report = make()
    dataset = Dataset.open(tmp_path / "out")
    assert sorted(text for split in dataset.splits for text in documents(dataset, split)) == sorted(texts)
    assert report.totals["train"]["documents"] + report.totals["validation"]["documents"] == len(texts)
    assert sum(total["text_bytes"] for total in report.totals.values()) == sum(len(text.encode()) for text in texts)
    assert report.totals["train"]["shards"] > 1
    assert len(dataset.require("train")) == report.totals["train"]["shards"]
    verify(tmp_path / "out")


def test_records_that_are_no_documents_are_counted_and_listed(make, tmp_path):
    lines = [
        b'{"text": "good"}',
        b"",
        b'{"text": " \\n"}',
        b'{"text": ',
        b'["text"]',
        b'{"body": "x"}',
        b'{"text": 3}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "last, without newline"}',
    ]
    fill(tmp_path / "in", {"a.jsonl": b"\n".join(lines), "b.txt": b"\xff\xfe", "c.txt": b"", "d.txt": b"fine"})
    table = pyarrow.table({"text": pyarrow.array(["good row", None, ""])})
    pyarrow.parquet.write_table(table, tmp_path / "in" / "e.parquet")
    report = make(validation_fraction=0.0)
    assert report.rejected == {"broken json": 2, "empty": 3, "invalid utf-8": 3, "missing field": 3}
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert len(listed) == 11
    first = {entry["record"]: entry["reason"] for entry in listed if entry["source"] == "in/a.jsonl"}
    assert first[len(lines[0]) + 2] == "empty"  # the byte where the line begins
    assert {(e["record"], e["reason"]) for e in listed if e["source"] == "in/e.parquet"} == {(1, "missing field"), (2, "empty")}
    dataset = Dataset.open(tmp_path / "out")
    assert set(documents(dataset, "train")) == {"good", "last, without newline", "fine", "good row"}
    assert "11 (2 broken json, 3 empty" in str(report)
    again = make(validation_fraction=0.0)
    assert (again.rejected, again.examples) == (report.rejected, report.examples)


@settings(max_examples=150)
@given(st.lists(st.text(st.sampled_from("aé \\n語"), max_size=12), max_size=12), st.integers(1, 200), st.booleans())
def test_a_jsonl_cut_anywhere_gives_the_same_records(tmp_path_factory, lines, piece_bytes, newline):
    folder = tmp_path_factory.mktemp("cut")
    content = "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines) + ("\n" if newline else "")
    fill(folder, {"a.jsonl": content.encode()})
    (source,) = find_input_files([folder / "a.jsonl"], ["*"], []).sources

    def read(size):
        return [record for piece in split_source(source, size, "text") for record in read_piece(piece, "text")]

    whole = read(1 << 30)
    assert read(piece_bytes) == whole
    assert [r.text.decode() for r in whole if isinstance(r, Document)] == [line for line in lines if line.strip()]
    assert sum(isinstance(r, Rejected) for r in whole) == sum(not line.strip() for line in lines) + (not content)


def test_equal_documents_never_fall_on_both_sides(make, tmp_path):
    texts = [f"document {i % 400}" for i in range(1200)]
    fill(tmp_path / "in", {f"{i}.jsonl": jsonl(texts[i::5]) for i in range(5)})
    make(shard_bytes=2_000)
    dataset = Dataset.open(tmp_path / "out")
    train, held = set(documents(dataset, "train")), set(documents(dataset, "validation"))
    assert not train & held
    assert 50 < len(held) < 110
    fill(tmp_path / "in2", {"other name.jsonl": jsonl(reversed(texts))})
    make("out2", [tmp_path / "in2"])
    assert set(documents(Dataset.open(tmp_path / "out2"), "validation")) == held


def test_shards_are_the_same_bytes_whatever_the_number_of_processes(corpus, tokenizer, make, tmp_path):
    make("one", [corpus], tokenizer=tokenizer.path)
    make("three", [corpus], tokenizer=tokenizer.path, workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_a_second_run_changes_nothing(corpus, make, tmp_path):
    first = make("out", [corpus])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    second = make("out", [corpus])
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert (first.totals, first.rejected) == (second.totals, second.rejected)
    assert second.tasks_kept > 0


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


def test_a_kill_before_any_rename_is_made_good_by_running_again(corpus, make, tmp_path):
    make("whole", [corpus], shard_bytes=40_000)
    expected = contents(tmp_path / "whole")
    kept = []
    real = os.replace
    for survive in range(200):
        name = f"killed{survive}"
        calls = 0

        def replace(old, new, survive=survive):
            nonlocal calls
            calls += 1
            if calls > survive:
                raise Killed
            real(old, new)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                make(name, [corpus], shard_bytes=40_000)
                finished = True
            except Killed:
                finished = False
        if not finished and survive:
            with pytest.raises(DataError, match="unfinished"):
                Dataset.open(tmp_path / name)
        kept.append(make(name, [corpus], shard_bytes=40_000).tasks_kept)
        assert contents(tmp_path / name) == expected
        if finished:
            break
    assert finished
    assert survive > 20
    assert max(kept[:-1]) >= 3  # finished tasks were not done again


def test_damage_to_a_finished_task_is_found_and_done_again(corpus, make, tmp_path):
    make("whole", [corpus])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.data_pipeline.prepare._publish", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            make("out", [corpus])
    shard = sorted((tmp_path / "out" / ".parts").glob("*.train-*.tar"))[1]
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    tasks = len(list((tmp_path / "out" / ".parts").glob("task-??????.json")))
    assert make("out", [corpus]).tasks_kept == tasks - 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_sigkill_leaves_no_process_and_running_again_finishes(make, tmp_path):
    rng = random.Random(1)
    fill(tmp_path / "in", {f"{i}.jsonl": jsonl([f"{rng.random()} " * 300 for _ in range(40)]) for i in range(30)})
    make("whole", shard_bytes=200_000)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            from baton.data_pipeline.prepare import prepare

            def progress(done, total):
                print(done, flush=True)

            if __name__ == "__main__":
                prepare([{str(tmp_path / "in")!r}], {str(tmp_path / "out")!r}, shard_bytes=200_000, validation_fraction=0.2,
                        workers=2, progress=progress)
        """)
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()  # it is under way; its parts' records come after what is shown
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until and not any((tmp_path / "out" / PARTS).glob("task-??????.json")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:  # the workers notice that their parent is gone
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("worker processes outlive the killed run")
    assert make("out", shard_bytes=200_000).tasks_kept > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_of_other_inputs_or_settings_is_refused_with_what_differs(make, tmp_path, tokenizer):
    fill(tmp_path / "in", {"a.txt": b"one", "b.txt": b"two"})
    make()
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="shard_bytes was 20000, is 10000"):
        make(shard_bytes=10_000)
    with pytest.raises(DataError, match="tokenizer was None, is"):
        make(tokenizer=tokenizer.path)
    fill(tmp_path / "in", {"a.txt": b"changed", "c.txt": b"three"})
    (tmp_path / "in" / "b.txt").unlink()
    with pytest.raises(DataError, match=r"input in/a\.txt has changed; input in/b\.txt is gone; input in/c\.txt is new"):
        make()
    assert contents(tmp_path / "out") == before


def test_only_a_dataset_or_an_empty_folder_is_written_to(make, tmp_path):
    fill(tmp_path / "in", {"a.txt": b"one"})
    fill(tmp_path / "out", {"thesis.tex": b"precious"})
    with pytest.raises(DataError, match="not a dataset"):
        make()
    assert contents(tmp_path / "out") == {"thesis.tex": b"precious"}
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="is a file"):
        make("file")
    with pytest.raises(DataError, match="no dataset at"):
        Dataset.open(tmp_path / "out")


def test_the_output_below_an_input_is_not_an_input(make, tmp_path):
    fill(tmp_path / "in", {"a.txt": b"a", "b.txt": b"\xff"})
    for _ in range(2):
        report = make("in/out", validation_fraction=0.0)
        assert report.sources == 2


def test_file_names_need_not_be_unicode(make, tmp_path):
    fill(tmp_path / "in", {"a.txt": b"fine"})
    Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/\xff.txt")).write_bytes(b"")
    for _ in range(2):
        report = make(validation_fraction=0.0)
        str(report).encode()
        assert report.rejected == {"empty": 1}


def test_patterns_choose_files(make, tmp_path):
    files = {"a.py": b"a", "sub/b.py": b"b", "sub/c.txt": b"c", "skip/d.py": b"d", "sub/skip/e.py": b"e", "old/f.py": b"f"}
    fill(tmp_path / "in", files)
    make(include=["*.py"], exclude=["skip", "old/*"], validation_fraction=0.0)
    assert list(documents(Dataset.open(tmp_path / "out"), "train")) == ["a", "b"]


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({}, {"inputs": ["nowhere"]}, "nowhere does not exist"),
        ({"a.md": b"x"}, {}, r"matches \*.txt"),
        ({"a.txt": b" "}, {}, "no document for training"),
        ({"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 999)[:-9]}, {}, "a.jsonl.gz: .*ends in the middle of a frame"),
        ({"a.jsonl.zst": zstandard.compress(os.urandom(9999))[:-9]}, {}, "a.jsonl.zst: .*middle of a frame"),
        ({"a.jsonl.zst": b"not zstandard"}, {}, "a.jsonl.zst: not valid zstandard"),
        ({"a.parquet": b"not parquet"}, {}, "a.parquet: it is no sound parquet"),
        ({"a.txt": b"x"}, {"validation_fraction": 1.5}, "validation_fraction 1.5: .*less than 1"),
        ({"a.txt": b"x"}, {"workers": 0}, "workers 0"),
        ({"a.txt": b"x"}, {"tokenizer": "none.model"}, "cannot read the tokenizer none.model"),
    ],
)
def test_bad_input_is_named_in_one_line(make, tmp_path, files, arguments, message):
    (tmp_path / "in").mkdir()
    fill(tmp_path / "in", files)
    with pytest.raises(DataError, match=message) as caught:
        make(**arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_failed_start_does_not_refuse_corrected_settings(make, tmp_path):
    fill(tmp_path / "in", {"a.jsonl.gz": b"broken", "b.txt": b"good"})
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        make()
    assert not (tmp_path / "out").exists()
    make(exclude=["*.gz"], validation_fraction=0.0)


@pytest.mark.parametrize(
    ("given", "corrected", "message"),
    [
        ({}, {"text_field": "body"}, r"rejected: 1 missing field, such as in/a.jsonl record 0: .*no field 'text' among 'body'"),
        ({"text_field": "body", "validation_fraction": 0.999}, {"text_field": "body"}, "all among the 0.999 that are held out"),
    ],
)
def test_a_dataset_without_documents_does_not_refuse_corrected_settings(make, tmp_path, given, corrected, message):
    fill(tmp_path / "in", {"a.jsonl": b'{"body": "a page"}\n'})
    with pytest.raises(DataError, match=message):
        make(**given)
    assert not (tmp_path / "out").exists()
    make(**{"validation_fraction": 0.0, **corrected})


def test_parquet_without_a_text_column_says_which_there_are(make, tmp_path):
    (tmp_path / "in").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "in" / "a.parquet")
    with pytest.raises(DataError, match="no column 'text' but body, n"):
        make()
    with pytest.raises(DataError, match="holds int64, not strings"):
        make(text_field="n")
    make(text_field="body", validation_fraction=0.0)
    assert list(documents(Dataset.open(tmp_path / "out"), "train")) == ["x"]


def test_two_files_of_one_name_are_refused(make, tmp_path):
    fill(tmp_path, {"x/in/a.txt": b"one", "y/in/a.txt": b"two"})
    with pytest.raises(DataError, match=r"both be called in/a\.txt"):
        make(inputs=[tmp_path / "x" / "in", tmp_path / "y" / "in"])


def test_an_input_that_changes_while_it_is_read_is_noticed(tmp_path):
    fill(tmp_path, {"a.txt": b"one"})
    (source,) = find_input_files([tmp_path / "a.txt"], ["*"], []).sources
    (piece,) = split_source(source, 100, "text")
    (tmp_path / "a.txt").write_bytes(b"longer")
    with pytest.raises(DataError, match="changed while it was read"):
        list(read_piece(piece, "text"))


def test_a_full_disk_leaves_no_half_file(tmp_path):
    target = tmp_path / "big"
    target.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"big: cannot be written at present \(File too large\); free some room"):
            files.write_atomically(target, b"x" * 3_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == {"big": b"old"}


def test_two_preparations_of_one_folder_do_not_meet(corpus, make, tmp_path):
    def progress(_done, _total):
        with pytest.raises(DataError, match=f"is being prepared by process {os.getpid()} on ") as busy:
            make("out", [corpus])
        assert busy.value.exit_status == 75, "the same command works later"

    make("out", [corpus], progress=progress)
    verify(tmp_path / "out")
