"""`baton settings`: the reference of a run file's settings."""

import argparse

from baton.launcher.cli.arguments import Subparsers, add_command


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "settings", _run, "the settings of a run file: values, defaults and what they mean")
    example = "e.g. training.optimizer or mamba"
    parser.add_argument("keys", metavar="KEY", nargs="*", help=f"a setting, a group or a mixer's kind, {example} (default: all)")


def _run(arguments: argparse.Namespace) -> int:
    from baton.launcher.settings_reference import lookup

    blocks = []
    for group in lookup(arguments.keys):
        if not group.settings:
            continue
        heading = group.title + (f": {group.about}" if group.about else "")
        blocks.append("\n".join([f"# {heading}", *(line for setting in group.settings for line in setting.lines())]))
    print("\n\n".join(blocks))
    return 0
