"""Creates the Secret with the bundled Redis' password, unless it exists.

    python redis_password.py NAME LABELS [DIRECTORY]

LABELS is JSON. DIRECTORY is the mount of the service account, which may only create Secrets.
"""

import base64
import json
import os
import secrets
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

name, labels = sys.argv[1], json.loads(sys.argv[2])
account = Path(sys.argv[3] if len(sys.argv) > 3 else "/var/run/secrets/kubernetes.io/serviceaccount")
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
namespace = (account / "namespace").read_text().strip()
secret = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": name, "labels": labels},
    "data": {"password": base64.b64encode(secrets.token_urlsafe(32).encode()).decode()},
}
request = urllib.request.Request(
    f"https://{f'[{host}]' if ':' in host else host}:{port}/api/v1/namespaces/{namespace}/secrets",
    json.dumps(secret).encode(),
    {
        "authorization": f"Bearer {(account / 'token').read_text().strip()}",
        "content-type": "application/json",
    },
)
trust = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(account / "ca.crt")))
try:
    urllib.request.build_opener(urllib.request.ProxyHandler({}), trust).open(request, timeout=30).read()
    print(f"Secret {name}: created")
except urllib.error.HTTPError as error:
    if error.code != 409:
        sys.exit(f"Secret {name}: {error.code} {error.read().decode(errors='replace')}")
    print(f"Secret {name}: already exists, not changed")
