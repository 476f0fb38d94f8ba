"""Collectives and messages against oracles that each rank computes from all ranks' inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d import comm
from megatron3d.comm import (
    EXCHANGE_LIMIT,
    agree,
    all_gather,
    all_reduce,
    exchange,
    gather_objects,
    reduce_from,
    reduce_scatter,
    scatter_seq,
    start_all_gather,
    start_all_reduce,
    start_receive,
    start_reduce_scatter,
    start_send,
)
from megatron3d.config import ParallelConfig
from megatron3d.mesh import Axis, Mesh
from tests.ranks import on_mesh

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (2, 3, 4)


def on_axis(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls body(dp axis, *args) on `size` ranks."""
    return on_mesh(ParallelConfig(tp=1, pp=1, dp=size, timeout_seconds=60), lambda mesh: body(mesh.dp, *args))


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, case: int = 0) -> Tensor:
    """What rank `rank` brings to a case; magnitudes differ wildly, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    size = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return (size * 10 ** (4 * torch.rand(tuple(shape), generator=generator, dtype=torch.float64) - 2)).to(dtype)


def rank_order_sum(inputs: Sequence[Tensor]) -> Tensor:
    """Rank 0 + rank 1 + ..., in at least fp32, rounded once."""
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    total = inputs[0].to(wide)
    for value in inputs[1:]:
        total = total + value.to(wide)
    return total.to(inputs[0].dtype)


def layouts_of(value: Tensor) -> list[Tensor]:
    """The same values contiguous, and as a view with gaps."""
    gaps = torch.zeros(*value.shape, 2, dtype=value.dtype)
    gaps[..., 0] = value
    return [value.clone(), gaps[..., 0]]


def check_collectives(axis: Axis) -> None:
    cases = itertools.product(DTYPES, ((1,), (7,), (5, 3), (2, 3, 4), (4099,)))
    for case, (dtype, shape) in enumerate(cases):
        inputs = [values(rank, shape, dtype, case) for rank in range(axis.size)]
        stacked = [values(rank, (axis.size * shape[0], *shape[1:]), dtype, case) for rank in range(axis.size)]
        share = slice(axis.rank * shape[0], (axis.rank + 1) * shape[0])
        gathered, total = torch.cat(inputs), rank_order_sum(inputs)
        scattered = rank_order_sum(stacked)[share]
        for mine, whole in zip(layouts_of(inputs[axis.rank]), layouts_of(stacked[axis.rank]), strict=True):
            assert torch.equal(all_gather(mine, axis), gathered)
            assert torch.equal(reduce_scatter(whole, axis), scattered)
            assert torch.equal(all_reduce(mine, axis), total)
    assert torch.equal(all_gather(torch.tensor([[axis.rank]]), axis).flatten(), torch.arange(axis.size))


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_collectives(size: int) -> None:
    """Every collective, dtype, odd sizes, contiguous or not: bit-equal to the sum in rank order."""
    on_axis(size, check_collectives)


def check_large_sums(axis: Axis) -> None:
    count = EXCHANGE_LIMIT // 4 + 1  # beyond the limit at any size, and no size but 1 divides it
    assert count % axis.size
    inputs = [values(rank, (count,), torch.float32) for rank in range(axis.size)]
    assert torch.equal(all_reduce(inputs[axis.rank].clone(), axis), rank_order_sum(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_sums_beyond_the_exchange_limit(size: int) -> None:
    """Large sums are scattered and gathered, with padding; the bits are those of small ones."""
    on_axis(size, check_large_sums)


def check_place_in_the_buffer(axis: Axis) -> None:
    probe = [values(rank, (50,), torch.float32) for rank in range(axis.size)]
    expected = rank_order_sum(probe)
    for offset in (0, 1, 63, 700, 950):
        buffer = values(axis.rank, (1200,), torch.float32, case=offset + 1)
        buffer[offset : offset + 50] = probe[axis.rank]
        assert torch.equal(all_reduce(buffer.clone(), axis)[offset : offset + 50], expected)
        total = all_gather(reduce_scatter(buffer, axis), axis)
        assert torch.equal(total[offset : offset + 50], expected)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sum_does_not_depend_on_the_place_in_the_buffer(size: int) -> None:
    """Hence buckets may be cut anywhere: re-bucketing changes no bit."""
    on_axis(size, check_place_in_the_buffer)


def check_into_place(axis: Axis) -> None:
    buffer = values(axis.rank, (axis.size * 6,), torch.float32)
    everyone = [values(rank, (axis.size * 6,), torch.float32) for rank in range(axis.size)]
    mine = slice(axis.rank * 6, axis.rank * 6 + 6)
    before = buffer.clone()
    result = start_reduce_scatter(buffer, axis, out=buffer[mine]).wait()
    expected = rank_order_sum(everyone)
    assert torch.equal(buffer[mine], expected[mine]) and result.data_ptr() == buffer[mine].data_ptr()
    outside = torch.ones_like(before, dtype=torch.bool)
    outside[mine] = False
    assert torch.equal(buffer[outside], before[outside])
    assert start_all_gather(buffer[mine], axis, out=buffer).wait() is buffer
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_piece_is_reduced_and_gathered_in_its_own_buffer(size: int) -> None:
    """What a bucket does: its sum lands in this rank's piece, and the gather completes the rest."""
    on_axis(size, check_into_place)


def check_many_in_flight(axis: Axis) -> None:
    def inputs(case: int) -> list[Tensor]:
        return [values(rank, (axis.size * (case + 1),), torch.float32, case) for rank in range(axis.size)]

    started = []
    for case in range(5):
        mine = inputs(case)[axis.rank]
        started.append(start_all_gather(mine.clone(), axis))
        started.append(start_reduce_scatter(mine.clone(), axis))
        started.append(start_all_reduce(mine.clone(), axis))
    for case in reversed(range(5)):  # the last one first
        total = rank_order_sum(inputs(case))
        assert torch.equal(started[3 * case + 2].wait(), total)
        assert torch.equal(started[3 * case + 1].wait(), total.chunk(axis.size)[axis.rank])
        assert torch.equal(started[3 * case].wait(), torch.cat(inputs(case)))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_collectives_in_flight(size: int) -> None:
    on_axis(size, check_many_in_flight)


def check_messages(axis: Axis) -> None:
    """Each rank sends three messages to the next one and swaps one with its neighbour."""
    following, preceding = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    receives = [start_receive(torch.empty(3, 2), axis, preceding) for _ in range(3)]
    sends = [start_send(values(axis.rank, (2, 3), torch.float32, case).t(), axis, following) for case in range(3)]
    for case in reversed(range(3)):
        assert torch.equal(receives[case].wait(), values(preceding, (2, 3), torch.float32, case).t())
    for sending in sends:
        sending.wait()
    if axis.rank < axis.size // 2 * 2:
        peer = axis.rank ^ 1
        assert torch.equal(
            exchange(values(axis.rank, (5,), torch.float64), axis, peer), values(peer, (5,), torch.float64)
        )


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_messages_and_exchange(size: int) -> None:
    """In order, also from a tensor with gaps; `exchange` swaps both ways."""
    on_axis(size, check_messages)


def disagree(mesh: Mesh) -> str:
    agree(None, mesh.control)
    try:
        agree({1: "disk full", 2: "disk gone"}.get(mesh.rank), mesh.control)
    except RuntimeError as error:
        assert gather_objects((mesh.rank, "x"), mesh.control) == [(rank, "x") for rank in range(3)]
        return str(error)
    raise AssertionError("nobody heard of the problem")


def test_one_rank_s_problem_stops_all() -> None:
    """The same words on every rank, and the control axis still works afterwards."""
    texts = on_mesh(ParallelConfig(tp=1, pp=1, dp=3, timeout_seconds=60), disagree)
    assert texts == ["rank 1: disk full"] * 3


def check_autograd(axis: Axis) -> None:
    shape = (2 * axis.size, 3)
    inputs = [values(rank, shape, torch.float64) for rank in range(axis.size)]
    x = inputs[axis.rank].clone().requires_grad_()
    y = reduce_from(x, axis)
    assert torch.equal(y, rank_order_sum(inputs)) and torch.equal(x, inputs[axis.rank])
    y.backward(values(9, shape, torch.float64))
    assert x.grad is not None and torch.equal(x.grad, values(9, shape, torch.float64))

    x = inputs[axis.rank].clone().requires_grad_()
    y = scatter_seq(x, axis)
    assert torch.equal(y, rank_order_sum(inputs).chunk(axis.size)[axis.rank])
    y.backward(values(axis.rank, y.shape, torch.float64, case=1))
    gathered = torch.cat([values(rank, y.shape, torch.float64, case=1) for rank in range(axis.size)])
    assert x.grad is not None and torch.equal(x.grad, gathered)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_autograd_pairs(size: int) -> None:
    """reduce_from: all-reduce / identity; scatter_seq: reduce-scatter / all-gather."""
    on_axis(size, check_autograd)


def test_identity_at_size_one() -> None:
    axis, x = Mesh.single().dp, torch.arange(6.0).requires_grad_()
    for collective in (all_gather, all_reduce, reduce_scatter, reduce_from, scatter_seq):
        assert collective(x, axis) is x
    assert start_reduce_scatter(x, axis, out=x).wait() is x
    assert start_all_gather(x, axis, out=x).wait() is x
    assert gather_objects("alone", axis) == ["alone"]
    agree(None, axis)
    with pytest.raises(RuntimeError, match="rank 0: trouble"):
        agree("trouble", axis)


def check_unordered(axis: Axis) -> None:
    """The back-end's own sums, as used on GPUs without --deterministic: right to rounding."""
    loose = Axis(axis.name, axis.size, axis.rank, axis.ranks, axis.group, ordered=False)
    inputs = [values(rank, (axis.size * 5,), torch.float64) for rank in range(axis.size)]
    total, mine = torch.stack(inputs).sum(0), inputs[axis.rank]
    torch.testing.assert_close(comm.all_reduce(mine.clone(), loose), total)
    torch.testing.assert_close(comm.reduce_scatter(mine, loose), total.chunk(axis.size)[axis.rank])


def test_sums_of_the_back_end() -> None:
    on_axis(2, check_unordered)
