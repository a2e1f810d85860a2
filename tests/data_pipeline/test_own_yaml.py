"""What Baton reads of what it wrote itself: YAML, and the names and versions of installed packages."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from baton.data_pipeline.own_yaml import parse_own_yaml
from baton.data_pipeline.written_by import installed_packages

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(VALUES)
def test_what_was_written_is_read(value):
    """Also characters that YAML escapes."""
    assert parse_own_yaml(yaml.safe_dump(value, sort_keys=False)) == value


@pytest.mark.parametrize("text", ["\ud83d\ude00", "caf\udce9"])
def test_lone_surrogates_are_read_as_they_were_written(text):
    """Libyaml refuses them: JSON's form of what lies behind U+FFFF, and bytes that are not UTF-8."""
    assert parse_own_yaml(yaml.safe_dump({"name": text})) == {"name": text}


def test_errors_are_those_of_users_files():
    with pytest.raises(yaml.YAMLError) as error:
        parse_own_yaml("a: [1, 2\nb: 3\n")
    with pytest.raises(yaml.YAMLError) as expected:
        yaml.safe_load("a: [1, 2\nb: 3\n")
    assert str(error.value) == str(expected.value)


def test_packages_are_found_however_they_were_installed(tmp_path, monkeypatch):
    """A folder of metadata, a file of it, a header with other cases and ends of lines, what is half removed, and a package that
    another of the same name hides."""
    header = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n\nName: what the text says\n"
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
    (first / "by_distutils-1.5.egg-info").write_text(header.format("by-distutils", "1.5"))
    for folder, name, text in (
        (first, "hidden-1", header.format("hidden", "1")),
        (second, "hidden-2", header.format("hidden", "2")),
        (second, "other_case-3", header.format("other-case", "3").lower().replace("\n", "\r\n")),
    ):
        (folder / f"{name}.dist-info").mkdir()
        (folder / f"{name}.dist-info" / "METADATA").write_bytes(text.encode())
    (second / "half_removed-4.dist-info").mkdir()
    found = installed_packages()
    assert {name: found.get(name) for name in ("by-distutils", "hidden", "other-case")} == {
        "by-distutils": "1.5",
        "hidden": "2",
        "other-case": "3",
    }
    assert "what the text says" not in found
    assert found["torch"]
