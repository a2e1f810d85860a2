"""The package stands alone: it imports nothing else of ours, and no torch."""

import subprocess
import sys
from pathlib import Path

import baton.data_pipeline


def test_nothing_of_ours_and_no_torch_is_imported():
    names = sorted(path.stem for path in Path(baton.data_pipeline.__path__[0]).glob("*.py") if path.stem != "__init__")
    assert {"tokenizer", "prepare", "verify", "run_source"} <= set(names)
    program = "import sys, importlib\n"
    program += f"for name in {names}: importlib.import_module('baton.data_pipeline.' + name)\n"
    program += (
        "bad = [m for m in sys.modules if m.split('.')[0] == 'torch' or m.startswith('baton.') and 'data_pipeline' not in m]\n"
    )
    program += "sys.exit(', '.join(bad) or 0)\n"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
