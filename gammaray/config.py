"""Settings, one frozen class per process.

Each field is read from its constructor argument, else from the environment variable `GAMMARAY_<FIELD>`
(upper case), else it takes the default written here. A bad value stops the start.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from gammaray.pools import PoolSize

__all__ = [
    "ClusterSettings",
    "DraftSettings",
    "OrchestratorSettings",
    "ScalingSettings",
    "TargetSettings",
    "WorkerSettings",
]

DEMO_PAIR = "demo"
"""Model name that stands for the pair that ships with gammaray (its target or its draft, by role)."""


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="GAMMARAY_", frozen=True, extra="forbid", protected_namespaces=()
    )


class _ServingSettings(_Settings):
    metrics_listen: str = Field(
        "127.0.0.1:0",
        description="host:port of the Prometheus endpoint; port 0 takes a free one, a range like 9464-9479 "
        "its first free one, empty: none.",
    )
    tls_ca: str = Field(
        "", description="PEM file of the authority for TLS between orchestrators and workers; empty: no TLS."
    )
    tls_cert: str = Field("", description="PEM file of the own certificate, see `gammaray certs`.")
    tls_key: str = Field("", description="PEM file of its private key.")


class WorkerSettings(_ServingSettings):
    """What draft and target workers have in common."""

    model: str = Field(
        DEMO_PAIR, min_length=1, description="Directory or hub name of a causal LM; 'demo' is the demo pair."
    )
    listen: str = Field("127.0.0.1:0", description="host:port of the gRPC server; port 0 takes a free one.")
    advertise: str = Field("", description="host:port that orchestrators dial; empty is the bound address.")
    redis_url: str = Field(
        "", repr=False, description="Registry to announce this worker in; empty: do not announce."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto prefers CUDA."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Arithmetic; auto is float32 on CPU and bfloat16 on CUDA."
    )
    threads: int = Field(1, ge=1, le=256, description="CPU threads of the model's arithmetic.")
    cpu_affinity: str = Field("", description="Comma-separated cores to stay on; empty: no binding.")
    cache_budget_mb: int = Field(
        1024,
        ge=1,
        description="Upper bound of KV cache memory, in MiB; least recently used sessions are evicted.",
    )
    max_batch_tokens: int = Field(
        1024, ge=16, description="Upper bound of tokens fed in one forward, over all sessions."
    )
    prefill_chunk: int = Field(
        256,
        ge=16,
        description="Upper bound of one session's prompt tokens in one forward; long prompts take several.",
    )
    deterministic: bool = Field(
        False, description="Bit-identical logits whatever the batch and gamma (CPU float32 only; slower)."
    )
    lean: bool = Field(
        True, description="Use the compiled kernel (CPU) or CUDA graphs where they cover the architecture."
    )
    drain_timeout_s: float = Field(
        10.0, ge=0, description="How long running blocks may finish after SIGTERM, in seconds."
    )


class TargetSettings(WorkerSettings):
    """A target worker."""

    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Devices that each target's model is spread over, all in one machine."
    )
    rank_timeout_s: float = Field(
        300.0, gt=0, description="How long those devices wait for each other, loading included, in seconds."
    )


class DraftSettings(WorkerSettings):
    """A draft worker."""

    draft_top_k: int = Field(
        64, ge=1, le=4096, description="Support of the sparse draft distribution (rejection verification)."
    )
    weight_bits: int = Field(12, ge=1, le=24, description="Bits of its quantised weights' sum.")
    draft_ahead: bool = Field(
        True,
        description="Prepare the next proposals while the target verifies; it stops where it does not pay.",
    )
    ahead_rows: int = Field(
        4, ge=1, le=64, description="Upper bound of tokens in one forward of draft-ahead, over all sessions."
    )


class OrchestratorSettings(_ServingSettings):
    """An orchestrator replica."""

    model: str = Field(
        DEMO_PAIR,
        min_length=1,
        description="The target model: its tokenizer and configuration are read here.",
    )
    served_model_name: str = Field("", description="Name that clients use; empty: derived from `model`.")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        repr=False,
        description="Session store and worker registry: redis://, rediss://, unix:// or, with Sentinel, "
        "redis+sentinel://HOST:PORT,.../SERVICE/DB.",
    )
    redis_wait_s: float = Field(
        60.0, ge=0, description="How long a start waits for Redis to answer, in seconds."
    )
    target_addresses: str = Field(
        "", description="Comma-separated host:port of target workers, beside those of the registry."
    )
    draft_addresses: str = Field(
        "", description="Comma-separated host:port of draft workers, beside those of the registry."
    )
    max_gamma: int = Field(8, ge=0, le=64, description="Upper bound of an adaptive gamma.")
    max_nodes: int = Field(
        32, ge=0, le=256, description="Upper bound of an adaptive proposal's nodes; up to 1: chains only."
    )
    propose_timeout_s: float = Field(
        2.0, gt=0, description="Deadline of one proposal; past it the cycle goes on with gamma 0."
    )
    verify_timeout_s: float = Field(60.0, gt=0, description="Deadline of one verification, prefill included.")
    worker_wait_s: float = Field(
        30.0, ge=0, description="How long a request waits for a target worker to be there."
    )
    prefix_caching: bool = Field(
        True,
        description="Workers keep the caches of ended sessions for others of the tenant that begin alike.",
    )
    session_ttl_s: int = Field(
        3600, ge=1, description="How long a finished or abandoned session stays in the store."
    )
    max_prompt_bytes: int = Field(2**20, ge=1, description="Largest prompt, in bytes of UTF-8.")
    max_concurrent_requests: int = Field(
        256, ge=1, description="Requests in flight per replica; more wait, their tenants in turn."
    )
    max_waiting_requests: int = Field(
        256, ge=0, description="Requests that wait for a place per replica; more are refused."
    )
    max_tenant_share: float = Field(
        0.9, gt=0, le=1, description="Share of these that one tenant may have, where keys name tenants."
    )
    max_wait_s: float = Field(
        30.0, gt=0, description="How long a request waits for a place before it is refused, in seconds."
    )
    max_body_mb: int = Field(
        256, ge=16, description="Upper bound of all HTTP bodies held at once, in MiB; more are refused."
    )
    api_keys_file: str = Field(
        "",
        description="Key file of `gammaray keys`; empty asks nobody for a key. Read again when it changes.",
    )
    local_only: bool = Field(
        False, description="Refuse gRPC callers of other machines, whatever the port is bound to."
    )
    probe_key_sha256: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        description="SHA-256 of one more key, for whoever watches over the cluster.",
    )


class ScalingSettings(_Settings):
    """When pools of workers grow and shrink between their bounds; see `services.scaling` for the rules."""

    target_load: float = Field(
        8.0, gt=0, description="Blocks in flight per target worker from which on another one is wanted."
    )
    draft_load: float = Field(
        4.0, gt=0, description="Blocks in flight per draft worker from which on another one is wanted."
    )
    min_gain: float = Field(
        1.0,
        description="Tokens per second, beyond plain decoding, that a drafter must gain to stay; any number.",
    )
    retry_s: float = Field(
        60.0, gt=0, description="Pause after a drafter that did not pay, doubling up to 16-fold, in seconds."
    )
    scale_up_delay_s: float = Field(
        3.0, ge=0, description="How long more workers must be wanted before they come, in seconds."
    )
    scale_down_delay_s: float = Field(
        60.0, ge=0, description="How long fewer workers must be wanted before one goes, in seconds."
    )
    report_interval_s: float = Field(
        1.0, gt=0, description="How often a worker reports its load, in seconds; decisions see ten reports."
    )


def _at_least_one(size: PoolSize) -> PoolSize:
    if size.minimum < 1:
        raise ValueError(f"got {size}, allowed: at least 1 target worker at all times")
    return size


class ClusterSettings(_Settings):
    """A whole cluster on one machine: what `gammaray up` starts."""

    target: str = Field(DEMO_PAIR, min_length=1, description="Target model.")
    draft: str = Field(DEMO_PAIR, min_length=1, description="Draft model.")
    target_workers: Annotated[PoolSize, AfterValidator(_at_least_one)] = Field(
        "1", validate_default=True, description="Number of target workers, N or MIN:MAX to scale between."
    )
    draft_workers: PoolSize = Field(
        "1", validate_default=True, description="Number of draft workers, N or MIN:MAX to scale between."
    )
    orchestrators: int = Field(1, ge=1, le=64, description="Number of orchestrator replicas.")
    http_port: int = Field(8000, ge=1, le=65535, description="Port of the OpenAI-compatible HTTP API.")
    grpc_port: int = Field(9000, ge=1, le=65535, description="Port of the gRPC API.")
    redis_url: str = Field("", repr=False, description="Redis to use; empty starts a private redis-server.")
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address of both APIs; one that others reach needs api_keys_file, or no_auth.",
    )
    api_keys_file: str = Field(
        "", description="Key file of `gammaray keys`; every caller must have a key of it. Empty: nobody must."
    )
    no_auth: bool = Field(False, description="Serve other machines without asking anybody for a key.")
    worker_tls: bool = Field(
        False, description="Mutual TLS between orchestrators and workers, by certificates made at start."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the models run.")
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Devices that each target's model is spread over, all in one machine."
    )
    pin_cores: bool = Field(
        True,
        description="Without GPUs, keep each role of workers on cores of its own, if there are enough.",
    )
    deterministic: bool = Field(
        False, description="Bit-identical logits whatever the batch and gamma (CPU float32 only; slower)."
    )
