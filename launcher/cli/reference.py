"""The reference of all commands, made from their parsers: docs/commands.md."""

import argparse
from collections.abc import Iterator

INTRODUCTION = """# Commands

Every command says the same with `--help`. Words in capitals are yours to fill in, and words in brackets may be left out. Where a
command takes `key=value`, these are settings over the run file's ([settings.md](settings.md)). Exit statuses: 0 well, 1 failed,
2 bad input, 74 files that cannot be read or written at present, 75 busy or stopped. `make reference` writes this page from the
commands' parsers."""


def markdown(parser: argparse.ArgumentParser) -> str:
    """docs/commands.md. parser: of `baton`."""
    return "\n".join([INTRODUCTION, *_sections(parser)]) + "\n"


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for command in action.choices.values():
            if any(isinstance(one, argparse._SubParsersAction) for one in command._actions):
                yield from _sections(command)
                continue
            words = [f"`{_word(one)}`" for one in command._actions if not one.option_strings]
            yield from ("", f"## {command.prog}", "", f"{_sentence(command.description or '')}", "")
            yield from ("| | |", "| --- | --- |")
            shown = [one for one in command._actions if one.help is not argparse.SUPPRESS and one.dest != "help"]
            for word, one in zip([*words, *map(_option, _options(shown))], [*_positionals(shown), *_options(shown)], strict=True):
                yield f"| {word} | {_help(one)} |"


def _positionals(actions: list[argparse.Action]) -> list[argparse.Action]:
    return [one for one in actions if not one.option_strings]


def _options(actions: list[argparse.Action]) -> list[argparse.Action]:
    return [one for one in actions if one.option_strings]


def _word(action: argparse.Action) -> str:
    name = str(action.metavar or (" or ".join(map(str, action.choices)) if action.choices else action.dest.upper()))
    return {"*": f"[{name} ...]", "+": f"{name} ...", "?": f"[{name}]"}.get(str(action.nargs), name)


def _option(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings[:-1])
    last = action.option_strings[-1] + ("" if action.nargs == 0 else f" {_word(action)}")
    return ", ".join(filter(None, [names, f"`{last}`"]))


def _help(action: argparse.Action) -> str:
    text = " ".join((action.help or "").split()) % {**vars(action), "prog": ""} if action.help else ""
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
