"""Every collective and every message; each takes an `Axis` and is the identity at size 1.

The one idea: sums run in rank order. A ring sum's low bits depend on where an element lies in the buffer; an exchange
followed by a local sum (rank 0 + rank 1 + ...) depends on the values alone, so that layouts can be compared bit by bit.
Collectives come as `start_*`, which return a `Pending` to wait for, so that callers can compute in between.

Conjugate pairs, forward / backward, with R replicated, I invariant, P partial, S sharded along the sequence (dim 0):

    copy_to     I->R  identity / all-reduce          reduce_from  P->I  all-reduce / identity
    gather_seq  S->R  all-gather / reduce-scatter    scatter_seq  P->S  reduce-scatter / all-gather

The left ones live inside ColumnParallelLinear, where the backward collective hides behind the weight gradient, the
right ones inside RowParallelLinear; the two that stand alone, for the embedding, are here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron3d.config import JobError
from megatron3d.flight import Message
from megatron3d.mesh import Axis

# torch 2.13 renames the tensor collectives; the old names remain with a warning.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Work = tuple[Sequence[int], dist.Work | None]
"""A running operation of the back-end, behind the world ranks it needs."""

# Bytes a rank sends: up to here all ranks swap whole tensors to add them up, one round of messages instead of two.
EXCHANGE_LIMIT = 1 << 20


class PeerError(RuntimeError):
    """Another rank did not answer: it has died, left, or stands still beyond the time-out."""


class Pending:
    """A running collective or message: wait() completes it and returns its result.

    `works` come with the world ranks that each of them needs. Holds them and, in `keep`, their send buffers, because
    gloo reads those late.
    """

    def __init__(
        self,
        works: Sequence[Work],
        finish: Callable[[], Tensor],
        keep: Sequence[Tensor] = (),
        message: Message | None = None,
    ) -> None:
        self._works = works
        self._finish = finish
        self._keep = keep
        self._message = message

    def wait(self) -> Tensor:
        """Blocks until done (on CUDA: until the stream may go on). Raises PeerError if a peer does not answer."""
        for peers, work in self._works:
            with _answering(self._message, peers):
                if work is not None:
                    work.wait()
        if self._message is not None:
            self._message.ended = time.time()
        return self._finish()


@contextlib.contextmanager
def _answering(message: Message | str | None, peers: Sequence[int]) -> Iterator[None]:
    """Turns the back-end's words about a lost connection into whom this rank was waiting for, in what."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].split(".cc:")[-1].partition("] ")[2].partition(". ")[0]
        raise PeerError(f"no answer from rank {', '.join(map(str, peers))}; {message}; {reason}") from error


def _enter(operation: str, axis: Axis, peers: Sequence[int], x: Tensor) -> Message:
    return axis.recorder.begin(operation, axis.name, tuple(peers), x.numel() * x.element_size())


def _others(axis: Axis) -> tuple[int, ...]:
    """World ranks of the other members."""
    return tuple(rank for rank in axis.ranks if rank != axis.ranks[axis.rank])


def _done(result: Tensor) -> Pending:
    return Pending((), lambda: result)


# Collectives ----------------------------------------------------------------------------------------------------------


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Concatenates the shards of all ranks along dim 0; into `out` if given (x may be its own part of it)."""
    if axis.group is None:
        return _done(x if out is None else out)
    x = x.contiguous()
    total = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if out is None else out
    message = _enter("all_gather", axis, _others(axis), x)
    if _swaps(x):
        works = _swap([x] * axis.size, list(total.chunk(axis.size)), axis)
    else:
        works = [(_others(axis), _all_gather_single(total, x, group=axis.group, async_op=True))]
    return Pending(works, lambda: total, keep=(x,), message=message)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenation of the shards of all ranks along dim 0."""
    return start_all_gather(x, axis).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Sums over ranks and leaves each rank its share of dim 0 (which the size divides); into `out` if given."""
    if axis.group is None:
        return _done(x if out is None or out.data_ptr() == x.data_ptr() else out.copy_(x))
    x = x.contiguous()
    share = x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) if out is None else out
    message = _enter("reduce_scatter", axis, _others(axis), x)
    if not axis.ordered:
        works: list[Work] = [(_others(axis), _reduce_scatter_single(share, x, group=axis.group, async_op=True))]
        return Pending(works, lambda: share, keep=(x,), message=message)
    shares = torch.empty_like(x)
    if _swaps(x):
        works = _swap(list(x.chunk(axis.size)), list(shares.chunk(axis.size)), axis)
    else:
        works = [(_others(axis), dist.all_to_all_single(shares, x, group=axis.group, async_op=True))]
    total = shares.view(axis.size, *share.shape)
    return Pending(works, lambda: _ordered_sum(total, share), keep=(x,), message=message)


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Sum over ranks; `x` may be overwritten."""
    if axis.group is None:
        return _done(x)
    x = x.contiguous()
    if not axis.ordered:
        message = _enter("all_reduce", axis, _others(axis), x)
        works = [(_others(axis), dist.all_reduce(x, group=axis.group, async_op=True))]
        return Pending(works, lambda: x, message=message)
    if x.numel() * x.element_size() * (axis.size - 1) <= EXCHANGE_LIMIT:
        gathering = start_all_gather(x.unsqueeze(0), axis)
        return Pending((), lambda: _ordered_sum(gathering.wait(), torch.empty_like(x)))
    padded = torch.nn.functional.pad(x.view(-1), (0, -x.numel() % axis.size))
    scattered = start_reduce_scatter(padded, axis)
    return Pending((), lambda: all_gather(scattered.wait(), axis)[: x.numel()].view_as(x))


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks; `x` may be overwritten."""
    return start_all_reduce(x, axis).wait()


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks, this rank's share of dim 0."""
    return start_reduce_scatter(x, axis).wait()


def _swaps(x: Tensor) -> bool:
    """Whether ranks talk pairwise. On CPUs one direct round beats gloo's ring, whose every hop waits for a thread to be
    scheduled: gathering 64 KiB over 4 ranks on 2 cores takes 1.0 ms instead of 3.2, over 8 ranks 3.7 instead of 10."""
    return x.device.type == "cpu"


def _swap(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis) -> list[Work]:
    """Sends outgoing[r] to rank r and receives incoming[r] from it, for every r; this rank's own is copied."""
    others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    works = [_receive(incoming[peer], axis, peer) for peer in others]
    works += [_send(outgoing[peer], axis, peer) for peer in others]
    if incoming[axis.rank].data_ptr() != outgoing[axis.rank].data_ptr():
        incoming[axis.rank].copy_(outgoing[axis.rank])
    return works


def _ordered_sum(shares: Tensor, out: Tensor) -> Tensor:
    """Sum over dim 0 in rank order, in at least fp32, rounded once into `out`."""
    total = shares[0].to(torch.promote_types(shares.dtype, torch.float32), copy=True)
    for share in shares[1:]:
        total += share
    return out.copy_(total)


# Messages between two ranks -------------------------------------------------------------------------------------------


def start_send(x: Tensor, axis: Axis, peer: int) -> Pending:
    """Sends to position `peer` of the axis; `x` must stay as it is until wait() returns."""
    x = x.contiguous()
    message = _enter("send", axis, (axis.ranks[peer],), x)
    return Pending([_send(x, axis, peer)], lambda: x, message=message)


def start_receive(buffer: Tensor, axis: Axis, peer: int) -> Pending:
    """Receives from position `peer` of the axis into `buffer`, whose shape and dtype must be the sender's."""
    message = _enter("receive", axis, (axis.ranks[peer],), buffer)
    return Pending([_receive(buffer, axis, peer)], lambda: buffer, message=message)


def _send(x: Tensor, axis: Axis, peer: int) -> Work:
    rank = axis.ranks[peer]
    with _answering(f"sending over {axis.name}", (rank,)):
        return (rank,), dist.isend(x, rank, group=axis.group)


def _receive(buffer: Tensor, axis: Axis, peer: int) -> Work:
    rank = axis.ranks[peer]
    with _answering(f"receiving over {axis.name}", (rank,)):
        return (rank,), dist.irecv(buffer, rank, group=axis.group)


def exchange(x: Tensor, axis: Axis, peer: int) -> Tensor:
    """Swaps equally shaped tensors with one peer; the lower rank sends first, so that blocking back-ends meet."""
    buffer = torch.empty_like(x)
    if axis.rank < peer:
        start_send(x, axis, peer).wait()
        return start_receive(buffer, axis, peer).wait()
    received = start_receive(buffer, axis, peer).wait()
    start_send(x, axis, peer).wait()
    return received


# Decisions ------------------------------------------------------------------------------------------------------------


def gather_objects(value: Any, control: Axis) -> list[Any]:
    """Small Python values of all ranks, in rank order, on every rank."""
    if control.group is None:
        return [value]
    values: list[Any] = [None] * control.size
    with _recorded("gather_objects", control):
        dist.all_gather_object(values, value, group=control.group)
    return values


def gather_to_first(value: Any, control: Axis) -> list[Any]:
    """Python values of all ranks, in rank order, on the first rank; an empty list on the others."""
    if control.group is None:
        return [value]
    values: list[Any] | None = [None] * control.size if control.rank == 0 else None
    with _recorded("gather_to_first", control):
        dist.gather_object(value, values, dst=control.ranks[0], group=control.group)
    return values or []


@contextlib.contextmanager
def _recorded(operation: str, control: Axis) -> Iterator[None]:
    """Enters a blocking exchange of Python values."""
    message = control.recorder.begin(operation, control.name, _others(control), 0)
    with _answering(message, _others(control)):
        yield
    message.ended = time.time()


def agree(problem: str | None, control: Axis) -> None:
    """Meets all ranks; if any of them has a problem, every rank raises `JobError` with the first one's words."""
    for rank, found in enumerate(gather_objects(problem, control)):
        if found is not None:
            raise JobError(f"rank {rank}: {found}")


# Autograd pairs -------------------------------------------------------------------------------------------------------


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _ScatterSeq(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.axis), None


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """P->I: sum over ranks; identity backward."""
    return x if axis.group is None else _ReduceFrom.apply(x, axis)


def scatter_seq(x: Tensor, axis: Axis) -> Tensor:
    """P->S: (S, ...) summed over ranks to (S / size, ...); all-gather backward."""
    return x if axis.group is None else _ScatterSeq.apply(x, axis)
