"""Pipeline schedules: who computes and sends what, in which order.

The one idea: a schedule is data, one list of Ops per pipeline rank. Generators write the compute passes, `with_comms`
adds the messages, `verify` proves that the lists are complete, consistent and free of deadlock, `simulate` times them.
pipeline.py executes a list and decides nothing; the planner simulates the same lists.

A stage is a chunk of consecutive layers, numbered in depth order; a placement says which rank holds which stage, so a
rank may hold several. A forward pass F(s) needs F(s - 1); a backward pass B(s) needs F(s) and B(s + 1). Neighbours on
one rank hand over directly, others through a message:

    send_forward(s)   -> recv_forward(s + 1)     the output of stage s
    send_backward(s)  -> recv_backward(s - 1)    the gradient of the input of stage s
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "send_forward", "recv_forward", "send_backward", "recv_backward"]


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of a rank's list. The stage is the rank's own, also of a message."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


Lists = list[list[Op]]
"""A schedule: the Ops of each rank, in the order in which it takes them."""


class Span(NamedTuple):
    """When an Op runs, in the units of the durations it was simulated with."""

    start: float
    end: float


# Generators: compute passes only


def split_layers(num_layers: int, stages: int, head: float = 0.0) -> tuple[int, ...]:
    """Layers per stage, so that the slowest stage is as fast as it can be, and else as even as possible, earlier stages
    first: 7 over 4 is (2, 2, 2, 1). `head` is the work of the last stage beside its layers, in layers: a head of 3
    makes 4 over 2 (3, 1), and 4 over 4 (2, 1, 1, 0). Every stage has something: a layer at least, or the head."""
    if num_layers < stages - (head > 0):
        raise ValueError(f"{num_layers} layers cannot fill {stages} stages")
    if stages == 1:
        return (num_layers,)

    def others(last: int) -> int:  # falls with `last`
        return -(-(num_layers - last) // (stages - 1))

    choices = range(0 if head else 1, num_layers - stages + 2)
    crossing = bisect_left(choices, True, key=lambda last: last + head >= others(last))
    around = choices[max(0, crossing - 1) : crossing + 1]
    best = min(max(others(last), last + head) for last in around)
    least = bisect_left(choices, True, key=lambda last: others(last) <= best)
    most = bisect_right(choices, best, key=lambda last: last + head) - 1
    last = min(max(num_layers // stages, choices[least]), choices[most])
    share, rest = divmod(num_layers - last, stages - 1)
    return (*(share + (stage < rest) for stage in range(stages - 1)), last)


def gpipe(stages: int, microbatches: int) -> Lists:
    """All forward passes, then all backward passes: simple, and holds every microbatch at once."""
    return [_passes("F", stage, microbatches) + _passes("B", stage, microbatches) for stage in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> Lists:
    """Fill the pipeline, then alternate: stage s of p holds at most p - s microbatches."""
    lists = []
    for stage in range(stages):
        forward, backward = _passes("F", stage, microbatches), _passes("B", stage, microbatches)
        warmup = min(microbatches, stages - stage - 1)
        steady = [op for pair in zip(forward[warmup:], backward, strict=False) for op in pair]
        lists.append(forward[:warmup] + steady + backward[microbatches - warmup :])
    return lists


def forward_only(stages: int, microbatches: int) -> Lists:
    """Forward passes alone, for evaluation."""
    return [_passes("F", stage, microbatches) for stage in range(stages)]


def build(name: Literal["gpipe", "1f1b", "forward"], stages: int, microbatches: int) -> Lists:
    """The named schedule with its messages, verified; stage s is placed on rank s."""
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"a pipeline needs stages and microbatches, got {stages} stages and {microbatches} microbatches"
        )
    generate = {"gpipe": gpipe, "1f1b": one_f_one_b, "forward": forward_only}[name]
    placement = range(stages)
    lists = with_comms(generate(stages, microbatches), placement)
    verify(lists, placement, stages, microbatches, backward=name != "forward")
    return lists


def _passes(kind: Literal["F", "B"], stage: int, microbatches: int) -> list[Op]:
    return [Op(kind, stage, microbatch) for microbatch in range(microbatches)]


# What depends on what


def other_end(op: Op) -> Op:
    """The receive that a send meets, or the send that a receive meets."""
    match op.kind:
        case "send_forward":
            return Op("recv_forward", op.stage + 1, op.microbatch)
        case "recv_forward":
            return Op("send_forward", op.stage - 1, op.microbatch)
        case "send_backward":
            return Op("recv_backward", op.stage - 1, op.microbatch)
        case "recv_backward":
            return Op("send_backward", op.stage + 1, op.microbatch)
    raise ValueError(f"{op} is no message")


def _is_pass(op: Op) -> bool:
    return op.kind in ("F", "B")


def _inputs(op: Op, stages: int) -> list[Op]:
    """The passes, on whatever rank, whose results a pass works on."""
    neighbour = op.stage + (-1 if op.kind == "F" else 1)
    inputs = [Op("F", op.stage, op.microbatch)] if op.kind == "B" else []
    if 0 <= neighbour < stages:
        inputs.append(Op(op.kind, neighbour, op.microbatch))
    return inputs


def _send_after(op: Op, placement: Sequence[int]) -> Op | None:
    """The message that carries a pass's result away; None at the pipeline's end or if the next stage is here."""
    neighbour = op.stage + (1 if op.kind == "F" else -1)
    if not 0 <= neighbour < len(placement) or placement[neighbour] == placement[op.stage]:
        return None
    return Op("send_forward" if op.kind == "F" else "send_backward", op.stage, op.microbatch)


def _needs(op: Op, placement: Sequence[int]) -> list[Op]:
    """The Ops that must stand before `op` in its own rank's list."""
    if op.kind.startswith("recv"):
        return []
    if op.kind.startswith("send"):
        return [Op("F" if op.kind == "send_forward" else "B", op.stage, op.microbatch)]
    here = placement[op.stage]
    receive: Kind = "recv_forward" if op.kind == "F" else "recv_backward"
    return [
        source if placement[source.stage] == here else Op(receive, op.stage, op.microbatch)
        for source in _inputs(op, len(placement))
    ]


# Messages


def with_comms(lists: Sequence[Sequence[Op]], placement: Sequence[int]) -> Lists:
    """The lists of passes with their sends and receives.

    Passes are taken in the order in which they would end if a backward pass took twice a forward pass. Each pass enters
    its rank's list followed by its send, and the receive enters the receiver's list at that same moment. So all lists
    follow one global order, in which no one can wait for something later: that order is free of deadlock.
    """
    spans = simulate(lists, placement, _typical_duration)
    complete: Lists = [[] for _ in lists]
    for op in sorted(spans, key=lambda op: (spans[op].end, placement[op.stage])):
        complete[placement[op.stage]].append(op)
        if send := _send_after(op, placement):
            receive = other_end(send)
            complete[placement[send.stage]].append(send)
            complete[placement[receive.stage]].append(receive)
    return complete


# Proof


def verify(
    lists: Sequence[Sequence[Op]],
    placement: Sequence[int],
    stages: int,
    microbatches: int,
    backward: bool = True,
) -> None:
    """Prove that the lists run the whole batch; raise a ValueError that names the Op and the rank if they do not.

    Proved: every pass and message occurs exactly once and on its rank; everything stands after what it needs; the
    backward passes of a stage run in microbatch order (their sums are then the same in every schedule); between two
    ranks and in one direction messages are received in the order they are sent (NCCL knows no tags); and the lists run
    to their ends if a send blocks until the receive has been posted, while a receive blocks only the pass that uses it.
    """
    if len(placement) != stages or len(lists) != max(placement) + 1:
        raise ValueError(f"{len(lists)} lists and placement {tuple(placement)} do not fit {stages} stages")
    _check_members(lists, placement, microbatches, ("F", "B") if backward else ("F",))
    for rank, ops in enumerate(lists):
        _check_order(rank, ops, placement)
    _check_fifo(lists, placement)
    _check_progress(lists, placement)


def _check_members(
    lists: Sequence[Sequence[Op]], placement: Sequence[int], microbatches: int, kinds: Sequence[Literal["F", "B"]]
) -> None:
    expected: list[set[Op]] = [set() for _ in lists]
    for kind, stage, microbatch in product(kinds, range(len(placement)), range(microbatches)):
        op = Op(kind, stage, microbatch)
        send = _send_after(op, placement)
        for member in (op, send, other_end(send)) if send else (op,):
            expected[placement[member.stage]].add(member)
    for rank, ops in enumerate(lists):
        for op, count in Counter(ops).items():
            if op not in expected[rank]:
                raise ValueError(f"{op} has no place on rank {rank}")
            if count > 1:
                raise ValueError(f"{op} occurs {count} times on rank {rank}")
        if missing := expected[rank] - set(ops):
            raise ValueError(f"{min(missing, key=str)} is missing on rank {rank}")


def _check_order(rank: int, ops: Sequence[Op], placement: Sequence[int]) -> None:
    seen: set[Op] = set()
    next_backward: Counter[int] = Counter()
    for op in ops:
        for need in _needs(op, placement):
            if need not in seen:
                raise ValueError(f"{op} stands before {need} on rank {rank}")
        if op.kind == "B":
            if op.microbatch != next_backward[op.stage]:
                raise ValueError(f"{op} is out of microbatch order on rank {rank}")
            next_backward[op.stage] += 1
        seen.add(op)


def _check_fifo(lists: Sequence[Sequence[Op]], placement: Sequence[int]) -> None:
    """Sends of one rank to another in one direction, in order, against the receives there."""
    sent: dict[tuple[int, int, str], deque[Op]] = {}
    for rank, ops in enumerate(lists):
        for op in ops:
            if op.kind.startswith("send"):
                receive = other_end(op)
                sent.setdefault((rank, placement[receive.stage], receive.kind), deque()).append(receive)
    for rank, ops in enumerate(lists):
        for op in ops:
            if op.kind.startswith("recv"):
                due = sent[placement[other_end(op).stage], rank, op.kind].popleft()
                if op != due:
                    raise ValueError(f"{op} stands on rank {rank} where {due} would arrive")


def _check_progress(lists: Sequence[Sequence[Op]], placement: Sequence[int]) -> None:
    done: set[Op] = set()  # passes run, receives posted, sends delivered

    def may_pass(op: Op) -> bool:
        if op.kind.startswith("send"):
            return other_end(op) in done
        return all(need in done if _is_pass(need) else other_end(need) in done for need in _needs(op, placement))

    position = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            while position[rank] < len(ops) and may_pass(ops[position[rank]]):
                done.add(ops[position[rank]])
                position[rank] += 1
                moved = True
    stuck = [f"rank {r} at {ops[position[r]]}" for r, ops in enumerate(lists) if position[r] < len(ops)]
    if stuck:
        raise ValueError("deadlock: " + ", ".join(stuck))


# Time and memory


def _typical_duration(op: Op) -> float:
    return {"F": 1.0, "B": 2.0}[op.kind]


def simulate(
    lists: Sequence[Sequence[Op]],
    placement: Sequence[int],
    durations: Callable[[Op], float],
    latency: float = 0.0,
) -> dict[Op, Span]:
    """When each pass starts and ends: every rank runs its passes in its order, each as soon as its inputs are there.

    `durations` gives the time of a pass; a result reaches another rank `latency` after the pass that made it. Messages
    in the lists take no time of their rank. Raises ValueError if some pass can never start.
    """
    waiting = [deque(filter(_is_pass, ops)) for ops in lists]
    spans: dict[Op, Span] = {}
    free = [0.0] * len(lists)
    while any(waiting):
        ready = [r for r, ops in enumerate(waiting) if ops and all(i in spans for i in _inputs(ops[0], len(placement)))]
        if not ready:
            stuck = [f"rank {rank} at {ops[0]}" for rank, ops in enumerate(waiting) if ops]
            raise ValueError("no pass can start: " + ", ".join(stuck))
        for rank in ready:
            op = waiting[rank].popleft()
            arrivals = [
                spans[source].end + latency * (placement[source.stage] != rank)
                for source in _inputs(op, len(placement))
            ]
            start = max(free[rank], *arrivals, 0.0)
            free[rank] = start + durations(op)
            spans[op] = Span(start, free[rank])
    return spans


def bubble_fraction(spans: dict[Op, Span], ranks: int) -> float:
    """Share of all ranks' time, from the first start to the last end, in which nothing is computed."""
    total = max(span.end for span in spans.values()) - min(span.start for span in spans.values())
    return 1 - sum(span.end - span.start for span in spans.values()) / (ranks * total)


def in_flight(ops: Sequence[Op]) -> int:
    """Most microbatches of one rank, over all its stages, that have run forward and still await their backward."""
    held = peak = 0
    awaited = {(op.stage, op.microbatch) for op in ops if op.kind == "B"}
    for op in ops:
        if (op.stage, op.microbatch) in awaited:
            held += {"F": 1, "B": -1}.get(op.kind, 0)
            peak = max(peak, held)
    return peak


def render(
    lists: Sequence[Sequence[Op]],
    placement: Sequence[int],
    durations: Callable[[Op], float] = _typical_duration,
    latency: float = 0.0,
) -> str:
    """A chart of `simulate`: a row per rank, time to the right; F3 is microbatch 3 going forward, dots are idle."""
    spans = simulate(lists, placement, durations, latency)
    widest = max(len(f"{op.kind}{op.microbatch}") for op in spans) + 1
    columns = widest / min(span.end - span.start for span in spans.values())  # per unit of time
    rows = ["." * round(columns * max(span.end for span in spans.values()))] * len(lists)
    for op, span in spans.items():
        start, end = round(columns * span.start), round(columns * span.end)
        box = f"{op.kind}{op.microbatch}".ljust(end - start - 1, "-") + " "
        row = rows[placement[op.stage]]
        rows[placement[op.stage]] = row[:start] + box + row[end:]
    return "\n".join(f"rank {rank:<3}{row.rstrip()}" for rank, row in enumerate(rows))
