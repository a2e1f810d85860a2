"""The text of shoot_out.py: source code and documentation out of packages of Debian and PyPI, as compressed JSON lines.

Packages are downloaded by `pip download` and `apt-get download` at the versions below and unpacked; nothing of them is run. Files
that occur twice are taken once. Documents are files, in an order by their hashes, so that each file of lines is a sample of all.
FOLDER/text.json has the packages, the documents, the bytes, and a hash of it all.

    python benchmarks/shoot_out_text.py FOLDER [--megabytes 200]
"""

import argparse
import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

WHEELS = (
    "astropy==7.1.1",
    "bokeh==3.8.1",
    "buildbot==4.3.0",
    "dask==2025.11.0",
    "distributed==2025.11.0",
    "django==5.2.8",
    "jax==0.10.2",
    "matplotlib==3.10.7",
    "mypy==1.18.2",
    "networkx==3.5",
    "nltk==3.9.2",
    "numpy==2.3.5",
    "pandas==2.3.3",
    "plotly==6.5.0",
    "scikit-learn==1.7.2",
    "scipy==1.16.3",
    "sphinx==8.2.3",
    "sqlalchemy==2.0.44",
    "statsmodels==0.14.5",
    "sympy==1.14.0",
    "transformers==5.24.0",
    "twisted==25.5.0",
    "wagtail==7.2",
)
KERNEL = "linux-source-6.1=6.1.192-3"
"""Debian's package of Linux: C, and documentation in English."""
FOLDERS = """
Documentation arch/arm64 arch/x86 block crypto drivers/base drivers/block drivers/char drivers/md drivers/net/ethernet/intel
drivers/nvme drivers/pci drivers/scsi drivers/usb drivers/virtio fs include/linux include/net ipc kernel lib mm net security
sound/core tools/perf virt
"""
KINDS = (".c", ".h", ".md", ".py", ".pyi", ".rst", ".txt")
LEAST, MOST = 200, 200_000
"""Characters of a document; the source of longer ones is a table as a rule."""
FILES = 8
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28)))


def download(folder: Path) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    subprocess.run([*pip, *platforms, "-d", str(folder), *WHEELS], check=True)
    if subprocess.run(["apt-get", "download", "-qq", KERNEL], cwd=folder, check=False).returncode:
        raise SystemExit(f"apt-get does not find {KERNEL}: run `apt-get update`, or name a folder with the packages (--packages)")


def texts(folder: Path) -> Iterator[str]:
    """Of all packages in a folder."""
    for path in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(KINDS):
                    yield archive.read(name).decode("utf-8", errors="ignore")
    for path in sorted(folder.glob("*.deb")):
        inside = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(inside)) as package:
            member = next(name for name in package.getnames() if name.endswith(".tar.xz"))
            source = package.extractfile(member)
            assert source is not None
            yield from _of_kernel(io.BytesIO(source.read()))


def _of_kernel(source: io.BytesIO) -> Iterator[str]:
    inside = tuple(f"{name}/" for name in FOLDERS.split())
    with tarfile.open(fileobj=source, mode="r:xz") as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            if member.isfile() and inner.endswith(KINDS) and inner.startswith(inside):
                file = archive.extractfile(member)
                assert file is not None
                yield file.read().decode("utf-8", errors="ignore")


def write_lines(path: Path, documents: list[str]) -> int:
    """Compressed bytes of a file of lines."""
    raw = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents).encode()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]
    packed = lzma.compress(raw, format=lzma.FORMAT_XZ, filters=filters)
    path.write_bytes(packed)
    return len(packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=200, help="of text, about")
    parser.add_argument("--packages", type=Path, help="a folder with the packages (default: they are downloaded)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        packages = arguments.packages or Path(temporary)
        if arguments.packages is None:
            download(packages)
        found = {hashlib.sha256(text.encode()).hexdigest(): text for text in texts(packages) if LEAST <= len(text) <= MOST}
    chosen, size = list[str](), 0
    for key in sorted(found):
        if size < arguments.megabytes * 1_000_000:
            chosen.append(key)
            size += len(found[key].encode())
    parts = [[found[key] for key in chosen[n::FILES]] for n in range(FILES)]
    with ProcessPoolExecutor() as pool:
        packed = sum(pool.map(write_lines, [arguments.folder / f"text-{n}.jsonl.xz" for n in range(FILES)], parts))
    words = {
        "packages": [*WHEELS, KERNEL],
        "documents": len(chosen),
        "of": len(found),
        "bytes": size,
        "compressed": packed,
        "sha256": hashlib.sha256("".join(chosen).encode()).hexdigest(),
    }
    (arguments.folder / "text.json").write_text(json.dumps(words, indent=1) + "\n")
    print(json.dumps(words))


if __name__ == "__main__":
    main()
