"""Progress shows itself as a bar on a terminal and as lines elsewhere."""

import os
import pty
import subprocess
import sys

PROGRAM = """
from baton.data_pipeline.progress import console_progress
with console_progress("reading") as progress:
    for done in range(0, 5_000_001, 1_000_000):
        progress(done, 5_000_000)
"""


def test_a_log_gets_a_line_at_the_end():
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("reading: 5.0 of 5.0 MB")


def test_a_terminal_gets_a_bar():
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-P", "-c", PROGRAM], stdout=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:  # how Linux ends a terminal whose other side is closed
            break
        if not block:
            break
        shown += block
    os.close(master)
    assert process.wait() == 0
    assert b"reading" in shown
    assert b"5.0/5.0 MB" in shown
