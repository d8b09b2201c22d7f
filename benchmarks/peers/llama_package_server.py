"""llama.cpp's server of the package `xllamacpp`, with the options of llama-server that the comparison uses.

Runs in the environment that `llama_package` makes, so it imports nothing of this project.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import xllamacpp  # type: ignore[import-not-found]


def serve(arguments: list[str]) -> int:
    """Run the server with llama-server's options until SIGTERM or SIGINT; return the exit status."""
    parser = argparse.ArgumentParser(prog="llama-server")
    version = f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info()}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("-t", dest="threads", type=int, default=1)
    parser.add_argument("-tb", dest="batch_threads", type=int, default=1)
    parser.add_argument("-np", dest="slots", type=int, default=1)
    parser.add_argument("-c", dest="context", type=int, default=4096)
    parser.add_argument("--no-webui", action="store_true")
    parser.add_argument("--spec-type", choices=("ngram-simple", "ngram-map-k", "draft-simple"))
    parser.add_argument("-md", dest="draft")
    parser.add_argument("-td", dest="draft_threads", type=int, default=1)
    parser.add_argument("--spec-draft-n-max", dest="draft_tokens", type=int, default=3)
    options = parser.parse_args(arguments)

    params = xllamacpp.CommonParams()
    params.hostnames, params.port = [options.host], options.port
    params.model.path = options.model
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = options.threads, options.batch_threads
    params.n_parallel, params.n_ctx = options.slots, options.context
    params.n_gpu_layers, params.fit_params, params.ui = 0, False, False
    if options.spec_type:
        kind = options.spec_type.replace("-", "_").upper()
        types = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if options.draft:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_gpu_layers = options.draft, options.draft_tokens, 0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.draft_threads
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    while not ended.wait(0.2):
        pass
    del server
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
