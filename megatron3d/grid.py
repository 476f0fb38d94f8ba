"""The mesh as arithmetic: coordinates <-> rank, and which ranks share a group, without any process.

The one idea: ranks are the cells of a box whose axes are ordered slowest first; a group along some axes is what remains
when the coordinates of all other axes are held still. mesh.py turns these lists into communicators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping


class Grid:
    """Cells of a box with named, ordered axes; `Grid(pp=2, dp=2, tp=2)`: tp varies fastest, pp slowest.

    Raises `ValueError` for sizes below 1 and for unknown axes.
    """

    def __init__(self, **sizes: int) -> None:
        if any(size < 1 for size in sizes.values()):
            raise ValueError(f"axis sizes must be positive, not {sizes}")
        self.sizes: Mapping[str, int] = dict(sizes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} lies outside the {self.size} ranks of {dict(self.sizes)}")
        position: dict[str, int] = {}
        for axis in reversed(list(self.sizes)):
            rank, position[axis] = divmod(rank, self.sizes[axis])
        return {axis: position[axis] for axis in self.sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Rank at `coordinates` (one for each axis)."""
        if set(coordinates) != set(self.sizes):
            raise ValueError(f"coordinates {dict(coordinates)} do not name the axes {list(self.sizes)}")
        rank = 0
        for axis, size in self.sizes.items():
            if not 0 <= coordinates[axis] < size:
                raise ValueError(f"coordinate {coordinates[axis]} lies outside axis {axis} of size {size}")
            rank = rank * size + coordinates[axis]
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Partition of all ranks into groups along `axes`, ordered by first member; members in rank order."""
        unknown = [axis for axis in axes if axis not in self.sizes]
        if unknown:
            raise ValueError(f"unknown axes {unknown}; this grid has {list(self.sizes)}")
        others = [axis for axis in self.sizes if axis not in axes]
        inside = [axis for axis in self.sizes if axis in axes]
        return [[self.rank(fixed | free) for free in self._positions(inside)] for fixed in self._positions(others)]

    def _positions(self, axes: list[str]) -> Iterator[dict[str, int]]:
        for values in itertools.product(*(range(self.sizes[axis]) for axis in axes)):
            yield dict(zip(axes, values, strict=True))
