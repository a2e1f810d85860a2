#!/usr/bin/env bash
# setup.sh [EXTRA...] - make .venv and install Baton into it, with the optional dependency groups EXTRA (test, lint).
#
# Quick when nothing changed. Where python3 already has a torch that sees a CUDA GPU, the venv builds on it and torch is left
# alone; elsewhere everything is installed as constraints.txt pins it. BATON_WHEELS=DIR installs from the wheels in DIR, without
# a network. Nothing outside .venv is touched.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $*" >&2; exit 2; }

python=
for candidate in ${BATON_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$(command -v "$candidate"); break
    fi
done
[ -n "$python" ] || fail "no Python 3.11 or newer found; install one, or name it with BATON_PYTHON=/path/to/python3"
# Debian's python3 comes without ensurepip: then the pip beside it serves the venv from outside
if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # the pip that comes with Python may be years old, and spends a minute more on reading the index; without a network it does
    make_venv() {
        "$python" -m venv "$@" .venv
        pip install "${flags[@]}" --constraint constraints.txt --upgrade pip >/dev/null 2>&1 || true
    }
    pip() { .venv/bin/python -m pip "$@"; }
elif "$python" -m pip --version >/dev/null 2>&1; then
    make_venv() { "$python" -m venv --without-pip "$@" .venv; }
    pip() { "$python" -m pip --python .venv/bin/python "$@"; }
else
    fail "$python has neither ensurepip nor pip; install one (Debian, Ubuntu: apt-get install python3-venv)"
fi

# a CUDA torch that is already there is kept: it fits the machine's driver, and it is gigabytes
cuda_torch=$("$python" - <<'END' 2>/dev/null || true
from importlib.metadata import version

import torch
if torch.cuda.is_available() and tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11):
    print(version("torch"))
END
)

extras=$(IFS=,; echo "$*")
wanted=$( { cat pyproject.toml setup.py constraints.txt scripts/setup.sh; echo "$python $cuda_torch"; } | sha256sum | cut -d' ' -f1)
if [ -f .venv/.baton ] && [ "$(head -n 1 .venv/.baton)" != "$wanted" ]; then rm -rf .venv; fi
have() { grep -qx "extra:$1" .venv/.baton 2>/dev/null; }
missing=0
have base || missing=1
for extra in "$@"; do have "$extra" || missing=1; done
[ $missing = 1 ] || exit 0

echo "setting up .venv with $("$python" --version)${cuda_torch:+, on its torch $cuda_torch} ..."
flags=(--disable-pip-version-check)
# for tests, whose processes keep it, Python makes bytecode of what they import, once; of all modules it takes as long as the rest.
# Elsewhere PYTHONDONTWRITEBYTECODE may be set, and every start would make it again
case " $* " in *" test "*) flags+=(--no-compile) ;; esac
install() {
    pip install "${flags[@]}" --constraint "$constraints" "$@" >.venv/setup.log 2>&1 || {
        tail -n 25 .venv/setup.log >&2; fail "the installation failed; all of its output is in .venv/setup.log"; }
}
if [ -n "${BATON_WHEELS:-}" ]; then
    [ -d "$BATON_WHEELS" ] || fail "BATON_WHEELS=$BATON_WHEELS: no such folder"
    flags+=(--no-index --find-links "$BATON_WHEELS" --no-build-isolation)
fi
if [ -n "$cuda_torch" ]; then
    [ -x .venv/bin/python ] || make_venv --system-site-packages
    constraints=$(mktemp); trap 'rm -f "$constraints"' EXIT
    echo "torch==$cuda_torch" >"$constraints"
    # a python that is itself a venv does not hand its packages on: name its folder
    "$python" - .venv <<'END'
import pathlib, site, sys, sysconfig
folders = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
target = next(pathlib.Path(sys.argv[1]).glob("lib/python3.*/site-packages")) / "system-torch.pth"
target.write_text("".join(f"{folder}\n" for folder in sorted(folders)))
END
else
    [ -x .venv/bin/python ] || make_venv
    constraints=constraints.txt
    # torch first: DeepSpeed's build and pip's choice of torch both depend on what is there
    install torch
fi
install --editable ".${extras:+[$extras]}"
{ echo "$wanted"; echo "extra:base"; { grep '^extra:' .venv/.baton 2>/dev/null || true; for extra in "$@"; do echo "extra:$extra"; done; } | sort -u; } >.venv/.baton.new
mv .venv/.baton.new .venv/.baton
echo "setting up .venv: done"
