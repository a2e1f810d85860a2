"""Hooks of mkdocs: pages of the site that are not files of docs/, and links that leave docs/.

README.md becomes the first page and CONTRIBUTING.md a page, so that neither has a copy. The API reference has a page for each
package, made from the modules that users import; mkdocstrings fills it from their docstrings without importing them. A link to a
file of the repository that is no page becomes the file's name as code.
"""

import ast
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
COPIES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Page -> file of the repository."""
API = {
    "kernels": ("protocol.py", "errors.py", "registry.py", "*/op.py"),
    "models": ("config.py", "lm.py", "block.py", "mixer.py", "mixers/*.py", "settings/*.py"),
    "parallel": ("config.py", "mesh.py", "*.py"),
    "data_pipeline": ("config.py", "*.py"),
    "training": ("config.py", "loop.py", "**/*.py"),
}
"""Package -> patterns of modules, in the order in which its page has them."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for page, source in COPIES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for package, patterns in API.items():
        files.append(File.generated(config, f"api/{package}.md", content=reference(package, patterns)))
    return files


def reference(package: str, patterns: tuple[str, ...]) -> str:
    """Markdown of a package's page: each module with a docstring and a public function, class or constant."""
    modules = dict.fromkeys(path for pattern in patterns for path in sorted((ROOT / package).glob(pattern)))
    lines = [f"# baton.{package}", ""]
    for path in modules:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = any(isinstance(n, ast.ClassDef | ast.FunctionDef) and not n.name.startswith("_") for n in tree.body)
        if public and not any(part.startswith("_") for part in path.relative_to(ROOT).with_suffix("").parts):
            name = ".".join(("baton", *path.relative_to(ROOT).with_suffix("").parts))
            lines += [f"## {name.removeprefix('baton.')}", "", f"::: {name}", "    options: {show_root_heading: false}", ""]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """With links that work from the page's place in the site."""
    uri = page.file.src_uri
    source = PurePosixPath(COPIES.get(uri, f"docs/{uri}"))
    pages = {file: name for name, file in COPIES.items()} | {f"docs/{file.src_uri}": file.src_uri for file in files}

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = normpath(str(source.parent / target))
        if path in pages:
            return f"[{text}]({'../' * uri.count('/')}{pages[path]}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs names it
        return text if text.startswith("`") else f"`{path}`"

    return _LINK.sub(link, markdown) if uri.count("/") == 0 else markdown
