"""The work of a Transformer by formula, where no module is at hand to trace: every matmul, and the bytes between them.

Matmuls cost two operations a multiply-add: 2 m k n forward, twice that backward (Kaplan et al. 2020). Attention's two
products cost 4 s^2 w a head and sequence, of which a causal kernel computes half; its backward multiplies five times
where the forward does twice (Dao et al. 2022, FlashAttention). What lies between reads and writes the residual stream
so many times. With `tensor` ranks a Transformer is cut as Megatron does (Shoeybi et al. 2019): heads, the inner width
and the vocabulary are divided, norms and residuals are not unless `sequence_parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.models.config import ModelConfig
from paceline.plan.work import Operation, UnitWork, Work

ITEMSIZE = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 2}
"""Bytes of an activation by what matmuls compute in; with 8 bits activations stay in 16, and are cast for each."""


@dataclass(frozen=True)
class Software:
    """How a program computes a Transformer, where that changes what it costs.

    Attributes:
        fused_attention: Whether attention is one kernel; if not, scores of all heads are written and read.
        scores_passes: How often materialised attention reads or writes the scores forward: product, scale and mask,
            softmax, dropout, product. Backward takes twice as many.
        elementwise_passes: How often a block reads or writes an activation of the stream's width forward, of norms,
            residuals and copies, beyond what matmuls do.
        head_bytes: Bytes moved for each logit, forward and backward, beyond what the matmuls move.
        compiled: Whether neighbouring elementwise operations are one kernel.
        complex_rotary: Whether queries and keys are turned as complex numbers, for which torch.compile makes no kernels
            (pytorch/torchtitan issue 15): they are turned as without it.
        separate: Whether queries, keys and values are three products of the stream, and a gated feed-forward's first
            layer two: each reads the stream, and backward adds up what they give for it.
        cast_bytes: Bytes moved for each number that is cast to 8 bits: read to find the largest, read again and
            written; 4 where the largest is that of steps before, and a transposed copy is written.
    """

    fused_attention: bool = True
    scores_passes: float = 6.0
    elementwise_passes: float = 12.0
    head_bytes: float = 28.0
    compiled: bool = False
    complex_rotary: bool = False
    separate: bool = False
    cast_bytes: float = 5.0
    row_scales: bool = False


EAGER = Software()
"""PyTorch's operations one by one, with fused attention."""

_RMSNORM_PASSES = 16
"""Passes over 16-bit activations by which RMSNorm of single operations exceeds LayerNorm, which is one kernel of 2: a
cast to fp32 takes 3, its square 4, the mean 2, the product with its root 4, the cast back 3, the weight 2."""
_ROTARY_PASSES = 10
"""The same of turning queries and keys: cast to fp32 3, product of complex numbers 4, cast back 3."""


def transformer_work(
    config: ModelConfig,
    samples: int,
    context: int = 0,
    *,
    dtype: str = "bfloat16",
    software: Software = EAGER,
    tensor: int = 1,
    sequence_parallel: bool = False,
    context_ranks: int = 1,
    causal: bool = True,
) -> Work:
    """One micro-batch of a Transformer on one rank.

    Units are named as those of the reference Transformer: embedding, blocks.0 and so on, norm, head.

    Args:
        config: The model's shape.
        samples: Sequences of the micro-batch.
        context: Tokens of a sequence; 0: the model's longest.
        dtype: What matmuls compute in; "float8" where they take 8 bits.
        software: How the program computes it.
        tensor: Ranks that share each matmul.
        sequence_parallel: Whether they also share norms and residuals by tokens.
        context_ranks: Ranks that share each sequence.
        causal: Whether attention skips what lies ahead.
    """
    context = context or config.context
    sizes = _Sizes(config, samples, context, dtype, software, tensor, sequence_parallel, context_ranks, causal)
    block = _block(sizes)
    blocks = tuple(replace(block, unit=f"blocks.{index}") for index in range(config.layers))
    head = _head(sizes)
    units = (_embedding(sizes), *blocks, _norm_unit(sizes), head)
    return Work(units, samples, sizes.tokens, "formula")


@dataclass(frozen=True)
class _Sizes:
    config: ModelConfig
    samples: int
    context: int
    dtype: str
    software: Software
    tensor: int
    sequence_parallel: bool
    context_ranks: int
    causal: bool

    @property
    def tokens(self) -> int:
        return self.samples * self.context // self.context_ranks

    @property
    def item(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def stream(self) -> float:
        """Bytes of the residual stream on this rank, once."""
        shared = self.tensor if self.sequence_parallel else 1
        return self.tokens * self.config.width * self.item / shared

    @property
    def inner(self) -> float:
        """Bytes of the feed-forward's inner activation on this rank, once."""
        return self.tokens * self.config.feed_forward * self.item / self.tensor

    @property
    def qkv(self) -> int:
        config = self.config
        return (config.heads + 2 * config.key_value_heads) * config.head_width

    @property
    def logits_kept(self) -> int:
        """The logits, and in fp32 what the loss keeps of them."""
        return self.tokens * self.config.vocabulary // self.tensor * (self.item + 4)


def matmul(rows: int, inner: int, columns: int, dtype: str, batch: int = 1, count: int = 1) -> Operation:
    """(rows, inner) times (inner, columns), so often: 2 x the product of all operations, each matrix moved once."""
    item = ITEMSIZE[dtype]
    operand = 1 if dtype == "float8" else item
    moved = float(batch * ((rows * inner + inner * columns) * operand + rows * columns * item))
    flops = 2.0 * batch * rows * inner * columns
    return Operation("matmul", flops, moved, dtype, (batch, rows, inner, columns), count)


def memory(moved: float, dtype: str, count: int = 1) -> Operation:
    """An elementwise operation that reads and writes `moved` bytes."""
    return Operation("memory", 0.0, moved, dtype, count=count)


def _projections(sizes: _Sizes) -> list[tuple[int, int, int]]:
    """Rows, inner and columns of a block's four matmuls."""
    config, t = sizes.config, sizes.tensor
    ups = 2 if config.activation == "swiglu" else 1
    return [
        (sizes.tokens, config.width, sizes.qkv // t),
        (sizes.tokens, config.width // t, config.width),
        (sizes.tokens, config.width, ups * config.feed_forward // t),
        (sizes.tokens, config.feed_forward // t, config.width),
    ]


def _products(sizes: _Sizes) -> list[tuple[int, int, int]]:
    """The same of the matmuls as the program computes them, of which the first layers may be in parts."""
    fused = _projections(sizes)
    if not sizes.software.separate:
        return fused
    config, t = sizes.config, sizes.tensor
    (rows, width, _), out, (_, _, up), down = fused
    heads = [count * config.head_width // t for count in (config.heads, *[config.key_value_heads] * 2)]
    halves = [up // 2] * 2 if config.activation == "swiglu" else [up]
    return [*((rows, width, each) for each in heads), out, *((rows, width, each) for each in halves), down]


def _adding(sizes: _Sizes) -> list[Operation]:
    """Backward's sums of what products of the same stream give for it."""
    sums = len(_products(sizes)) - len(_projections(sizes))
    # Two are read and one is written; a kernel of the compiler's reads each of them only.
    moved = (1 if sizes.software.compiled else 3) * sizes.tokens * sizes.config.width * sizes.item
    return [memory(moved, sizes.dtype, count=sums)] if sums else []


def _backward(projection: tuple[int, int, int], dtype: str) -> tuple[Operation, Operation]:
    """Gradients of input and weight."""
    rows, inner, columns = projection
    return matmul(rows, columns, inner, dtype), matmul(inner, rows, columns, dtype)


def _casts(projections: list[tuple[int, int, int]], sizes: _Sizes, times: int) -> list[Operation]:
    """With 8 bits each matrix is cast before it is multiplied."""
    if sizes.dtype != "float8":
        return []
    return [
        memory(times * (rows * inner + inner * columns) * sizes.software.cast_bytes, "bfloat16")
        for rows, inner, columns in projections
    ]


def _attention(sizes: _Sizes) -> tuple[list[Operation], list[Operation]]:
    config, software = sizes.config, sizes.software
    heads = config.heads // sizes.tensor
    s, w = sizes.context, config.head_width
    wide = "bfloat16" if sizes.dtype == "float8" else sizes.dtype
    io = sizes.tokens * sizes.qkv * sizes.item / sizes.tensor
    if software.fused_attention:
        share = 0.5 if sizes.causal else 1.0
        queries = s // sizes.context_ranks
        products = 2.0 * sizes.samples * heads * queries * s * w * share
        shape = (sizes.samples * heads, queries, s, w)
        forward = [Operation("attention", 2 * products, io * 4 / 3, wide, shape)]
        # Scores are computed again, then four products give the gradients of both factors of both products.
        backward = [Operation("attention", 5 * products, io * 8 / 3, wide, shape)]
        return forward, backward
    batch = sizes.samples * heads
    queries = s // sizes.context_ranks
    scores = float(batch * queries * s * sizes.item)
    product = (matmul(queries, w, s, wide, batch), matmul(queries, s, w, wide, batch))
    passes = software.scores_passes
    forward = [*product, memory(scores * passes, wide)]
    backward = [replace(each, count=2) for each in product] + [memory(2 * scores * passes, wide)]
    return forward, backward


def _block(sizes: _Sizes) -> UnitWork:
    config, dtype, software = sizes.config, sizes.dtype, sizes.software
    projections, products = _projections(sizes), _products(sizes)
    attended, attended_back = _attention(sizes)
    gated = config.activation == "swiglu"
    # GELU reads and writes the inner width; SwiGLU reads both halves, and eager PyTorch writes SiLU's result between.
    activation = (3.0 if software.compiled else 5.0) if gated else 2.0
    passes = software.elementwise_passes * (0.6 if software.compiled else 1.0)
    if config.norm == "rmsnorm" and not software.compiled:
        passes += 2 * _RMSNORM_PASSES
    rotary = 0.0
    if config.position == "rotary":
        turned = (config.heads + config.key_value_heads) * config.head_width / sizes.tensor
        fused = software.compiled and not software.complex_rotary
        rotary = (2 if fused else _ROTARY_PASSES) * sizes.tokens * turned * sizes.item
    between = [
        memory(sizes.stream * passes / 4, dtype, count=4),
        memory(sizes.inner * activation, dtype),
        *([memory(rotary, dtype)] if rotary else []),
    ]
    forward = (*(matmul(*each, dtype) for each in products), *_casts(projections, sizes, 1), *attended, *between)
    backward = (
        *(op for each in reversed(products) for op in _backward(each, dtype)),
        *_adding(sizes),
        *_casts(projections, sizes, 4 if software.row_scales else 2),
        *attended_back,
        memory(sizes.stream * passes * 1.5 / 6, dtype, count=6),
        memory(sizes.inner * activation * 1.5, dtype),
        *([memory(rotary, dtype)] if rotary else []),
    )
    attention_out = int(sizes.tokens * config.width * sizes.item // sizes.tensor)
    qkv = int(sizes.tokens * sizes.qkv * sizes.item // sizes.tensor)
    inner = int(sizes.inner * (4 if gated else 2))
    scores = 0 if software.fused_attention else sizes.samples * config.heads // sizes.tensor * sizes.context**2
    # Both norms' inputs and results, queries, keys and values, what attention gives, the inner activations; of
    # materialised scores the softmax, its mask of one byte and what dropout leaves (Korthikanti et al. 2022).
    kept = int(4 * sizes.stream) + qkv + attention_out + inner + scores * (2 * sizes.item + 1)
    return UnitWork("", forward, backward, kept, int(sizes.stream), int(sizes.stream) + qkv + attention_out)


def _embedding(sizes: _Sizes) -> UnitWork:
    stream = sizes.stream
    sums = 4 if sizes.config.position == "learned" else 2
    return UnitWork(
        "embedding",
        (memory(sums * stream, sizes.dtype, count=1),),
        (memory(2 * stream, sizes.dtype),),
        kept=8 * sizes.tokens,
        kept_input=8 * sizes.tokens,
    )


def _norm_unit(sizes: _Sizes) -> UnitWork:
    stream = sizes.stream
    return UnitWork(
        "norm", (memory(2 * stream, sizes.dtype),), (memory(3 * stream, sizes.dtype),), int(stream), int(stream)
    )


def _head(sizes: _Sizes) -> UnitWork:
    config = sizes.config
    # No published program computes the output layer in 8 bits.
    wide = "bfloat16" if sizes.dtype == "float8" else sizes.dtype
    projection = (sizes.tokens, config.width, config.vocabulary // sizes.tensor)
    logits = sizes.tokens * config.vocabulary / sizes.tensor
    moved = logits * sizes.software.head_bytes
    return UnitWork(
        "head",
        (matmul(*projection, wide), memory(moved / 2, wide)),
        (*_backward(projection, wide), memory(moved / 2, wide)),
        kept=int(sizes.stream) + sizes.logits_kept,
        kept_input=int(sizes.stream),
        logits=sizes.logits_kept,
    )
