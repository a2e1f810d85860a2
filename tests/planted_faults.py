"""`make faults`: plants thirty faults one at a time (support/faults.py) and writes docs/planted-faults.md with the test that finds
each.

Each fault gets a copy of the source tree of its own. Its tests run in the quick selection (what `make test` runs) until one fails;
where none does and --long is given, the long forms of the same files follow. At the end the finders run in a tree without faults:
one that fails there as well has found nothing. Ends with status 1 if a fault is not found; the page is written all the same.

--of TREE runs the tests and the code of another source tree, such as an older commit's worktree, and --as before puts the results
into the column that others are compared with.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # after -P has kept it out

from support.faults import AREAS, FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "planted-faults.md", ROOT / "docs" / "planted-faults.json"
PACKAGES = ("kernels", "data_pipeline", "parallel", "models", "training", "launcher", "slurm", "configs")
QUICK, LONG = "not long and not long_slurm", "long"
LIMIT_S = 1800
"""Seconds for one call of pytest. A test that hangs is ended by its own time limit long before."""


@dataclass(frozen=True)
class Found:
    """by: the test that failed; None: none did. why: what it said. selection: of the tests it is among, "quick" or "long". seconds:
    of processor time, of all tests that ran."""

    by: str | None
    why: str
    selection: str
    seconds: float
    commit: str


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults and see which tests find them.")
    parser.add_argument("--only", action="append", metavar="NAME", help="these faults alone (may be given several times)")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (2)")
    parser.add_argument("--long", action="store_true", help="run the long forms too where the quick tests find nothing")
    parser.add_argument("--of", type=Path, default=ROOT, metavar="TREE", help="another source tree")
    parser.add_argument("--as", dest="column", choices=("now", "before"), default="now", help="the results' column (now)")
    given = parser.parse_args()
    names = [fault.name for fault in FAULTS]
    if unknown := set(given.only or ()) - set(names):
        parser.error(f"no fault is called {sorted(unknown)[0]}; there are {', '.join(names)}")
    chosen = [fault for fault in FAULTS if fault.name in (given.only or names)]
    for fault in chosen:
        if (why := fault.problem(given.of)) is not None:
            print(f"{fault.name}: {why}", file=sys.stderr)
            return 2
    commit = subprocess.run(
        ["git", "-C", str(given.of), "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()

    def look(fault: Fault) -> Found:
        found = look_for(fault, given.of, commit, long=given.long)
        record(given.column, {fault.name: found})
        print(f"{fault.name}: {found.by or 'NOT FOUND'} ({found.selection}, {found.seconds:.0f} s) {found.why}", flush=True)
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        results = dict(zip((fault.name for fault in chosen), pool.map(look, chosen), strict=True))
    for name in failing_anyway(results, given.of):
        print(f"{name}: {results[name].by} fails without the fault as well", flush=True)
        results[name] = replace(results[name], by=None)
    PAGE.write_text(page(record(given.column, results)), encoding="utf-8")
    missed = [name for name, found in results.items() if found.by is None]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found; {PAGE} written")
    return int(bool(missed))


def look_for(fault: Fault, source: Path, commit: str, *, long: bool) -> Found:
    """Plant a fault in a copy of `source` and run its tests until one fails."""
    seconds, seen = 0.0, ("quick", "long") if long else ("quick",)
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        python = copied(source, Path(folder))
        fault.plant(Path(folder) / "tree")
        for selection in seen:
            for words in fault.tests:
                by, why, spent = run(python, Path(folder) / "tree", _words(words), {"quick": QUICK, "long": LONG}[selection])
                seconds += spent
                if by is not None:
                    return Found(by, why, selection, round(seconds, 1), commit)
    return Found(None, "", seen[-1], round(seconds, 1), commit)


def _words(words: str) -> list[str]:
    """Arguments of pytest; what follows -k is one of them."""
    files, _, expression = words.partition(" -k ")
    return [*files.split(), *(("-k", expression) if expression else ())]


def copied(source: Path, folder: Path) -> Path:
    """A copy of a source tree in folder/tree, with a virtual environment that imports baton from there and all else from where this
    process has it; the environment's python."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (source / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, tree / name)
    venv.create(tree / ".venv", with_pip=False, symlinks=True)
    (folder / "packages" / "baton").mkdir(parents=True)
    for package in PACKAGES:
        (folder / "packages" / "baton" / package).symlink_to(tree / package)
    python = tree / ".venv" / "bin" / "python"
    own = Path(sysconfig.get_path("purelib"))
    site = tree / ".venv" / own.relative_to(sys.prefix)
    # paths of a .pth file are not searched for further ones, so the other tree's editable install does nothing here
    (site / "fault.pth").write_text(f"{folder / 'packages'}\n{own}\n")
    command = python.with_name("baton")
    command.write_text(f"#!{python} -P\nimport sys\nfrom baton.launcher.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    return python


def run(python: Path, tree: Path, words: list[str], selection: str) -> tuple[str | None, str, float]:
    """Run some tests until one fails: that one, or None, what it said, and seconds of processor time."""
    command = [str(python), "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", selection, *words]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryFile("w+") as output:
        # pytest and what it starts have a session of their own, so that what is left of them can be ended
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline, ended = time.monotonic() + LIMIT_S, (0, 0, None)
        while not ended[0]:
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.2)
            ended = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        said = output.read()
    seconds = ended[2].ru_utime + ended[2].ru_stime
    if process.returncode in (0, 5):  # 5: no test was selected
        return None, "", seconds
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+(?:::[^\n]*?)?)(?: - .*)?$", said, re.MULTILINE)
    if failed is None and process.returncode == 4:
        raise RuntimeError(f"pytest was asked for what it does not know: {words}\n{said[-2000:]}")
    errors = re.findall(r"^E +(\S.*)$", said, re.MULTILINE)
    why = next((line for line in reversed(errors) if re.match(r"\w*(Error|Failed|Timeout)\b", line)), errors[0] if errors else "")
    return failed[1] if failed else f"{words[0]} (ended with status {process.returncode})", why[:200], seconds


def failing_anyway(results: dict[str, Found], source: Path) -> list[str]:
    """Faults whose finder fails in a tree without a fault as well."""
    finders = {name: found.by for name, found in results.items() if found.by is not None and "::" in found.by}
    if not finders:
        return []
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        python = copied(source, Path(folder))
        wanted = sorted(set(finders.values()))
        if run(python, Path(folder) / "tree", wanted, f"({QUICK}) or {LONG}")[0] is None:
            return []
        bad = {by for by in wanted if run(python, Path(folder) / "tree", [by], f"({QUICK}) or {LONG}")[0] is not None}
    return [name for name, by in finders.items() if by in bad]


def record(column: str, results: dict[str, Found]) -> dict[str, dict[str, Found]]:
    """Add results to the recorded ones; all of them, {column: {fault: result}}, of faults that there are."""
    RESULTS.touch()
    with open(RESULTS, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two calls with --only may end at the same time
        known = json.loads(file.read() or "{}")
        every = {c: {name: Found(**({"why": ""} | value)) for name, value in known.get(c, {}).items()} for c in ("before", "now")}
        every[column] |= results
        names = [fault.name for fault in FAULTS]
        every = {c: {name: of[name] for name in names if name in of} for c, of in every.items()}
        text = json.dumps({c: {name: asdict(found) for name, found in of.items()} for c, of in every.items()}, indent=1)
        file.seek(0)
        file.truncate()
        file.write(text + "\n")
    return every


def page(every: dict[str, dict[str, Found]]) -> str:
    rows = []
    for area in AREAS:
        for fault in (fault for fault in FAULTS if fault.area == area):
            cells = [_cell(every[column].get(fault.name)) for column in ("now", "before")]
            rows.append(f"| {fault.name} | {area} | {fault.what} | {' | '.join(cells)} |")
    return PAGE_TEXT.format(now=_summary(every["now"]), before=_summary(every["before"]), count=len(FAULTS), rows="\n".join(rows))


def _cell(found: Found | None) -> str:
    if found is None:
        return "not run"
    if found.by is None:
        return "**not found**" + (" (long forms too)" if found.selection == "long" else "")
    file, _, test = found.by.partition("::")
    where = f"{file.removeprefix('tests/')} {test}".strip()
    return f"`{where}`" + (" (long)" if found.selection == "long" else "") + f", {found.seconds:.0f} s"


def _summary(results: dict[str, Found]) -> str:
    counts = {s: sum(found.by is not None and found.selection == s for found in results.values()) for s in ("quick", "long")}
    commits = sorted({found.commit for found in results.values()})
    long = f", {counts['long']} more by long forms" if counts["long"] else ""
    return f"{counts['quick']} of {len(results)}{long} (commit {', '.join(commits) or 'none'})"


PAGE_TEXT = """# Planted faults

Written by `make faults`: {count} faults are planted in the code one at a time, and the tests of the files concerned run until one
fails. `tests/support/faults.py` has each fault's text and the tests that were run. A test that fails without the fault as well has
not found it. The seconds are processor time up to the failure, with imports and start-up.

| suite | found by the tests that `make test` runs |
| --- | --- |
| now | {now} |
| before its processor time was cut from 76 minutes | {before} |

| fault | area | what goes wrong | found by | before |
| --- | --- | --- | --- | --- |
{rows}
"""


if __name__ == "__main__":
    sys.exit(main())
