"""What is checked before anything expensive starts: ports, models, and that their vocabularies agree."""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
from pathlib import Path
from typing import Any

from gammaray.config import DEMO_PAIR
from gammaray.demo_pair import demo_directory
from gammaray.errors import InvalidArgumentError

__all__ = ["check_port", "check_vocabularies", "free_ports", "gpu_share", "gpus_by_role", "vocab_size"]

_QUIET_PORTS = range(29_600, 32_700)


def check_port(field: str, host: str, port: int) -> None:
    """Check that nobody listens on a port.

    Raises:
        InvalidArgumentError: The port is taken, or this user may not have it.
    """
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: closing connections linger
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = f"{port}, which cannot be had ({error.strerror})"
            raise InvalidArgumentError(field, reason, "a free port") from None


def free_ports(host: str, count: int) -> list[int]:
    """Return distinct ports that were free a moment ago.

    They lie below those that systems give to outgoing connections, one of which could take a port before it
    is bound again, and beside those that Ray's workers and Serve's replicas look through.
    """
    probes: list[socket.socket] = []
    for port in random.sample(_QUIET_PORTS, len(_QUIET_PORTS)):
        if len(probes) == count:
            break
        with contextlib.suppress(OSError):
            probes.append(socket.create_server((host, port)))
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    if len(ports) < count:
        raise InvalidArgumentError("ports", len(ports), f"{count} free ones in {_QUIET_PORTS}")
    return ports


def check_vocabularies(target: str, draft: str) -> None:
    """Check that the two models exist and share a vocabulary size; workers compare the tokenizers.

    Raises:
        InvalidArgumentError: A model cannot be found or read, or the sizes differ.
    """
    target_size, draft_size = vocab_size("target", target), vocab_size("draft", draft)
    if target_size != draft_size:
        raise InvalidArgumentError(
            "draft",
            f"{draft!r} with a vocabulary of {draft_size} tokens",
            f"one with the vocabulary of the target {target!r}, {target_size} tokens",
        )


def vocab_size(role: str, model: str) -> int:
    """Return the number of token ids of a model, by its configuration.

    Raises:
        InvalidArgumentError: There is no such model, or its configuration does not tell.
    """
    config = _config(role, demo_directory(role, role) if model == DEMO_PAIR else model)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise InvalidArgumentError(role, f"{model!r}, whose configuration has no vocab_size", "a causal LM")
    return size


def gpu_share(num_gpus: int, num_workers: int) -> float:
    """Return how much of a GPU each worker gets, so that all find room: whole ones while there are enough."""
    if num_gpus == 0:
        return 0.0
    workers_per_gpu = max(1, math.ceil(num_workers / num_gpus))
    return math.floor(10_000 / workers_per_gpu) / 10_000  # Ray counts to the fourth decimal


def gpus_by_role(num_gpus: int, num_targets: int, num_drafts: int, num_ranks: int) -> dict[str, float]:
    """Return how many GPUs, or how much of one, each worker of a role gets.

    Args:
        num_gpus: GPUs of this machine; 0 leaves everybody on the CPU.
        num_targets: Most target workers.
        num_drafts: Most draft workers.
        num_ranks: GPUs that each target is spread over; above 1 they are whole ones, the drafters share the
            rest.

    Raises:
        InvalidArgumentError: There are too few.
    """
    if num_gpus == 0 or num_ranks == 1:
        return dict.fromkeys(("target", "draft"), gpu_share(num_gpus, num_targets + num_drafts))
    left = num_gpus - num_targets * num_ranks
    if left < (num_drafts > 0):
        allowed = f"{num_targets} targets of that many, and one for drafters, within {num_gpus} GPUs"
        raise InvalidArgumentError("tensor_parallel", num_ranks, allowed)
    return {"target": num_ranks, "draft": gpu_share(left, num_drafts)}


def _config(role: str, model: str) -> dict[str, Any]:
    folder = Path(model)
    allowed = "a directory with a config.json, or the name of a model on the hub or in its cache"
    if folder.is_dir():
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(role, f"{model!r} ({error})", allowed) from None
        return config if isinstance(config, dict) else {}
    if model.startswith((".", "/", "~")):
        raise InvalidArgumentError(role, f"{model!r}, which is not there", allowed)
    from transformers import AutoConfig  # slow to import, and most often not needed

    try:
        return dict(AutoConfig.from_pretrained(model).to_dict())
    except Exception as error:  # whatever the hub's client comes up with
        reason = str(error).strip().splitlines()[0]
        raise InvalidArgumentError(role, f"{model!r} ({reason})", allowed) from None
