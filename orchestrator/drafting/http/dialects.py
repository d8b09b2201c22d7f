"""The APIs of servers that draft: what is sent for a proposal, and where the answer has its tokens.

Each dialect takes and returns token ids where its server does; else text, which the caller tokenises. Except
for gammaray, servers are asked for their most likely tokens: they do not have the target's noise, and of all
tokens the most likely one is most often the token that the target draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gammaray.types import SamplingParams
from orchestrator.drafting.http.client import DraftServerError, Failure

__all__ = ["Ask", "Dialect", "Reply", "dialect_of"]


@dataclass(frozen=True)
class Ask:
    """What a server is asked for.

    Args:
        prompt: The committed tokens, as ids or as text.
        depth: Upper bound of the proposed tokens.
        model: Name of the server's model; "" if it serves a single one.
        ignores_eos: Whether the completion continues after an end-of-sequence token.
        salt: Servers that share caches by salt share this one's with requests of the same salt only.
        slot: Slot of a llama.cpp server; -1 lets the server choose.
        sampling: Parameters with which a server that has the target's noise draws; None asks for the most
            likely tokens.
    """

    prompt: Sequence[int] | str
    depth: int
    model: str = ""
    ignores_eos: bool = False
    salt: str = ""
    slot: int = -1
    sampling: SamplingParams | None = None


@dataclass(frozen=True)
class Reply:
    """What a server proposes.

    Args:
        token_ids: The tokens; None if the server returned text alone.
        text: Their text.
        is_end: Whether the server's model ended the text after them.
    """

    token_ids: tuple[int, ...] | None
    text: str
    is_end: bool = False


class Dialect(ABC):
    """The API of one kind of server.

    Attributes:
        name: Name of the kind.
        path: Path of the call that drafts.
        has_ids: Whether it takes and returns token ids.
        has_noise: Whether it can draw with the target's noise.
    """

    name: ClassVar[str]
    path: ClassVar[str] = "/v1/completions"
    has_ids: ClassVar[bool] = True
    has_noise: ClassVar[bool] = False

    @abstractmethod
    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of the call."""

    @abstractmethod
    def reply(self, body: Any) -> Reply:
        """Return what the body of an answer proposes.

        Raises:
            DraftServerError: It is not an answer of such a server.
        """


class OpenAI(Dialect):
    """OpenAI's completions, text in and out: what every server has."""

    name = "openai"
    has_ids = False

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of the call."""
        return {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.depth,
            "temperature": 0,
            "stream": False,
        }

    def reply(self, body: Any) -> Reply:
        """Return what the body of an answer proposes."""
        choice = _first(_field(body, "choices", list))
        return Reply(None, _field(choice, "text", str), choice.get("finish_reason") == "stop")


class VLLM(OpenAI):
    """vLLM: token ids with `return_token_ids`; its prefix cache is automatic, by `cache_salt`."""

    name = "vllm"
    has_ids = True

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of the call."""
        salt = {"cache_salt": ask.salt} if ask.salt else {}
        return {**super().body(ask), "return_token_ids": True, "ignore_eos": ask.ignores_eos, **salt}

    def reply(self, body: Any) -> Reply:
        """Return what the body of an answer proposes."""
        choice = _first(_field(body, "choices", list))
        is_end = choice.get("finish_reason") == "stop"
        return Reply(_ids(choice, "token_ids"), _field(choice, "text", str), is_end)


class Gammaray(OpenAI):
    """Another gammaray: of the same seed it has the target's noise; its prefix cache is automatic.

    Its proposals are no sessions: it stores none of them.
    """

    name = "gammaray"
    has_ids = True
    has_noise = True

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of the call."""
        own = {"cache_salt": ask.salt}
        options = {"gammaray": own, "ignore_eos": ask.ignores_eos, "store": False}
        given = ask.sampling
        if given is None:
            return {**super().body(ask), **options, "seed": 0}
        return {
            **super().body(ask),
            **options,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k,
            "min_p": given.min_p,
            "repetition_penalty": given.repetition_penalty,
            "logit_bias": {str(token_id): bias for token_id, bias in given.logit_bias.items()},
            "allowed_token_ids": list(given.allowed_token_ids),
            "seed": given.seed,
        }

    def reply(self, body: Any) -> Reply:
        """Return what the body of an answer proposes."""
        reply = super().reply(body)
        return Reply(_ids(_field(body, "gammaray", dict), "token_ids"), reply.text, reply.is_end)


class SGLang(Dialect):
    """SGLang's own API, since its completions return no token ids; its prefix cache is automatic."""

    name = "sglang"
    path = "/generate"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of the call."""
        prompt = {"text": ask.prompt} if isinstance(ask.prompt, str) else {"input_ids": list(ask.prompt)}
        sampling = {"max_new_tokens": ask.depth, "temperature": 0, "ignore_eos": ask.ignores_eos}
        return {**prompt, "sampling_params": sampling, "stream": False}

    def reply(self, body: Any) -> Reply:
        """Return what the body of an answer proposes."""
        meta = body.get("meta_info") if isinstance(body, dict) else None
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        is_end = isinstance(reason, dict) and reason.get("type") == "stop"
        return Reply(_ids(body, "output_ids"), _field(body, "text", str), is_end)


class LlamaCpp(Dialect):
    """llama.cpp's own API, since its completions of OpenAI's form return no token ids."""

    name = "llama.cpp"
    path = "/completion"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of the call."""
        return {
            "prompt": ask.prompt,
            "n_predict": ask.depth,
            "temperature": 0,
            "cache_prompt": True,
            "id_slot": ask.slot,
            "ignore_eos": ask.ignores_eos,
            "return_tokens": True,
            "response_fields": ["content", "tokens", "stop_type"],  # else it repeats the prompt
            "stream": False,
        }

    def reply(self, body: Any) -> Reply:
        """Return what the body of an answer proposes."""
        is_end = isinstance(body, dict) and body.get("stop_type") == "eos"
        return Reply(_ids(body, "tokens"), _field(body, "content", str), is_end)


class Ollama(Dialect):
    """Ollama's own API, since its completions apply the model's template; text only."""

    name = "ollama"
    path = "/api/generate"
    has_ids = False

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of the call."""
        options = {"num_predict": ask.depth, "temperature": 0}
        return {"model": ask.model, "prompt": ask.prompt, "raw": True, "stream": False, "options": options}

    def reply(self, body: Any) -> Reply:
        """Return what the body of an answer proposes."""
        text = _field(body, "response", str)
        return Reply(None, text, body.get("done_reason") == "stop")


_BY_OWNER: Mapping[str, type[Dialect]] = {
    "gammaray": Gammaray,
    "library": Ollama,
    "llamacpp": LlamaCpp,
    "sglang": SGLang,
    "vllm": VLLM,
}


def dialect_of(owner: str) -> Dialect:
    """Return the dialect of a server by `owned_by` of the models that it lists; OpenAI's for unknown ones."""
    return _BY_OWNER.get(owner, OpenAI)()


def _field(body: Any, name: str, kind: type[Any]) -> Any:
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, kind):
        raise DraftServerError(Failure.CONTENT, f"an answer without {name}")
    return value


def _first(choices: list[Any]) -> dict[str, Any]:
    if not choices or not isinstance(choices[0], dict):
        raise DraftServerError(Failure.CONTENT, "an answer without a choice")
    return choices[0]


def _ids(body: Any, name: str) -> tuple[int, ...]:
    found = _field(body, name, list)
    if not all(type(token_id) is int for token_id in found):
        raise DraftServerError(Failure.CONTENT, f"{name} that are not token ids")
    return tuple(found)
