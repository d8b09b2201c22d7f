"""Computes which connections the rendered NetworkPolicies allow, as a network plugin would."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Policy = dict[str, Any]
OWN_NAMESPACE: Mapping[str, str] = {"kubernetes.io/metadata.name": "somewhere"}


@dataclass(frozen=True)
class Pod:
    """One end of a connection.

    Args:
        labels: Of the pod.
        namespace: Labels of its namespace; by default that of the release.
    """

    labels: Mapping[str, str]
    namespace: Mapping[str, str] = field(default_factory=lambda: OWN_NAMESPACE)


def may_reach(policies: Iterable[Policy], source: Pod, goal: Pod, port: int) -> bool:
    """Return whether `source` may open a TCP port of `goal`, a pod in the release's namespace.

    A pod that no policy selects is open to all; else some rule of some policy must allow it.
    """
    return _is_allowed(policies, "Ingress", goal, source, port)


def may_leave(policies: Iterable[Policy], source: Pod, goal: Pod, port: int) -> bool:
    return _is_allowed(policies, "Egress", source, goal, port)


def _is_allowed(policies: Iterable[Policy], direction: str, selected: Pod, peer: Pod, port: int) -> bool:
    """Return whether the policies that select a pod allow traffic in a direction with a peer."""
    selecting = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], selected.labels)
    ]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower()) or []]
    peers = "from" if direction == "Ingress" else "to"
    return not selecting or any(_allows(rule, peers, peer, port) for rule in rules)


def _allows(rule: dict[str, Any], key: str, source: Pod, port: int) -> bool:
    ports, peers = rule.get("ports"), rule.get(key)
    is_port = not ports or any(one["port"] <= port <= one.get("endPort", one["port"]) for one in ports)
    return is_port and (not peers or any(_is_peer(peer, source) for peer in peers))


def _is_peer(peer: dict[str, Any], source: Pod) -> bool:
    unknown = peer.keys() - {"podSelector", "namespaceSelector"}
    assert not unknown, f"not understood: {unknown}"
    if "namespaceSelector" in peer:
        is_near = _selects(peer["namespaceSelector"], source.namespace)
    else:
        is_near = source.namespace == OWN_NAMESPACE
    return is_near and ("podSelector" not in peer or _selects(peer["podSelector"], source.labels))


def _selects(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    unknown = selector.keys() - {"matchLabels"}
    assert not unknown, f"not understood: {unknown}"
    return labels.items() >= selector.get("matchLabels", {}).items()
