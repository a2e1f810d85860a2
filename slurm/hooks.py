"""Notification hooks: a shell command, or a URL that receives JSON. A failing hook is reported and has no other effect."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

PATIENCE_S = 20.0


def tell(hook: str | None, event: str, run: Path, attempt: str, text: str) -> None:
    """Calls a hook, if there is one. event: start, failure or finish."""
    if hook is None:
        return
    told = {"event": event, "run": str(run), "attempt": attempt, "text": text}
    try:
        if hook.startswith(("http://", "https://")):
            request = urllib.request.Request(hook, json.dumps(told).encode(), {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()
        else:
            names = {f"BATON_{name.upper()}": value for name, value in told.items()}
            subprocess.run(hook, shell=True, env={**os.environ, **names}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           timeout=PATIENCE_S, check=True)  # fmt: skip
    except (OSError, subprocess.SubprocessError, urllib.error.URLError, ValueError) as error:
        print(f"the hook for {event} failed: {error}", file=sys.stderr, flush=True)
