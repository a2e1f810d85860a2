"""Progress of a long command: a bar on a terminal, elsewhere (a log, a pipe) a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

#: Called with (bytes done, bytes in all); cheap enough to call often.
Progress = Callable[[int, int], None]

_LINE_SECONDS = 5.0


@contextmanager
def console_progress(label: str) -> Iterator[Progress]:
    """A `Progress` that shows itself on stdout under `label`."""
    if sys.stdout.isatty():
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Bar(*columns) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    start = time.monotonic()
    shown = [start, -1.0]  # when, and which share, the last line showed

    def line(done: int, total: int) -> None:
        now = time.monotonic()
        share = done / total if total else 1.0
        if (share >= 1 and shown[1] < 1) or now - shown[0] >= _LINE_SECONDS:
            rate = done / max(now - start, 1e-9)
            left = f", {(total - done) / rate:.0f} s left" if rate and share < 1 else ""
            print(f"{label}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s{left}", flush=True)
            shown[:] = now, share

    yield line


def shown(progress: Progress | None, label: str) -> AbstractContextManager[Progress]:
    """The caller's `progress`, or one on the console."""
    return console_progress(label) if progress is None else nullcontext(progress)
