"""Shared memory between ranks: the sums are those of the network, in any order of waiting; the dead are not awaited."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d import board, comm
from megatron3d.config import ParallelConfig
from megatron3d.flight import PeerError
from megatron3d.mesh import Mesh
from tests.ranks import on_mesh

ROWS = 12  # every size here divides it


def drawn(rank: int, case: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def both_ways(mesh: Mesh) -> list[Any]:
    """Every collective over the board and over the back-end: those that differ, and how many notices were put up."""
    shared, network = mesh.tp, replace(mesh.tp, board=None)
    assert shared.board is not None
    differing, posted = [], shared.board._next
    too_large = board.CAPACITY // 4 // ROWS + 1
    for case, (width, dtype) in enumerate(
        [(1, torch.float32), (333, torch.bfloat16), (1000, torch.float64), (too_large, torch.float32)]
    ):
        for start in (comm.start_all_gather, comm.start_reduce_scatter, comm.start_all_reduce):
            x = drawn(mesh.rank, case, (ROWS, width), dtype)
            if not torch.equal(start(x.clone(), shared).wait(), start(x.clone(), network).wait()):
                differing.append((start.__name__, width, dtype))
    return [differing, shared.board._next - posted]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_bits_as_over_the_network(size: int) -> None:
    """Small tensors go over the board; of those beyond its places, only the shares of a sum that are gathered."""
    for differing, posted in on_mesh(ParallelConfig(tp=size, dp=1), both_ways):
        assert differing == [] and posted == 3 * 3 + 1


def at_random(mesh: Mesh, seed: int, rounds: int) -> int:
    """More sums under way than there are places, waited for in any order, while ranks dawdle; returns how many were
    posted."""
    same, own = random.Random(seed), random.Random(seed + 1 + mesh.rank)
    shared = mesh.tp.board
    assert shared is not None
    pending: list[tuple[int, comm.Pending]] = []
    for number in range(rounds):
        x = torch.full((ROWS, same.randint(1, 2000)), float(number + mesh.rank))
        pending.append((number, comm.start_all_reduce(x, mesh.tp)))
        if own.random() < 0.05:
            time.sleep(own.random() / 200)
        while len(pending) > same.randint(0, 7):
            started, sum_of_all = pending.pop(same.randrange(len(pending)))
            expected = mesh.tp.size * started + sum(range(mesh.tp.size))
            assert (sum_of_all.wait() == expected).all(), f"sum {started} of round {number}"
    for started, sum_of_all in pending:
        assert (sum_of_all.wait() == mesh.tp.size * started + sum(range(mesh.tp.size))).all()
    return shared._next


@pytest.mark.parametrize("size", [2, 4])
def test_places_are_free_when_they_are_used_again(size: int) -> None:
    assert on_mesh(ParallelConfig(tp=size, dp=1), at_random, 3, 400) == [400] * size, "none goes over the network"


def left_alone(mesh: Mesh, how: str) -> str:
    shared = mesh.tp.board
    assert shared is not None
    comm.all_reduce(torch.ones(4), mesh.tp)  # nobody ends while another still connects,
    shared.timeout = 1.0 if how == "still" else 60.0
    if how == "failed":
        comm.gather_objects(None, mesh.control)  # or says that it fails while another still reads
    if mesh.rank == 1:
        if how == "failed":
            shared.leave()
        if how == "ended":
            os._exit(0)
        return ""
    try:
        comm.all_reduce(torch.ones(4), mesh.tp)  # of which rank 1 knows nothing
    except PeerError as error:
        return str(error)
    return "answered"


@pytest.mark.parametrize(("how", "reason"), [("failed", "it has failed"), ("still", "timed out after 1 s")])
def test_who_does_not_answer_is_named(how: str, reason: str) -> None:
    told = on_mesh(ParallelConfig(tp=2, dp=1), left_alone, how)[0]
    assert told.startswith("no answer from rank 1; step 0, all_reduce over tp with ranks [1]") and told.endswith(reason)


def test_a_process_that_has_ended_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    """And not waited for until the time-out, which would be the reason then."""

    def body(mesh: Mesh) -> None:
        told = left_alone(mesh, "ended")
        os.write(2, told.encode())

    with pytest.raises(AssertionError, match="rank 1 of 2: died with exit code 0"):
        on_mesh(ParallelConfig(tp=2, dp=1), body)
    assert "its process has ended" in capfd.readouterr().err


def without_memory(mesh: Mesh) -> tuple[bool, float]:
    return mesh.tp.board is None, float(comm.all_reduce(torch.ones(4), mesh.tp).sum())


def test_a_system_that_has_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by the network."""

    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refused)
    assert on_mesh(ParallelConfig(tp=2, dp=1), without_memory) == [(True, 8.0)] * 2


def test_memory_of_another_machine_is_not_taken() -> None:
    offered = board.Board.offer(2)
    assert offered is not None
    offer, _ = offered
    assert board.Board.accept(offer) is not None
    assert board.Board.accept(offer._replace(token=bytes(16))) is None
    assert board.Board.accept(offer._replace(descriptor=999)) is None and board.Board.accept(None) is None
