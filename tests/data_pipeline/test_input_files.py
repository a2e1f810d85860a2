"""Inputs are read as what they are, or refused by name; what is left out is named; a damaged one costs nothing that is finished."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import random
import re
import shlex
import socket
import tarfile
import zlib
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from baton.data_pipeline import file_io, prepare_workers
from baton.data_pipeline.config import PrepareConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError, InputError, StorageError
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.input_files import InputFile, InputPiece, exclusion, find_input_files
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.prepare_plan import PARTS, make_tasks
from baton.data_pipeline.prepare_workers import piece_key
from baton.data_pipeline.verify import verify
from baton.launcher.cli import main

PAGES = [f"page {i} about lakes, hills — é and 語" for i in range(30)]
COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.fixture
def make(tmp_path, quiet):
    """Prepare inputs below `tmp_path` into `tmp_path/NAME`; all documents are for training."""

    def run(*inputs, out="out", **arguments):
        defaults = {"validation_fraction": 0.0, "workers": 1, "progress": quiet}
        return prepare([tmp_path / each for each in inputs], tmp_path / out, **{**defaults, **arguments})

    return run


@pytest.fixture
def read(tmp_path):
    """The texts of `tmp_path/NAME`."""
    return lambda out="out": list(documents(Dataset.open(tmp_path / out), "train"))


@pytest.fixture
def rejected(tmp_path):
    """{(source, reason)} of `tmp_path/NAME`."""

    def listed(out="out"):
        lines = (tmp_path / out / "rejected.jsonl").read_text().splitlines()
        return {(entry["source"], entry["reason"]) for entry in map(json.loads, lines)}

    return listed


def lines(pages=PAGES) -> bytes:
    return "".join(json.dumps({"url": "http://x", "text": page}, ensure_ascii=False) + "\n" for page in pages).encode()


def tar(members: dict[str, bytes], **settings) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **settings) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def parquet(column, **others) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(len(column))), "text": column, **others}), file, row_group_size=7)
    return file.getvalue()


READ_AS_IT_IS = {
    "a.json": lines(),
    "a.ndjson": lines(),
    "bom.jsonl": b"\xef\xbb\xbf" + lines(),
    "crlf.jsonl": lines().replace(b"\n", b"\r\n"),
    "shard-00000-of-01024": lines(),
    "array.json": json.dumps([{"text": page} for page in PAGES]).encode(),
    "array.jsonl": json.dumps([{"text": page} for page in PAGES], indent=2, ensure_ascii=False).encode(),
    "pretty.json": "\n".join(json.dumps({"text": page, "n": [1, {"m": "]"}]}, indent=1) for page in PAGES).encode(),
    "txt.tar": tar(
        {
            f"d/{i:03d}.{end}": content
            for i, page in enumerate(PAGES)
            for end, content in (("json", b'{"n": 1}'), ("txt", page.encode()))
        }
    ),
    "json.tar": tar(
        {
            f"{i:03d}.{end}": content
            for i, page in enumerate(PAGES)
            for end, content in (("jpg", b"\0"), ("json", json.dumps({"text": page}).encode()))
        }
    ),
    "jsonl.tar": tar(
        {"a/b.jsonl": lines(PAGES[:20]), "a/c.jsonl": lines(PAGES[20:]), "a/" + "long" * 60 + ".jsonl": b""},
        format=tarfile.PAX_FORMAT,
    ),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", READ_AS_IT_IS)
def test_json_and_tars_are_read_as_what_they_are(tmp_path, make, read, name, compression):
    content = COMPRESSIONS[compression](READ_AS_IT_IS[name])
    (tmp_path / (name + compression)).write_bytes(content)
    assert make(name + compression).rejected == {}
    assert Counter(read()) == Counter(PAGES)
    verify(tmp_path / "out")


def test_a_name_may_say_nothing_of_the_compression(tmp_path, make, read):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(lines()))
    (tmp_path / "b.tgz").write_bytes(gzip.compress(READ_AS_IT_IS["txt.tar"]))
    make("a.jsonl", "b.tgz", shard_bytes=100)
    assert Counter(read()) == Counter(PAGES + PAGES)


STRINGS = {
    "string_view": pyarrow.array(PAGES, pyarrow.string_view()),
    "large_string": pyarrow.array(PAGES, pyarrow.large_string()),
    "dictionary": pyarrow.array(PAGES).dictionary_encode(),
    "binary": pyarrow.array([page.encode() for page in PAGES]),
    "large_binary": pyarrow.array([page.encode() for page in PAGES], pyarrow.large_binary()),
}


@pytest.mark.parametrize("kind", STRINGS)
def test_a_column_of_any_type_of_strings_is_read(tmp_path, make, read, kind):
    (tmp_path / "a.parquet").write_bytes(parquet(STRINGS[kind]))
    assert make("a.parquet", shard_bytes=200).rejected == {}
    assert Counter(read()) == Counter(PAGES)


def test_rows_without_text_are_counted_whatever_their_type(tmp_path, make, read, rejected):
    (tmp_path / "null.parquet").write_bytes(parquet(pyarrow.nulls(3)))
    (tmp_path / "bytes.parquet").write_bytes(parquet(pyarrow.array([b"fine", b"\xff", None])))
    (tmp_path / "none.parquet").write_bytes(parquet(pyarrow.array([], pyarrow.string())))
    assert make("null.parquet", "bytes.parquet", "none.parquet").rejected == {"empty": 1, "invalid utf-8": 1, "missing field": 4}
    assert read() == ["fine"]
    assert ("none.parquet", "empty") in rejected()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pyarrow.table([["x"], ["y"]], ["text", "text"]), r"a\.parquet has 2 columns 'text'; rename"),
        (pyarrow.table([[["x"]]], ["text"]), "holds list<.*>, not strings"),
        (pyarrow.table([[{"text": "x"}]], ["text"]), "holds struct<.*>, not strings"),
        (pyarrow.table([[{"text": "x"}]], ["doc"]), "no column 'text' but doc"),
        (pyarrow.table([pyarrow.array([1]).dictionary_encode()], ["text"]), "holds int64, not strings"),
    ],
)
def test_a_table_without_one_column_of_strings_is_refused_by_name(tmp_path, make, table, message):
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        make("a.parquet")
    assert not (tmp_path / "out").exists()


def test_other_columns_may_have_the_same_name(tmp_path, make, read):
    pyarrow.parquet.write_table(pyarrow.table([[1], ["x"], [2]], ["n", "text", "n"]), tmp_path / "a.parquet")
    make("a.parquet")
    assert read() == ["x"]


UNKNOWN = {
    "a.pdf": b"%PDF-1.7\n",
    "b.zip": b"PK\x03\x04",
    "c": b"\x7fELF\x02",
    "d.warc": b"WARC/1.0\r\n",
    "e.lz4": b"\x04\x22\x4d\x18",
    "f.npy": b"\x93NUMPY",
    "g.txt": b"some text\0and more",
    "i.txt": "text".encode("utf-16"),
    "j.jsonl": lines().decode().encode("utf-16"),
    "k.jsonl": b"PK\x03\x04",
    "l.csv": b"text\nx\n",
    "m.txt.gz": gzip.compress(b"\x7fELF\x02"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_no_text_is_never_a_document(tmp_path, make, read, rejected, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(UNKNOWN[name])
    (tmp_path / "in" / "good.txt").write_bytes(b"good")
    with pytest.raises(DataError, match=rf"cannot read the input .*/in/{re.escape(name)}: it (is|has) .*"):
        make(f"in/{name}", "in/good.txt")
    make("in", include=["*"])
    if name != "l.csv":  # asked for by a pattern, a table is text
        assert read() == ["good"]
        assert {source for source, _ in rejected()} == {f"in/{name}"}


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_what_a_name_says_is_compressed_must_be_so(tmp_path, make, suffix):
    for content in (b'{"text": "plain"}\n', zlib.compress(lines())):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.jsonl{suffix}: not valid \w+ data, as its name's {suffix} says"):
            make(f"a.jsonl{suffix}")


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_members_behind_each_other_are_one_text_and_what_follows_is_named(tmp_path, make, read, rejected, suffix):
    compress = COMPRESSIONS[suffix]
    members = b"".join(compress(lines(PAGES[i : i + 10])) for i in (0, 10, 20))
    for name, behind in (("members", b""), ("padded", bytes(512)), ("stray", b"EOF-MARK\n")):
        (tmp_path / f"{name}.jsonl{suffix}").write_bytes(members + behind)
        report = make(f"{name}.jsonl{suffix}", out=name)
        assert Counter(read(name)) == Counter(PAGES)
        assert report.rejected == ({"stray bytes": 1} if name == "stray" else {})
    assert rejected("stray") == {(f"stray.jsonl{suffix}", "stray bytes")}
    assert f"record {len(members)}: stray bytes (9 bytes after the last" in str(report)
    for behind in (bytes(100) + os.urandom(9000), compress(lines())[1:] + members):  # a member that has lost its beginning
        (tmp_path / f"lost.jsonl{suffix}").write_bytes(members + b"x" + behind)
        with pytest.raises(DataError, match=rf"lost\.jsonl{suffix}: not valid \w+ data at byte {len(members):,}"):
            make(f"lost.jsonl{suffix}", out="lost")
    (tmp_path / f"cut.jsonl{suffix}").write_bytes(members[:-9])
    with pytest.raises(
        DataError, match=rf"cut\.jsonl{suffix}: the compressed file ends in the middle of a frame .*{len(members) - 9:,}"
    ):
        make(f"cut.jsonl{suffix}", out="cut")


def test_zstandard_frames_may_be_skippable_empty_or_need_a_long_window(tmp_path, make, read):
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    long = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=30)).compressobj()
    content = skippable + zstandard.compress(b"") + long.compress(lines()) + long.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    make("a.jsonl.zst")
    assert Counter(read()) == Counter(PAGES)


def test_files_without_a_record_are_named(tmp_path, make, rejected):
    files = {"zero.jsonl": b"", "zero.jsonl.gz": b"", "none.jsonl.gz": gzip.compress(b""), "zero.tar": b"", "none.tar": tar({})}
    for name, content in {**files, "array.json": b" [ ]\n", "good.txt": b"good"}.items():
        (tmp_path / name).write_bytes(content)
    make(*files, "array.json", "good.txt")
    assert rejected() == {(name, "empty") for name in (*files, "array.json")}


def test_json_that_cannot_be_gone_on_from_is_refused_at_its_byte(tmp_path, make):
    good = json.dumps([{"text": page} for page in PAGES]).encode()
    for content, message in (
        (good[:-1], f"array has no end at byte {len(good) - 1:,}"),
        (good[:100] + b"\x01" + good[100:], "not JSON at byte "),
        (good.replace(b"}, {", b"} {", 1), "no comma between"),
        (b"[\n" + b"[" * 100_000, "nested too deeply"),
    ):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.json: .*({message})"):
            make("a.json")


def test_long_values_of_an_array_are_read_whole(tmp_path, make, read):
    pages = ["é" * 700_000, "語", "x" * 300_000]
    (tmp_path / "a.json").write_text(json.dumps([{"text": page} for page in pages], ensure_ascii=False))
    make("a.json")
    assert Counter(read()) == Counter(pages)


def test_a_damaged_tar_is_refused_where_the_library_takes_it_for_its_end(tmp_path, make, read, rejected):
    sound = READ_AS_IT_IS["txt.tar"]
    header = sound.index(b"d/007.json")
    for content, message in (
        (sound[:header] + b"\xff" * 512 + sound[header + 512 :], f"no tar header at byte {header:,}"),
        (sound[: header + 100], f"the tar ends at byte {header:,} without its end mark"),
        (sound[:header], f"the tar ends at byte {header:,} without its end mark"),
        (sound[: header + 515], "not a sound tar"),
    ):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.tar: .*{message}"):
            make("a.tar")
    members = {"1.jpg": b"\0", "1.cls": b"3", "2.txt": b"a\0b", "3.txt": b"fine", "4.json": b'["x"]', "5.txt": b"\xff"}
    (tmp_path / "a.tar").write_bytes(tar(members))
    assert make("a.tar").rejected == {"missing field": 1, "not text": 1, "broken json": 1, "invalid utf-8": 1}
    assert read() == ["fine"]


def test_links_are_followed_once_and_what_is_not_read_is_named(tmp_path, make, read, rejected):
    for folder in ("blobs", "corpus/real", "far/deep"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in (("blobs/a", "blob"), ("far/c.txt", "far"), ("far/deep/d.txt", "deep"), ("corpus/real/e.txt", "real")):
        (tmp_path / name).write_text(text)
    (tmp_path / "corpus" / "e.md").write_text("of another name")
    for name, target in (
        ("a.txt", "../blobs/a"),
        ("again.txt", "../blobs/a"),
        ("e.txt", "real/e.txt"),
        ("gone.txt", "../blobs/gone"),
        ("round.txt", "round.txt"),
        ("away", "../nowhere"),
        ("more", "../far"),
        ("same", "../far"),
        ("inner", "../far/deep"),
        ("real2", "real"),
        ("loop", ".."),
        ("here", "."),
    ):
        os.symlink(target, tmp_path / "corpus" / name)
    os.symlink("..", tmp_path / "far" / "deep" / "up")
    os.mkfifo(tmp_path / "corpus" / "pipe.txt")
    os.symlink("/dev/null", tmp_path / "corpus" / "null.txt")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(tmp_path / "corpus", os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/socket.txt")
        os.close(here)
    report = make("corpus")
    assert sorted(read()) == ["blob", "deep", "far", "real"]
    assert rejected() == {
        *((f"corpus/{name}", "dangling link") for name in ("gone.txt", "round.txt", "away")),
        *((f"corpus/{name}", "linked folder") for name in ("same", "real2", "loop", "here", "inner/up", "more/deep")),
        *((f"corpus/{name}", "same file") for name in ("again.txt", "e.txt")),
        *((f"corpus/{name}", "not a file") for name in ("pipe.txt", "socket.txt", "null.txt")),
    } - {("corpus/more/deep", "linked folder")}
    assert f"linked folders, followed: corpus/inner -> {tmp_path}/far/deep, corpus/more -> {tmp_path}/far" in str(report)
    assert "not matched by --include: 1 .md" in str(report)
    assert make("corpus").rejected == report.rejected


def test_an_input_that_is_named_twice_is_read_once(tmp_path, make, read, rejected):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("once")
    os.symlink("in/a.txt", tmp_path / "link.txt")
    make("in", "in/a.txt", "in/../in/a.txt", "link.txt")
    assert read() == ["once"]
    assert rejected() == {("in/a.txt", "same file"), ("link.txt", "same file")}


def test_inputs_that_are_no_files_are_refused_by_what_they_are(tmp_path, make):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("gone", tmp_path / "link.txt")
    for name, what in (("pipe", "a named pipe"), ("link.txt", "a link to nothing"), ("/dev/null", "a device")):
        with pytest.raises(DataError, match=f"{name} is {what}; inputs are files or folders"):
            make(name)
    (tmp_path / "in").mkdir()
    os.symlink("gone", tmp_path / "in" / "link.txt")
    (tmp_path / "in" / "b.json").write_text("{}")
    with pytest.raises(DataError, match=r"no file in .* matches .*in/link\.txt: it is a link to gone, .*there are 1 \.json; see"):
        make("in")


def test_a_file_that_cannot_be_read_at_present_is_read_again_and_then_left_for_a_later_start(tmp_path, make, read, monkeypatch):
    """No process can read its mem file from 0 on: a read fails as on a bad disk, and the link may lead elsewhere the next time."""
    monkeypatch.setattr(file_io, "PAUSES_S", (0.0, 0.0))
    os.symlink("/proc/self/mem", tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("good")
    with pytest.raises(
        StorageError, match=r"/a\.txt: Input/output error; 1 of 2 parts are finished and kept; start again"
    ) as caught:
        make("a.txt", "b.txt", shard_bytes=1)
    assert caught.value.exit_status == 74
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").write_text("back")
    assert make("a.txt", "b.txt", shard_bytes=1).tasks_kept == 1
    assert sorted(read()) == ["back", "good"]


def test_a_read_error_that_passes_leaves_no_trace(tmp_path, make, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines())
    make("a.jsonl", out="undisturbed")
    opened = 0

    def sleep(_):
        (tmp_path / "away").rename(tmp_path / "a.jsonl")

    real = prepare_workers.read_piece

    def failing(piece, text_field, ids):
        """The file server forgets the file in the middle, once."""
        nonlocal opened
        opened += 1
        for number, record in enumerate(real(piece, text_field)):
            if opened == 1 and number == 5:
                (tmp_path / "a.jsonl").rename(tmp_path / "away")
                raise InputError("a.jsonl", piece.source.path, os.strerror(errno.ESTALE), is_transient=True)
            yield record

    monkeypatch.setattr(prepare_workers, "read_piece", failing)
    monkeypatch.setattr(prepare_workers.time, "sleep", sleep)
    make("a.jsonl")
    for name in ("dataset.json", "train-000000.tar", "train-000000.index.npz"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


NAMES = ["a[1].gz", "a*?.gz", "it's $HOME.gz", "a\nb\t.gz", "\udcff.gz", "é 語.gz", "-x", "[", "!a", "a'\"b"]


@pytest.mark.parametrize("name", NAMES)
def test_the_words_that_exclude_a_file_exclude_it_alone(tmp_path, name):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for other in (*NAMES, f"sub/{name}", f"{name}.gz", f"x{name}"):
        (folder / other).write_bytes(b"x")
    (tmp_path / "in2").mkdir()
    (tmp_path / "in2" / name).write_bytes(b"x")
    words = shlex.split(exclusion(f"in/{name}"))
    assert words[0] == "--exclude"
    before, after = (
        {source.name for source in find_input_files([folder, tmp_path / "in2"], ["*"], exclude).sources}
        for exclude in ([], words[1:])
    )
    assert before - after == {f"in/{name}"}


def test_every_piece_is_in_one_task_whatever_is_kept(tmp_path):
    rng = random.Random(3)
    settings = PrepareConfig(shard_bytes=50)
    for _ in range(200):
        made = [InputFile(f"{i:02d}", "", 1, 1) for i in range(rng.randrange(1, 12))]
        pieces = [InputPiece(source, start, start + 9, rng.randrange(1, 70)) for source in made for start in range(0, 27, 9)]
        first = make_tasks(pieces, {}, settings, tmp_path, None)
        assert [piece for task in first for piece in task.pieces] == pieces
        gone = set(rng.sample(made, rng.randrange(len(made))))
        left = [piece for piece in pieces if piece.source not in gone]
        kept = [task for task in first if rng.random() < 0.5 and not {piece.source for piece in task.pieces} & gone]
        plan = {"kept": [[task.number, [list(piece_key(piece)) for piece in task.pieces]] for task in kept], "next": len(first)}
        again = make_tasks(left, plan, settings, tmp_path, None)
        assert sorted(left, key=piece_key) == sorted((piece for task in again for piece in task.pieces), key=piece_key)
        assert len({task.number for task in again}) == len(again)
        assert set(kept) <= set(again)
        assert make_tasks(left, json.loads(json.dumps(plan)), settings, tmp_path, None) == again


def damaged(content: bytes, kind: type[Exception]) -> bytes:
    """gzip data with some bytes changed so that decompressing fails with this kind of error."""
    for hole in (1, 300):
        for at in range(200, len(content) - 400, 11):
            broken = content[:at] + bytes(byte ^ 0x55 for byte in content[at : at + hole]) + content[at + hole :]
            try:
                gzip.decompress(broken)
            except kind:
                return broken
            except (OSError, EOFError, zlib.error):
                pass
    raise AssertionError(f"no {kind} found")


@pytest.mark.parametrize(("workers", "restored"), [(1, False), (1, True), (2, False)])
def test_the_advice_about_damaged_inputs_works_and_keeps_finished_parts(tmp_path, capsys, read, workers, restored):
    folder = tmp_path / "in"
    folder.mkdir()
    rng = random.Random(workers)
    names = [*(f"{i}.jsonl.gz" for i in range(4)), "4 [it's] $a.jsonl.gz", "5.jsonl.gz"]
    texts = {name: [f"{name} {rng.random()} {rng.random()}" for _ in range(30)] for name in names}
    sound = {name: gzip.compress(lines(pages), mtime=0) for name, pages in texts.items()}
    for name, content in sound.items():
        (folder / name).write_bytes(content)
    (folder / names[2]).write_bytes(damaged(sound[names[2]], zlib.error))
    (folder / names[4]).write_bytes(damaged(sound[names[4]], gzip.BadGzipFile))
    named = tmp_path / "named.jsonl.gz"  # one that is given as an input itself
    texts[named.name] = [f"named {rng.random()} {rng.random()}" for _ in range(30)]
    sound[named.name] = gzip.compress(lines(texts[named.name]))
    named.write_bytes(sound[named.name][:-20])
    words = ["data", "prepare", str(folder), str(named), "--out", str(tmp_path / "out"), "--workers", str(workers)]
    words += ["--validation-fraction", "0", "--shard-bytes", "1000"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(
        r"3 inputs: .*/2\.jsonl\.gz: not valid gzip data at byte [0-9,]+ \(.*/4 .*a\.jsonl\.gz: the checksum of", error
    )
    assert "named.jsonl.gz: the compressed file ends in the middle of a frame" in error
    assert "4 of 7 parts are finished and kept" in error
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / PARTS).glob("task-*.tar")}
    assert main(words) == 2  # the same again: the same answer
    assert capsys.readouterr().err == error
    os.utime(folder / names[0])
    assert main(words) == 2  # a part that is finished would be lost
    assert "was prepared differently (input in/0.jsonl.gz has changed)" in capsys.readouterr().err
    os.utime(folder / names[0], ns=(json.loads((tmp_path / "out" / "prepare.json").read_text())["inputs"]["in/0.jsonl.gz"][1],) * 2)
    if restored:
        for path in (folder / names[2], folder / names[4], named):
            path.write_bytes(sound[path.name])
    else:
        advice = error[error.index("the same command with ") :].removeprefix("the same command with ")
        words += shlex.split(advice)
        for name in (names[2], names[4], named.name):
            del texts[name]
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert main(words) == 0
    assert "4 finished parts were verified and kept" in capsys.readouterr().out
    assert Counter(read()) == Counter(page for pages in texts.values() for page in pages)
    verify(tmp_path / "out")


def test_a_part_of_a_damaged_file_that_was_finished_is_given_up(tmp_path, make, read):
    """Of a table in several pieces, one damaged."""
    content = bytearray(parquet(pyarrow.array([f"{page} {i * 7919}" for i, page in enumerate(PAGES)])))
    chunk = pyarrow.parquet.ParquetFile(io.BytesIO(content)).metadata.row_group(1).column(1)
    content[chunk.data_page_offset : chunk.data_page_offset + 40] = b"\xff" * 40
    (tmp_path / "a.parquet").write_bytes(content)
    (tmp_path / "b.txt").write_text("good")
    with pytest.raises(
        DataError, match=r"a\.parquet: it cannot be read from row 7 on: .*5 of 6 parts are finished and kept.*--exclude /a\.parquet"
    ):
        make("a.parquet", "b.txt", shard_bytes=1)
    assert make("a.parquet", "b.txt", shard_bytes=1, exclude=["/a.parquet"]).tasks_kept == 1
    assert read() == ["good"]
