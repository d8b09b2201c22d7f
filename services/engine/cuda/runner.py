"""Steps as CUDA graphs: Llama-like models without launch gaps and without padded attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.core.batch import Batch
from services.engine.cuda.tables import Bucket, Tables, bucket_of, fill, new_tables, slot_levels
from services.engine.cuda.torch_kernels import Stripes, TorchKernels
from services.engine.cuda.weights import GraphModel

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

__all__ = [
    "MAX_CAPTURED_ROWS",
    "Buffers",
    "Capture",
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
    def make(cls, model: GraphModel, kernels: TorchKernels, bucket: Bucket, num_taps: int = 0) -> Buffers:
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
            scratch=kernels.new_scratch(bucket, device),
        )

    def within(self, rows: int, wanted: int, states: Tensor, scratch: list[Tensor]) -> Buffers:
        """The first rows of these buffers, with other `states` and `scratch`."""
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
    bucket: Bucket,
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
        kernels.attend(qkv, index, tables, bucket, buffers.scratch, mixed)
        kernels.add_linear(mixed, layer.out, layer.out_bias, x)
        kernels.norm(x, layer.mlp_norm, h)
        kernels.swiglu(h, layer.gate_up, inner)
        kernels.add_linear(inner, layer.down, None, x)
    _record(x, len(model.layers), tapped, buffers)
    if bucket.wanted:
        kernels.norm(x, model.last_norm, buffers.last, tables.wanted)
        kernels.linear(buffers.last, model.head, None, buffers.logits)


def _record(state: Tensor, layer: int, tapped: Sequence[int], buffers: Buffers) -> None:
    for column, wanted in enumerate(tapped):
        if wanted == layer:
            buffers.states[:, column].copy_(state)


MAX_CAPTURED_ROWS = 320
_MAX_PROGRAMS = 64


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
            # The first time also compiles kernels, which a capture must not; many sizes never come again.
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
    """Memory that the buffers of all captured programs are views of, since no two of them run at once.

    It is for all steps of at most MAX_CAPTURED_ROWS rows, up to the model's context.

    Args:
        model: The weights.
        kernels: Say how much scratch a step needs.
    """

    def __init__(self, model: GraphModel, kernels: TorchKernels) -> None:
        self.kernels = kernels
        rows, max_slots = MAX_CAPTURED_ROWS, slot_levels(model.rotation.shape[1])[-1]
        # Steps of few rows have more splits.
        few = min(rows, max(1, kernels.max_rows))
        needed = [self._scratch_of(Bucket(1, count, 0, 1, 1, max_slots)) for count in (few, rows)]
        sizes = [max(one.numel(), other.numel()) for one, other in zip(*needed, strict=True)]
        self._scratch = [torch.zeros(size, device=model.device) for size in sizes]
        self._buffers = Buffers.make(model, kernels, Bucket(1, rows, rows, 1, 1, max_slots=0))

    def view(self, bucket: Bucket, num_taps: int) -> Buffers | None:
        """The first rows of the buffers, None when the bucket is too large."""
        mine, needed = self._buffers, self._scratch_of(bucket)
        pairs = list(zip(needed, self._scratch, strict=True))
        if bucket.rows > MAX_CAPTURED_ROWS or any(own.numel() > flat.numel() for own, flat in pairs):
            return None
        scratch = [flat[: own.numel()].view(own.shape) for own, flat in pairs]
        states = mine.h.new_zeros(bucket.rows, num_taps, mine.h.shape[1])
        return mine.within(bucket.rows, bucket.wanted, states, scratch)

    def _scratch_of(self, bucket: Bucket) -> list[Tensor]:
        return self.kernels.new_scratch(bucket, torch.device("meta"))


@dataclass
class Program:
    """A bucket's tensors and its captured work."""

    bucket: Bucket
    tables: Tables
    buffers: Buffers
    capture: Capture


class GraphRunner:
    """Runs the engine's steps; see `services.engine.engine.Runner`.

    Args:
        model: The weights.
        kernels: Operations; by default the fastest that the device has.

    Attributes:
        programs: The captured programs by bucket, whether they draw and tapped layers, least recently used
            first.
        draws_on_device: It draws tokens where a batch asks for them.
        last: The work of the last step or proposal, which may be replayed to be timed.
    """

    draws_on_device = True

    def __init__(self, model: GraphModel, kernels: TorchKernels | None = None) -> None:
        self.model = model
        self.kernels = kernels if kernels is not None else make_kernels(model)
        self.pool = torch.cuda.graph_pool_handle() if self.kernels.capturable else None
        self.last: Capture | None = None
        self._shared: _Shared | None = None
        self.programs: OrderedDict[tuple[Bucket, bool, tuple[int, ...]], Program] = OrderedDict()

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self.model.shape.hidden

    def tap_obstacle(self) -> str:
        """Return why hidden states cannot be recorded: nothing prevents it."""
        return ""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile all kernels that steps launch, except those of trees of more than 64 nodes.

        The steps have no sessions. Each later step is captured when its sizes come for the second time.
        """
        if not self.kernels.capturable:
            return
        for bucket in self.warm_buckets():
            self._new_program(bucket, True, ()).capture.run()

    def warm_buckets(self) -> list[Bucket]:
        """Return buckets whose steps launch every variant of the kernels.

        Their tiles differ by the number of rows, and the splits of attention by the longest session.
        """
        most = self.kernels.max_rows
        return [
            Bucket(1, rows, rows, 1, rows, max_slots)
            for max_slots in slot_levels(self.model.rotation.shape[1])
            for rows in sorted({1, max(1, most), most + 1})
        ]

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

    def _run(self, batch: Batch) -> Program:
        bucket = bucket_of(batch)
        layers = () if batch.taps is None else batch.taps.layers
        program = self.program(bucket, draws=bool(batch.draws), tapped=layers)
        fill(program.tables, bucket, batch, batch.draws, self.kernels.anchor.data_ptr())
        program.capture.run()
        self.last = program.capture
        return program

    def program(self, bucket: Bucket, *, draws: bool, tapped: tuple[int, ...] = ()) -> Program:
        """Return the bucket's program; prompt chunks get theirs for one step only."""
        key = (bucket, draws, tapped)
        program = self.programs.get(key)
        if program is None:
            program = self._new_program(bucket, draws, tapped)
            if bucket.rows <= MAX_CAPTURED_ROWS:
                self.programs[key] = program
                if len(self.programs) > _MAX_PROGRAMS:
                    self.programs.popitem(last=False)
        else:
            self.programs.move_to_end(key)
        return program

    @torch.inference_mode()
    def buffers(self, bucket: Bucket, num_taps: int = 0) -> Buffers:
        """Return a bucket's buffers, which overlap those of all others.

        Only steps that are too large for a capture have their own.
        """
        if self._shared is None or self._shared.kernels is not self.kernels:
            self._shared = _Shared(self.model, self.kernels)
        shared = self._shared.view(bucket, num_taps)
        return Buffers.make(self.model, self.kernels, bucket, num_taps) if shared is None else shared

    def _new_program(self, bucket: Bucket, draws: bool, tapped: tuple[int, ...]) -> Program:
        model, kernels = self.model, self.kernels
        tables = new_tables(bucket, model.device)
        buffers = self.buffers(bucket, len(tapped))

        def work() -> None:
            run_forward(model, kernels, bucket, tables, buffers, tapped)
            if draws:
                kernels.stripes(buffers.logits, tables, None, buffers.stripes)
                kernels.pick(buffers.stripes, buffers.tokens, marks_bad=True)

        capturable = kernels.capturable and bucket.rows <= MAX_CAPTURED_ROWS
        return Program(bucket, tables, buffers, Capture(work, capturable=capturable, pool=self.pool))
