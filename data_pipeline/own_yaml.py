"""Reading of YAML that Baton itself wrote: resolved configurations, in every process of a run. Users' files are read by
launcher.yaml_file, whose errors name the line."""

from typing import Any

import yaml


def parse_own_yaml(text: str) -> Any:
    """The value of a YAML text. By libyaml, where PyYAML has it: in a tenth of the time. What libyaml refuses PyYAML's own parser
    reads again, for it reads all that is written, lone surrogates as well. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return yaml.safe_load(text)
