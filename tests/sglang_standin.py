"""A stand-in for an interpreter that has SGLang: its `sglang.launch_server` answers what the launcher asks, in no time.

It has the real server's flags that matter here, reads its keys from the `--config` file, and starts a child as the real
one does. What it is asked to do wrong comes as flags: `--fail` ends it at once, `--deaf` never gets ready, `--stubborn`
ignores SIGTERM.
"""

import os
import sys
from pathlib import Path

SERVER = """
import argparse, json, os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for flag in ("--model-path", "--host", "--config", "--dtype", "--weight-version", "--context-length", "--device"):
    parser.add_argument(flag)
parser.add_argument("--port", type=int)
parser.add_argument("--tp-size", type=int)
for flag in ("--incremental-streaming-output", "--skip-tokenizer-init", "--fail", "--deaf", "--stubborn"):
    parser.add_argument(flag, action="store_true")
options, rest = parser.parse_known_args()
with open(options.config) as file:
    mode = os.fstat(file.fileno()).st_mode & 0o777
    keys = json.load(file)
print("flags", json.dumps(sys.argv[1:]))
print("keys", keys["api-key"], keys["admin-api-key"], oct(mode))
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), "key seen", "SGLANG_API_KEY" in os.environ, flush=True)
if options.fail:
    print("the model is broken")
    sys.exit(7)
if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = self.path == "/health" or self.headers["Authorization"] == "Bearer " + keys["api-key"]
        body = json.dumps({"weight_version": options.weight_version}).encode()
        self.send_response(503 if options.deaf else 200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
"""


def make_standin(folder: Path) -> str:
    """An interpreter, as a path, that has the stand-in."""
    package = folder / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{package.parent}" exec "{sys.executable}" "$@"\n')
    os.chmod(python, 0o700)
    return str(python)
