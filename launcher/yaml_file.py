"""Strict reading of YAML from users: files, and values of key=value arguments. Torch-free.

In YAML a later key silently replaces an earlier one of the same name, so of a setting that is written twice one would be ignored.
Here it is an error that names both lines.
"""

from pathlib import Path
from typing import Any

import yaml

from baton.data_pipeline.file_io import read_text
from baton.launcher.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with the same key twice. Keys that a merge (<<) brings may still be replaced."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in first_lines:
                where = f"line {first_lines[key]} and line {line}" if line != first_lines[key] else f"line {line}"
                raise yaml.YAMLError(f"the key {key!r} is there twice ({where}); remove one")
            first_lines[key] = line
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError for what is not YAML, and for a key that is there twice."""
    return yaml.load(text, _UniqueKeyLoader)


def read_yaml(path: Path, of: str = "") -> dict[str, Any]:
    """The keys and values of a file. of: comes before "expected keys and values" in the error. Raises ConfigError with one line."""
    return read_yaml_and_text(path, of)[1]


def read_yaml_and_text(path: Path, of: str = "") -> tuple[str, dict[str, Any]]:
    """The same, and its text, which has comments: a pipe can be read only once."""
    try:
        text = read_text(path)
        values = parse_yaml(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {of}expected keys and values")
    return text, values
