"""The optimizer: fp32 masters and moments of the ranges this rank updates, one global norm, clipping, the update.

The one idea: ZeRO-0 and ZeRO-1 are the same code over different spans of the same buckets: the whole bucket, or this
data-parallel rank's piece. The norm counts each value once over all ranks (layout.owned), its squares summed in fp64
and rounded once, so that it does not depend on how the values are dealt out. Loss and token counts ride in the same
message.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron3d import kernels
from megatron3d.comm import all_reduce, on_host
from megatron3d.config import OptimConfig
from megatron3d.grads import FlatGrads
from megatron3d.layout import Run, merge, owned, runs
from megatron3d.mesh import Mesh
from megatron3d.weights import FlatWeights


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on all ranks."""

    loss: float
    """Mean over the valid tokens of the global batch, before the update."""
    grad_norm: float
    """Of the mean loss, before clipping."""
    valid_tokens: int
    applied: bool
    """False: the gradient was not finite, or no token was valid, and nothing was updated."""
    stop_votes: int = 0
    """Ranks that ask for the run to stop after this step."""
    written_votes: int = field(default=0, compare=False)
    """Ranks that have written their part of a checkpoint (checkpoint.Save): it says nothing of the step itself."""


@dataclass
class Span:
    """What this rank updates of one bucket. `start` is the first element; the tensors are (length,) each."""

    start: int
    weight: Tensor
    grad: Tensor
    master: Tensor
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None
    ranges: list[tuple[int, int, bool]]
    """Elements [from, to) of the span that hold values, and whether they decay."""
    owned: list[Run]
    """Values of the bucket that this rank alone answers for: counts in the norm, writes into checkpoints."""
    counted: list[tuple[int, int]]
    """The elements of `owned`, neighbours joined."""


class Optimizer:
    """Updates `weights` from `grads`.

    `sites` are the stage's. Under bf16 the masters are a copy in fp32; when weights are fp32 (fp64) they are the
    masters.
    """

    def __init__(
        self, config: OptimConfig, weights: FlatWeights, grads: FlatGrads, *, sites: list[str], mesh: Mesh, zero: int
    ) -> None:
        self.config, self.weights, self.grads, self.mesh = config, weights, grads, mesh
        self.sites = sites
        self.sharded = zero == 1
        self.count = 0
        self.spans = [self._span(i) for i in range(len(weights.buckets))]

    def _span(self, i: int) -> Span:
        bucket, dp = self.weights.layout.buckets[i], self.mesh.dp
        piece = bucket.piece(dp.rank, dp.size)
        start, stop = piece if self.sharded else (0, bucket.size)
        weight, grad = self.weights.buckets[i][start:stop], self.grads.buckets[i][start:stop]
        held = runs(bucket, start, stop)
        ranges = [
            (a - start, b - start, decays)
            for decays in (True, False)
            for a, b in merge(held, keep=lambda spec, decays=decays: spec.decay == decays)  # type: ignore[misc]
        ]
        mine = owned(bucket, piece, self.sites, {"tp": self.mesh.tp.rank})
        moments = self.config.optimizer == "adamw"
        return Span(
            start,
            weight,
            grad,
            master=weight if weight.dtype == grad.dtype else weight.to(grad.dtype),
            exp_avg=torch.zeros_like(grad) if moments else None,
            exp_avg_sq=torch.zeros_like(grad) if moments else None,
            ranges=ranges,
            owned=mine,
            counted=merge(mine),
        )

    def reset_masters(self) -> None:
        """Takes the masters from the weights, after these were set from outside."""
        for span in self.spans:
            if span.master is not span.weight:
                span.master.copy_(span.weight)

    def step(
        self,
        lr: float,
        sums: Tensor,
        expected_tokens: int,
        *,
        loss_scale: float = 1.0,
        stop: bool = False,
        written: bool = False,
    ) -> StepResult:
        """One update from finished gradients of (sum of losses) x loss_scale / expected_tokens.

        `sums` is fp64 [sum of losses, valid tokens] of this rank (zeros where they do not count); expected_tokens and
        loss_scale are the constants that seeded the backward pass. Gradients are rescaled to the mean over valid tokens
        here, once. `stop` and `written` are this rank's votes, whose numbers are in the result.
        """
        squares = self._sum_of_squares()
        votes = torch.tensor([float(stop), float(written)], dtype=torch.float64, device=sums.device)
        shared = all_reduce(torch.cat([squares.view(1), sums, votes]), self.mesh.world)
        norm_squared, loss_sum, valid, stops, writers = on_host(shared, self.mesh.world)
        rescale = expected_tokens / valid / loss_scale if valid else math.nan
        norm = self._round(math.sqrt(norm_squared) * rescale)
        applied = math.isfinite(norm) and math.isfinite(loss_sum)
        if applied:
            limit = self.config.clip_grad
            clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
            self._update(lr, torch.tensor(rescale * clip, dtype=torch.float64))
        mean = loss_sum / valid if valid else math.nan
        return StepResult(mean, norm, int(valid), applied, int(stops), int(writers))

    def _sum_of_squares(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for span, buffer in zip(self.spans, self.grads.buckets, strict=True):
            for start, stop in span.counted:
                total += kernels.sum_of_squares(buffer[start:stop])
        return total

    def _round(self, norm: float) -> float:
        """To fp32, or in an fp64 run to 36 bits: the last bits of the sum may differ between layouts, these not."""
        if torch.float64 in {buffer.dtype for buffer in self.grads.buckets}:
            wide = norm * (2.0**17 + 1)  # Veltkamp's split: 53 - 17 bits remain
            return wide - (wide - norm)
        return ctypes.c_float(norm).value

    def _update(self, lr: float, scale: Tensor) -> None:
        self.count += 1
        for span in self.spans:
            grad_scale = scale.to(span.grad)
            for start, stop, decays in span.ranges:
                self._update_range(
                    span, slice(start, stop), lr, self.config.weight_decay if decays else 0.0, grad_scale
                )
            if span.master is not span.weight:
                span.weight.copy_(span.master)
        if self.sharded:
            self.weights.start_gather()

    def _update_range(self, span: Span, part: slice, lr: float, decay: float, grad_scale: Tensor) -> None:
        config = self.config
        if span.exp_avg is None or span.exp_avg_sq is None:
            kernels.sgd(span.master[part], span.grad[part], lr=lr, weight_decay=decay, grad_scale=grad_scale)
            return
        kernels.adamw(
            span.master[part],
            span.grad[part],
            span.exp_avg[part],
            span.exp_avg_sq[part],
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=decay,
            step=self.count,
            grad_scale=grad_scale,
        )
