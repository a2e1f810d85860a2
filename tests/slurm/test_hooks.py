"""Notification hooks: commands and URLs; a failing hook is reported and has no other effect."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from baton.slurm.hooks import tell

RUN = Path("/shared/runs/x")
TOLD = {"event": "failure", "run": str(RUN), "attempt": "0002", "text": 'rank 3 hung; it\'s "tried" again'}


def test_a_command_is_told_by_its_environment(tmp_path):
    tell(
        f'printf "%s|" "$BATON_EVENT" "$BATON_RUN" "$BATON_ATTEMPT" "$BATON_TEXT" > {tmp_path}/told',
        "failure",
        RUN,
        "0002",
        TOLD["text"],
    )
    assert (tmp_path / "told").read_text().split("|") == [*TOLD.values(), ""]


def test_a_url_is_sent_json():
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            sent.append((self.headers["Content-Type"], json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    tell(f"http://127.0.0.1:{server.server_port}/baton", "failure", RUN, "0002", TOLD["text"])
    thread.join(10)
    server.server_close()
    assert sent == [("application/json", TOLD)]


def test_a_hook_that_fails_is_mentioned(capsys):
    for hook in ("exit 3", "http://127.0.0.1:9/nobody", "http://[bad"):
        tell(hook, "start", RUN, "0001", "")
        assert capsys.readouterr().err.startswith("the hook for start failed: ")
    tell(None, "start", RUN, "0001", "")
    assert capsys.readouterr().err == ""
