"""Hooks that schemathesis loads in addition to its configuration, see `openapi_fuzz.py`."""

import schemathesis

TIMEOUT_HEADER, TIMEOUT_MS = "gammaray-timeout-ms", "3000"


@schemathesis.hook
def before_call(context, case, kwargs):
    """Give a request a deadline of its own, unless a deadline is what is tried.

    Some ask for as many tokens as there can be. What takes longer ends with 504, or with an error event.
    """
    if TIMEOUT_HEADER not in case.headers:
        case.headers[TIMEOUT_HEADER] = TIMEOUT_MS
