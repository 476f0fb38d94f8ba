"""Runs one rank's list of Ops: owns activations and messages, decides nothing.

The one idea: the schedule (schedule.py) has fixed the order of every pass and message; this file only executes it. A
receive is posted at its place in the list and waited for by its consumer; a send is waited for before the next send in
the same direction, so that one message per direction is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron3d.comm import Pending, start_receive, start_send
from megatron3d.mesh import Axis, Mesh
from megatron3d.model import GPTStage
from megatron3d.schedule import Op
from megatron3d.timers import Timer, untimed


@dataclass(frozen=True)
class MicroBatch:
    """Token ids and labels (S, B), int64; a negative label is outside the loss. `samples`: the B global sample
    indices."""

    tokens: Tensor
    labels: Tensor
    samples: tuple[int, ...]


Feed = Callable[[int], MicroBatch]
"""Microbatch number -> its data; asked only by the stages that have the embedding or the head, or need dropout."""


class _Seed(Function):
    """torch.autograd.backward(y, dy) as the backward pass of a scalar. Given a gradient, torch imports its symbolic
    shapes to compare two tuples: a third of a second in the first step of every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: Tensor) -> Tensor:
        ctx.dy = dy
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.dy, None


class Pipeline:
    """Executes schedules on this rank's `stage`; `rows` is the length S (or S / tp) of its hidden states."""

    def __init__(
        self,
        stage: GPTStage,
        mesh: Mesh,
        *,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        timer: Timer = untimed,
    ) -> None:
        self.stage, self.mesh, self.timer = stage, mesh, timer
        self.rows, self.hidden, self.dtype = rows, hidden, dtype

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's sums count: the stage with the head has them, and its tp ranks have the same ones."""
        return self.stage.has_head and self.mesh.tp.rank == 0

    def train(self, ops: Sequence[Op], feed: Feed, *, micro_batch_size: int, seed: float) -> Tensor:
        """Forward and backward passes of one step; the loss of each valid token is weighted by the constant `seed`.

        Returns fp64 [sum of losses, valid tokens] on the ranks whose sums count, zeros elsewhere.
        """
        return _Run(self, feed, micro_batch_size, seed).execute(ops)

    @torch.no_grad()
    def evaluate(self, ops: Sequence[Op], feed: Feed, *, micro_batch_size: int) -> Tensor:
        """Forward passes only, without dropout; returns what `train` returns."""
        return _Run(self, feed, micro_batch_size, None).execute(ops)


class _Run:
    """The state of one execution: what is received, kept for the backward pass, and on its way out."""

    def __init__(self, pipeline: Pipeline, feed: Feed, micro_batch_size: int, seed: float | None) -> None:
        self.stage, self.mesh = pipeline.stage, pipeline.mesh
        self.counts_loss = pipeline.counts_loss
        self.timer = untimed if seed is None else pipeline.timer  # an evaluation is a phase as a whole
        self.shape = (pipeline.rows, micro_batch_size, pipeline.hidden)
        self.dtype, self.feed, self.seed = pipeline.dtype, feed, seed
        self.received: dict[tuple[str, int], Pending] = {}
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.results: dict[tuple[str, int], Tensor] = {}
        self.sending: dict[str, Pending] = {}
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)

    def execute(self, ops: Sequence[Op]) -> Tensor:
        pp, back = self.mesh.pp, self.mesh.pp_back
        for op in ops:
            match op.kind:
                case "F":
                    with self.timer("forward"):
                        self._forward(op.microbatch)
                case "B":
                    with self.timer("backward"):
                        self._backward(op.microbatch)
                case "recv_forward":
                    self._receive("forward", op.microbatch, pp, pp.rank - 1)
                case "send_forward":
                    self._send("forward", op.microbatch, pp, pp.rank + 1)
                case "recv_backward":
                    self._receive("backward", op.microbatch, back, back.rank + 1)
                case "send_backward":
                    self._send("backward", op.microbatch, back, back.rank - 1)
        for pending in self.sending.values():
            self._wait(pending)
        assert not (self.received or self.outputs or self.results), "the schedule left passes or messages behind"
        return self.sums

    def _receive(self, direction: str, microbatch: int, axis: Axis, peer: int) -> None:
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
        self.received[direction, microbatch] = start_receive(buffer, axis, peer)

    def _send(self, direction: str, microbatch: int, axis: Axis, peer: int) -> None:
        if direction in self.sending:
            self._wait(self.sending.pop(direction))
        self.sending[direction] = start_send(self.results.pop((direction, microbatch)), axis, peer)

    def _wait(self, message: Pending) -> Tensor:
        with self.timer("pipeline wait"):
            return message.wait()

    def _forward(self, microbatch: int) -> None:
        stage, training = self.stage, self.seed is not None
        needs_data = stage.has_embedding or stage.has_head or (training and stage.model.dropout > 0)
        with self.timer("data"):
            data = self.feed(microbatch) if needs_data else None
        if stage.has_embedding:
            assert data is not None
            x = data.tokens
        else:
            x = self._wait(self.received.pop(("forward", microbatch))).requires_grad_(training)
        labels = data.labels if data is not None and stage.has_head else None
        y = stage(x, labels, data.samples if data is not None and training else ())
        if training:
            self.inputs[microbatch], self.outputs[microbatch] = x, y
        if not stage.has_head:
            self.results["forward", microbatch] = y.detach()
        elif self.counts_loss:
            assert labels is not None
            self.sums += torch.stack([y.detach().sum(dtype=torch.float64), (labels >= 0).sum()])

    def _backward(self, microbatch: int) -> None:
        x, y = self.inputs.pop(microbatch), self.outputs.pop(microbatch)
        if self.stage.has_head:
            assert self.seed is not None
            dy = torch.full_like(y, self.seed)
        else:
            dy = self._wait(self.received.pop(("backward", microbatch)))
        _Seed.apply(y, dy).backward()
        if not self.stage.has_embedding:
            assert x.grad is not None
            self.results["backward", microbatch] = x.grad
