"""Tensor-parallel layers: linears, embedding, norms, activations, cross-entropy.

The one idea: each layer is one autograd.Function that owns both directions, so that it can save the sequence shard
rather than the gathered sequence, hide the input-gradient collective behind the weight gradient, and put weight
gradients where they belong: into a `GradSlot` (grads.py) that accumulates them in a flat fp32 buffer. Layers get one
`Axis` and plain values; the arithmetic is in megatron3d.kernels, the composition in model.py.

Shapes: S sequence, B batch, H hidden, O and I rows and columns of a local weight, V rows of a vocabulary shard.
Activations are (S, B, H), sequence first, so that sequence-parallel shards (S / tp, B, H) are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron3d import kernels
from megatron3d.comm import (
    all_gather,
    all_reduce,
    reduce_from,
    reduce_scatter,
    scatter_seq,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron3d.mesh import Axis


class GradSlot(Protocol):
    """Where a weight's gradient goes: gets a function that adds it to the buffer it is given."""

    def deposit(self, add: Callable[[Tensor], None]) -> None:
        """Calls `add` on the gradient buffer, now or later; `add` holds all it needs."""


Slots = tuple[GradSlot | None, GradSlot | None]
"""Of a weight and its bias."""


def _give(slot: GradSlot | None, weight: Tensor, add: Callable[[Tensor], None]) -> Tensor | None:
    """Deposits a weight gradient; without a slot it is returned to autograd as usual."""
    if slot is not None:
        slot.deposit(add)
        return None
    grad = torch.zeros_like(weight)
    add(grad)
    return grad


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter without memory: the flat buffers lend it theirs (weights.py)."""
    return nn.Parameter(torch.empty(shape, device="meta"))


# Linears --------------------------------------------------------------------------------------------------------------


class _ColumnLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sp: bool, slots: Slots) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.axis, ctx.sp, ctx.slots = axis, sp, slots
        return F.linear(all_gather(x, axis) if sp else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        gathering = start_all_gather(x, ctx.axis) if ctx.sp else None
        dx = dy @ weight
        reducing = start_reduce_scatter(dx, ctx.axis) if ctx.sp else start_all_reduce(dx, ctx.axis)
        total = gathering.wait() if gathering else x
        grads = _linear_grads(dy, total, weight, bias, ctx.slots)
        return reducing.wait(), *grads, None, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sp: bool, slots: Slots) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.axis, ctx.sp, ctx.slots = axis, sp, slots
        partial = F.linear(x, weight)
        y = reduce_scatter(partial, axis) if sp else all_reduce(partial, axis)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        total = all_gather(dy, ctx.axis) if ctx.sp else dy
        dweight, _ = _linear_grads(total, x, weight, None, (ctx.slots[0], None))
        # The bias is added to the sequence shard, so its gradient sums this shard only.
        dbias = None if bias is None else _give(ctx.slots[1], bias, lambda out: _add_rows(out, dy))
        return total @ weight, dweight, dbias, None, None, None


def _linear_grads(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots
) -> tuple[Tensor | None, Tensor | None]:
    """Gives away the gradients of a linear with inputs x (..., I) and output gradients dy (..., O)."""
    dweight = _give(
        slots[0], weight, lambda out: kernels.accumulate_weight_grad(out, dy.flatten(0, -2), x.flatten(0, -2))
    )
    dbias = None if bias is None else _give(slots[1], bias, lambda out: _add_rows(out, dy))
    return dweight, dbias


def _add_rows(out: Tensor, dy: Tensor) -> None:
    """out (O) += sum of dy (..., O) over its leading dims, in out's dtype."""
    out += dy.flatten(0, -2).sum(0, dtype=out.dtype)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows (outputs) of W split over `axis`.

    x is (S / tp, B, I) under sequence parallelism, else (S, B, I) and the same on all ranks; y is (S, B, O) with this
    rank's O outputs.
    """

    weight_grad: GradSlot | None = None
    bias_grad: GradSlot | None = None

    def __init__(self, inputs: int, local_outputs: int, *, bias: bool, axis: Axis, sp: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(local_outputs, inputs)
        self.bias = empty_parameter(local_outputs) if bias else None
        self.axis, self.sp = axis, sp

    def forward(self, x: Tensor) -> Tensor:
        """(S or S / tp, B, I) -> (S, B, O)."""
        slots = (self.weight_grad, self.bias_grad)
        y: Tensor = _ColumnLinear.apply(x, self.weight, self.bias, self.axis, self.sp, slots)
        return y


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x W^T, + b, with the columns (inputs) of W split over `axis`.

    x is (S, B, I) with this rank's I inputs; y is (S / tp, B, O) under sequence parallelism, else (S, B, O).
    """

    weight_grad: GradSlot | None = None
    bias_grad: GradSlot | None = None

    def __init__(self, local_inputs: int, outputs: int, *, bias: bool, axis: Axis, sp: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(outputs, local_inputs)
        self.bias = empty_parameter(outputs) if bias else None
        self.axis, self.sp = axis, sp

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, I) -> (S or S / tp, B, O)."""
        slots = (self.weight_grad, self.bias_grad)
        y: Tensor = _RowLinear.apply(x, self.weight, self.bias, self.axis, self.sp, slots)
        return y


# Embeddings -----------------------------------------------------------------------------------------------------------


class _Lookup(Function):
    """Rows of a table by index; rows that `here` leaves out are zero and get no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, here: Tensor, slot: GradSlot | None) -> Tensor:
        ctx.save_for_backward(weight, rows, here)
        ctx.slot = slot
        return F.embedding(rows, weight) * here.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        weight, rows, here = ctx.saved_tensors

        def add(out: Tensor) -> None:
            out.index_add_(0, rows.flatten(), (dy * here.unsqueeze(-1)).flatten(0, -2).to(out.dtype))

        return _give(ctx.slot, weight, add), None, None, None


class VocabParallelEmbedding(nn.Module):
    """Word vectors with the vocabulary split over `axis`: each rank looks up the ids it holds, and the ranks add up."""

    weight_grad: GradSlot | None = None

    def __init__(self, local_rows: int, hidden: int, *, axis: Axis, sp: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(local_rows, hidden)
        self.axis, self.sp = axis, sp
        self.first_id = axis.rank * local_rows

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids (S, B) -> vectors (S, B, H), or this rank's (S / tp, B, H) under sequence parallelism."""
        rows = tokens - self.first_id
        here = (rows >= 0) & (rows < self.weight.shape[0])
        partial = _Lookup.apply(self.weight, rows.where(here, 0), here, self.weight_grad)
        return scatter_seq(partial, self.axis) if self.sp else reduce_from(partial, self.axis)


class PositionEmbedding(nn.Module):
    """Learned absolute positions."""

    weight_grad: GradSlot | None = None

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = empty_parameter(rows, hidden)

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (S) -> vectors (S, 1, H)."""
        everywhere = torch.ones_like(positions, dtype=torch.bool)
        vectors: Tensor = _Lookup.apply(self.weight, positions, everywhere, self.weight_grad)
        return vectors.unsqueeze(1)


# Norms ----------------------------------------------------------------------------------------------------------------


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, slot: GradSlot | None) -> Tensor:
        y, rstd = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.slot = slot
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = kernels.rms_norm_backward(dy, x, weight, rstd)
        return dx, _give(ctx.slot, weight, lambda out: _add(out, dweight)), None, None


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, slots: Slots) -> Tensor:
        y, mean, rstd = kernels.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.slots = slots
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = kernels.layer_norm_backward(dy, x, weight, mean, rstd)
        weight_grad = _give(ctx.slots[0], weight, lambda out: _add(out, dweight))
        bias_grad = _give(ctx.slots[1], bias, lambda out: _add(out, dbias))
        return dx, weight_grad, bias_grad, None, None


def _add(out: Tensor, grad: Tensor) -> None:
    out += grad


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim."""

    weight_grad: GradSlot | None = None
    bias_grad: GradSlot | None = None

    def __init__(self, size: int, *, kind: str, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size) if kind == "layernorm" else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        if self.bias is None:
            y: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.weight_grad)
        else:
            y = _LayerNorm.apply(x, self.weight, self.bias, self.eps, (self.weight_grad, self.bias_grad))
        return y


# Functions without weights --------------------------------------------------------------------------------------------


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return kernels.swiglu_backward(dy, gate_up)


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return kernels.gelu(x, tanh=tanh)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return kernels.gelu_backward(dy, x, tanh=ctx.tanh), None


def activation(x: Tensor, kind: str) -> Tensor:
    """The MLP's function: "swiglu" maps (..., 2F) to (..., F), "gelu" and "gelu_tanh" keep the shape."""
    y: Tensor = _SwiGLU.apply(x) if kind == "swiglu" else _GELU.apply(x, kind == "gelu_tanh")
    return y


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels.rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return kernels.rotary_backward(dy, cos, sin), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads by their position: x (S, B, heads, D); cos, sin (S, D / 2)."""
    y: Tensor = _Rotary.apply(x, cos, sin)
    return y


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention to this and earlier positions: query (S, B, heads, D), key and value (S, B, kv heads, D), where
    query head i uses key head i // (heads / kv heads); returns (S, B, heads, D).

    Raises `ValueError` for unequal lengths: back-ends disagree about where the causal mask of a rectangle begins.
    """
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"causal attention needs equal lengths, not {query.shape[0]} queries and {key.shape[0]} keys")
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (B, heads, S, D)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.permute(2, 0, 1, 3)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, first_id: int, num_valid: int) -> Tensor:
        probabilities, stats = kernels.cross_entropy_local(logits, labels, first_id, num_valid)
        loss, share = kernels.cross_entropy_merge(all_gather(stats.unsqueeze(0), axis), labels, axis.rank)
        ctx.save_for_backward(probabilities, labels, share)
        ctx.first_id, ctx.num_valid, ctx.dtype = first_id, num_valid, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, labels, share = ctx.saved_tensors
        dlogits = kernels.cross_entropy_backward(probabilities, labels, ctx.first_id, ctx.num_valid, share, dloss)
        return dlogits.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> Tensor:
    """Loss per token from logits (S, B, V) of this rank's shard; (S, B), in at least fp32.

    Labels (S, B) are global ids; a negative one is outside the loss: its loss and gradient are 0. Ids at and beyond
    `vocab_size` are padding and outside the softmax. The logits are overwritten.
    """
    local = logits.shape[-1]
    first_id = axis.rank * local
    num_valid = min(max(vocab_size - first_id, 0), local)
    loss: Tensor = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), axis, first_id, num_valid)
    return loss.view_as(labels)
