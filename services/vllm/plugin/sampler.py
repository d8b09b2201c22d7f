"""Draws with noise of (seed, position, token) in the V1 model runner, and keeps drafts that equal the draw.

Every row of logits goes through vLLM's own sampler, a draft's like any other, with the request's parameters
and the drafts before it as its history. So the token of a row is the one that plain decoding draws there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from .noise import noisy_argmax, row_keys, signed_seed

NO_TOKEN = -1
"""vLLM's padding of sampled tokens."""

_LEAST_TEMPERATURE = 1e-5
"""Below it vLLM's sampler is greedy."""

_OF_REQUESTS = (
    *("temperature", "top_p", "top_k", "prompt_token_ids", "allowed_token_ids_mask"),
    *("frequency_penalties", "presence_penalties", "repetition_penalties"),
)
"""Tensors of vLLM's sampling metadata with a row for each request."""


@dataclass(frozen=True)
class Rows:
    """The rows of logits of one step.

    Args:
        counts: Drafts of each request; it has one row more.
        seeds: [requests] int64.
        first: [requests] int64, the position of the token that a request's first row decides.
    """

    counts: Sequence[int]
    seeds: Tensor
    first: Tensor

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Each row's request, and the number of drafts before it."""
        return [(at, depth) for at, count in enumerate(self.counts) for depth in range(count + 1)]

    @cached_property
    def requests(self) -> Tensor:
        """[rows] int64."""
        return torch.tensor([at for at, _ in self.places], device=self.first.device)

    @cached_property
    def keys(self) -> Tensor:
        """[rows] int64, of the noise."""
        depths = torch.tensor([depth for _, depth in self.places], device=self.first.device)
        return row_keys(self.seeds[self.requests], self.first[self.requests] + depths)


class CoupledSampler:
    """Takes the place of the random parts of a V1 model runner's sampling."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample = runner._sample
        self._draws = runner.sampler.topk_topp_sampler
        self._draw = self._draws.forward
        self._verify: Any = getattr(runner, "rejection_sampler", None)
        self._drafter: Any = getattr(runner, "drafter", None)
        self._draft: Any = getattr(self._drafter, "_greedy_sample", None)
        self._rows: Rows | None = None  # of the step that is sampled
        self._last: tuple[Any, Rows] | None = None  # of the step after which drafts are made
        self._depth = 0

    def install(self) -> list[str]:
        """Replace methods of the runner and its parts; return their names."""
        runner, drafter = self._runner, self._drafter
        runner._sample = self.sample
        self._draws.forward = self.draw
        taken = ["GPUModelRunner._sample", "TopKTopPSampler.forward"]
        if self._verify is not None:
            runner.rejection_sampler = self.verify
            taken.append("RejectionSampler.forward")
        # Others take no argmax of logits over the target's vocabulary.
        is_known = getattr(type(drafter), "_greedy_sample", None) is SpecDecodeBaseProposer._greedy_sample
        has_other_tokens = getattr(drafter, "use_heterogeneous_vocab", False)  # not in vLLM 0.24
        if is_known and not (drafter.use_local_argmax_reduction or has_other_tokens):
            drafter._greedy_sample = self.draft
            drafter._enable_probabilistic_draft_probs = False
            taken.append(f"{type(drafter).__name__}._greedy_sample")
        return taken

    def sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """Return the tokens of a step, as vLLM's `SamplerOutput`; in place of `GPUModelRunner._sample`."""
        if logits is None:
            return self._sample(logits, spec_decode_metadata)
        batch = self._runner.input_batch
        batch.generators.clear()
        metadata, rows = batch.sampling_metadata, self._rows_of(spec_decode_metadata)
        if self._verify is not None and spec_decode_metadata is None:
            # With speculation vLLM keeps no processors of min_p and logit_bias.
            batch.sampling_metadata = replace(metadata, logitsprocs=self._processors(rows))
        self._rows = rows
        try:
            output = self._sample(logits, spec_decode_metadata)
        finally:
            self._rows, batch.sampling_metadata = None, metadata
        emitted = (output.sampled_token_ids != NO_TOKEN).sum(dim=-1)
        self._last = metadata, replace(rows, first=rows.first + emitted)
        self._depth = 0
        return output

    def draw(
        self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draw a token from each row of logits [rows, vocab_size]; in place of `TopKTopPSampler.forward`."""
        if self._rows is None:  # vLLM tries its sampler when it starts
            drawn: tuple[Tensor, Tensor | None] = self._draw(logits, generators, k, p)
            return drawn
        logits = apply_top_k_top_p(logits, k, p)
        shown = None
        if self._draws.logprobs_mode == "processed_logits":
            shown = logits
        elif self._draws.logprobs_mode == "processed_logprobs":
            shown = logits.log_softmax(dim=-1, dtype=torch.float32)
        return noisy_argmax(logits, self._rows.keys), shown

    def verify(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        """Draw every row and keep drafts while they equal the draws; in place of `RejectionSampler`."""
        rows = self._rows
        if rows is None:
            return self._verify(metadata, draft_probs, logits, sampling_metadata)
        drafts = metadata.draft_token_ids
        output = self._runner.sampler(
            logits=logits, sampling_metadata=self._expanded(sampling_metadata, rows, drafts)
        )
        drawn = output.sampled_token_ids.view(-1)
        proposed = torch.full_like(drawn, NO_TOKEN)
        proposed[metadata.target_logits_indices] = drafts.to(drawn.dtype)
        width = max(rows.counts) + 1
        sizes = torch.tensor(rows.counts, device=drawn.device) + 1
        starts = sizes.cumsum(0) - sizes
        # A request's columns past its last row are never reached: no draft equals the draw of that one.
        index = (starts[:, None] + torch.arange(width, device=drawn.device)).clamp_(max=len(drawn) - 1)
        is_kept = (drawn == proposed)[index].long()
        is_reached = torch.cat([torch.ones_like(is_kept[:, :1]), is_kept[:, :-1].cumprod(dim=1)], dim=1)
        tokens = drawn[index].masked_fill(is_reached == 0, NO_TOKEN)
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            logprobs = LogprobsTensors(*(tensor[index.view(-1)] for tensor in logprobs[:3]))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def draft(self, hidden_states: Tensor) -> Tensor:
        """Draft with the noise of the positions; in place of the argmax of a drafter's logits.

        The target's token is the argmax of its own scores with the same noise, so that a drafter that knows
        the distribution finds it more often than by its most likely token.
        """
        if self._last is None or self._last[0].all_greedy:
            drafted: Tensor = self._draft(hidden_states)
            return drafted
        metadata, last = self._last
        logits = self._drafter.model.compute_logits(hidden_states)
        tokens: Tensor = logits.argmax(dim=-1)
        # A parallel drafter gives all tokens of a request at once, in order.
        each, rest = divmod(len(tokens), len(last.counts))
        if rest or not each:
            return tokens
        places = torch.arange(len(tokens), device=tokens.device)
        at, positions = places // each, self._depth + places % each
        self._depth += each
        temperature = metadata.temperature[at]
        is_drawn = temperature >= _LEAST_TEMPERATURE
        scores = logits.float() / temperature.where(is_drawn, 1.0)[:, None]
        k, p = (None if each is None else each[at] for each in (metadata.top_k, metadata.top_p))
        keys = row_keys(last.seeds[at], last.first[at] + positions)
        return noisy_argmax(apply_top_k_top_p(scores, k, p), keys).where(is_drawn, tokens)

    def _rows_of(self, spec_decode_metadata: Any) -> Rows:
        runner, names = self._runner, self._runner.input_batch.req_ids
        seeds = [signed_seed(runner.requests[name].sampling_params.seed, name) for name in names]
        count, device = len(seeds), runner.seq_lens.device
        counts = [0] * count if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        # On the device it is right under asynchronous scheduling, too, where the host does not know yet how
        # many drafts of the step before were kept.
        first = runner.seq_lens[:count].long() - torch.tensor(counts, device=device)
        return Rows(counts, torch.tensor(seeds, dtype=torch.int64, device=device), first)

    def _expanded(self, metadata: Any, rows: Rows, draft_token_ids: Any) -> Any:
        """Return vLLM's sampling metadata of requests as that of rows."""

        values = {name: getattr(metadata, name) for name in _OF_REQUESTS}
        texts, specific = metadata.output_token_ids, metadata.logprob_token_ids
        if texts:
            drafts = [part.tolist() for part in draft_token_ids.split(list(rows.counts))]
            texts = [[*texts[at], *drafts[at][:depth]] for at, depth in rows.places]
        if specific:
            specific = {row: specific[at] for row, (at, _) in enumerate(rows.places) if at in specific}
        words = metadata.bad_words_token_ids
        return replace(
            metadata,
            **{name: each if each is None else each[rows.requests] for name, each in values.items()},
            output_token_ids=texts,
            bad_words_token_ids={row: words[at] for row, (at, _) in enumerate(rows.places) if at in words},
            logitsprocs=self._processors(rows),
            logprob_token_ids=specific,
            spec_token_ids=None,
        )

    def _processors(self, rows: Rows) -> Any:
        """Return vLLM's processors of min_p, logit_bias and min_tokens for rows."""
        runner = self._runner
        states = [runner.requests[request_id] for request_id in runner.input_batch.req_ids]
        params = [state.sampling_params for state in states]
        if not any(each.min_p or each.logit_bias or each.min_tokens for each in params):
            return LogitsProcessors()
        first = rows.first.tolist()
        added = [
            # Of the output min_tokens reads the length.
            (row, params[at], None, range(max(0, first[at] + depth - states[at].num_prompt_tokens)))
            for row, (at, depth) in enumerate(rows.places)
        ]
        size = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(added)))
        made = [kind(size, runner.device, False) for kind in BUILTIN_LOGITS_PROCESSORS]
        for processor in made:
            processor.update_state(BatchUpdate(len(added), (), added, ()))
        return LogitsProcessors(made)
