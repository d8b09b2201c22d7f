"""Tests the health and one completion of a deployed gammaray: python helm_test.py URL yes|no.

The second argument is whether clients need an API key. The test uses the key in GAMMARAY_API_KEY; if a key is
needed and none is set, it tests that a completion is rejected.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

url, needs_key = sys.argv[1], sys.argv[2] == "yes"
key = os.environ.get("GAMMARAY_API_KEY", "")
headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(path, body=None):
    request = urllib.request.Request(url + path, body and json.dumps(body).encode(), headers)
    try:
        with opener.open(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


deadline = time.monotonic() + 60
while (health := ask("/health"))[0] != 200:
    if time.monotonic() > deadline:
        sys.exit(f"/health: {health}")
    time.sleep(1)
print(f"/health: {health}")
status, answer = ask(
    "/v1/completions", {"prompt": "def read_lines(path):", "max_tokens": 8, "temperature": 0}
)
if needs_key and not key:
    if status != 401:
        sys.exit(f"/v1/completions without a key: {status} {answer}, expected 401")
    print("/v1/completions: requires a key; set helmTest.apiKeySecret to test a completion")
elif status != 200 or not answer["usage"]["completion_tokens"]:
    sys.exit(f"/v1/completions: {status} {answer}")
else:
    print(f"/v1/completions: {answer['choices'][0]['text']!r}")
