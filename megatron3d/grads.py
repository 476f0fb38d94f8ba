"""Flat gradient buffers: where weight gradients accumulate, and how they are summed over the mesh.

The one idea: a bucket owns its memory and knows when its last contribution has arrived; then its reduction starts,
behind the rest of the backward pass. What needs another sum first waits in the last bucket: `finish()` adds partial
gradients over tp, then the two uses of a tied embedding, and only then reduces over dp. All sums run in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megatron3d.comm import Pending, all_reduce, exchange, start_all_gather, start_reduce_scatter
from megatron3d.layout import FlatLayout, LocalTensor, merge, runs
from megatron3d.mesh import Axis


class _Slot:
    """A tensor's place in its bucket; counts what arrives (layers.GradSlot)."""

    def __init__(self, view: Tensor, arrived: Callable[[], None]) -> None:
        self.view = view
        self._arrived = arrived

    def deposit(self, add: Callable[[Tensor], None]) -> None:
        add(self.view)
        self._arrived()


class FlatGrads:
    """Gradient buckets of `stage`, in at least fp32.

    `tied_peer` is the position on the pipeline axis of the stage with the other copy of a tied embedding, None if there
    is none. With `gather`, reduced pieces are gathered, so that every data-parallel rank has the whole sum (ZeRO-0).
    """

    def __init__(
        self,
        stage: nn.Module,
        layout: FlatLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: Axis,
        dp: Axis,
        pp: Axis,
        tied_peer: int | None,
        overlap: bool,
        gather: bool,
    ) -> None:
        self.layout, self.tp, self.dp, self.pp = layout, tp, dp, pp
        self.tied_peer, self.overlap, self.gather = tied_peer, overlap, gather
        dtype = torch.promote_types(dtype, torch.float32)
        self.buckets = [torch.zeros(bucket.size, dtype=dtype, device=device) for bucket in layout.buckets]
        self._missing = [0] * len(self.buckets)
        self._reducing: dict[int, Pending] = {}
        self._shared: Tensor | None = None
        for i, bucket in enumerate(layout.buckets):
            for slot in bucket.slots:
                view = self.buckets[i][slot.offset : slot.offset + slot.tensor.size].view(slot.tensor.shape)
                _bind(stage, slot.tensor, _Slot(view, partial(self._count, i)))
                if len(slot.tensor.parts[0].spec.sites) > 1:
                    self._shared = view
        self._partial = [
            buffer[start:stop]
            for bucket, buffer in zip(layout.buckets, self.buckets, strict=True)
            for start, stop in merge(runs(bucket, 0, bucket.size), keep=lambda spec: tp.size > 1 and bool(spec.partial))
        ]
        self._tied_use = self._second_use(stage, layout.tied_use, dtype, device)

    def _second_use(
        self, stage: nn.Module, tensor: LocalTensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """The head's gradient of a matrix that this stage also embeds with: kept apart and added once in finish(), as
        it is when the two uses are on different stages."""
        if tensor is None:
            return None
        view = torch.zeros(tensor.shape, dtype=dtype, device=device)
        _bind(stage, tensor, _Slot(view, partial(self._count, len(self.buckets) - 1)))
        return view

    def begin(self, num_microbatches: int) -> None:
        """Clears the buffers for a step in which each tensor gets `num_microbatches` contributions."""
        for buffer in self.buckets:
            buffer.zero_()
        if self._tied_use is not None:
            self._tied_use.zero_()
        self._missing = [num_microbatches * len(bucket.slots) for bucket in self.layout.buckets]
        if self.layout.tied_use is not None:
            self._missing[-1] += num_microbatches

    def _count(self, i: int) -> None:
        self._missing[i] -= 1
        if self._missing[i] == 0 and self.overlap and self.layout.buckets[i].site is not None:
            self._reduce(i)

    def finish(self) -> None:
        """Completes all sums; afterwards this rank's piece of every bucket (or, with `gather`, all of it) is final.

        Raises `RuntimeError` if a contribution is missing or one too many has come.
        """
        if any(self._missing):
            raise RuntimeError(f"gradient contributions missing per bucket: {self._missing}")
        self._sum_partial()
        self._sum_tied()
        for i in range(len(self.buckets)):
            if i not in self._reducing:
                self._reduce(i)
        while self._reducing:
            self._reducing.pop(next(iter(self._reducing))).wait()
        if self.gather:
            gathering = [
                start_all_gather(self._piece(i), self.dp, out=self.buckets[i]) for i in range(len(self.buckets))
            ]
            for pending in gathering:
                pending.wait()

    def _piece(self, i: int) -> Tensor:
        start, stop = self.layout.buckets[i].piece(self.dp.rank, self.dp.size)
        return self.buckets[i][start:stop]

    def _reduce(self, i: int) -> None:
        """Sum over dp; lands in this rank's piece, in place."""
        self._reducing[i] = start_reduce_scatter(self.buckets[i], self.dp, out=self._piece(i))

    def _sum_partial(self) -> None:
        """Adds up over tp what each rank computed only a part of, all in one message."""
        if self._partial:
            total = all_reduce(torch.cat(self._partial), self.tp)
            for view, part in zip(self._partial, total.split([len(view) for view in self._partial]), strict=True):
                view.copy_(part)

    def _sum_tied(self) -> None:
        """Embedding use + head use; on two stages both compute the same sum, in IEEE arithmetic to the last bit."""
        if self._shared is None:
            return
        if self._tied_use is not None:
            self._shared += self._tied_use
        elif self.tied_peer is not None:
            self._shared += exchange(self._shared, self.pp, self.tied_peer)


def _bind(stage: nn.Module, tensor: LocalTensor, slot: _Slot) -> None:
    """Makes `slot` the place where the module that uses `tensor` deposits its gradient."""
    module_name, _, name = tensor.name.rpartition(".")
    setattr(stage.get_submodule(module_name), f"{name}_grad", slot)
