"""Steps as CUDA graphs: Llama-like models without launch gaps and without padded attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.core.batch import Batch
from services.engine.cuda.tables import (
    MAX_CAPTURED_ROWS,
    Bucket,
    Buckets,
    Tables,
    clear,
    fill,
    new_tables,
)
from services.engine.cuda.torch_kernels import Stripes, TorchKernels
from services.engine.cuda.weights import GraphModel

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

__all__ = [
    "Buffers",
    "Capture",
    "Drafts",
    "GraphRunner",
    "Program",
    "make_kernels",
    "run_forward",
]


@dataclass
class Buffers:
    """What a forward writes; the residual stream and the logits are float32, the rest of the model's type.

    Attributes:
        x: [rows, hidden], the residual stream.
        h: [rows, hidden].
        qkv: [rows, num_qkv_heads * head_dim].
        mixed: [rows, num_heads * head_dim].
        inner: [rows, intermediate].
        last: [wanted, hidden].
        logits: [wanted, vocab_size].
        stripes: Of the wanted rows.
        tokens: [wanted], drawn.
        states: [rows, taps, hidden], recorded hidden states.
        scratch: Of the kernels.
    """

    x: Tensor
    h: Tensor
    qkv: Tensor
    mixed: Tensor
    inner: Tensor
    last: Tensor
    logits: Tensor
    stripes: Stripes
    tokens: Tensor
    states: Tensor
    scratch: list[Tensor]

    @classmethod
    def make(
        cls,
        model: GraphModel,
        kernels: TorchKernels,
        bucket: Bucket,
        num_taps: int = 0,
        scratch: list[Tensor] | None = None,
    ) -> Buffers:
        """Buffers for all steps of a bucket, which record the states of `num_taps` layers."""
        shape, device, dtype = model.shape, model.device, model.dtype
        rows, wanted = bucket.rows, bucket.wanted

        def zeros(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        return cls(
            x=zeros(rows, shape.hidden, kind=torch.float32),
            h=zeros(rows, shape.hidden),
            qkv=zeros(rows, shape.num_qkv_heads * shape.head_dim),
            mixed=zeros(rows, shape.num_heads * shape.head_dim),
            inner=zeros(rows, shape.intermediate),
            last=zeros(wanted, shape.hidden),
            logits=zeros(wanted, shape.vocab_size, kind=torch.float32),
            stripes=Stripes.make(wanted, shape.vocab_size, device),
            tokens=zeros(wanted, kind=torch.int64),
            states=zeros(rows, num_taps, shape.hidden),
            scratch=kernels.new_scratch(bucket, device) if scratch is None else scratch,
        )

    def within(self, bucket: Bucket, states: Tensor, scratch: list[Tensor]) -> Buffers:
        """The first rows of these buffers, with other `states` and `scratch`."""
        rows, wanted = bucket.rows, bucket.wanted
        return Buffers(
            x=self.x[:rows],
            h=self.h[:rows],
            qkv=self.qkv[:rows],
            mixed=self.mixed[:rows],
            inner=self.inner[:rows],
            last=self.last[:wanted],
            logits=self.logits[:wanted],
            stripes=self.stripes.of_rows(wanted),
            tokens=self.tokens[:wanted],
            states=states,
            scratch=scratch,
        )


def run_forward(
    model: GraphModel,
    kernels: TorchKernels,
    tables: Tables,
    buffers: Buffers,
    tapped: Sequence[int] = (),
) -> None:
    """Feed the rows of `tables`: keys and values go to the caches, logits and tapped states to `buffers`."""
    x, h, qkv, mixed, inner = buffers.x, buffers.h, buffers.qkv, buffers.mixed, buffers.inner
    x.copy_(F.embedding(tables.token, model.embedding))
    for index, layer in enumerate(model.layers):
        _record(x, index, tapped, buffers)
        kernels.norm(x, layer.attention_norm, h)
        kernels.linear(h, layer.qkv, layer.qkv_bias, qkv)
        kernels.rotate(qkv, index, layer.head_norm, tables)
        kernels.attend(qkv, index, tables, buffers.scratch, mixed)
        kernels.add_linear(mixed, layer.out, layer.out_bias, x)
        kernels.norm(x, layer.mlp_norm, h)
        kernels.swiglu(h, layer.gate_up, inner)
        kernels.add_linear(inner, layer.down, None, x)
    _record(x, len(model.layers), tapped, buffers)
    if len(buffers.last):
        kernels.norm(x, model.last_norm, buffers.last, tables.wanted)
        kernels.linear(buffers.last, model.head, None, buffers.logits)


def _record(state: Tensor, layer: int, tapped: Sequence[int], buffers: Buffers) -> None:
    for column, wanted in enumerate(tapped):
        if wanted == layer:
            buffers.states[:, column].copy_(state)


def make_kernels(model: GraphModel) -> TorchKernels:
    """Triton's kernels on a CUDA device that has Triton, plain torch elsewhere."""
    if model.device.type != "cuda":
        return TorchKernels(model)
    try:
        from services.engine.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError:
        return TorchKernels(model)
    return TritonKernels(model)


class Capture:
    """Some work on fixed tensors: run once as it is, captured when it comes again, and replayed from then on.

    Args:
        work: Enqueues the work on the current stream; must do the same each time.
        capturable: False to go on running it as it is.
        pool: Memory shared by all graphs that never run at the same time.
    """

    def __init__(self, work: Callable[[], None], *, capturable: bool, pool: _POOL_HANDLE | None) -> None:
        self._work, self._capturable, self._pool = work, capturable, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._has_run = False

    def run(self) -> None:
        """Enqueue the work."""
        if self._graph is None and not (self._has_run and self._capturable):
            # The first time also compiles kernels, which a capture must not.
            self._work()
            self._has_run = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, such as one that copies keys and values.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._work()
            self._graph = graph
        self._graph.replay()


class _Shared:
    """Memory that tables and buffers of all captured steps are views of, since no two of them run at once.

    Args:
        model: The weights.
        kernels: Say how much scratch a step needs.
        buckets: All captured ones.
    """

    def __init__(self, model: GraphModel, kernels: TorchKernels, buckets: Buckets) -> None:
        self.kernels = kernels
        sizes = [[one.numel() for one in self._scratch_of(bucket)] for bucket in buckets.all()]
        self._scratch = [torch.zeros(max(ones), device=model.device) for ones in zip(*sizes, strict=True)]
        self._buffers = Buffers.make(model, kernels, buckets.captured(MAX_CAPTURED_ROWS), scratch=[])
        self.flat = new_tables(buckets.captured(MAX_CAPTURED_ROWS), model.device).flat

    def view(self, bucket: Bucket, num_taps: int) -> Buffers:
        """The first rows of the buffers."""
        states = self._buffers.h.new_zeros(bucket.rows, num_taps, self._buffers.h.shape[1])
        return self._buffers.within(bucket, states, self.scratch(bucket))

    def scratch(self, bucket: Bucket) -> list[Tensor]:
        """Scratch for the kernels, of their own when the shared one is too small."""
        needed = self._scratch_of(bucket)
        pairs = list(zip(needed, self._scratch, strict=True))
        if any(own.numel() > flat.numel() for own, flat in pairs):
            return self.kernels.new_scratch(bucket, self.flat.device)
        return [flat[: own.numel()].view(own.shape) for own, flat in pairs]

    def _scratch_of(self, bucket: Bucket) -> list[Tensor]:
        return self.kernels.new_scratch(bucket, torch.device("meta"))


@dataclass
class Program:
    """A bucket's tensors and its work, captured or not."""

    tables: Tables
    buffers: Buffers
    capture: Capture


@dataclass(frozen=True)
class Drafts:
    """What steps drew, and what may follow instead.

    Attributes:
        tokens: [steps][rows], 0 where no score was a finite number.
        guesses: [steps][rows] tokens with the largest scores, at most one of each stripe of ids, best first,
            and their shares of sum exp(sharpness * score).
    """

    tokens: list[list[int]]
    guesses: list[list[list[tuple[int, float]]]]


class GraphRunner:
    """Runs the engine's steps; see `services.engine.engine.Runner`.

    Args:
        model: The weights.
        kernels: Operations; by default the fastest that the device has.

    Attributes:
        buckets: Of the captured steps.
        programs: The captured steps, by bucket and tapped layers.
        draws_on_device: It draws tokens where a batch asks for them.
        last: The work of the last step, which may be replayed to be timed.
    """

    draws_on_device = True

    def __init__(self, model: GraphModel, kernels: TorchKernels | None = None) -> None:
        self.model = model
        self.kernels = kernels if kernels is not None else make_kernels(model)
        shape = model.shape
        self.buckets = Buckets(shape.num_heads // shape.num_kv_heads, model.rotation.shape[1])
        self.pool = torch.cuda.graph_pool_handle() if self.kernels.capturable else None
        self.last: Capture | None = None
        self._memory: _Shared | None = None
        self.programs: dict[tuple[Bucket, tuple[int, ...]], Program] = {}

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self.model.shape.hidden

    def tap_obstacle(self) -> str:
        """Return why hidden states cannot be recorded: nothing prevents it."""
        return ""

    @torch.inference_mode()
    def warm_up(self, tapped: tuple[int, ...] = ()) -> None:
        """Compile all kernels and capture all steps that are captured at all, with nothing in them.

        Args:
            tapped: Layers whose states the steps record.
        """
        if not self.kernels.capturable:
            return
        self.programs.clear()
        # The largest come first: the memory of their graphs is enough for the others'.
        for bucket in self.buckets.all():
            program = self.program(bucket, tapped)
            clear(program.tables)
            for _ in range(2):  # as it is, then captured
                program.capture.run()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [wanted rows, vocab_size] in float32; writes new keys, values and the taps.

        The next step overwrites the logits: callers keep a copy. With draws, one small copy brings the drawn
        tokens back.
        """
        program = self._run(batch)
        if batch.taps is not None:
            batch.taps.states.copy_(program.buffers.states[: len(batch.token_ids)])
        wanted = len(batch.token_ids) if batch.logit_rows is None else len(batch.logit_rows)
        if batch.draws:
            tokens = program.buffers.tokens[:wanted].tolist()
            batch.drawn = [None if token < 0 else token for token in tokens]
        return program.buffers.logits[:wanted]

    @torch.inference_mode()
    def draft(self, batch: Batch, count: int, num_guesses: int) -> Drafts:
        """Run a step, then `count` - 1 times a step of the tokens that were drawn.

        Nothing waits for the host in between. The caches have room for the further tokens.

        Args:
            batch: The first step, with draws; with `count` above 1 a session's only wanted row is its last.
            count: Steps, at least 1.
            num_guesses: Tokens per row.
        """
        program = self._run(batch, more=count - 1)
        rows = len(batch.token_ids) if batch.logit_rows is None else len(batch.logit_rows)
        sharpness = program.tables.sharpness[program.tables.session[program.tables.wanted[:rows]]]
        tokens = program.buffers.tokens.new_empty(count, rows)
        shape = (count, rows, program.buffers.stripes.score.shape[1])
        stripes = program.buffers.stripes.empty(shape)
        for step in range(count):
            if step == 1:
                program = self._run(_next_batch(batch), more=count - 2, tokens=tokens[0])
            elif step:
                program.tables.advance(tokens[step - 1])
                program.capture.run()
            torch.clamp(program.buffers.tokens[:rows], min=0, out=tokens[step])
            stripes.write(step, program.buffers.stripes)
        return Drafts(*_guesses(tokens, stripes, sharpness, num_guesses))

    def _run(self, batch: Batch, more: int = 0, tokens: Tensor | None = None) -> Program:
        """Run a step, with other `tokens` [rows] if given; `more` slots of each session may follow it."""
        layers = () if batch.taps is None else batch.taps.layers
        program = self.program(self.buckets.of(batch, more), layers)
        fill(program.tables, batch, batch.draws, self.kernels.anchor.data_ptr(), self.buckets.group, more)
        if tokens is not None:
            program.tables.token[: len(tokens)].copy_(tokens)
        program.capture.run()
        self.last = program.capture
        return program

    def program(self, bucket: Bucket, tapped: tuple[int, ...] = ()) -> Program:
        """Return the bucket's program; steps that are not captured get theirs for one step only."""
        if not bucket.is_captured:
            return self._new_program(bucket, tapped)
        key = (bucket, tapped)
        if key not in self.programs:
            self.programs[key] = self._new_program(bucket, tapped)
        return self.programs[key]

    @torch.inference_mode()
    def _new_program(self, bucket: Bucket, tapped: tuple[int, ...]) -> Program:
        model, kernels, shared = self.model, self.kernels, self._shared
        if bucket.is_captured:
            tables = new_tables(bucket, model.device, shared.flat)
            buffers = shared.view(bucket, len(tapped))
        else:
            tables = new_tables(bucket, model.device)
            buffers = Buffers.make(model, kernels, bucket, len(tapped), shared.scratch(bucket))

        def work() -> None:
            run_forward(model, kernels, tables, buffers, tapped)
            if bucket.wanted:
                kernels.stripes(buffers.logits, tables, buffers.stripes)
                kernels.pick(buffers.stripes, buffers.tokens)

        capturable = kernels.capturable and bucket.is_captured
        return Program(tables, buffers, Capture(work, capturable=capturable, pool=self.pool))

    @property
    def _shared(self) -> _Shared:
        if self._memory is None or self._memory.kernels is not self.kernels:
            self._memory = _Shared(self.model, self.kernels, self.buckets)
        return self._memory


def _next_batch(batch: Batch) -> Batch:
    """The step after one, of a row per session whose token the device knows."""
    segments = [
        replace(
            segment,
            row=index,
            count=1,
            start=segment.start + segment.count,
            positions=[segment.positions[-1] + 1],
        )
        for index, segment in enumerate(batch.segments)
    ]
    positions = [segment.positions[0] for segment in segments]
    return Batch(segments, [0] * len(segments), positions, None, draws=batch.draws)


def _guesses(
    tokens: Tensor, stripes: Stripes, sharpness: Tensor, count: int
) -> tuple[list[list[int]], list[list[list[tuple[int, float]]]]]:
    """Bring tokens [steps, rows] and the best of their stripes to the host, in one copy."""
    weight = stripes.score * sharpness[:, None]
    total = torch.logsumexp(weight + stripes.mass.log(), -1, keepdim=True)
    best = torch.topk(weight, min(count, weight.shape[-1]), -1)
    ids = stripes.token.gather(-1, best.indices)
    # Ids are exact in float64.
    numbers = torch.cat(
        (tokens[..., None].double(), ids.double(), (best.values - total).exp().nan_to_num(0.0)), -1
    ).tolist()
    width = ids.shape[-1]
    drawn = [[int(row[0]) for row in step] for step in numbers]
    guesses = [
        [list(zip(map(int, row[1 : 1 + width]), row[1 + width :], strict=True)) for row in step]
        for step in numbers
    ]
    return drawn, guesses
