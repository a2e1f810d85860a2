"""Versions of Triton kernels: a result says which one it measured, and docs/measured.md marks results of earlier ones.

A version is a digest of the syntax trees of all Triton kernels that a mixer may launch. Names of variables, comments,
docstrings and the place of a kernel in its folder do not count, so that a rename makes no result old.
"""

import ast
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCAN = ("diagonal_scan", "short_conv")
OPS = {
    "mamba2": ("gated_linear_attention", "short_conv"),
    "mamba": ("selective_scan", *SCAN),
    "longhorn": ("longhorn", *SCAN),
    "rg_lru": SCAN,
    "s4d": ("short_conv",),
    "ttt": ("short_conv",),
    "gsa": ("gated_slot_attention", "gated_linear_attention"),
    "gla": ("gated_linear_attention",),
    "rwkv6": ("gated_linear_attention", "short_conv"),
    "mamba3": ("mamba3", "gated_linear_attention"),
    "mlstm": ("gated_linear_attention",),
    "retnet": ("gated_linear_attention",),
    "hgrn2": ("gated_linear_attention",),
    "linear_attention": ("gated_linear_attention",),
    "delta_net": ("delta_rule", "short_conv"),
    "gated_delta_net": ("delta_rule", "short_conv"),
    "delta-net": ("delta_rule", "short_conv"),
    "gated-delta-net": ("delta_rule", "short_conv"),
    "kda": ("channel_delta_rule", "delta_rule", "gated_linear_attention", "short_conv"),
    "rwkv7": ("generalized_delta_rule", "channel_delta_rule", "delta_rule", "gated_linear_attention", "short_conv"),
    "lattice": ("lattice", "short_conv"),
    "bmojo": ("eidetic_attention", "selective_scan", *SCAN),
    "transformer": ("eidetic_attention",),
    "conv": ("short_conv",),
}
"""Mixer or model, as cases of benchmarks begin, to the folders of kernels/ with its Triton kernels."""
_CASE = re.compile(rf"^(?:gated )?({'|'.join(sorted(map(re.escape, OPS), key=len, reverse=True))})(?![a-z0-9_])")


def ops_of(case: str) -> tuple[str, ...]:
    """Folders of the kernels that a case measures, by the first word of its name; none if it is not about one mixer."""
    found = _CASE.match(case)
    return OPS[found[1]] if found else ()


def version(sources: Iterable[str]) -> str:
    """Twelve hexadecimal digits for the Triton kernels in these texts of Python files; "" if there are none."""
    digests = sorted(
        hashlib.sha256(_normalised(node).encode()).hexdigest()
        for text in sources
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    )
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:12] if digests else ""


@cache
def current(ops: tuple[str, ...], root: Path = ROOT) -> str:
    """The version of these folders' kernels in a checkout."""
    return version(path.read_text(encoding="utf-8") for op in ops for path in sorted((root / "kernels" / op).glob("*.py")))


def _normalised(function: ast.FunctionDef) -> str:
    """Its syntax tree as text, with names numbered in the order in which they appear."""
    numbers: dict[str, int] = {}

    def number(name: str) -> str:
        return f"n{numbers.setdefault(name, len(numbers))}"

    tree = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    tree.decorator_list = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = node.id if node.id == "tl" else number(node.id)
        elif isinstance(node, ast.arg):
            node.arg = number(node.arg)
        elif isinstance(node, ast.FunctionDef):
            node.name = number(node.name)
    for node in ast.walk(tree):
        # keywords of tl's functions keep their names; those of kernels are numbered like the argument that they name
        if isinstance(node, ast.keyword) and node.arg is not None and node.arg in numbers:
            node.arg = number(node.arg)
    return _dumped(tree)


def _dumped(node: Any) -> str:
    """What ast.dump says, without what it says in some versions of Python only: lists that are empty, fields that are new."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment") and value != [])
    return f"{type(node).__name__}({', '.join(f'{name}={_dumped(value)}' for name, value in fields)})"
