"""Every collective and every message; each takes an `Axis` and is the identity at size 1.

The one idea: sums run in rank order. A ring sum's low bits depend on where an element lies in the buffer; an exchange
followed by a local sum (rank 0 + rank 1 + ...) depends on the values alone, so that layouts can be compared bit by bit.
Collectives come as `start_*`, which return a `Pending` to wait for, so that callers can compute in between. Those of
CPU ranks on one machine go through memory that they share (board.py), as far as they fit there.

Conjugate pairs, forward / backward, with R replicated, I invariant, P partial, S sharded along the sequence (dim 0):

    copy_to     I->R  identity / all-reduce          reduce_from  P->I  all-reduce / identity
    gather_seq  S->R  all-gather / reduce-scatter    scatter_seq  P->S  reduce-scatter / all-gather

The left ones live inside ColumnParallelLinear, where the backward collective hides behind the weight gradient, the
right ones inside RowParallelLinear; the two that stand alone, for the embedding, are here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron3d.board import Notice
from megatron3d.config import JobError
from megatron3d.flight import Message, answering
from megatron3d.mesh import Axis

# torch 2.13 renames the tensor collectives; the old names remain with a warning.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Work = tuple[Sequence[int], dist.Work | Notice | None]
"""A running operation of the back-end, or a notice on the board, behind the world ranks it needs."""

# Bytes a rank sends: up to here all ranks swap whole tensors to add them up, one round of messages instead of two.
EXCHANGE_LIMIT = 1 << 20


class Pending:
    """A running collective or message: wait() completes it, once, and returns its result.

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
        self._result: Tensor | None = None
        for _, work in works:
            if isinstance(work, Notice):
                work.read = self.wait

    def wait(self) -> Tensor:
        """Blocks until done (on CUDA: until the stream may go on). Raises PeerError if a peer does not answer."""
        if self._result is None:
            for peers, work in self._works:
                with answering(self._message, peers):
                    if work is not None:
                        work.wait()
            if self._message is not None:
                self._message.ended = time.time()
            self._result = self._finish()
            for _, work in self._works:
                if isinstance(work, Notice):
                    work.taken()
        return self._result


def _enter(operation: str, axis: Axis, peers: Sequence[int], x: Tensor) -> Message:
    return axis.recorder.begin(operation, axis.name, tuple(peers), x.numel() * x.element_size())


def _done(result: Tensor) -> Pending:
    return Pending((), lambda: result)


# Collectives ----------------------------------------------------------------------------------------------------------


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Concatenates the shards of all ranks along dim 0; into `out` if given (x may be its own part of it)."""
    if axis.group is None:
        return _done(x if out is None else out)
    x = x.contiguous()
    total = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if out is None else out
    message = _enter("all_gather", axis, axis.others, x)
    if notice := _post(x, axis):
        return Pending([(axis.others, notice)], lambda: _copy_all(notice, total, axis), message=message)
    if _swaps(x):
        works = _swap([x] * axis.size, list(total.chunk(axis.size)), axis, message)
    else:
        works = [(axis.others, _all_gather_single(total, x, group=axis.group, async_op=True))]
    return Pending(works, lambda: total, keep=(x,), message=message)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenation of the shards of all ranks along dim 0."""
    return start_all_gather(x, axis).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Sums over ranks and leaves each rank its share of dim 0 (which the size divides); into `out` if given, which may
    be this rank's share of x."""
    if axis.group is None:
        return _done(x if out is None or out.data_ptr() == x.data_ptr() else out.copy_(x))
    x = x.contiguous()
    share = x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) if out is None else out
    message = _enter("reduce_scatter", axis, axis.others, x)
    if axis.ordered:
        swapping, parts = _meet(x, axis, message, cut=True)
        return Pending(swapping, lambda: _sum_in_order(parts, share), keep=(x,), message=message)
    summing = _reduce_scatter_single(share, x, group=axis.group, async_op=True)
    return Pending([(axis.others, summing)], lambda: share, keep=(x,), message=message)


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Sum over ranks; `x` may be overwritten."""
    if axis.group is None:
        return _done(x)
    x = x.contiguous()
    if not axis.ordered:
        message = _enter("all_reduce", axis, axis.others, x)
        works = [(axis.others, dist.all_reduce(x, group=axis.group, async_op=True))]
        return Pending(works, lambda: x, message=message)
    if x.numel() * x.element_size() * (axis.size - 1) <= EXCHANGE_LIMIT:
        message = _enter("all_reduce", axis, axis.others, x)
        swapping, parts = _meet(x, axis, message, cut=False)
        return Pending(swapping, lambda: _sum_in_order(parts, x), message=message)
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


def _swap(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis, message: Message) -> list[Work]:
    """Sends outgoing[r] to rank r and receives incoming[r] from it, for every r; this rank's own is copied."""
    others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    works = [_receive(incoming[peer], axis, peer, message) for peer in others]
    works += [_send(outgoing[peer], axis, peer, message) for peer in others]
    if incoming[axis.rank].data_ptr() != outgoing[axis.rank].data_ptr():
        incoming[axis.rank].copy_(outgoing[axis.rank])
    return works


def _post(x: Tensor, axis: Axis) -> Notice | None:
    """Puts x up where all members can read it, if there is such a place and room in it."""
    return axis.board.post(x) if axis.board is not None else None


def _copy_all(notice: Notice, total: Tensor, axis: Axis) -> Tensor:
    """What all ranks have put up, one after the other."""
    for rank, chunk in enumerate(total.chunk(axis.size)):
        part = notice.of(rank)
        if chunk.data_ptr() != part.data_ptr():
            chunk.copy_(part)
    return total


def _meet(x: Tensor, axis: Axis, message: Message, *, cut: bool) -> tuple[list[Work], list[Tensor]]:
    """Meets the other ranks; returns what each of them will have for this one, in rank order: all of its x, or with
    `cut` this rank's share of it. This rank's own is not copied."""
    if notice := _post(x, axis):
        wholes = [notice.of(rank) for rank in range(axis.size)]
        return [(axis.others, notice)], [whole.chunk(axis.size)[axis.rank] if cut else whole for whole in wholes]
    outgoing = x.chunk(axis.size) if cut else [x] * axis.size
    own = outgoing[axis.rank]
    if _swaps(own):
        incoming = [own if rank == axis.rank else torch.empty_like(own) for rank in range(axis.size)]
        return _swap(outgoing, incoming, axis, message), incoming
    incoming = [torch.empty_like(own) for _ in outgoing]
    return [(axis.others, dist.all_to_all(incoming, list(outgoing), group=axis.group, async_op=True))], incoming


def _sum_in_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Sum of two or more parts in rank order, in at least fp32, rounded once into `out`, which may be one of them."""
    *most, last = parts
    wide = torch.promote_types(last.dtype, torch.float32)
    return torch.add(reduce(torch.add, (part.to(wide) for part in most)), last, out=out)


# Messages between two ranks -------------------------------------------------------------------------------------------


def start_send(x: Tensor, axis: Axis, peer: int) -> Pending:
    """Sends to position `peer` of the axis; `x` must stay as it is until wait() returns."""
    x = x.contiguous()
    message = _enter("send", axis, (axis.ranks[peer],), x)
    return Pending([_send(x, axis, peer, message)], lambda: x, message=message)


def start_receive(buffer: Tensor, axis: Axis, peer: int) -> Pending:
    """Receives from position `peer` of the axis into `buffer`, whose shape and dtype must be the sender's."""
    message = _enter("receive", axis, (axis.ranks[peer],), buffer)
    return Pending([_receive(buffer, axis, peer, message)], lambda: buffer, message=message)


def _send(x: Tensor, axis: Axis, peer: int, message: Message) -> Work:
    rank = axis.ranks[peer]
    with answering(message, (rank,)):
        return (rank,), dist.isend(x, rank, group=axis.group)


def _receive(buffer: Tensor, axis: Axis, peer: int, message: Message) -> Work:
    rank = axis.ranks[peer]
    with answering(message, (rank,)):
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
    with control.recorder.waiting("gather_objects", control.name, control.others):
        dist.all_gather_object(values, value, group=control.group)
    return values


def gather_to_first(value: Any, control: Axis) -> list[Any]:
    """Python values of all ranks, in rank order, on the first rank; an empty list on the others."""
    if control.group is None:
        return [value]
    values: list[Any] | None = [None] * control.size if control.rank == 0 else None
    with control.recorder.waiting("gather_to_first", control.name, control.others):
        dist.gather_object(value, values, dst=control.ranks[0], group=control.group)
    return values or []


def agree(problem: str | None, control: Axis) -> None:
    """Meets all ranks; if any of them has a problem, every rank raises `JobError` with the first one's words."""
    for rank, found in enumerate(gather_objects(problem, control)):
        if found is not None:
            raise JobError(f"rank {rank}: {found}")


def on_host(x: Tensor, axis: Axis) -> list[float]:
    """The values of a 1-d tensor that came over `axis`. A GPU's host waits here for messages whose wait() has long
    returned; so that is entered as one, or nobody could say what a rank is stuck in."""
    message = _enter("host read", axis, axis.others, x) if x.device.type != "cpu" else None
    values: list[float] = x.tolist()
    if message is not None:
        message.ended = time.time()
    return values


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
