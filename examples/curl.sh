#!/bin/sh
# curl: one completion, then a stream of server-sent events.
#
# sh examples/curl.sh [BASE_URL]                 # http://localhost:8000/v1 by default
set -eu
url=${1:-http://localhost:8000/v1}

curl --fail-with-body --silent --show-error "$url/completions" -H 'content-type: application/json' -d '{
  "model": "demo", "prompt": "def read_lines(path):", "max_tokens": 32, "temperature": 0,
  "gammaray": {"verification": "coupled", "gamma": "adaptive"}}'
echo

# -N prints every event as it arrives.
curl --fail-with-body --silent --show-error -N "$url/chat/completions" -H 'content-type: application/json' -d '{
  "model": "demo", "messages": [{"role": "user", "content": "Write a function that reads a file."}],
  "max_tokens": 32, "seed": 1, "stream": true}'
