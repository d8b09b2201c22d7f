"""Exits with 0 if every URL returns status 200: python is_alive.py URL..."""

import sys
import urllib.request

for url in sys.argv[1:]:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2).read()
