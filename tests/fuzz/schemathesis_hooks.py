"""Hooks that schemathesis loads in addition to its configuration, see `openapi_fuzz.py`."""

import schemathesis

TIMEOUT_HEADER, TIMEOUT_MS = "gammaray-timeout-ms", "3000"


@schemathesis.hook
def before_call(context, case, kwargs):
    """Give a request a deadline, unless the test sets one.

    Some request the maximum number of tokens. Requests past the deadline end with 504 or an error event.
    """
    if TIMEOUT_HEADER not in case.headers:
        case.headers[TIMEOUT_HEADER] = TIMEOUT_MS
