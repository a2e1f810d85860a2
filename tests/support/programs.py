"""Python programs in processes of their own, forked from one that has paid for the imports.

Their Triton compiles: TRITON_INTERPRET, which the tests set for themselves where there is no GPU, is not set. Of this repository
nothing has been imported before a program begins, and no kernel has been launched.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


class Programs:
    """The process that is forked; it starts with the first program. Use the fixture `programs` of tests/conftest.py."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, code: str, *words: str, **environment: str) -> str:
        """What a program writes to stdout. words: its arguments. Raises AssertionError where it does not end with status 0."""
        if self._server is None:
            settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            settings |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
            command = [sys.executable, "-P", __file__]
            self._server = subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request = {"code": code, "words": words, "environment": environment, "out": str(out), "err": str(err)}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            status = self._server.stdout.readline().strip()
            assert status == "0", f"status {status}: {err.read_text()[-3000:]}"
            return out.read_text()

    def close(self) -> None:
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait()


def _serve() -> None:
    import deepspeed  # noqa: F401
    import megatron.core.parallel_state
    import megatron.core.tensor_parallel  # noqa: F401
    import torch._dynamo
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    import triton.runtime  # noqa: F401

    gc.freeze()  # a program's collector need not look at what is imported here
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _program(**request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _program(code: str, words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Become the program; does not return."""
    import traceback

    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    sys.argv = ["program", *words]
    status = 0
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
