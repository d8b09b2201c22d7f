"""The clusters of chaos runs, by what drafts: draft workers with some kind of model, or a head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gammaray.demo_pair import resolve_model
from tests.chaos.chaos_drafters import DRAFTER, HEAD, PAIR, VOCABULARY, Way
from tests.chaos.chaos_redis import ChaosRedis, chaos_redis
from tests.chaos.network.links import Network
from tests.chaos.other_vocabulary import with_fewer_merges
from tests.chaos.victims import ROLES
from tests.support.cluster.cluster_helpers import Cluster, running_cluster
from tests.support.drafter_helpers import make_drafter
from tests.support.head_helpers import bigram_head
from tests.support.workers.redis_helpers import port_of

TWO_OF_EACH = ("--orchestrators", "2", "--target-workers", "2")
DRAFTS = ("--draft-workers", "2")


@dataclass(frozen=True)
class Kind:
    """A kind of cluster."""

    ways: tuple[Way, ...]
    roles: tuple[str, ...] = ROLES


KINDS = {
    "model": Kind(PAIR),
    "vocabulary": Kind(VOCABULARY),
    "parallel": Kind(DRAFTER),
    "early-exit": Kind(DRAFTER),
    "head": Kind(HEAD, tuple(role for role in ROLES if role != "draft")),
}


@dataclass(frozen=True)
class Scene:
    cluster: Cluster
    redis: ChaosRedis
    ways: tuple[Way, ...]
    network: Network


@contextmanager
def started(
    name: str, stderr: int | None = None, other_target: str | None = None, engine: str = "auto"
) -> Iterator[Scene]:
    """Run a cluster of two orchestrators, two target workers and what drafts.

    Args:
        name: One of `KINDS`.
        stderr: Where the standard error of its processes goes.
        other_target: Target of the kind "vocabulary"; None: the demo target with other tokens.
        engine: Of the workers. vLLM computes the same bits in every batch on GPUs only: elsewhere its tokens
            are the same up to ties.
    """
    plain = (*TWO_OF_EACH, "--engine", engine, *(() if engine == "vllm" else ("--deterministic",)))
    with_drafts = (*plain, *DRAFTS)
    with ExitStack() as stack:
        redis = stack.enter_context(chaos_redis())
        network = stack.enter_context(Network())
        link = network.link(port_of(redis.server.url), announces=True)
        options = ["--redis-url", redis.server.url.replace(f":{link.target}/", f":{link.port}/")]
        if name == "vocabulary":
            if other_target is None:
                folder = Path(stack.enter_context(TemporaryDirectory()), "target")
                other_target = str(with_fewer_merges(Path(resolve_model("demo", "target")), folder))
            options += [*with_drafts, "--target", other_target, "--draft", "demo"]
        elif name == "parallel":
            target = Path(resolve_model("demo", "target"))
            drafter = make_drafter(
                Path(resolve_model("demo", "draft")),
                Path(stack.enter_context(TemporaryDirectory()), "drafter"),
                pard_token=0,
                mask_embedding=True,
                draft_vocab_size=1500,
                target=target,
            )
            # Neither its int8 weights nor a token that it lacks may change a token of the text.
            options += [*with_drafts, "--target", "demo", "--draft", str(drafter), "--draft-weights", "int8"]
        elif name == "head":
            target = Path(resolve_model("demo", "target"))
            head = bigram_head(Path(stack.enter_context(TemporaryDirectory()), "head"), target)
            options += [*plain, "--draft-workers", "0", "--target", "demo", "--head", str(head)]
        elif name == "early-exit":
            options += [*with_drafts, "--target", "demo", "--draft", "early-exit:13"]
        else:
            options += with_drafts
        cluster = stack.enter_context(running_cluster(*options, stderr=stderr))
        yield Scene(cluster, redis, KINDS[name].ways, network)
