"""Checks before anything expensive starts: ports, cores and models."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import random
import socket
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from gammaray.config import ClusterSettings, WorkerSettings, parse_adapters
from gammaray.demo_pair import early_exit_layers, is_missing, resolve_model
from gammaray.deploy.serve_config import APPLICATIONS, role_settings
from gammaray.engines import AUTO, ENGINES, check_installed, takes_gpu
from gammaray.errors import InvalidArgumentError
from gammaray.program.settings import checked_settings

_OTHERWISE = {"draft_vocab_size", "pard_token"}
"""Keys of the configurations of drafters that are not ordinary; workers find others by their tensors."""

_OWN_ADDRESS = "an IPv4 address or name of this machine"
_QUIET_PORTS = range(29_600, 32_700)
_reservations: dict[int, socket.socket] = {}


def worker_cores(
    cores: Collection[int], num_targets: int, num_drafts: int, threads: int = 1
) -> dict[str, tuple[int, ...]]:
    """Assign each role as many exclusive cores as its workers have threads, the first ones to the targets.

    Workers of one role share its cores; other processes may run on every core. With fewer cores than threads
    no worker is pinned: both roles have no cores.
    """
    of_targets, of_drafts = num_targets * threads, num_drafts * threads
    if len(cores) < of_targets + of_drafts:
        return {"target": (), "draft": ()}
    usable = tuple(sorted(cores))
    return {"target": usable[:of_targets], "draft": usable[of_targets : of_targets + of_drafts]}


def check_port(field: str, host: str, port: int) -> None:
    """Refuse a port that cannot be bound; `free_ports` will not return it."""
    with socket.socket() as probe:
        # As servers do, because of connections in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise InvalidArgumentError("host", f"{host} ({error.strerror})", _OWN_ADDRESS) from None
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise InvalidArgumentError("host", host, _OWN_ADDRESS) from None
            reason = f"{port}, which is not available ({error.strerror})"
            raise InvalidArgumentError(field, reason, "a free port") from None
    _reserve(port)


def check_host(host: str) -> None:
    """Refuse an address at which Serve's proxy, which dials 127.0.0.1, does not reach its replicas."""
    with contextlib.suppress(socket.gaierror):  # check_port says so
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, socket.AF_INET)}
        if not found & {"127.0.0.1", "0.0.0.0"}:
            allowed = "127.0.0.1, or 0.0.0.0 for every address of this machine"
            raise InvalidArgumentError("host", host, allowed)


def free_ports(host: str, count: int) -> list[int]:
    """Return distinct ports that were free at the time of the check.

    They lie below the ephemeral ports, so that no outgoing connection takes one before it is bound again, and
    outside the ranges that Ray's workers and Serve's replicas search. No other process gets them from this
    function before this one ends: it can take seconds until a server binds them.
    """
    probes: list[socket.socket] = []
    for port in random.sample(_QUIET_PORTS, len(_QUIET_PORTS)):
        if len(probes) == count:
            break
        with contextlib.suppress(OSError):
            probe = socket.create_server((host, port))
            if _reserve(port):
                probes.append(probe)
            else:
                probe.close()
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    if len(ports) < count:
        raise InvalidArgumentError("ports", len(ports), f"{count} free ones in {_QUIET_PORTS}")
    return ports


def _reserve(port: int) -> bool:
    """Reserve a port, by an abstract Unix socket, until this process ends; return whether it was free."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0gammaray-port-{port}")
    except OSError:
        name.close()
        return False
    _reservations[port] = name
    return True


def check_workers(settings: ClusterSettings) -> None:
    """Refuse settings that workers and orchestrators would refuse after their start; load no model."""
    most = {"target": settings.target_workers.maximum, "draft": settings.draft_workers.maximum}
    for role, given in role_settings(settings).items():
        made = checked_settings(APPLICATIONS[role].settings, given)
        if isinstance(made, WorkerSettings) and most[role]:
            check_installed(made.engine, settings.device)
        if adapters := parse_adapters(getattr(made, "lora", "")):
            import_module("services.process.adapters").max_rank(adapters)


def check_models(target: str, draft: str, engine: str = "auto") -> list[str]:
    """Check that both models exist and the engine serves the draft; return what is to be said about them."""
    target_size = vocab_size("target", target)
    is_other = early_exit_layers(draft) is not None
    is_ordinary = engine != AUTO and not ENGINES[engine].drafts_otherwise
    if is_ordinary and (is_other or _config("draft", draft).keys() & _OTHERWISE):
        raise InvalidArgumentError("draft", draft, f"an ordinary draft model with the engine {engine}")
    if is_other:
        config = _config("target", target)
        early_exit_layers(draft, (config.get("text_config") or config).get("num_hidden_layers"))
        return []
    draft_size = vocab_size("draft", draft)
    if target_size == draft_size:
        return []
    if is_ordinary:
        raise InvalidArgumentError("draft", draft, f"one of {target}'s vocabulary with the engine {engine}")
    return [
        f"the draft has {draft_size} token ids and the target {target_size}: the draft's tokens are mapped "
        "to the target's; `gammaray qualify` measures what that costs"
    ]


def drafting_notes(settings: ClusterSettings) -> list[str]:
    """Return what is not obvious from the settings: who drafts if no draft worker does."""
    if not settings.target_workers.maximum:
        return ["no workers here: uses those that announce themselves in this Redis"]
    if settings.head:
        return [f"the head {settings.head} drafts in the target workers"]
    if not settings.draft_workers.maximum:
        return ["no draft workers: speculates by look-ups in the text; --draft names a draft model"]
    return []


def check_drafting_head(head: str) -> None:
    """Check that a head in a local directory exists; its format is checked by the worker that loads it."""
    if head and (is_missing(head) or Path(head).is_dir()):
        _config("head", head)


def vocab_size(role: str, model: str) -> int:
    """Return the number of token ids in a model's configuration."""
    config = _config(role, model)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise InvalidArgumentError(role, f"{model!r}, whose configuration has no vocab_size", "a causal LM")
    return size


def gpu_share(num_gpus: int, num_workers: int) -> float:
    """Return the share of a GPU per worker, such that all workers fit: whole GPUs if there are enough."""
    if num_gpus == 0:
        return 0.0
    workers_per_gpu = max(1, math.ceil(num_workers / num_gpus))
    return math.floor(10_000 / workers_per_gpu) / 10_000  # Ray's precision is four decimals


def worker_gpus(settings: ClusterSettings, num_gpus: int) -> dict[str, float]:
    """Return the number of this machine's GPUs, or the share of one, per worker of each role.

    Targets that are spread over several get whole GPUs, and the draft workers share the rest. Without a GPU
    all workers run on the CPU.
    """
    if settings.device == "cpu" or not takes_gpu(settings.engine):
        num_gpus = 0
    elif settings.device == "cuda" and not num_gpus:
        raise InvalidArgumentError("device", "cuda", "auto or cpu: Ray finds no GPU on this machine")
    num_targets, num_drafts = settings.target_workers.maximum, settings.draft_workers.maximum
    num_ranks = settings.tensor_parallel
    if num_gpus == 0 or num_ranks == 1:
        return dict.fromkeys(("target", "draft"), gpu_share(num_gpus, num_targets + num_drafts))
    left = num_gpus - num_targets * num_ranks
    if left < (num_drafts > 0):
        allowed = f"{num_targets} targets of that many, and one for drafters, within {num_gpus} GPUs"
        raise InvalidArgumentError("tensor_parallel", num_ranks, allowed)
    return {"target": num_ranks, "draft": gpu_share(left, num_drafts)}


def _config(role: str, name: str) -> dict[str, Any]:
    model = resolve_model(name, "target" if role == "target" else "draft", role)
    folder = Path(model)
    allowed = "a directory with a config.json, or the name of a model on the hub or in its cache"
    if folder.is_dir():
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(role, f"{model!r} ({error})", allowed) from None
        return config if isinstance(config, dict) else {}
    from transformers import AutoConfig  # slow to import, and rarely needed

    try:
        return dict(AutoConfig.from_pretrained(model).to_dict())
    except Exception as error:  # the hub's client may raise anything
        reason = str(error).strip().splitlines()[0]
        raise InvalidArgumentError(role, f"{model!r} ({reason})", allowed) from None
