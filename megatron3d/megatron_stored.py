"""A Megatron-LM checkpoint as whole tensors by name, however its folder is laid out.

The one idea: a whole tensor is a set of boxes, and behind each box is a way to read it. Who reads a folder
(megatron_legacy.py, megatron_dist.py) says which boxes there are; nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron3d.config import ConfigError
from megatron3d.layout import Box, box_shape, intersect, relative, whole

Read = Callable[[], Tensor]


@dataclass(frozen=True)
class Whole:
    """A tensor, padding included."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Box, Read], ...]
    """Boxes that tile it."""
    copies: tuple[tuple[str, Read], ...] = ()
    """Where else all of it is kept, for tensors that every rank has."""

    def read(self, rows: int | None = None) -> Tensor:
        """Its values, or those of its first `rows`, in memory of their own."""
        if len(self.parts) == 1 and rows in (None, self.shape[0]):
            values = self.parts[0][1]()
        else:
            wanted = whole(self.shape if rows is None else (rows, *self.shape[1:]))
            values = torch.empty(box_shape(wanted), dtype=self.dtype)
            for box, read in self.parts:
                if (common := intersect(box, wanted)) is not None:
                    values[relative(common, wanted)] = read()[relative(common, box)]
        for place, read in self.copies:
            check_equal(values, read(), place)
        return values

    def check(self, values: Tensor, place: str) -> None:
        """ConfigError unless these, its first rows, are equal; `place` names the tensor."""
        wanted = whole(values.shape)
        for box, read in self.parts:
            if (common := intersect(box, wanted)) is not None:
                check_equal(values[relative(common, wanted)], read()[relative(common, box)], place)


def check_equal(values: Tensor, copy: Tensor, place: str) -> None:
    """ConfigError unless both have the same bytes; `place` names the copy."""
    if not torch.equal(values.view(torch.uint8), copy.view(torch.uint8)):
        raise ConfigError(
            f"{place} is a copy of values that are kept elsewhere too, but it differs from them: the checkpoint is "
            "damaged, or the ranks of the run that saved it had come apart."
        )


@dataclass(frozen=True)
class Kept:
    """What a folder holds."""

    folder: Path
    args: Mapping[str, Any]
    iteration: int | None
    tensors: Mapping[str, Whole]
    """By the names of megatron_lm.py, layers counted over the whole model."""
    fused: int
    """Groups into which the rows of SwiGLU's gate and up are dealt."""
    notes: tuple[str, ...] = ()
    """What is left out."""


WEIGHTS_ONLY = "It holds the state of an optimizer, which is left out: what is read are the weights."
