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
    "GAMMARAY_VLLM_COUPLED": "vLLM's own server: turns the plug-in gammaray-vllm on",
}
"""Variables that are not settings, and their purpose."""

_SERVICE_HOST = "_SERVICE_HOST"
_NO_PROXY = ("no_proxy", "NO_PROXY")  # gRPC reads the first only, and others prefer it


def past_proxies(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return variables with which no proxy of `environment` is used for connections to `hosts`."""
    named = next((value for name in _NO_PROXY if (value := environment.get(name, "").strip())), "")
    added = [host for host in hosts if host not in named.split(",")]
    return {} if named == "*" else dict.fromkeys(_NO_PROXY, ",".join(filter(None, (named, *added))))


def check_environment(
    known_variables: Callable[[], Collection[str]], environment: Mapping[str, str] | None = None
) -> None:
    """Check that gammaray knows every variable whose name begins with `PREFIX`.

    Variables that Kubernetes sets for a Service named gammaray or gammaray-* are ignored. `known_variables`
    is called only if there is one outside `OTHER_VARIABLES`, since importing the settings is slow. The
    InvalidArgumentError names the unknown variable and the nearest known one, but not its value.
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

            (nearest,) = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            allowed = f"a variable of gammaray; the nearest name is {nearest}"
            raise InvalidArgumentError(names[name], "an unknown environment variable", allowed)


def _is_service_link(name: str, names: Collection[str]) -> bool:
    """Whether Kubernetes set a variable for a Service, as it does in pods with `enableServiceLinks`."""
    services = (other.removesuffix(_SERVICE_HOST) for other in names if other.endswith(_SERVICE_HOST))
    return any(name.startswith((f"{service}_SERVICE_", f"{service}_PORT")) for service in services)
