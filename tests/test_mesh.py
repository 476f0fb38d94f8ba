"""Groups as torch.distributed really makes them: who is in them, starting and ending, refusals, time-outs."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron3d.comm import all_gather, all_reduce
from megatron3d.config import ConfigError, ParallelConfig
from megatron3d.launch import Launch
from megatron3d.mesh import Mesh, pick_device
from tests.ranks import run_ranks

CPU = torch.device("cpu")
AXES = ("tp", "dp", "pp", "pp_back", "world", "control")


def layouts(world: int) -> list[tuple[int, int, int]]:
    """All (tp, pp, dp) of a world size."""
    sizes = range(1, world + 1)
    return [(tp, pp, dp) for tp, pp, dp in itertools.product(sizes, sizes, sizes) if tp * pp * dp == world]


def members(rank: int, tp: int, pp: int, dp: int) -> dict[str, tuple[int, ...]]:
    """Closed form: rank = (p * dp + d) * tp + t."""
    p, d, t = rank // (dp * tp), rank // tp % dp, rank % tp
    along_pp = tuple((i * dp + d) * tp + t for i in range(pp))
    everyone = tuple(range(tp * pp * dp))
    return {
        "tp": tuple((p * dp + d) * tp + i for i in range(tp)),
        "dp": tuple((p * dp + i) * tp + t for i in range(dp)),
        "pp": along_pp,
        "pp_back": along_pp,
        "world": everyone,
        "control": everyone,
    }


def report(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Who answers on each axis: the world ranks that a gather over it brings, checked against what the axis says."""
    found = {}
    for name in AXES:
        axis = getattr(mesh, name)
        answered = tuple(all_gather(torch.tensor([mesh.rank]), axis).tolist())
        assert answered == axis.ranks and axis.ranks[axis.rank] == mesh.rank and axis.size == len(axis.ranks)
        assert (axis.group is None) == (axis.size == 1)
        found[name] = answered
    return found


def rounds(launch: Launch, init_method: str, sizes: list[tuple[int, int, int]]) -> list[dict[str, tuple[int, ...]]]:
    """Every layout in turn: torch.distributed is begun and ended each time."""
    reports = []
    for number, (tp, pp, dp) in enumerate(sizes):
        parallel = ParallelConfig(tp=tp, pp=pp, dp=dp, timeout_seconds=60)
        mesh = Mesh.create(parallel, launch, CPU, init_method=f"{init_method}.{number}")
        assert mesh.coordinates == {
            "pp": launch.rank // (dp * tp),
            "dp": launch.rank // tp % dp,
            "tp": launch.rank % tp,
        }
        assert mesh.is_main == (launch.rank == 0)
        reports.append(report(mesh))
        mesh.close()
        assert not dist.is_initialized()
    return reports


@pytest.mark.parametrize("sizes", [[(2, 2, 1), (1, 2, 2)], pytest.param(layouts(8), marks=pytest.mark.slow)])
def test_groups_of_every_layout(sizes: list[tuple[int, int, int]]) -> None:
    """PIPE-07: the same closed-form table on all ranks, each kind a partition; destroy + init again works."""
    world = math.prod(sizes[0])
    results = run_ranks(world, rounds, sizes)
    for number, (tp, pp, dp) in enumerate(sizes):
        for rank in range(world):
            assert results[rank][number] == members(rank, tp, pp, dp), f"rank {rank} at tp {tp}, pp {pp}, dp {dp}"
        for name in AXES:
            groups = {results[rank][number][name] for rank in range(world)}
            assert sorted(itertools.chain(*groups)) == list(range(world))


def two_at_once(launch: Launch, init_method: str) -> Any:
    """A second mesh beside the first, which goes on working after the second has closed."""
    first = Mesh.create(ParallelConfig(tp=2, pp=2, dp=1, timeout_seconds=60), launch, CPU, init_method=init_method)
    second = Mesh.create(ParallelConfig(tp=1, pp=1, dp=4, timeout_seconds=60), launch, CPU, init_method=init_method)
    reports = [report(first), report(second), report(first)]
    second.close()
    assert dist.is_initialized(), "the first mesh began it, so the first ends it"
    reports.append(report(first))
    first.close()
    assert not dist.is_initialized()
    return reports


def test_two_meshes_in_one_process() -> None:
    """PIPE-07: a second mesh over the same ranks."""
    for rank, (before, second, between, after) in enumerate(run_ranks(4, two_at_once)):
        assert before == between == after == members(rank, tp=2, pp=2, dp=1)
        assert second == members(rank, tp=1, pp=1, dp=4)


def test_a_single_process_needs_no_torch_distributed() -> None:
    parallel = ParallelConfig(tp=1, pp=1, dp=1)
    launch = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
    for mesh in (Mesh.single(), Mesh.create(parallel, launch, CPU)):
        assert not dist.is_initialized()
        assert report(mesh) == dict.fromkeys(AXES, (0,))
        assert mesh.is_main and mesh.coordinates == {"pp": 0, "dp": 0, "tp": 0}
        mesh.close()


def refused(launch: Launch, init_method: str, parallel: ParallelConfig) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        Mesh.create(parallel, launch, CPU, init_method=init_method)
    except ConfigError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("a mesh came to be")


@pytest.mark.parametrize(("world", "sizes"), [(2, (2, 2, 1)), (3, (2, 1, 1)), (2, (1, 1, 1))])
def test_a_mesh_of_another_size_is_refused_at_once(world: int, sizes: tuple[int, int, int]) -> None:
    """DIV-11: the world size comes from the launcher; on every rank the refusal has the numbers."""
    tp, pp, dp = sizes
    for text, seconds in run_ranks(world, refused, ParallelConfig(tp=tp, pp=pp, dp=dp)):
        assert seconds < 60
        assert f"'pp': {pp}, 'dp': {dp}, 'tp': {tp}}} has {tp * pp * dp} ranks" in text and f"{world} processes" in text


def lonely(launch: Launch, init_method: str) -> str:
    """Rank 0 calls, rank 1 never comes (but lives on, so that no closed connection gives it away)."""
    parallel = ParallelConfig(tp=1, pp=1, dp=2, timeout_seconds=5)  # they also have to meet in time
    mesh = Mesh.create(parallel, launch, CPU, init_method=init_method)
    missed = Path(f"{init_method.removeprefix('file://')}.missed")
    if mesh.rank == 1:
        begin = time.monotonic()
        while not missed.exists() and time.monotonic() < begin + 200:
            time.sleep(0.01)
        return ""
    try:
        all_reduce(torch.ones(3), mesh.dp)
    except RuntimeError as error:
        missed.touch()
        return str(error)
    raise AssertionError("a sum without all ranks")


@pytest.mark.slow
def test_a_missing_rank_is_an_error_not_a_hang() -> None:
    text, _ = run_ranks(2, lonely)
    assert text.endswith("timed out after 5 s")


def test_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(rank=0, world_size=2, local_rank=0, local_world_size=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", launch) == pick_device("cpu", launch) == CPU
    with pytest.raises(ConfigError, match="no CUDA device"):
        pick_device("cuda", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("cpu", launch) == CPU
    with pytest.raises(ConfigError, match="2 processes on this node share 1 GPU"):
        pick_device("auto", launch)
