"""The environment variables of gammaray, and the check that rejects misspelt ones.

Settings are read from `GAMMARAY_<FIELD>`, so most variables are fields of the classes in `gammaray.config`
(see `gammaray.config.known_variables`). `OTHER_VARIABLES` holds the rest; add new ones there.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Mapping
from typing import Final

PREFIX: Final = "GAMMARAY_"

OTHER_VARIABLES: Final[Mapping[str, str]] = {
    "GAMMARAY_ADDRESS": "command line: host:port of the gRPC API",
    "GAMMARAY_API_KEY": "command line: key of a cluster that requires one",
    "GAMMARAY_CA_FILE": "command line: PEM file of the CA that signed the server's certificate",
    "GAMMARAY_CLUSTER_ID": "set by `gammaray up`, which identifies its processes by it",
    "GAMMARAY_URL": "command line: URL of the HTTP API",
}
"""Variables that are not settings, and their purpose."""

_REMOVED: Final[Mapping[str, str]] = {
    f"{PREFIX}ADVERTISE": f"{PREFIX}LISTEN, with the address that orchestrators connect to",
    f"{PREFIX}CERT_FILE": "the option --cert-file",
    f"{PREFIX}CPU_AFFINITY": "unset; start the process with `taskset`",
    f"{PREFIX}DRAFT_CA_FILE": "unset; drafts are loaded by draft workers",
    f"{PREFIX}DRAFT_ADDRESSES": f"{PREFIX}REDIS_URL of the draft workers, which announce themselves there",
    f"{PREFIX}DRAFT_KEY_FILE": "unset; drafts are loaded by draft workers",
    f"{PREFIX}DRAFT_LOAD": "`scaling.draft_load` of the chart; it is 4 elsewhere",
    f"{PREFIX}DRAFT_SERVER": f"{PREFIX}DRAFT, a model that a draft worker loads",
    f"{PREFIX}FAST_KERNELS": f"{PREFIX}ENGINE=transformers in place of false",
    f"{PREFIX}FEATURES": f"{PREFIX}HEAD of the target workers",
    f"{PREFIX}FEATURE_WINDOW": f"{PREFIX}HEAD of the target workers",
    f"{PREFIX}HEAD_WEIGHTS": f"{PREFIX}DRAFT_WEIGHTS",
    f"{PREFIX}HEAD_WINDOW": "unset; heads of `gammaray train` read 64 positions of a prompt, others all",
    f"{PREFIX}KERNEL_CACHE": "unset; kernels are in gammaray/kernel of XDG_CACHE_HOME",
    f"{PREFIX}KEY_FILE": "the option --key-file",
    f"{PREFIX}LOCAL_ONLY": "unset; `gammaray up` without API keys serves its own machine",
    f"{PREFIX}MAX_CORPUS_TOKENS": f"{PREFIX}PREFIX_CACHING=false in place of 0; it is 2^20 now",
    f"{PREFIX}MAX_NODES": "`gammaray.max_nodes` of a request",
    f"{PREFIX}MAX_TENANT_CORPUS_SHARE": f"{PREFIX}MAX_TENANT_SHARE",
    f"{PREFIX}MAX_TENANT_STORED_SHARE": f"{PREFIX}MAX_TENANT_SHARE",
    f"{PREFIX}MAX_WAITING_REQUESTS": f"{PREFIX}MAX_CONCURRENT_REQUESTS, which is the same",
    f"{PREFIX}MIN_GAIN": "unset; pools scale by load",
    f"{PREFIX}ORCHESTRATOR_LOAD": "`scaling.orchestrator_load` of the chart; it is 64 elsewhere",
    f"{PREFIX}NO_AUTH": f"{PREFIX}API_KEYS_FILE=none",
    f"{PREFIX}PIN_CORES": "unset; start `gammaray up` with `taskset` to choose its cores",
    f"{PREFIX}PREFILL_CHUNK": f"{PREFIX}MAX_BATCH_TOKENS, of which it is a quarter",
    f"{PREFIX}PROBE_KEY_SHA256": "unset; `gammaray up` passes its own key",
    f"{PREFIX}REDIS_MAXMEMORY_MB": f"{PREFIX}REDIS_URL of a Redis with another limit",
    f"{PREFIX}TARGET_ADDRESSES": f"{PREFIX}REDIS_URL of the target workers, which announce themselves there",
    f"{PREFIX}TARGET_LOAD": "`scaling.target_load` of the chart; it is 8 elsewhere",
    f"{PREFIX}TARGET_MODEL": f"{PREFIX}TARGET",
    f"{PREFIX}TLS": f"{PREFIX}ADDRESS=https://HOST:PORT, {PREFIX}URL=https://HOST or the option --tls",
    f"{PREFIX}VOCABULARY_MAPPING": "unset; drafts of another vocabulary propose the tokens that both have",
    f"{PREFIX}WORKER_TLS": f"{PREFIX}TLS_CA, {PREFIX}TLS_CERT and {PREFIX}TLS_KEY",
    **{
        f"{PREFIX}{name}": f"unset; it is {value} now"
        for name, value in {
            "AHEAD_ROWS": "4",
            "DRAFT_TOP_K": "64",
            "DRAIN_TIMEOUT_S": "10",
            "MAX_BODY_MB": "256",
            "MAX_PROMPT_BYTES": "2^20",
            "MAX_STEP_MS": "50",
            "MAX_TEXT_GAMMA": "24",
            "MAX_WAIT_S": "30",
            "PROPOSE_TIMEOUT_S": "2",
            "REDIS_WAIT_S": "60",
            "REPORT_INTERVAL_S": "1",
            "RETRY_S": "60",
            "SCALE_DOWN_DELAY_S": "60",
            "SCALE_UP_DELAY_S": "3",
            "VERIFY_TIMEOUT_S": "60 and 0.02 more for each token of the prompt",
            "WEIGHT_BITS": "12",
            "WORKER_WAIT_S": "30",
        }.items()
    },
}
"""Variables of former versions, and what to use instead."""

_SERVICE_HOST = "_SERVICE_HOST"


def check_environment(
    known_variables: Callable[[], Collection[str]], environment: Mapping[str, str] | None = None
) -> None:
    """Check that gammaray knows every variable whose name begins with `PREFIX`.

    Variables that Kubernetes sets for a Service named gammaray or gammaray-* are ignored.

    Args:
        known_variables: Returns the names of all variables that gammaray reads or sets. Called only if there
            is a variable outside `OTHER_VARIABLES`, since importing the settings is slow.
        environment: The environment to check; None: that of this process.

    Raises:
        InvalidArgumentError: Names the unknown or removed variable and what to use, but not its value.
    """
    given = os.environ if environment is None else environment
    # pydantic-settings ignores the case of names.
    names = {name.upper(): name for name in given if name.upper().startswith(PREFIX)}
    left = [name for name in names if name not in OTHER_VARIABLES and not _is_service_link(name, names)]
    if not left:
        return  # avoids importing the settings, which most commands do not need
    known = known_variables()
    for name in sorted(left):
        if name not in known:
            from gammaray.errors import InvalidArgumentError  # imports gRPC

            if name in _REMOVED:
                raise InvalidArgumentError(names[name], "a variable that was removed", _REMOVED[name])
            (nearest,) = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            allowed = f"a variable of gammaray; the nearest name is {nearest}"
            raise InvalidArgumentError(names[name], "an unknown environment variable", allowed)


def _is_service_link(name: str, names: Collection[str]) -> bool:
    """Whether Kubernetes set a variable for a Service, as it does in pods with `enableServiceLinks`."""
    services = (other.removesuffix(_SERVICE_HOST) for other in names if other.endswith(_SERVICE_HOST))
    return any(name.startswith((f"{service}_SERVICE_", f"{service}_PORT")) for service in services)
