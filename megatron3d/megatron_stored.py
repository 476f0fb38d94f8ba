"""A Megatron-LM checkpoint as whole tensors by name, however its folder is laid out.

The one idea: a whole tensor is a set of boxes, and behind each box is a way to find its values. Who reads a folder
(megatron_legacy.py, megatron_dist.py) says which boxes there are; nothing is read before it is asked for, and then
straight to where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron3d.config import ConfigError
from megatron3d.layout import Box, intersect, relative, shift, whole
from megatron3d.unpickle import StoredTensor

Find = Callable[[], StoredTensor]
"""Opens the file that values lie in."""


@dataclass(frozen=True)
class Whole:
    """A tensor, padding included."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Box, Find], ...]
    """Boxes that tile it."""
    copies: tuple[tuple[str, Find], ...] = ()
    """Where else all of it is kept, for tensors that every rank has."""

    def fill(self, pieces: Sequence[Tensor]) -> None:
        """Reads its first rows into `pieces`, contiguous tensors that are stacked along the first dim. ConfigError for
        a damaged file, and for a copy that differs."""
        for targets, stored in self._meeting(pieces):
            if all(target.is_contiguous() for target in targets):
                stored.fill(targets)
            else:
                for target, values in zip(targets, stored.read().split([len(t) for t in targets]), strict=True):
                    target.copy_(values)
        for place, find in self.copies:
            _check_equal(pieces, find(), place)

    def check(self, pieces: Sequence[Tensor], place: str) -> None:
        """ConfigError unless its first rows are equal to these, stacked; `place` names the tensor."""
        for targets, stored in self._meeting(pieces):
            _check_equal(targets, stored, place)

    def _meeting(self, pieces: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], StoredTensor]]:
        """(views of the pieces that a part covers, stacked; where their values lie) of each part that covers any."""
        first, frames = 0, list[Box]()
        for piece in pieces:
            frames.append(((first, first + len(piece)), *whole(piece.shape[1:])))
            first += len(piece)
        wanted = whole((first, *self.shape[1:]))
        for box, find in self.parts:
            if (common := intersect(box, wanted)) is not None:
                met = [(piece, frame, intersect(box, frame)) for piece, frame in zip(pieces, frames, strict=True)]
                views = [piece[relative(inner, frame)] for piece, frame, inner in met if inner is not None]
                yield views, find().part(shift(common, [-start for start, _ in box]))


def _check_equal(pieces: Sequence[Tensor], stored: StoredTensor, place: str) -> None:
    """ConfigError unless the pieces, stacked, have the stored bytes; `place` names these."""
    copies = stored.read().split([len(piece) for piece in pieces])
    if not all(map(torch.equal, map(_bytes, pieces), map(_bytes, copies))):
        raise ConfigError(
            f"{place} is a copy of values that are kept elsewhere too, but it differs from them: the checkpoint is "
            "damaged, or the ranks of the run that saved it had come apart."
        )


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


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
