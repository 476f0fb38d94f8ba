"""Flat weight buffers: the memory that a stage's parameters are views of, their initial values, and their gather.

The one idea: what is gathered together lies together. A ZeRO-1 rank updates its piece of each bucket; an all-gather
then completes the bucket in place, behind the next forward pass, which waits for a site's buckets just before that site
runs. Buckets and pieces are laid out in layout.py; gradients use the same slots (grads.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron3d import rng
from megatron3d.comm import Pending, start_all_gather
from megatron3d.layout import FlatLayout, LocalTensor, relative, runs
from megatron3d.mesh import Axis
from megatron3d.timers import Timer, untimed


class FlatWeights:
    """One flat buffer per bucket of `layout`; the parameters of `stage` become views of them."""

    def __init__(
        self,
        stage: nn.Module,
        layout: FlatLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        dp: Axis,
        timer: Timer = untimed,
    ) -> None:
        self.layout, self.dp, self._timer = layout, dp, timer
        self.buckets = [torch.zeros(bucket.size, dtype=dtype, device=device) for bucket in layout.buckets]
        self._gathering: dict[int, Pending] = {}
        for slot, view in zip((slot for bucket in layout.buckets for slot in bucket.slots), self._views(), strict=True):
            _lend(stage, slot.tensor, view)
        if layout.tied_use is not None:
            owner = layout.tied_use.parts[0].spec.tensor
            _lend(stage, layout.tied_use, stage.get_parameter(owner).data)
        self._wait_before_sites(stage)

    def _views(self) -> list[Tensor]:
        return [
            buffer[slot.offset : slot.offset + slot.tensor.size].view(slot.tensor.shape)
            for bucket, buffer in zip(self.layout.buckets, self.buckets, strict=True)
            for slot in bucket.slots
        ]

    def _wait_before_sites(self, stage: nn.Module) -> None:
        for site in {slot.tensor.site for bucket in self.layout.buckets for slot in bucket.slots}:
            needed = [i for i, bucket in enumerate(self.layout.buckets) if bucket.site in (site, None)]
            stage.get_submodule(site).register_forward_pre_hook(lambda *_, needed=needed: self._wait(needed))

    def initialise(self, seed: int) -> None:
        """Fills all parameters; each value depends on the seed, the parameter's name and its place in it alone."""
        for bucket, buffer in zip(self.layout.buckets, self.buckets, strict=True):
            for run in runs(bucket, 0, bucket.size):
                spec, part = run.part.spec, run.part
                values = buffer[run.start : run.stop].view([stop - start for start, stop in part.box])
                if spec.init == "normal":
                    rng.init_normal(values, box=part.box, shape=spec.shape, seed=seed, name=spec.name, std=spec.std)
                else:
                    values.fill_(1.0 if spec.init == "ones" else 0.0)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's boxes out of whole, global tensors by canonical name."""
        for bucket, buffer in zip(self.layout.buckets, self.buckets, strict=True):
            for run in runs(bucket, 0, bucket.size):
                spec, box = run.part.spec, run.part.box
                source = tensors[spec.name][relative(box, tuple((0, extent) for extent in spec.shape))]
                buffer[run.start : run.stop].view(source.shape).copy_(source)

    def start_gather(self) -> None:
        """Begins to complete every bucket from the data-parallel ranks' pieces, in the order of the forward pass."""
        for i in reversed(range(len(self.buckets))):
            start, stop = self.layout.buckets[i].piece(self.dp.rank, self.dp.size)
            buffer = self.buckets[i]
            self._gathering[i] = start_all_gather(buffer[start:stop], self.dp, out=buffer)

    def finish_gather(self) -> None:
        """Waits for every bucket: after it, all weights are those of the last step."""
        self._wait(list(self._gathering))

    def _wait(self, needed: list[int]) -> None:
        for i in needed:
            if i in self._gathering:
                with self._timer("gather"):
                    self._gathering.pop(i).wait()


def _lend(stage: nn.Module, tensor: LocalTensor, memory: Tensor) -> None:
    """Replaces the parameter called `tensor.name` by one that lives in `memory`."""
    module_name, _, name = tensor.name.rpartition(".")
    setattr(stage.get_submodule(module_name), name, nn.Parameter(memory))
