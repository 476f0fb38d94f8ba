"""How other libraries lay out the same tensors: stacked, transposed, or with heads dealt out by group.

The one idea: every foreign tensor is a few of ours, put together in one of three ways, so a library is a table of names
(huggingface.py, megatron_lm.py) and both directions of a conversion follow from it. All tensors here are whole and
unpadded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron3d.config import Config, ConfigError
from megatron3d.params import ParamSpec

PIECE = 1 << 20  # values that are converted at a time: the check on them takes memory


class Source(Protocol):
    """A model's global, unpadded tensors by kind and canonical name (params.py), wherever they are kept.

    Kinds: "weight", and where a run's state is kept too "master", "exp_avg", "exp_avg_sq".
    """

    @property
    def config(self) -> Config:
        """The resolved config; of a library that knows no more, all but the model is the default."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """Step, counts and the like of the run that saved it; empty where none are kept."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of each tensor, weights first."""

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Of a tensor as it is kept."""

    def read(self, kind: str, name: str) -> Tensor:
        """The whole tensor, on the CPU, in memory of its own."""


@dataclass(frozen=True)
class Foreign:
    """A tensor of another library, and which of ours it is made of."""

    name: str
    parts: tuple[str, ...]
    """Canonical names, stacked in this order along the first dim."""
    transposed: bool = False
    """Kept as (inputs, outputs)."""
    groups: int = 1
    """Rows are dealt out: for each of so many groups, the group's rows of every part."""


def pack(foreign: Foreign, parts: Sequence[Tensor]) -> Tensor:
    """The foreign tensor of its parts: (rows, ...) each, in the order of `foreign.parts`."""
    if len(parts) == 1 and not foreign.transposed:
        return parts[0].contiguous()
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    packed = torch.empty(shape[::-1] if foreign.transposed else shape, dtype=dtype)
    stacked, at = packed.t() if foreign.transposed else packed, 0
    for piece in dealt(foreign, parts):
        stacked[at : at + len(piece)] = piece
        at += len(piece)
    return packed


def dealt(foreign: Foreign, parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts as views of a group's rows each, in the order in which they are stacked."""
    groups = [part.chunk(foreign.groups) for part in parts]
    return [piece for group in zip(*groups, strict=True) for piece in group]


def unpack(
    foreign: Foreign, tensor: Tensor, specs: Mapping[str, ParamSpec], only: str | None = None
) -> dict[str, Tensor]:
    """Canonical name -> part of a foreign tensor, the inverse of `pack`; `only`: of one part. Raises ValueError for
    another shape."""
    stacked = tensor.t() if foreign.transposed and tensor.dim() == 2 else tensor
    shapes = [specs[name].shape for name in foreign.parts]
    expected = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if tuple(stacked.shape) != expected:
        shown = expected[::-1] if foreign.transposed else expected
        raise ValueError(f"{foreign.name} has shape {tuple(tensor.shape)}, the model needs {shown}")
    by_group = stacked.reshape(foreign.groups, -1, *stacked.shape[1:])
    rows = [shape[0] // foreign.groups for shape in shapes]
    return {
        name: part.flatten(0, 1).contiguous()
        for name, part in zip(foreign.parts, by_group.split(rows, dim=1), strict=True)
        if only in (None, name)
    }


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in another type. ConfigError, in which `name` is theirs, if it cannot hold them."""
    if values.dtype == dtype:
        return values
    converted = torch.empty_like(values, dtype=dtype)
    for before, after in zip(values.reshape(-1).split(PIECE), converted.view(-1).split(PIECE), strict=True):
        if not torch.equal(after.copy_(before).isfinite(), before.isfinite()):
            raise ConfigError(
                f"{name} has values beyond {torch.finfo(dtype).max:g}, the largest of {dtype}. Choose a wider type."
            )
    return converted
