"""The specification of every fused operation, in plain PyTorch; also the path that CPUs run.

The one idea: each function is what its faster twin must equal. Forward and backward come as a pair of plain functions
that know nothing of autograd, so a caller decides what is saved and when the backward runs. Arithmetic happens in `up`,
the wider of the input's dtype and fp32; results are rounded once, to the dtype of the input; weight gradients stay in
`up`. The autograd functions around these live in layers.py, the choice of an implementation in `__init__.py`.

Shapes: S sequence, B batch, H hidden, F inner width, D width of a head, N tokens, V columns of a vocabulary shard,
O and I rows and columns of a weight; `...` is any leading dims.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SQUARES_BLOCK = 1 << 18  # elements; 2 MiB in fp64


def _up(x: Tensor) -> torch.dtype:
    """The dtype in which arithmetic on x happens: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


# Norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight: x (..., H), weight (H) -> y (..., H), rstd (..., 1) in up."""
    wide = x.to(_up(x))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd).mul_(weight).to(x.dtype), rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: dx (..., H) in x's dtype, dweight (H) in up."""
    up = _up(x)
    normed = x.to(up) * rstd
    slope = dy.to(up) * weight.to(up)
    along = (slope * normed).mean(-1, keepdim=True)  # the part of the slope that only stretches x is normalised away
    dx = slope.addcmul_(normed, along, value=-1).mul_(rstd)
    return dx.to(x.dtype), normed.mul_(dy).reshape(-1, x.shape[-1]).sum(0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the last dim: x (..., H), weight and bias (H) -> y (..., H), mean and rstd (..., 1) in up."""
    up = _up(x)
    y, mean, rstd = torch.native_layer_norm(x.to(up), x.shape[-1:], weight.to(up), bias.to(up), eps)
    return y.to(x.dtype), mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm`: dx (..., H) in x's dtype, dweight and dbias (H) in up."""
    up = _up(x)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(up), x.to(up), x.shape[-1:], mean, rstd, weight.to(up), torch.zeros_like(weight, dtype=up), [True] * 3
    )
    return dx.to(x.dtype), dweight, dbias


# Activations


def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """GELU of x, exact (erf) or in the tanh approximation; any shape."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def gelu_backward(dy: Tensor, x: Tensor, *, tanh: bool) -> Tensor:
    """Gradient of `gelu` at x, in x's dtype."""
    dx: Tensor = torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if tanh else "none")
    return dx


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last dim: (..., 2F) -> (..., F)."""
    gate, linear = gate_up.to(_up(gate_up)).chunk(2, dim=-1)
    return F.silu(gate).mul_(linear).to(gate_up.dtype)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `swiglu`: dy (..., F), gate_up (..., 2F) -> (..., 2F) in gate_up's dtype."""
    wide, dy = gate_up.to(_up(gate_up)), dy.to(_up(gate_up))
    slope = torch.empty_like(wide)
    (gate, linear), (dgate, dlinear) = wide.chunk(2, dim=-1), slope.chunk(2, dim=-1)
    torch.mul(dy, linear, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    torch.ops.aten.silu.out(gate, out=dlinear).mul_(dy)
    return slope.to(gate_up.dtype)


# Rotary positions


class RotaryScaling(NamedTuple):
    """Llama-3 frequency scaling; any 4-tuple in this order will do."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def rotary_tables(
    positions: Tensor,
    dim: int,
    theta: float,
    scaling: tuple[float, float, float, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles: positions (S), even head width `dim` -> two tables (S, dim/2) in dtype.

    Computed in fp64 and rounded once: in half precision the angle itself is off by radians after a few hundred tokens.
    With `scaling`, frequencies that turn fewer than low_freq_factor times within original_max_position are divided by
    factor, those that turn more than high_freq_factor times are kept, and those between are blended linearly.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    frequencies = theta**-exponents  # (dim/2), radians per token
    if scaling is not None:
        factor, low, high, original = scaling
        turns = frequencies * (original / (2 * math.pi))
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = torch.outer(positions.to(torch.float64), frequencies)  # (S, dim/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by the angle of its position, as Hugging Face pairs them.

    x (S, B, heads, D), cos and sin (S, D/2) in at least fp32 -> (S, B, heads, D) in x's dtype.
    """
    wide = x.to(_up(x))
    first, second = wide.chunk(2, dim=-1)
    # Over whole heads, since loops over halves would be too short for a CPU: (second, first) * (-sin, sin) + x * cos.
    turned = torch.cat((second, first), dim=-1).mul_(torch.cat((-sin, sin), dim=-1)[:, None, None, :])
    return turned.addcmul_(wide, torch.cat((cos, cos), dim=-1)[:, None, None, :]).to(x.dtype)


def rotary_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of `rotary`: the opposite rotation of dy (S, B, heads, D)."""
    return rotary(dy, cos, -sin)


# Cross-entropy over a vocabulary that is split into shards


def _targets(labels: Tensor, first_id: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Which rows have their target in this shard, and in which column (0 where they have not): both (N)."""
    column = labels - first_id
    here = (column >= 0) & (column < num_valid)
    return here, column.where(here, 0)


def cross_entropy_local(logits: Tensor, labels: Tensor, first_id: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Softmax of each row within one shard, (N, V) in up, and what the shard contributes to the loss, (3, N) in up.

    The rows of the second are the largest logit, the sum of exp(logit - largest), and the target's logit (0 where the
    label is another shard's). logits (N, V) cover ids first_id ... first_id + V - 1, of which the first num_valid
    exist; the other columns are padding and outside the softmax. An empty shard (num_valid 0) gives -inf, 0, 0. The
    logits are overwritten, by the softmax itself where they are as wide as it.
    """
    up = _up(logits)
    stats = logits.new_zeros(3, len(labels), dtype=up)
    if num_valid == 0:
        stats[0] = -math.inf
        return torch.zeros_like(logits, dtype=up), stats
    logits[:, num_valid:] = -math.inf
    here, column = _targets(labels, first_id, num_valid)
    wide = logits.to(up)
    stats[2] = wide.gather(1, column[:, None]).squeeze(1).where(here, 0)
    torch.amax(wide, 1, out=stats[0])
    probabilities = torch.softmax(wide, 1, out=wide)
    stats[1] = probabilities.amax(1).reciprocal()  # the largest logit's is exp(0) / sum
    return probabilities, stats


def cross_entropy_merge(stats: Tensor, labels: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Loss of each row from the shards' stats (ranks, 3, N), and the share of shard `rank` in the softmax of the whole
    row: two (N) in up, summed in rank order.

    Rows with a negative label have loss 0. A label beyond every shard is the caller's mistake and not noticed here.
    """
    largest = stats[:, 0].amax(0)
    masses = stats[:, 1] * (stats[:, 0] - largest).exp()
    total = torch.zeros_like(largest)
    target = torch.zeros_like(largest)
    for mass, local_target in zip(masses, stats[:, 2], strict=True):
        total += mass
        target += local_target
    # Small numbers first: largest + log(total) - target would lose the loss's last digits when logits are large.
    loss = total.log() + (largest - target)
    return loss.masked_fill(labels < 0, 0), masses[rank] / total


def cross_entropy_backward(
    probabilities: Tensor, labels: Tensor, first_id: int, num_valid: int, share: Tensor, dloss: Tensor
) -> Tensor:
    """(softmax - one-hot) * dloss, written into the local `probabilities` (N, V) and returned; share and dloss (N).

    Padded columns and rows with a negative label get exactly 0.
    """
    here, column = _targets(labels, first_id, num_valid)
    slope = dloss.masked_fill(labels < 0, 0)
    probabilities.mul_((share * slope)[:, None])
    return probabilities.scatter_add_(1, column[:, None], -(here * slope)[:, None])


# Weight gradients and updates


def accumulate_weight_grad(out: Tensor, dy: Tensor, x: Tensor) -> None:
    """out (O, I) += dy^T x for dy (N, O), x (N, I); out may be wider than the product."""
    if out.dtype == dy.dtype == x.dtype:
        out.addmm_(dy.t(), x)
    else:
        out.add_(dy.t() @ x)


def sum_of_squares(x: Tensor) -> Tensor:
    """Of x (n), in fp64: 0-d. In blocks, so that the fp64 copy of one stays in a CPU's cache."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for block in x.split(SQUARES_BLOCK):
        wide = block.to(torch.float64)
        total += wide.dot(wide)
    return total


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: Tensor,
) -> None:
    """One AdamW update in place, in the order of operations of torch.optim.AdamW.

    All tensors have one shape and one dtype (fp32 or fp64); `step` counts from 1; the gradient used is
    grad * grad_scale (0-d); grad is overwritten.
    """
    grad.mul_(grad_scale)
    param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = torch.sqrt(exp_avg_sq, out=grad)  # grad has been used up: its memory holds the denominator
    denominator = root.div_(math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def sgd(param: Tensor, grad: Tensor, *, lr: float, weight_decay: float, grad_scale: Tensor) -> None:
    """One step of plain gradient descent in place; grad * grad_scale (0-d) is used and grad overwritten."""
    grad.mul_(grad_scale).add_(param, alpha=weight_decay)
    param.add_(grad, alpha=-lr)
