"""Trains a head for a chat model on one GPU, in minutes what `gammaray train` does on a CPU in days.

The target writes conversations, as `gammaray train` has it (Magpie, arXiv 2406.08464), thousands at once in a
CUDA graph. Then a head is trained on its hidden states, which are computed again for each batch, in four
steps on its own states: by KL divergence, in the second half of the time for what coupled verification
accepts at the answer's temperature, with --init from the beginning.

    python -m benchmarks.train_head --target build/models/smollm2 --out build/head

Its card has its acceptance on conversations that it was not trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from services.engine.core.model import eos_token_ids, load_model
from services.train.answers.prompts import Job, Passages, Turns, own_jobs
from services.train.batches import Batch
from services.train.head import TrainableHead
from services.train.losses import coupled, loss_of, overlap
from services.train.trainable import fingerprints_of, optimizer_of, take_step

LENGTH = 640
"""Tokens of a conversation."""

_TEMPERATURES = (0.0, 0.7, 1.0, 0.7, 1.0)
_COOLEST = 0.4
"""At which both distributions of greedy answers are compared: at 0 nothing could be learnt."""

_MAX_TURN, _MAX_ANSWER = 96, 320
_BUCKET = 128
_MEASURED, _SAME = (0.7, 1.0), 1e-3
_WINDOWS = 0.5
_TOP_K = 32
_DEPTHS = 4
_KL_UNTIL = 0.5
_TURN, _ANSWER = 0, 1


@dataclass(frozen=True)
class Conversations:
    """What the target wrote.

    Attributes:
        token_ids: int64 [conversations, tokens].
        is_answer: Whether the target drew the token as part of an answer, bool [conversations, tokens].
        temperatures: Of the answers, float32 [conversations].
    """

    token_ids: Tensor
    is_answer: Tensor
    temperatures: Tensor

    def of(self, rows: Any) -> Conversations:
        """Return some of them."""
        return Conversations(self.token_ids[rows], self.is_answer[rows], self.temperatures[rows])


class Writer:
    """Lets a Llama model write conversations: all rows at the same position, prompts token by token.

    Args:
        model: The model, on its device.
        rows: Conversations at once.
        ends: Tokens that end a turn, besides the first of `to_answer`.
        to_answer: Tokens that end a user's turn and begin the answer.
        to_turn: Tokens that follow the end of an answer and begin a user's turn.
        length: Tokens of a conversation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        ends: tuple[int, ...],
        to_answer: list[int],
        to_turn: list[int],
        length: int = LENGTH,
    ) -> None:
        config: Any = model.config
        whole: Any = model
        self.model, self.decoder = whole, whole.get_decoder()
        self.rows, self.length, self.config = rows, length, config
        device = model.device
        dim = config.head_dim
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, length, dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        token_ids = ((to_answer[0], *ends), to_answer[1:], to_turn)
        self.ends, self.to_answer, self.to_turn = (torch.tensor(x, device=device) for x in token_ids)
        room = length + 1 + max(len(to_answer), len(to_turn))
        self.forced = torch.full((rows, room), -1, device=device)
        self.token_ids = torch.zeros(rows, room, dtype=torch.long, device=device)
        self.is_answer = torch.zeros(rows, room, dtype=torch.bool, device=device)
        self.mode = torch.zeros(rows, dtype=torch.long, device=device)
        self.count = torch.zeros_like(self.mode)
        self.temperatures = torch.zeros(rows, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        every = torch.arange(length, device=device)[None]
        self.cos, self.sin = self.decoder.rotary_emb(torch.zeros(1, 1, 1, device=device), every)
        self.cos, self.sin = (x.to(model.dtype) for x in (self.cos, self.sin))
        self._graphs: dict[int, Any] = {}

    @torch.no_grad()
    def write(self, jobs: list[Job]) -> Conversations:
        """Return a conversation for each job, of which there are as many as rows."""
        self.forced.fill_(-1)
        self.is_answer.fill_(False)
        forced = torch.full((self.rows, self.length // 2), -1)
        for row, job in zip(forced, jobs, strict=True):
            row[: len(job.prompt)] = torch.tensor(job.prompt)
        self.forced[:, : self.length // 2] = forced.to(self.forced.device)
        self.token_ids[:, 0] = self.forced[:, 0]
        self.mode.copy_(torch.tensor([_TURN if job.turn_end is not None else _ANSWER for job in jobs]))
        self.count.zero_()
        self.temperatures.copy_(torch.tensor([job.temperature for job in jobs]))
        self.place.zero_()
        for at in range(self.length - 1):
            self._run(min(self.length, (at // _BUCKET + 1) * _BUCKET))
        token_ids, is_answer = (x[:, : self.length].clone() for x in (self.token_ids, self.is_answer))
        return Conversations(token_ids, is_answer, self.temperatures.clone())

    def _run(self, reach: int) -> None:
        if self.keys.device.type != "cuda":
            self._step(reach)
            return
        if reach not in self._graphs:
            kept = [x.clone() for x in self._state()]
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(reach)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(reach)
            for x, before in zip(self._state(), kept, strict=True):
                x.copy_(before)
            self._graphs[reach] = graph
        self._graphs[reach].replay()

    def _state(self) -> tuple[Tensor, ...]:
        return self.forced, self.token_ids, self.is_answer, self.mode, self.count, self.place

    def _step(self, reach: int) -> None:
        """Feed the token at `place` and choose the next one; `reach` bounds the positions that are read."""
        logits = self._logits(reach)
        in_turn = self.mode == _TURN
        heat = torch.where(in_turn, 1.0, self.temperatures)[:, None]
        noise = torch.empty_like(logits).exponential_().log_()
        drawn = (logits - heat * noise).argmax(-1)
        following = self.place + 1
        given = self.forced.index_select(1, following)[:, 0]
        is_free = given < 0
        self.count.copy_(torch.where(is_free, self.count + 1, self.count))
        is_end = torch.isin(drawn, self.ends)
        is_long = self.count >= torch.where(in_turn, _MAX_TURN, _MAX_ANSWER)
        has_ended = is_free & (is_end | is_long)
        drawn = torch.where(is_end | is_long, self.ends[0], drawn)
        self.token_ids.index_copy_(1, following, torch.where(is_free, drawn, given)[:, None])
        is_own = is_free & ~in_turn & (is_end | ~is_long)
        self.is_answer.index_copy_(1, following, is_own[:, None])
        self._force(following + 1, has_ended & in_turn, self.to_answer)
        self._force(following + 1, has_ended & ~in_turn, self.to_turn)
        self.mode.copy_(torch.where(has_ended, 1 - self.mode, self.mode))
        self.count.copy_(torch.where(has_ended, 0, self.count))
        self.place.copy_(following)

    def _force(self, start: Tensor, rows: Tensor, token_ids: Tensor) -> None:
        where = start + torch.arange(len(token_ids), device=start.device)
        where = where.clamp_max(self.forced.shape[1] - 1)
        old = self.forced.index_select(1, where)
        self.forced.index_copy_(1, where, torch.where(rows[:, None], token_ids, old))

    def _logits(self, reach: int) -> Tensor:
        """Return the logits after the tokens at `place`, float32 [rows, vocab_size]."""
        config, decoder = self.config, self.decoder
        dim, kv_heads = config.head_dim, config.num_key_value_heads
        x = decoder.embed_tokens(self.token_ids.index_select(1, self.place))
        cos, sin = self.cos.index_select(1, self.place), self.sin.index_select(1, self.place)
        unseen = torch.arange(reach, device=x.device) > self.place
        bias = torch.zeros(reach, dtype=x.dtype, device=x.device).masked_fill(unseen, -torch.inf)
        for number, layer in enumerate(decoder.layers):
            own, normed = layer.self_attn, layer.input_layernorm(x)
            query, key, value = (
                project(normed).view(self.rows, 1, -1, dim).transpose(1, 2)
                for project in (own.q_proj, own.k_proj, own.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            self.keys[number].index_copy_(2, self.place, key)
            self.values[number].index_copy_(2, self.place, value)
            keys, values = self.keys[number, :, :, :reach], self.values[number, :, :, :reach]
            grouped = query.view(self.rows, kv_heads, -1, dim) * dim**-0.5
            share = (grouped @ keys.transpose(-1, -2) + bias).float().softmax(-1).to(x.dtype)
            x = x + own.o_proj((share @ values).reshape(self.rows, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: Tensor = self.model.lm_head(decoder.norm(x))[:, 0]
        return logits.float()


def heats(talks: Conversations) -> Tensor:
    """Return the temperatures at which distributions of conversations are compared, [conversations]."""
    return talks.temperatures.clamp_min(_COOLEST)


def _recorder(states: dict[int, Tensor], tap: int) -> Callable[..., None]:
    """Return a hook that records what enters a module as the state of `tap`."""

    def record(_module: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        states[tap] = positional[0] if positional else named["hidden_states"]

    return record


class Teacher:
    """Makes batches: the target's states and its most likely tokens, computed as they are needed.

    Args:
        model: The target, on its device.
        taps: The states that a head reads, as of `TrainableHead`.
    """

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...]) -> None:
        whole: Any = model
        self._model, self._decoder = whole, whole.get_decoder()
        modules = [*self._decoder.layers, self._decoder.norm]
        self._found: dict[int, Tensor] = {}
        for tap in taps:
            modules[tap].register_forward_pre_hook(_recorder(self._found, tap), with_kwargs=True)
        self._taps = taps

    @torch.no_grad()
    def batch(self, talks: Conversations, ids: Tensor, num_depths: int, starts: Tensor) -> Batch:
        """Return the batch of conversations for heads with the output tokens `ids`.

        Its `top_logs` are log-probabilities at `heats` of the conversations.

        Args:
            talks: The conversations.
            ids: Ascending, int64 [outputs].
            starts: First position of each conversation of which a head sees the state, int64.
        """
        width = talks.token_ids.shape[1]
        last = self._decoder(talks.token_ids, use_cache=False).last_hidden_state
        states = torch.stack([self._found[tap] for tap in self._taps], dim=2)
        where = torch.arange(width, device=ids.device) + starts[:, None]
        inside, where = where < width, where.clamp_max(width - 1)
        token_ids = talks.token_ids.gather(1, where)
        is_label = talks.is_answer.gather(1, where) & inside
        is_label[:, :2] = False
        states = states.gather(1, where[..., None, None].expand(-1, -1, *states.shape[2:]))
        rows, columns = is_label.nonzero(as_tuple=True)
        top_ids, top_logs = self._top(last[rows, where[rows, columns] - 1], heats(talks)[rows], ids)
        place, labels, chosen = [], [], []
        for depth in range(1, num_depths + 1):
            far = columns >= depth + 1
            row, label = rows[far], columns[far]
            place.append(torch.stack((row, label - depth + starts[row], torch.full_like(row, depth)), dim=1))
            labels.append(token_ids[row, label])
            chosen.append(far.nonzero()[:, 0])
        every = torch.cat(chosen)
        return Batch(
            token_ids, starts, torch.cat(place), torch.cat(labels), top_ids[every], top_logs[every], states
        )

    def _top(self, hidden: Tensor, heat: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for part, heat_of in zip(torch.split(hidden, 8192), torch.split(heat[:, None], 8192), strict=True):
            logits = self._model.lm_head(part)
            total = (logits.float() / heat_of).logsumexp(-1, keepdim=True)
            top = logits[:, ids].topk(_TOP_K, -1)
            found.append((ids[top.indices], top.values.float() / heat_of - total))
        top_ids, top_logs = zip(*found, strict=True)
        return torch.cat(top_ids), torch.cat(top_logs)


def conversations(
    model: PreTrainedModel, path: str, rows: int, seconds: float, seed: int
) -> Iterator[Conversations]:
    """Yield conversations that the target writes, `rows` at a time, at least twice."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    turns, passages = Turns(tokenizer), Passages()
    _, to_answer = turns.user("", None)
    writer = Writer(model, rows, eos_token_ids(path), to_answer, _to_turn(tokenizer, to_answer[0]))
    fitting = (
        job for job in own_jobs(turns, passages, _TEMPERATURES, seed) if len(job.prompt) < writer.length // 2
    )
    began = time.monotonic()
    number = 0
    while number < 2 or time.monotonic() - began < seconds:
        talks = writer.write(list(islice(fitting, rows)))
        number += 1
        yield talks
        for text in _answers(talks, tokenizer):
            passages.add(text)


def _to_turn(tokenizer: Any, end: int) -> list[int]:
    """Return the tokens between the end of an answer and the text of the next user's turn."""
    marks = ("\u2402a\u2403", "\u2402b\u2403", "\u2402c\u2403")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    between = text.partition(marks[1])[2].partition(marks[2])[0]
    token_ids: list[int] = tokenizer(between, add_special_tokens=False)["input_ids"]
    return token_ids[1:] if token_ids[:1] == [end] else token_ids


def _answers(talks: Conversations, tokenizer: Any) -> list[str]:
    """Return the first answers of some conversations."""
    texts = []
    for token_ids, own in zip(talks.token_ids[:256].tolist(), talks.is_answer[:256].tolist(), strict=True):
        if True in own:
            first = own.index(True)
            last = own.index(False, first) if False in own[first:] else len(own)
            texts.append(tokenizer.decode(token_ids[first : last - 1]))
    return texts


def train(
    head: TrainableHead,
    teacher: Teacher,
    talks: Conversations,
    *,
    seconds: float,
    rows: int,
    peak: float,
    kl_until: float,
) -> Iterator[tuple[int, Tensor]]:
    """Train a head for a time; yield the number of steps and the loss after each.

    Args:
        head: The head.
        teacher: Makes batches.
        talks: What it is trained on.
        seconds: How long.
        rows: Conversations per batch.
        peak: Highest learning rate.
        kl_until: Share of the time in which the loss is the KL divergence alone.
    """
    device = talks.token_ids.device
    optimizer = optimizer_of(head, 0.0)
    generator = torch.Generator().manual_seed(1)
    began, step = time.monotonic(), 0
    while (progress := (time.monotonic() - began) / seconds) < 1:
        chosen = torch.randint(len(talks.token_ids), (rows,), generator=generator)
        starts = torch.randint(talks.token_ids.shape[1] * 3 // 4, (rows,), generator=generator)
        starts *= torch.rand(rows, generator=generator) < _WINDOWS
        some = talks.of(chosen.to(device))
        batch = teacher.batch(some, head.target_ids, _DEPTHS, starts.to(device))
        weight = 0.8 ** (batch.place[:, 2] - 1).float()
        rate = min(1.0, (step + 1) / 100) * max(0.01, math.cos(progress * math.pi / 2) ** 2)
        optimizer.param_groups[0]["lr"] = peak * rate
        with torch.autocast(device.type, torch.bfloat16):
            logs = (head(batch) / heats(some)[batch.place[:, 0], None]).log_softmax(-1)
            wanted, found = head.common(batch, logs)
        each = loss_of("kl" if progress < kl_until else "coupled", wanted, found)
        loss = (each * weight).sum() / weight.sum()
        take_step(head, optimizer, loss)
        step += 1
        yield step, loss.detach()


@torch.no_grad()
def measure(head: TrainableHead, teacher: Teacher, held: Conversations) -> dict[str, Any]:
    """Return acceptance of a head on conversations that it was not trained on, by depth.

    Returns:
        `greedy`: share of matches in answers of temperature 0, given that all before matched;
        `tokens_per_proposal`: tokens that are accepted there, and the one of the target, after each token of
        the answers; `overlap` and `coupled` as of `evaluate`; `coupled_at_0.7` in answers of 0.7.
    """
    depth = head.depth
    tested, matched, anchors = torch.zeros(depth), torch.zeros(depth), 0
    shares = [torch.zeros(3, depth) for _ in _MEASURED]
    for first in range(0, len(held.token_ids), 32):
        talks = held.of(slice(first, first + 32))
        starts = torch.zeros_like(talks.token_ids[:, 0])
        batch = teacher.batch(talks, head.target_ids, depth, starts)
        with torch.autocast(starts.device.type, torch.bfloat16):
            logs = head(batch)
        row, anchor, at = batch.place.unbind(1)
        hits = torch.zeros(*talks.token_ids.shape, depth, dtype=torch.bool, device=starts.device)
        exists = torch.zeros_like(hits)
        hits[row, anchor, at - 1] = head.target_ids[logs.argmax(-1)] == batch.labels
        exists[row, anchor, at - 1] = True
        is_greedy = talks.temperatures == 0
        exists &= is_greedy[:, None, None] & exists[:, :, :1]
        reached = (hits & exists).cumprod(-1).bool()
        before = torch.cat((exists[..., :1], reached[..., :-1]), dim=-1) & exists
        tested += before.sum((0, 1)).cpu()
        matched += reached.sum((0, 1)).cpu()
        anchors += int(exists[..., 0].sum())
        heat = heats(talks)[row]
        both = head.common(batch, (logs / heat[:, None]).log_softmax(-1))
        agreed = torch.stack((overlap(*both), coupled(*both), torch.ones_like(heat))).float().cpu()
        for total, temperature in zip(shares, _MEASURED, strict=True):
            chosen = ((heat - temperature).abs() < _SAME).cpu()
            total.index_add_(1, at.cpu()[chosen] - 1, agreed[:, chosen])
    means = [(total[:2] / total[2].clamp_min(1)).tolist() for total in shares]
    return {
        "greedy": [round(x, 3) for x in (matched / tested.clamp_min(1)).tolist()],
        "overlap": [round(x, 3) for x in means[-1][0]],
        "coupled": [round(x, 3) for x in means[-1][1]],
        "coupled_at_0.7": [round(x, 3) for x in means[0][1]],
        "tokens_per_proposal": round(1 + float(matched.sum()) / max(1, anchors), 3),
        "gamma": depth,
        "positions": anchors,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", required=True, help="directory of a Llama chat model")
    parser.add_argument("--out", type=Path, required=True, help="directory of the head")
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--write", type=float, default=140, help="seconds of writing; default 140")
    parser.add_argument("--train", type=float, default=260, help="seconds of training; default 260")
    parser.add_argument("--rows", type=int, default=2048, help="conversations at once; default 2048")
    parser.add_argument("--batch", type=int, default=32, help="conversations per step; default 32")
    parser.add_argument("--outputs", type=int, default=8192, help="output tokens; default 8192")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak; default 0.001")
    parser.add_argument("--init", default="", help="head with as many output tokens to train further")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; default 1")
    return parser.parse_args()


def main() -> None:
    """Write conversations, train a head, and save it."""
    options = _options()
    torch.manual_seed(options.seed)
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {text}", flush=True)

    model = load_model(options.target, device=options.device, dtype="bfloat16").module
    model.set_attn_implementation("sdpa")
    whole: Any = model
    count = model.config.num_hidden_layers
    taps = (2, count // 2, count - 3, count)
    written = []
    for talks in conversations(model, options.target, options.rows, options.write, options.seed):
        written.append(talks)
        report(f"{sum(int(one.is_answer.sum()) for one in written)} answer tokens")
    held = written.pop().of(slice(256))
    every = (torch.cat([getattr(one, name) for one in written]) for name in Conversations.__annotations__)
    talks = Conversations(*every)
    used = torch.bincount(talks.token_ids[talks.is_answer], minlength=model.config.vocab_size)
    ids = used.topk(options.outputs).indices.sort().values
    report(f"{used[ids].sum() / used.sum():.4f} of the answers' tokens are among {options.outputs}")
    teacher = Teacher(model, taps)
    if options.device != "cpu":
        for layer in whole.get_decoder().layers:
            layer.compile()
    head = TrainableHead(model, taps, ids, lambda _: [])
    if options.init:
        head.start_from(options.init, options.target)
    head.to(options.device)
    if options.init:
        report(f"{options.init}: {json.dumps(measure(head, teacher, held))}")
    for step, loss in train(
        head,
        teacher,
        talks,
        seconds=options.train,
        rows=options.batch,
        peak=options.learning_rate,
        kl_until=0.0 if options.init else _KL_UNTIL,
    ):
        if step % 100 == 1:
            report(f"step {step}, loss {loss.item():.3f}")
    card = measure(head, teacher, held)
    card |= {"answer_tokens": int(talks.is_answer.sum()), "steps": step, "batch": options.batch}
    report(json.dumps(card))
    head.save(options.out, fingerprints_of(options.target), Path(options.target).name, card)


if __name__ == "__main__":
    main()
