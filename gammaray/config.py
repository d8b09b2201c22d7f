"""Settings, one frozen class per process.

Each field is read from its constructor argument, else from the environment variable `GAMMARAY_<FIELD>`
(upper case), else it takes its default. An invalid value, or an unknown variable whose name begins with
`GAMMARAY_`, aborts the start.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import core_schema
from pydantic_settings import BaseSettings, SettingsConfigDict

from gammaray.demo_pair import DEMO_PAIR, early_exit_layers
from gammaray.engines import refuse
from gammaray.environment import OTHER_VARIABLES, PREFIX, check_environment
from gammaray.errors import InvalidArgumentError

MAX_WORKERS = 64

REDIS_PREFIX = "gammaray"
"""Default of the setting `redis_prefix`."""

_FORM = re.compile(r"(\d+)(?::(\d+))?")

MAX_ADAPTERS = 32
"""Most adapters of a target: each has a place in the memory of its GPUs."""

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")

_OWN_MESSAGE = re.compile(r"(?:Value error, )?got (?P<got>.*), allowed: (?P<allowed>.*)", re.DOTALL)
# Description of allowed values by pydantic error type; braces are filled from the error's context.
_ALLOWED = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "an integer"),
    "dict_type": "a mapping",
    "extra_forbidden": "no such field",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_parsing_size": "an integer of fewer digits",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "missing": "a value; it is required",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_short": "a text of at least {min_length} character",
    "string_type": "a text",
}

METRICS_PORT = 9464
"""Metrics port (OpenTelemetry's default) where each process has its own network address, as in a pod."""

_HOST_NAMES = r"^( *(\*|\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*) *(,|$))*$"
"""Comma-separated host names without ports; a leading dot matches all subdomains, an asterisk everything."""

_ORIGINS = r"^( *(\*|[a-z][a-z0-9+.-]*://[^\s,/*]+) *(,|$))*$"
"""Comma-separated origins, as browsers send them, or an asterisk for all."""

REPEATABLE: dict[str, JsonValue] = {"repeatable": True}
"""Marks a field whose option may be repeated; its values are joined by commas."""

Engine = Literal["auto", "vllm", "native", "transformers"]
Weights = Literal["auto", "int8"]

_ENGINE = (
    "What computes the models: vllm; native, the compiled CPU kernel; transformers, the model's own layers. "
    "auto: vllm where it is installed and there is a GPU, else native where the kernel covers the model, "
    "else transformers."
)
_DETERMINISM = (
    "Bit-identical logits whatever the batch and gamma: on a CPU in float32, of models that the compiled "
    "kernel covers; with vLLM on GPUs its batch-invariant mode."
)
_DRAFT_WEIGHTS = (
    "Weights of the draft model or EAGLE head: int8 is quantised at load, which changes acceptance and "
    "speed, not the text; it needs the compiled CPU kernel. auto: as dtype."
)
_HEAD = (
    "What drafts in the target workers, alone or beside draft workers: directory or hub name of an EAGLE-3 "
    "head, which reads the target's hidden states, or of a draft model; with vLLM also an EAGLE, Medusa or "
    "DFlash head, or mtp: the target's own layers for this; empty: nothing."
)
_LEARN = (
    "Folder in which target workers train new versions of their head while they serve; with API keys only "
    "from streams of tenants that `gammaray drafters allow` names; empty: nothing is kept or learnt."
)
_LORA = (
    "NAME=DIR of a LoRA adapter of the target, in PEFT's format; several are separated by commas, or the "
    "option is repeated. A request whose `model` is NAME is served with it; only with vLLM as the engine."
)

NO_KEYS = "none"
"""Value of the setting `api_keys_file` with which a cluster serves other machines without keys."""


class PoolSize:
    """Bounds of the number of workers, each in [0, 64], written as `N` or `MIN:MAX`.

    A ValueError names invalid ones and what is allowed.
    """

    # NOTE: not a dataclass, since pydantic-settings would read it from the environment as JSON.
    __slots__ = ("maximum", "minimum")

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        most = minimum if maximum is None else maximum
        if not 0 <= minimum <= most <= MAX_WORKERS:
            raise ValueError(f"got {minimum}:{most}, allowed: 0 <= MIN <= MAX <= {MAX_WORKERS}")
        self.minimum, self.maximum = minimum, most

    @classmethod
    def parse(cls, value: object) -> PoolSize:
        """Parse a number or a text; ValueError if it is no pool size."""
        if isinstance(value, PoolSize):
            return value
        match = _FORM.fullmatch(str(value))
        if match is None or isinstance(value, bool):
            raise ValueError(f"got {value!r}, allowed: N or MIN:MAX, each 0 to {MAX_WORKERS}")
        return cls(int(match[1]), int(match[2]) if match[2] else None)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.minimum < self.maximum

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolSize) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash((self.minimum, self.maximum))

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}" if self.is_elastic else str(self.minimum)

    def __repr__(self) -> str:
        return f"PoolSize({self})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        # Settings classes parse the text of an option or variable, and serialise back to text.
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )


def parse_adapters(text: str) -> dict[str, str]:
    """Return the directories by name of a text such as `sql=/models/sql,legal=/models/legal`.

    For another form, a name twice or too many of them, ValueError says what is allowed.
    """
    found: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, separator, directory = (part.strip() for part in entry.partition("="))
        if not separator or not directory or _ADAPTER_NAME.fullmatch(name) is None:
            raise ValueError(f"got {entry!r}, allowed: NAME=DIR, names of letters, digits and ._:/-")
        if name in found:
            raise ValueError(f"got {name!r} twice, allowed: each name once")
        found[name] = directory
    if len(found) > MAX_ADAPTERS:
        raise ValueError(f"got {len(found)} adapters, allowed: at most {MAX_ADAPTERS}")
    return found


def _checked_adapters(text: str) -> str:
    parse_adapters(text)
    return text


Lora = Annotated[str, AfterValidator(_checked_adapters)]


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _check_environment(cls, given: Any) -> Any:
        check_environment(known_variables)
        return given


def settings_error(error: ValidationError) -> InvalidArgumentError:
    """Convert the first failure of a validation."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    own = _OWN_MESSAGE.fullmatch(first["msg"])
    if own:
        return InvalidArgumentError(field, own["got"], own["allowed"])
    got = "nothing" if first["type"] == "missing" else first["input"]
    got = "an empty text" if got == "" else got
    if first["type"] in _ALLOWED:
        return InvalidArgumentError(field, got, _ALLOWED[first["type"]].format(**first.get("ctx", {})))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return InvalidArgumentError(field, got, message)


class _ModelSettings(_Settings):
    """Settings of model execution, with checks of combinations that exclude each other."""

    engine: Engine = Field("auto", description=_ENGINE)
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the model; auto prefers CUDA."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Arithmetic; auto is float32 on CPU, bfloat16 on CUDA. On a CPU with AVX512-BF16 "
        "bfloat16 halves the time of prompts.",
    )
    deterministic: bool = Field(False, description=_DETERMINISM)

    @property
    def asked(self) -> dict[str, Any]:
        return dict(self)

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if (error := refuse(self.asked)) is not None:
            raise error
        return self


class _TargetModelSettings(_ModelSettings):
    """The same of a target."""

    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Devices that each target's model is spread over, all in one machine; more than one only "
        "with vLLM as the engine.",
    )
    head: str = Field("", description=_HEAD)
    learn: str = Field("", description=_LEARN)
    draft_weights: Weights = Field("auto", description=_DRAFT_WEIGHTS)
    lora: Lora = Field("", description=_LORA, json_schema_extra=REPEATABLE)

    @model_validator(mode="after")
    def _check_what_learns(self) -> Self:
        if self.learn and not self.head:
            raise InvalidArgumentError("learn", self.learn, "empty without a head, which alone learns")
        return self


class _AccessSettings(_Settings):
    api_keys_file: str = Field(
        "",
        description="Key file of `gammaray keys`, of whose keys clients need one; reloaded when it changes. "
        "Empty: no key is required, and `gammaray up` serves its own machine only; none: no key is required.",
    )
    receipt_keys_file: str = Field(
        "",
        description="File of `gammaray keys receipts`, whose newest key signs receipts; reloaded when it "
        "changes. Empty: requests for a receipt are refused.",
    )
    allowed_hosts: str = Field(
        "",
        pattern=_HOST_NAMES,
        description="Without API keys: comma-separated names that requests may have in `Host`, "
        "in addition to localhost and IP addresses; '.example.com' is all names below it, '*' any.",
    )

    cors_origins: str = Field(
        "",
        pattern=_ORIGINS,
        description="Comma-separated origins of browser applications, such as http://localhost:3000, whose "
        "requests are answered with CORS headers; '*' is all, only with API keys. Empty: none.",
    )

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        if "*" in self.cors_origins and self.key_file is None:
            raise InvalidArgumentError("cors_origins", self.cors_origins, "named origins, without API keys")
        return self

    @property
    def key_file(self) -> Path | None:
        """The file with the API keys of which clients need one; None: they need none."""
        return None if self.api_keys_file in ("", NO_KEYS) else Path(self.api_keys_file)


class ServingSettings(_Settings):
    """What workers and orchestrators have in common."""

    metrics_listen: str = Field(
        "127.0.0.1:0",
        description="host:port of the Prometheus endpoint; port 0 uses a free port, a range like 9464-9479 "
        "its first free port, empty: none.",
    )
    tls_dir: str = Field(
        "",
        description="Folder for TLS between orchestrators and workers, with ca.crt, the CA, and tls.crt and "
        "tls.key, this process's certificate, see docs/security.md; empty: no TLS.",
    )
    redis_url: str = Field("", repr=False)
    redis_password: str = Field(
        "",
        repr=False,
        description="Password of that Redis if redis_url has none; any characters, not percent-encoded.",
    )

    redis_prefix: str = Field(
        REDIS_PREFIX,
        pattern=r"^[A-Za-z0-9_.-]{1,128}$",
        description="Beginning of all keys in Redis: the same for all processes of a cluster; clusters that "
        "use the same database need different ones.",
    )

    @property
    def redis_login_url(self) -> str:
        """`redis_url` including `redis_password`, percent-encoded."""
        scheme, separator, rest = self.redis_url.partition("://")
        end = next((i for i, character in enumerate(rest) if character in "/?#"), len(rest))
        user, _, hosts = rest[:end].rpartition("@")
        if not self.redis_password or not separator or ":" in user:
            return self.redis_url
        return f"{scheme}://{user}:{quote(self.redis_password, safe='')}@{hosts}{rest[end:]}"


class WorkerSettings(ServingSettings, _ModelSettings):
    """Settings shared by draft and target workers."""

    model: str = Field(
        DEMO_PAIR, min_length=1, description="Directory or hub name of a causal LM; 'demo' is the demo pair."
    )
    listen: str = Field(
        "127.0.0.1:0",
        description="host:port of the gRPC server, to which orchestrators connect; port 0 uses a free port.",
    )
    redis_url: str = Field(
        "", repr=False, description="Registry to announce this worker in; empty: do not announce."
    )
    threads: int = Field(1, ge=1, le=256, description="CPU threads of the model's arithmetic.")
    cache_budget_mb: int | None = Field(
        None,
        ge=1,
        description="Upper bound of KV cache memory, in MiB; least recently used sessions are evicted. "
        "Unset: cache_memory_share of the GPU memory that is free after loading the weights; on a CPU a "
        "quarter of the memory available then, at most 1024.",
    )
    cache_memory_share: float = Field(
        0.8,
        gt=0,
        le=0.95,
        description="Share of a GPU's free memory for the KV cache if cache_budget_mb is unset; the rest "
        "is for activations.",
    )
    max_batch_tokens: int = Field(
        1024, ge=16, description="Upper bound of tokens fed in one forward, over all sessions."
    )

    @property
    def prefill_chunk(self) -> int:
        """Most prompt tokens of one session in one forward: long prompts leave room for other sessions."""
        return max(16, self.max_batch_tokens // 4)


class TargetSettings(WorkerSettings, _TargetModelSettings):
    """A target worker."""

    draft_ahead: bool = Field(
        True, description="Let that head draft the next proposals while no block waits."
    )


class DraftSettings(WorkerSettings, _ModelSettings):
    """A draft worker."""

    draft_weights: Weights = Field("auto", description=_DRAFT_WEIGHTS)
    draft_ahead: bool = Field(True, description="Prepare the next proposals while the target verifies.")
    target: str = Field(
        "",
        description="The target: directory or hub name. A draft with another vocabulary then "
        "proposes the tokens that both have; a drafter that shares weights with its target reads them from "
        "there, and one that was trained for another target is refused. Empty: the vocabularies are equal, "
        "and nothing is shared.",
    )


class OrchestratorSettings(ServingSettings, _AccessSettings):
    """An orchestrator replica."""

    model: str = Field(
        DEMO_PAIR, min_length=1, description="The target model, for its tokenizer and configuration."
    )
    served_model_name: str = Field("", description="Name that clients use; empty: derived from `model`.")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        repr=False,
        description="Session store and worker registry: redis://, rediss://, unix:// or, with Sentinel, "
        "redis+sentinel://HOST:PORT,.../SERVICE/DB.",
    )
    max_gamma: int = Field(
        8, ge=0, le=64, description="Upper bound of an adaptive gamma; 0: nothing is proposed."
    )
    prefix_caching: bool = Field(
        True,
        description="Workers keep caches of ended sessions for the tenant's prompts with the same prefix.",
    )
    session_ttl_s: int = Field(
        3600, ge=1, description="Time after which a finished or abandoned session expires."
    )
    max_concurrent_requests: int = Field(
        256,
        ge=1,
        description="Running requests per replica; as many wait in a queue that is fair between tenants.",
    )


class ScalingSettings(BaseModel):
    """Thresholds for scaling pools, given in a Serve configuration; rules: `services.serve.autoscaling`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target_load: float = Field(
        8.0, gt=0, description="Blocks in flight per target worker above which a worker is added."
    )
    orchestrator_load: float = Field(
        64.0, gt=0, description="Running and waiting requests per orchestrator above which one is added."
    )
    draft_load: float = Field(
        4.0, gt=0, description="Blocks in flight per draft worker above which a worker is added."
    )


def at_least_one(size: PoolSize) -> PoolSize:
    """Return `size`; ValueError if its minimum is 0."""
    if size.minimum < 1:
        raise ValueError(f"got {size}, allowed: at least 1 at all times")
    return size


def _checked_draft(draft: str) -> str:
    early_exit_layers(draft)
    return draft


class ClusterSettings(_TargetModelSettings, _AccessSettings):
    """A cluster on one machine, as started by `gammaray up`."""

    target: str = Field(DEMO_PAIR, min_length=1, description="Target model: directory or hub name.")
    draft: Annotated[str, AfterValidator(_checked_draft)] = Field(
        DEMO_PAIR,
        min_length=1,
        description="Draft model (an ordinary or a parallel one), or early-exit:N for the target's first N "
        "layers; without one, a target other than the demo pair's has no draft workers.",
    )
    target_workers: PoolSize = Field(
        "1",
        validate_default=True,
        description="Number of target workers, N or MIN:MAX to scale between; 0 with redis_url starts "
        "orchestrators that use the workers of other hosts.",
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
        description="Address of both APIs: 127.0.0.1; or 0.0.0.0, with api_keys_file, for other machines.",
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_draft(cls, given: Any) -> Any:
        """Start no draft workers where no target runs, or where only the demo's draft could."""
        has_other = bool(given.get("head")) or given.get("target", DEMO_PAIR) != DEMO_PAIR
        if (has_other and "draft" not in given) or str(given.get("target_workers")) == "0":
            return {"draft_workers": "0", **given}
        return given

    @property
    def asked(self) -> dict[str, Any]:
        """What is asked of the engines of its workers."""
        return {**super().asked, "has_keys": self.key_file is not None}

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        if not self.target_workers.minimum and (self.target_workers.maximum or not self.redis_url):
            allowed = "at least 1 at all times; or 0, with the redis_url that workers of other hosts use"
            raise InvalidArgumentError("target_workers", str(self.target_workers), allowed)
        return self


def known_variables() -> frozenset[str]:
    """Return the names of all environment variables that gammaray reads or sets."""
    classes = (ClusterSettings, DraftSettings, OrchestratorSettings, TargetSettings)
    fields = {f"{PREFIX}{field.upper()}" for settings in classes for field in settings.model_fields}
    return frozenset(fields | OTHER_VARIABLES.keys())
