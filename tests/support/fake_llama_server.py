"""A small server that speaks the part of llama-server's protocol that the benchmark uses; run as a program.

It continues a prompt of token ids with their sum plus 1, 2, ...; prompts with 666 are refused, those with 777
fail and those with 888 are cut off after the first chunk. Environment variables:

- FAKE_LLAMA_BROKEN makes every start fail.
- FAKE_LLAMA_LOG names a file to which the command line and each request are appended as JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOADING_S = 0.3
WITHIN_CHARACTER = 3
"""Tokens divisible by this end inside a UTF-8 character: the stream leaves them out."""


def log(entry: object) -> None:
    if path := os.environ.get("FAKE_LLAMA_LOG"):
        with Path(path).open("a") as stream:
            stream.write(json.dumps(entry) + "\n")


class Handler(BaseHTTPRequestHandler):
    started = time.monotonic()

    def do_GET(self) -> None:
        loaded = time.monotonic() - self.started > LOADING_S
        self._json(200 if loaded else 503, {"status": "ok"} if loaded else {"error": {"code": 503}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        log(body)
        prompt = body["prompt"]
        if 666 in prompt:
            self._json(400, {"error": {"code": 400, "message": "a refused prompt"}})
            return
        tokens = [sum(prompt) + number for number in range(1, body["n_predict"] + 1)]
        final = {"stop": True, "content": "", "tokens": [], "tokens_predicted": len(tokens)}
        if not body["stream"]:
            self._json(200, {**final, "tokens": tokens})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number, token in enumerate(tokens):
            if 777 in prompt and number:
                self._event({"code": 500, "message": "context full"}, "error")
                return
            if 888 in prompt and number:
                return  # the connection ends in the middle of the stream
            if token % WITHIN_CHARACTER:
                self._event({"content": "x", "tokens": [token], "stop": False})
            time.sleep(0.002)
        self._event(final)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _event(self, event: dict[str, Any], field: str = "data") -> None:
        self.wfile.write(f"{field}: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def main() -> None:
    options = sys.argv[1:]
    log(options)
    if os.environ.get("FAKE_LLAMA_BROKEN"):
        sys.exit("error: failed to load model")
    host, port = (options[options.index(name) + 1] for name in ("--host", "--port"))
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
