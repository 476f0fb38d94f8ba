"""The grid against brute force over coordinates."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from megatron3d.grid import Grid

SIZES = list(itertools.product(range(1, 5), repeat=3))
SUBSETS = [subset for n in range(4) for subset in itertools.combinations(("pp", "dp", "tp"), n)]


def coordinates(rank: int, dp: int, tp: int) -> dict[str, int]:
    """Closed form: tp varies fastest, pp slowest."""
    return {"pp": rank // (dp * tp), "dp": rank // tp % dp, "tp": rank % tp}


def test_example_of_the_design() -> None:
    grid = Grid(pp=2, dp=2, tp=2)
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("pp", "tp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_coordinates_are_the_closed_form_and_invert() -> None:
    for pp, dp, tp in SIZES:
        grid = Grid(pp=pp, dp=dp, tp=tp)
        assert grid.size == pp * dp * tp
        for rank in range(grid.size):
            assert grid.coordinates(rank) == coordinates(rank, dp, tp)
            assert grid.rank(grid.coordinates(rank)) == rank


def test_groups_are_those_of_brute_force() -> None:
    for (pp, dp, tp), along in itertools.product(SIZES, SUBSETS):
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(pp * dp * tp):
            at = coordinates(rank, dp, tp)
            found[tuple(at[axis] for axis in ("pp", "dp", "tp") if axis not in along)].append(rank)
        # The order of the names asked for does not matter, only the grid's own order of axes.
        assert Grid(pp=pp, dp=dp, tp=tp).groups(*reversed(along)) == sorted(found.values())


def test_groups_of_different_axes_meet_in_one_rank_at_most() -> None:
    for pp, dp, tp in SIZES:
        grid = Grid(pp=pp, dp=dp, tp=tp)
        for one, other in itertools.combinations(("pp", "dp", "tp"), 2):
            for a, b in itertools.product(grid.groups(one), grid.groups(other)):
                assert len(set(a) & set(b)) <= 1


def test_a_thousand_ranks() -> None:
    """A grid costs no processes: 1024 ranks, each axis a partition with the expected stride."""
    grid = Grid(pp=16, dp=8, tp=8)
    for axis, stride in (("tp", 1), ("dp", 8), ("pp", 64)):
        groups = grid.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(1024))
        assert all(b - a == stride for group in groups for a, b in itertools.pairwise(group))
    assert grid.groups("pp", "dp", "tp") == [list(range(1024))]


def test_any_axes_in_any_order() -> None:
    """A second grid over the same ranks, as an expert axis would need."""
    assert Grid(dp=2, ep=2, tp=1).groups("ep") == [[0, 1], [2, 3]]
    assert Grid(ep=2, dp=2).groups("ep") == [[0, 2], [1, 3]]


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Grid(pp=0, tp=1)
    grid = Grid(pp=2, tp=2)
    with pytest.raises(ValueError, match="unknown axes"):
        grid.groups("ep")
    with pytest.raises(ValueError, match="lies outside"):
        grid.coordinates(4)
    with pytest.raises(ValueError, match="lies outside"):
        grid.rank({"pp": 0, "tp": 2})
    with pytest.raises(ValueError, match="do not name"):
        grid.rank({"pp": 0})
