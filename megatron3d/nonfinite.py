"""Where a value that is not finite first shows: in a gradient, in a weight, or in what a layer puts out.

The one idea: the norm tells all ranks at once that something is wrong (optimizer.py); only then is it worth looking
where.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron3d.layout import runs
from megatron3d.optimizer import Optimizer


def bad_gradient(optimizer: Optimizer) -> str:
    """The first parameter, in depth order, with a gradient on this rank that is not finite; empty if there is none."""
    return _first(optimizer, [span.grad for span in optimizer.spans])


def bad_weight(optimizer: Optimizer) -> str:
    """The first parameter, in depth order, of which this rank keeps a master that is not finite; empty if none."""
    return _first(optimizer, [span.master for span in optimizer.spans])


def _first(optimizer: Optimizer, tensors: list[Tensor]) -> str:
    layout = optimizer.weights.layout
    for bucket, span, tensor in reversed(list(zip(layout.buckets, optimizer.spans, tensors, strict=True))):
        if bool(torch.isfinite(tensor.sum())):  # one pass without a copy; finite values may overflow it, hence the look
            continue
        for run in reversed(runs(bucket, span.start, span.start + len(tensor))):
            if not bool(torch.isfinite(tensor[run.start - span.start : run.stop - span.start]).all()):
                return run.part.spec.name
    return ""


class LayerWatch:
    """Notes the first site of a stage whose output is not finite. Reads back one flag per site and pass: for debugging.

    `found` is that site, since the last `begin`, or empty.
    """

    def __init__(self, stage: nn.Module) -> None:
        self.begin()
        for name, module in stage.named_modules():
            if name in ("embedding", "head") or (name.startswith("layers.") and name.count(".") == 1):
                module.register_forward_hook(self._look(name))

    def begin(self) -> None:
        """Forgets what was found."""
        self.found = ""

    def _look(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if not self.found and not bool(torch.isfinite(output).all()):
                self.found = name

        return hook
