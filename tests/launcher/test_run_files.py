"""The shipped run files: their headers are true, and they can be planned as they are and with the overrides that the headers
name."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from baton.launcher.cli import main
from baton.launcher.config import load

WORD = r"(?:training|model|layout|data)(?:\.[a-z_]+)*=[^\s,;()]*[^\s,;:.()]"
RUNS = Path(str(files("baton.configs"))) / "runs"
RUN_FILES = sorted(RUNS.rglob("*.yaml"))


def header(path):
    """The comment at the top of a run file, as one line."""
    lines = path.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:first])


def starts(path):
    """A run file as it is, and with each group of key=value words that its header names: words beside each other are one start."""
    return [(), *(tuple(group.split()) for group in re.findall(rf"{WORD}(?: {WORD})*", header(path)))]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_fits_80_gb_as_it_is_and_with_every_override_its_header_names(capsys, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no demo has been
    for words in starts(path):
        if path.stem == "demo":  # whose tokenizer is trained by `make demo`
            words = (*words, "model.vocab_size=512")
        status = main(["plan", str(path), *words, "--cluster", "h100"])
        out, err = capsys.readouterr()
        assert (status, out.splitlines()[-1][:5]) == (0, "fits:"), (words, err)


def test_overrides_are_found_in_headers():
    """The test above reads them from prose: these are some that it must have read."""
    found = {path.stem: starts(path)[1:] for path in RUN_FILES}
    assert found["longhorn-125m-openwebtext"] == [("training.sequence_length=4096",)]
    assert found["longhorn-350m-openwebtext"] == [("training.sequence_length=4096", "training.micro_batch_size=8")]
    assert found["mamba-2.8b-300b"] == [("training.optimizer.lr=8.0e-4",)]
    assert found["bmojo-1.4b"] == [("model=bmojo-f-1.4b",)]
    variants = [("model.mixers.lattice.variant=enc",), ("model.mixers.lattice.variant=sim",)]
    assert found["lattice-340m-pile"] == variants
    assert sum("=" in header(path) for path in RUN_FILES) == sum(map(bool, found.values()))


# tokens that each paper gives for its run: Gu & Dao, tables 3 and 12; Liu et al., table 5 and section 5.3; Zhang et al., section
# 4.1; Karami & Mirrokni, tables 2 and 3 (none for 1.3B); Zancato et al., 20 per parameter
BUDGETS = {
    "bmojo-1.4b": "28B",
    "bmojo-130m": "2.6B",
    "bmojo-370m": "7.4B",
    "bmojo-790m": "15.8B",
    "gsa-1.3b-slimpajama": "100B",
    "gsa-2.7b-slimpajama": "100B",
    "lattice-1.3b": "100B",
    "lattice-110m-pile": "2.4B",
    "lattice-340m-pile": "7.5B",
    "longhorn-1.3b-slimpajama": "100B",
    "longhorn-125m-openwebtext": "2.5B",
    "longhorn-350m-openwebtext": "7B",
    "mamba-1.4b-pile": "26B",
    "mamba-130m-pile": "2.5B",
    "mamba-2.8b-300b": "300B",
    "mamba-370m-pile": "7B",
    "mamba-790m-pile": "15B",
    "transformer-1.3b-slimpajama": "100B",
    "transformer-125m-pile": "2.5B",
}


@pytest.mark.parametrize("path", sorted((RUNS / "papers").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_papers_run_has_its_tokens_and_its_citation(path):
    budget = BUDGETS[path.stem]
    training, said = load(path).training, header(path)
    digits = len(budget.removesuffix("B").partition(".")[2])
    assert f"{training.steps * training.global_batch_tokens / 1e9:.{digits}f}B" == budget
    assert re.search(rf"\b{budget} tokens", said), said
    assert re.search(r"\((?:[A-Z][a-z]+ (?:et al\.|& [A-Z][a-z]+))[,)]", said), said
    assert "Open in the paper: " in said
