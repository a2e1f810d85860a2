"""The architecture: which package may import which, packaging, the form of files, names."""

import ast
import fnmatch
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tokenize
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
from support.faults import AREAS, FAULTS, Fault
from support.retired_names import NAMES, WORDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "data_pipeline", "parallel", "models", "training", "launcher", "slurm", "configs")

# who may import whom; every package may import itself
ARROWS = {
    "kernels": set(),
    "data_pipeline": set(),
    "configs": set(),
    "parallel": {"kernels.protocol", "kernels.state_message", "kernels.embedding", "kernels.adamw", "kernels.shared_gradient"},
    "models": {"kernels", "parallel"},
    "training": {"kernels", "parallel", "models", "data_pipeline"},
    "launcher": {"parallel", "models", "training", "data_pipeline", "configs"},
    "slurm": {
        # the configuration, the run directory, the planner, and how ranks are started and watched; not the commands
        *(f"launcher.{module}" for module in ("cluster", "config", "jobs_config", "errors", "inputs", "run_directory", "planner")),
        *(f"launcher.{module}" for module in ("bytecode", "liveness", "processes", "ranks")),
        "training.monitoring.heartbeat",
        "training.monitoring.time_ledger",
        "training.monitoring.goodput",
        "parallel.config",
    },
    # the commands, on top of everything
    "launcher.cli": {"parallel", "training", "data_pipeline", "launcher", "slurm"},
}
MOST_IMPORTERS = 20
"""Files that may import one module, other than the few that are the vocabulary of all (`SHARED`)."""
SHARED = (
    "kernels/protocol.py",
    "kernels/common/launch_utils.py",  # what launches an operator's kernels imports them by it, so an operator is one more
    "kernels/compile/aot.py",  # and asks it whether tensors are a GPU's
    "parallel/mesh.py",
    "launcher/config.py",  # a run's configuration: every command that has to do with one reads it
    "launcher/cli/arguments.py",  # every command is one more
    "models/config.py",  # what each format of another library says in its own words, so a new format is one more
    # the settings of each kind of mixer are written in these, so a new kind is one more
    "models/settings/declarations.py",
    "models/settings/cost_model.py",
    "models/initializers.py",
    # and the mixers in these
    "models/mixer.py",
    "models/forward_context.py",
    "parallel/tensor.py",
    "models/settings/__init__.py",  # what there are kinds of, for all that lists, builds or checks them
    "kernels/common/chunked_autograd.py",  # a recurrence whose chunks are in PyTorch is made of it, so one more is one more
)


def sources(package):
    return sorted((ROOT / package.replace(".", "/")).rglob("*.py"))


def package_of(path):
    """The key of ARROWS whose rules a file is under."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return max((name for name in ARROWS if dotted.startswith(f"{name}.")), key=len)


@cache
def module_file(name):
    """The file that a dotted name of baton's is in: of a module, of a package, or of something in one; None: a package's folder."""
    parts = name.removeprefix("baton.").split(".")
    while parts:
        place = ROOT.joinpath(*parts)
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
        parts.pop()
    return None


@cache
def import_graph():
    """Files that each file of the packages imports, wherever in it. Modules of a package that it lists itself are left out."""
    graph = {}
    for path in (path for package in PACKAGES for path in sources(package)):
        targets = {module_file(name) for name in imported(path)} - {path, None}
        graph[path] = targets
    return graph


def circles(graph):
    """Groups of files that import each other, directly or through others (strongly connected components of two or more)."""
    reach = {}

    def reached(path):
        seen, todo = set(), [path]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    for path in graph:
        reach[path] = reached(path)
    return {
        frozenset({path, *(other for other in reach[path] if path in reach.get(other, ()))})
        for path in graph
        if path in reach[path]
    }


@cache
def facts(path):
    """Of a file, in one walk over it: dotted names of baton's modules that it imports, wherever in it; names that it binds;
    functions in it that Triton compiles; whether it has a docstring. Several tests ask for every file's."""
    names: set[str] = set()
    jit: set[str] = set()
    found, tree = [], ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(it).startswith("triton.jit") for it in node.decorator_list):
                jit.add(node.name)
        elif isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "baton"]
        elif isinstance(node, ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            assert node.level == 0, f"{path}: relative import; write baton.…"
            if node.module and node.module.split(".")[0] == "baton":
                found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found), frozenset(names), frozenset(jit), bool(ast.get_docstring(tree))


def imported(path):
    return facts(path)[0]


@pytest.mark.parametrize("package", ARROWS)
def test_imports_go_one_way(package):
    allowed, kept_out = {package, *ARROWS[package]}, {name for name in ARROWS if name.startswith(f"{package}.")}
    for path in sources(package):
        if package_of(path) != package:
            continue
        for name in imported(path):
            target = name.removeprefix("baton.")
            ok = any(target == a or target.startswith(f"{a}.") for a in allowed)
            ok &= not any(target == k or target.startswith(f"{k}.") for k in kept_out)
            assert ok, f"{path.relative_to(ROOT)} imports {name}; {package} may import {sorted(allowed)}"


def test_no_files_import_each_other():
    found = {frozenset(str(path.relative_to(ROOT)) for path in circle) for circle in circles(import_graph())}
    assert found == set()


def test_no_operators_import_each_other():
    """Folders of kernels/; compile/ also tunes operators, so it is not one of them."""
    graph, kernels = {}, ROOT / "kernels"
    for path, targets in import_graph().items():
        folders = {other.parent for other in (path, *targets)}
        if path.parent.parent == kernels and path.parent.name != "compile":
            found = {f for f in folders - {path.parent} if f.parent == kernels and f.name != "compile"}
            graph[path.parent] = graph.get(path.parent, set()) | found
    assert {f.name for f in graph} >= {"common", "eidetic_attention", "window_attention"}
    assert circles(graph) == set()


def test_a_circle_is_seen():
    assert circles({1: {2}, 2: {3}, 3: {1, 4}, 4: set()}) == {frozenset({1, 2, 3})}


def test_few_files_import_any_one_module():
    """A module that half of the repository imports cannot change; those that are every file's vocabulary are excepted."""
    graph = import_graph()
    importers = {path: [other for other in graph if path in graph[other]] for path in graph}
    excepted = {path for path in graph if path.name == "errors.py"} | {ROOT / name for name in SHARED}
    many = {str(p.relative_to(ROOT)): len(who) for p, who in importers.items() if len(who) > MOST_IMPORTERS and p not in excepted}
    assert many == {}


def test_the_arrow_test_sees_a_wrong_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from baton.training import loop\n")
    assert imported(wrong) == ("baton.training.loop",)


def unresolved(path):
    """Imports of baton's modules, and of names in them, that are not there; for programs that neither mypy nor a test imports."""
    for name in imported(path):
        parent, _, leaf = name.removeprefix("baton.").rpartition(".")
        module, whole = ROOT / parent.replace(".", "/"), ROOT / name.removeprefix("baton.").replace(".", "/")
        if whole.is_dir() or whole.with_suffix(".py").is_file():
            continue
        file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        if not file.is_file() or leaf not in facts(file)[1]:
            yield name


def test_programs_import_what_there_is():
    found = {}
    for folder in ("benchmarks", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if names := list(unresolved(path)):
                found[str(path.relative_to(ROOT))] = names
    assert found == {}


def test_an_import_of_what_is_not_there_is_seen(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from baton.training.loop import train, no_such_name\nfrom baton.training import no_such_module\n")
    assert list(unresolved(wrong)) == ["baton.training.loop.no_such_name", "baton.training.no_such_module"]


def test_every_package_is_packaged():
    """A folder that is forgotten is missing from a wheel, not from a checkout."""
    code = "import setuptools, runpy; setuptools.setup = lambda **k: print(*k['packages']); runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}
    assert set(done.stdout.split()) == {"baton", *("baton." + ".".join(folder.parts) for folder in folders)}


def test_distributions_hold_every_file(tmp_path):
    """The source distribution, and the wheel that is built from it alone, have every file of the packages and the licence."""
    source = tmp_path / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "baton", source / "baton", ignore=shutil.ignore_patterns("__pycache__"))
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {"kernels/compile/launch_configs.json", "training/py.typed", "configs/runs/demo.yaml", "slurm/policy.py"} <= files
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def build(folder, what):
        code = f"import setuptools.build_meta as backend; backend.build_{what}({str(tmp_path)!r})"
        subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, check=True, capture_output=True)

    build(source, "sdist")
    (archive,) = tmp_path.glob("baton_lm-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {path for path in files if not (unpacked / path).is_file()} == set(), "missing from the source distribution"
    build(unpacked, "wheel")
    (wheel,) = tmp_path.glob("baton_lm-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        held = set(packed.namelist())
    assert {path for path in files if f"baton/{path.removeprefix('baton/')}" not in held} == set(), "missing from the wheel"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "configs"])
def test_files_open_with_what_they_are_for_and_stay_short(package):
    for path in sources(package):
        text = path.read_text(encoding="utf-8")
        assert facts(path)[3], f"{path.relative_to(ROOT)} has no docstring"
        assert len(text.splitlines()) <= 400, f"{path.relative_to(ROOT)} is longer than 400 lines"


@pytest.mark.parametrize("package", ["data_pipeline", "models", "parallel", "training", "launcher"])
def test_settings_are_torch_free(package):
    """Plans and refusals must work on a login node, at once."""
    code = f"import sys, baton.{package}.config; print(*[m for m in ('torch', 'deepspeed', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_shipped_configurations_are_valid():
    from baton.launcher.config import load

    for path in sorted((ROOT / "configs" / "runs").rglob("*.yaml")):
        load(path)


def test_pins_are_within_the_declared_ranges():
    """constraints.txt is what was tested; pyproject.toml must admit it."""
    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]:
        requirement = Requirement(text)
        version = pins.get(requirement.name.lower().replace("_", "-"))
        assert version is not None, f"{requirement.name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(version), f"{text} does not admit {version}"


@pytest.fixture
def tables(monkeypatch):
    """The program that writes tables of what was measured."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


def test_figures_are_those_of_the_results(tables):
    for path, text in tables.pages(tables.results()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is not what the results say: make tables"


def test_the_shoot_out_is_that_of_its_records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("shoot_out_page")
    found = page.records()
    assert found
    assert (page.DOCS / "shoot-out.md").read_text(encoding="utf-8") == page.text_of(found), "python benchmarks/shoot_out_page.py"


def test_a_result_that_is_none_is_named(tables, tmp_path):
    (tmp_path / "torn.json").write_text('[{"case": "x"')
    with pytest.raises(ValueError, match=r"torn.json: not a benchmark's result: "):
        tables.results(tmp_path)
    (tmp_path / "torn.json").write_text('[{"case": "a"}]')
    with pytest.raises(ValueError, match=r"the row .* has other keys than"):
        tables.results(tmp_path)


def test_a_run_replaces_what_it_measures_again(tables, tmp_path, monkeypatch, capsys):
    """Other rows and their runs' logs stay; a run whose rows are all replaced leaves no log."""
    report = importlib.import_module("report")
    monkeypatch.setattr(report.signal, "signal", lambda *_: None)

    def run(command, rows, name="bench"):
        monkeypatch.setattr(sys, "argv", [command])
        one = report.Report(name, "a card", folder=tmp_path)
        one.gate("gate", True, "the same")
        for case, ours in rows:
            one.row(case, "us", ours, "peer", 2.0, gate="gate", higher_is_better=False)
        one.save()

    run("first.py", [("a", 1.0), ("b", 1.0)])
    run("second.py", [("b", 3.0)])
    path = tmp_path / "bench.json"
    assert [(row["case"], row["ours"], row["ratio"], row["command"]) for row in report.load(path)] == [
        ("a", 1.0, 2.0, "python first.py"),
        ("b", 3.0, 2 / 3, "python second.py"),
    ]
    assert re.findall(r"^\$ (.*)$", path.with_suffix(".log").read_text(), re.MULTILINE) == ["python first.py", "python second.py"]
    run("third.py", [("a", 2.0)])
    run("third.py", [("a", 4.0)])
    assert re.findall(r"^\$ (.*)$", path.with_suffix(".log").read_text(), re.MULTILINE) == ["python second.py", "python third.py"]
    path.write_text(report.dump([*report.load(path), *report.load(path)]))
    with pytest.raises(ValueError, match="is there twice"):
        report.load(path)


def test_a_kernels_version_is_that_of_its_code(tables):
    """A rename leaves it as it is, a change of the code does not."""
    version = importlib.import_module("kernel_version").version
    code = '''
@triton.jit
def scale(x, out, FACTOR: tl.constexpr):
    """A docstring."""
    at = tl.program_id(0)
    tl.store(out + at, FACTOR * tl.load(x + at), mask=at < 8)
'''
    renamed = code.replace("scale", "gate_scale").replace("out", "y").replace("at ", "offset ").replace("at,", "offset,")
    renamed = renamed.replace("at)", "offset)").replace("A docstring", "Another")
    assert renamed != code
    assert version([renamed]) == version([code]) == version(["import triton", code])
    assert version([code]) == "51efb6762642", "the same in every version of Python"
    assert version([code.replace("< 8", "< 9")]) != version([code])
    assert version([code.replace("tl.load(", "tl.exp(")]) != version([code])
    assert version(["def f(): pass"]) == ""
    measured = importlib.import_module("kernel_version").OPS
    folders = {op for ops in measured.values() for op in ops}
    assert {op for op in folders if not (ROOT / "kernels" / op / "__init__.py").is_file()} == set(), "benchmarks/kernel_version.py"
    own = {path.parent.name for path in (ROOT / "kernels").glob("*/*kernels.py")}
    assert {kind for kind, ops in measured.items() if kind in own and kind not in ops} == set(), "benchmarks/kernel_version.py"


OPERATOR_FILES = {"__init__", "op", "reference", "recurrence", "chunked", "torch_impl", "triton_launch"}
KERNEL_FILES = {"triton_kernels", "triton_forward", "triton_backward", "triton_common"}
# what a folder has besides; other files with kernels are NAME_kernels.py, and what launches them NAME_launch.py
OTHER_FILES = {
    "delta_rule": {"triangular_inverse"},
    "diagonal_scan": {"channel_reduce"},
    "eidetic_attention": {"launch_config", "one_token", "topk_memory"},
    "gated_linear_attention": {"chunk_math", "launch_args"},
    "lattice": {"chunk_kernel_utils", "qr_chunk", "register_tiles", "sequential", "step_loop", "variant"},
    "mamba3": {"arguments", "rotation", "transitions"},
    "mamba3_mimo": {"ranks"},
    "selective_scan": {"selective_scan_interface"},
}


def misnamed(folder, names):
    """What is wrong with the files of an operator's folder."""
    kernels = {n for n in names if n in KERNEL_FILES or n.startswith("triton_chunk_") or n.endswith("_kernels")}
    allowed = OPERATOR_FILES | OTHER_FILES.get(folder, set()) | kernels | {n for n in names if n.endswith("_launch")}
    wrong = [f"{folder}/{name}.py" for name in sorted(names - allowed)]
    # two are shared by several operators; the other's kernels are delta_rule's for one kind of gate, of a version of their own
    kernels_alone = folder in ("diagonal_scan", "matrix_step", "channel_delta_rule")
    wrong += [f"{folder} has no op.py"] if "op" not in names and not kernels_alone else []
    wrong += [f"{folder} has kernels and no triton_launch.py"] if kernels and "triton_launch" not in names else []
    if "recurrence" in names:
        wrong += [f"{folder} has no reference.py"] if "reference" not in names else []
        wrong += [f"{folder} has not one of chunked.py and torch_impl.py"] if len(names & {"chunked", "torch_impl"}) != 1 else []
    return wrong


def test_operators_have_the_same_files():
    folders = [p for p in (ROOT / "kernels").iterdir() if (p / "__init__.py").is_file() and p.name not in ("common", "compile")]
    assert len(folders) >= 16
    assert [wrong for p in sorted(folders) for wrong in misnamed(p.name, {f.stem for f in p.glob("*.py")})] == []


def test_a_misnamed_file_of_an_operator_is_seen():
    assert misnamed("new", {"__init__", "op", "slots"}) == ["new/slots.py"]
    assert misnamed("new", {"__init__", "op", "triton_kernels"}) == ["new has kernels and no triton_launch.py"]
    assert misnamed("new", {"__init__", "op", "recurrence", "chunked"}) == ["new has no reference.py"]


def test_kernels_are_launched_through_lazy_modules():
    """A kernel that is imported otherwise has another key in Triton's cache, if it is the first that a process launches."""
    of = {path: found for path in sources("kernels") if (found := facts(path)[2])}
    assert len(of) > 20
    wrong = []
    for path in (path for package in PACKAGES for path in sources(package) if path not in of):
        for name in imported(path):
            at, last = module_file(name), name.rpartition(".")[2]
            if at in of and (last == at.stem or last in of[at]):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_programs_of_tests_do_not_import_from_where_they_stand():
    """Without -P `baton` is the checkout's folder of that name, which has no packages in it in a copy with faults."""
    bare = re.compile(r"sys\.executable, (?:\"-u\", )?\"-c\"")
    assert [str(path.relative_to(ROOT)) for path in sources("tests") if bare.search(path.read_text(encoding="utf-8"))] == []


def test_faults_can_still_be_planted():
    """`make faults` plants each by its text, which has to be in the code exactly once."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 30
    assert {fault.area for fault in FAULTS} == set(AREAS)
    problems = {fault.name: why for fault in FAULTS if (why := fault.problem(ROOT)) is not None}
    assert problems == {}, "give these faults of tests/support/faults.py the code's new text, or plant others in their place"
    stale = Fault("stale", "carry", "", "setup.py", "this text is not there", "", ("tests/test_architecture.py",))
    assert stale.problem(ROOT) == "setup.py has its text 0 times, not once:\nthis text is not there"


def texts():
    """Path and text of each file that people write; results of measurements and logs keep the names of their time."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        kept = name.startswith("benchmarks/results/") or name.endswith(".log") or name == "tests/support/retired_names.py"
        if not kept and (ROOT / name).is_file():
            try:
                yield name, (ROOT / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def identifiers(text):
    """Names in Python code as `name`, after a dot also as `.name`, and as keyword arguments also as `name=`."""
    before = after = None
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in (tokenize.NL, tokenize.COMMENT)]
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        after = following.string if following else ""
        if token.type == tokenize.NAME:
            yield token.string
            if before == ".":
                yield f".{token.string}"
            elif after == "=" and before in ("(", ","):
                yield f"{token.string}="
        before = token.string


def retired(name, text, words=WORDS, names=NAMES):
    """Retired names in one file's text."""
    written = set(re.findall(r"\w+", text))  # searching for each name, or reading tokens, takes long
    asked = {w for files, ws in words.values() if any(fnmatch.fnmatch(name, f) for f in files) for w in ws}
    found = asked & written
    parts = {w for w in asked if not w.isidentifier() and w in text}
    found |= {w for w in parts if re.search(rf"(?<!\w){re.escape(w)}(?!\w)", text)}
    if name.endswith(".py"):
        entries = [entry for part in names.values() for entry in part]
        asked = {n for files, ns in entries if any(fnmatch.fnmatch(name, f) for f in files) for n in ns}
        asked = {n for n in asked if n.strip(".=") in written}
        found |= asked & set(identifiers(text)) if asked else set()
    return found


def test_retired_names_stay_away():
    found = {name: names for name, text in texts() if (names := retired(name, text))}
    assert found == {}, "tests/support/retired_names.py says which names these are; git log says what replaced them"


def test_a_retired_name_is_seen():
    words, names = {"a": (("*.md", "a.py"), ("old_word",))}, {"b": [(("a.py",), (".old", "other="))]}
    assert retired("a.md", "an old_word here", words, names) == {"old_word"}
    assert retired("a.py", "x.old = f(1, other=2)  # old_word", words, names) == {"old_word", ".old", "other="}
    assert retired("a.py", "old = other = very_old_word = 1", words, names) == set()


def test_every_term_is_where_the_glossary_says():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)`, `([^`]+)` \|", text, re.MULTILINE)
    assert len(rows) == sum(line.startswith("| ") and "`" in line for line in text.splitlines()), "a row has another form"
    missing = []
    for term, name, file in rows:
        path = ROOT / file
        if not path.is_file() or not (path.stem == name or re.search(rf"\b{re.escape(name)}\b", path.read_text(encoding="utf-8"))):
            missing.append(f"{term}: {name} in {file}")
    assert missing == []


IMPORT = re.compile(r"^[ \t]+from (baton(?:\.\w+)*) import (\w+)$", re.MULTILINE)


def test_what_programs_in_strings_import_is_there():
    """Those that a test hands to another process fail in silence where they only prepare it."""
    missing = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module, name in IMPORT.findall(path.read_text()):
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError as error:  # of a package that is not needed, on an oldest or newest set of versions
                if str(error.name).startswith("baton"):
                    raise
                continue
            if not hasattr(found, name) and importlib.util.find_spec(f"{module}.{name}") is None:
                missing.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
    assert not missing
