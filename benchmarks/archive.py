"""Moves compiled kernels to an installation with another build of Triton or another path of the cache.

Triton names a cached kernel by a hash of Triton's own files and of what the kernel is compiled from, and stores the paths of its
files. A copied cache is therefore not found if the build of Triton (which depends on Python) or the path differs. An archive stores
the inputs of the hash beside the machine code, and unpacking creates the names for the installation there. Results of autotuning
are not archived, because they are only valid where they were measured.

    TRITON_CACHE_DIR=/tmp/cache python benchmarks/ahead.py --archive kernels.tar.xz train:mamba-1.4b:8x2048
    TRITON_CACHE_DIR=/tmp/there python benchmarks/archive.py kernels.tar.xz     # there, before it is run
"""

import hashlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MACHINE_CODE = (".cubin", ".json")
"""The files of a kernel that a launch needs; the others are intermediate results of the compiler."""
AUTOTUNED = ".autotune.json"
KEYS = "keys.json"
GROUP = "__grp__"


@contextmanager
def record_cache_keys() -> Iterator[dict[str, str]]:
    """Within it, what `compiling` collects: by a kernel's folder, what its name is made from beside Triton's files."""
    import triton.runtime.jit as jit
    from triton.runtime.cache import triton_key

    found: dict[str, str] = {}
    before = jit.get_cache_key

    def noted(*arguments: Any, **options: Any) -> str:
        key = before(*arguments, **options)
        assert key.startswith(triton_key())
        found[folder_of(key)] = key.removeprefix(triton_key())
        return key

    jit.get_cache_key = noted
    try:
        yield found
    finally:
        jit.get_cache_key = before


def folder_of(key: str) -> str:
    """The files of a kernel in the cache."""
    from triton.runtime.cache import _base32

    return _base32(hashlib.sha256(key.encode()).hexdigest())


def pack(keys: dict[str, str], cache: Path, archive: Path) -> int:
    """Write an archive of those kernels of `record_cache_keys` that are in the cache, and return how many they are."""
    there = {folder: key for folder, key in sorted(keys.items()) if (cache / folder).is_dir()}
    new = archive.with_name(f"{archive.name}.new")
    with tarfile.open(new, "w:xz", preset=3) as tar, tempfile.TemporaryDirectory() as temporary:
        names = Path(temporary, KEYS)
        names.write_text(json.dumps(there))
        tar.add(names, KEYS)
        for folder in there:
            for file in sorted((cache / folder).iterdir()):
                if file.name.endswith(MACHINE_CODE) and not file.name.endswith(AUTOTUNED):
                    tar.add(file, f"{folder}/{file.name}")
    new.replace(archive)
    return len(there)


def unpack(archive: Path, cache: Path) -> int:
    """Put an archive's kernels where this installation of Triton looks for them, and return how many they are."""
    from triton.runtime.cache import triton_key

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        keys: dict[str, str] = json.loads(Path(temporary, KEYS).read_text())
        for folder, key in keys.items():
            target = cache / folder_of(triton_key() + key)
            if target.exists():
                continue
            source = Path(temporary, folder)
            for group in source.glob(f"{GROUP}*"):
                files = json.loads(group.read_text())["child_paths"]
                here = {name: str(target / name) for name in files if (source / name).exists()}
                group.write_text(json.dumps({"child_paths": here}))
            source.rename(target)
    return len(keys)


def main() -> None:
    if len(sys.argv) != 2 or "TRITON_CACHE_DIR" not in os.environ:
        sys.exit("usage: TRITON_CACHE_DIR=FOLDER python benchmarks/archive.py ARCHIVE")
    count = unpack(Path(sys.argv[1]), Path(os.environ["TRITON_CACHE_DIR"]))
    print(f"{count} kernels in {os.environ['TRITON_CACHE_DIR']}")


if __name__ == "__main__":
    main()
