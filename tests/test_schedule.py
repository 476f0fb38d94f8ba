"""Schedules: every one of a grid verified, replayed by an independent interpreter, and broken on purpose."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import pytest

from megatron3d.schedule import (
    Kind,
    Lists,
    Op,
    bubble_fraction,
    build,
    forward_only,
    gpipe,
    in_flight,
    one_f_one_b,
    other_end,
    render,
    simulate,
    split_layers,
    verify,
    with_comms,
)

NAMES = ("gpipe", "1f1b", "forward")
GRID = [(stages, microbatches) for stages in range(1, 7) for microbatches in range(1, 13)]


class Broken(Exception):
    """The interpreter met a wrong value or could not go on."""


def interpret(lists: Sequence[Sequence[Op]], placement: Sequence[int], microbatches: int, backward: bool) -> None:
    """Run the lists with values in place of activations, under blocking rendezvous without tags.

    The result of a forward pass is ("F", stage, microbatch), that of a backward pass likewise; each pass checks what it
    is given. A send blocks until its peer has posted a receive and fills the oldest one; knows nothing of verify().
    """
    results: list[dict[tuple[str, int, int], object]] = [{} for _ in lists]
    posted: dict[tuple[int, int, str], deque[Op]] = defaultdict(deque)
    arrived: dict[Op, object] = {}
    last = len(placement) - 1
    backwards: dict[int, list[int]] = defaultdict(list)

    def step(rank: int, op: Op) -> bool:
        """Take op if it can be taken now."""
        kind, stage, microbatch = op.kind, op.stage, op.microbatch
        if placement[stage] != rank:
            raise Broken("wrong rank")
        direction = "forward" if kind in ("F", "send_forward", "recv_forward") else "backward"
        source = stage - 1 if direction == "forward" else stage + 1
        target = stage + 1 if direction == "forward" else stage - 1
        letter = "F" if direction == "forward" else "B"
        if kind.startswith("recv"):
            posted[placement[source], rank, direction].append(op)
            return True
        if kind.startswith("send"):
            queue = posted[rank, placement[target], direction]
            if not queue:
                return False
            if (letter, stage, microbatch) not in results[rank]:
                raise Broken("nothing to send")
            arrived[queue.popleft()] = results[rank][letter, stage, microbatch]
            return True
        if 0 <= source <= last:
            if placement[source] == rank:
                given = results[rank].get((letter, source, microbatch))
            else:
                receive = Op(f"recv_{direction}", stage, microbatch)
                if receive in itertools.chain(*posted.values()):
                    return False
                given = arrived.pop(receive, None)
            if given != (letter, source, microbatch):
                raise Broken(f"{op} was given {given}")
        if kind == "B":
            if ("F", stage, microbatch) not in results[rank]:
                raise Broken("backward before forward")
            backwards[stage].append(microbatch)
        if (letter, stage, microbatch) in results[rank]:
            raise Broken("twice")
        results[rank][letter, stage, microbatch] = (letter, stage, microbatch)
        return True

    position, moved = [0] * len(lists), True
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            if position[rank] < len(ops) and step(rank, ops[position[rank]]):
                position[rank] += 1
                moved = True
    if any(position[rank] < len(ops) for rank, ops in enumerate(lists)):
        raise Broken("deadlock")
    passes = (1 + backward) * len(placement) * microbatches
    if sum(map(len, results)) != passes or arrived or any(posted.values()):
        raise Broken("work left over")
    if any(order != sorted(order) for order in backwards.values()):
        raise Broken("backward order")


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_is_verified_and_runs(name: str) -> None:
    for stages, microbatches in GRID:
        lists = build(name, stages, microbatches)
        interpret(lists, range(stages), microbatches, backward=name != "forward")
        passes = 1 if name == "forward" else 2
        assert sum(map(len, lists)) == passes * (stages * microbatches + 2 * (stages - 1) * microbatches)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_fewer_microbatches_than_stages(name: str, microbatches: int) -> None:
    """PIPE-01: pp 4 with 1, 2 and 3 microbatches runs to its end under blocking sends."""
    interpret(build(name, 4, microbatches), range(4), microbatches, backward=name != "forward")


def test_memory() -> None:
    for stages, microbatches in GRID:
        for stage in range(stages):
            assert in_flight(build("1f1b", stages, microbatches)[stage]) == min(microbatches, stages - stage)
            assert in_flight(build("gpipe", stages, microbatches)[stage]) == microbatches
            assert in_flight(build("forward", stages, microbatches)[stage]) == 0


def duration(op: Op) -> float:
    return {"F": 1.0, "B": 2.0}[op.kind]


@pytest.mark.parametrize("name", NAMES)
def test_bubble_has_its_closed_form(name: str) -> None:
    """(p - 1) / (m + p - 1), for GPipe and 1F1B alike."""
    for stages, microbatches in GRID:
        spans = simulate(build(name, stages, microbatches), range(stages), duration)
        expected = (stages - 1) / (microbatches + stages - 1)
        assert bubble_fraction(spans, stages) == pytest.approx(expected, abs=1e-12)


def test_simulate_by_hand() -> None:
    """Two stages, two microbatches, the second stage slower, latency 0.5."""
    spans = simulate(build("1f1b", 2, 2), range(2), lambda op: {"F": 1, "B": 2}[op.kind] * (1 + op.stage), latency=0.5)
    expected = {
        Op("F", 0, 0): (0, 1),
        Op("F", 0, 1): (1, 2),
        Op("F", 1, 0): (1.5, 3.5),
        Op("B", 1, 0): (3.5, 7.5),
        Op("F", 1, 1): (7.5, 9.5),
        Op("B", 0, 0): (8, 10),
        Op("B", 1, 1): (9.5, 13.5),
        Op("B", 0, 1): (14, 16),
    }
    assert spans == expected
    assert bubble_fraction(spans, 2) == pytest.approx(1 - (6 + 12) / 32)


def test_passes_are_those_of_the_textbook() -> None:
    def text(ops: Sequence[Op]) -> str:
        return " ".join(f"{op.kind}{op.microbatch}" for op in ops)

    assert [text(ops) for ops in one_f_one_b(3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [text(ops) for ops in gpipe(2, 2)] == ["F0 F1 B0 B1"] * 2
    assert [text(ops) for ops in forward_only(2, 2)] == ["F0 F1"] * 2


def test_receives_are_posted_before_the_pass_in_progress_ends() -> None:
    """A message of the last stage arrives while its peer computes: the receive stands before that pass, not after."""
    lists = with_comms([[Op("F", 0, 0), Op("F", 0, 1)], [Op("F", 1, 0), Op("F", 1, 1)]], range(2))
    assert lists[1] == [
        Op("recv_forward", 1, 0),
        Op("recv_forward", 1, 1),
        Op("F", 1, 0),
        Op("F", 1, 1),
    ]


# Breaking them


def variants(lists: Lists) -> Iterator[tuple[str, Lists]]:
    """Every list with one op dropped, doubled, renumbered, moved to another stage, or swapped with its neighbour."""
    for rank, ops in enumerate(lists):
        for i, op in enumerate(ops):
            renumbered = Op(op.kind, op.stage, (op.microbatch + 1) % 4)
            changes = {
                "drop": [*ops[:i], *ops[i + 1 :]],
                "double": [*ops[: i + 1], *ops[i:]],
                "renumber": [*ops[:i], renumbered, *ops[i + 1 :]],
                "restage": [*ops[:i], Op(op.kind, (op.stage + 1) % 3, op.microbatch), *ops[i + 1 :]],
                "swap": [*ops[:i], *ops[i : i + 2][::-1], *ops[i + 2 :]],
            }
            for change, mutated in changes.items():
                if mutated != ops:
                    yield change, [mutated if r == rank else other for r, other in enumerate(lists)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_verify_refuses_just_what_does_not_run(name: str) -> None:
    """Over all single mutations verify and the interpreter agree, and all but harmless swaps are refused."""
    accepted = 0
    for change, lists in variants(build(name, 3, 4)):
        try:
            interpret(lists, range(3), 4, backward=True)
            runs = True
        except Broken:
            runs = False
        if runs:
            assert change == "swap"
            verify(lists, range(3), 3, 4)
            accepted += 1
        else:
            with pytest.raises(ValueError, match=r"rank \d"):
                verify(lists, range(3), 3, 4)
    assert accepted > 0


def swapped(ops: Sequence[Op], one: tuple[Kind, int], other: tuple[Kind, int]) -> list[Op]:
    """The list with two ops, given as (kind, microbatch), exchanged."""
    i, j = ([(op.kind, op.microbatch) for op in ops].index(which) for which in (one, other))
    mutated = list(ops)
    mutated[i], mutated[j] = ops[j], ops[i]
    return mutated


@pytest.mark.parametrize(
    ("rank", "one", "other", "message"),
    [
        (1, ("B", 1), ("B", 2), r"B\(stage 1, microbatch 2\) .*rank 1"),
        (2, ("F", 0), ("B", 0), r"B\(stage 2, microbatch 0\) stands before F\(stage 2, microbatch 0\) on rank 2"),
        (1, ("recv_forward", 0), ("F", 0), r"F\(stage 1, microbatch 0\) stands before recv_forward.* on rank 1"),
        (0, ("F", 0), ("send_forward", 0), r"send_forward\(stage 0, microbatch 0\) stands before F.* on rank 0"),
        (1, ("recv_forward", 0), ("recv_forward", 1), r"recv_forward\(stage 1, microbatch 1\) stands on rank 1 where"),
    ],
)
def test_refusals_name_the_op_and_the_rank(
    rank: int, one: tuple[Kind, int], other: tuple[Kind, int], message: str
) -> None:
    lists = build("gpipe", 3, 4)
    lists[rank] = swapped(lists[rank], one, other)
    with pytest.raises(ValueError, match=message):
        verify(lists, range(3), 3, 4)


def test_backward_order_is_refused_even_if_all_ranks_agree_on_it() -> None:
    """Such a schedule runs, but adds gradients in another order: its sums would differ in their last bits."""
    lists = [[*ops[:4], *reversed(ops[4:])] for ops in gpipe(2, 4)]
    with pytest.raises(ValueError, match=r"B\(stage 0, microbatch 3\) is out of microbatch order on rank 0"):
        verify(with_comms(lists, range(2)), range(2), 2, 4)


def test_deadlock_is_refused() -> None:
    """Each pass between its own receive and send, the obvious way to write 1F1B, hangs where both neighbours send."""
    lists: Lists = []
    for stage, ops in enumerate(one_f_one_b(2, 3)):
        lists.append([])
        for op in ops:
            forward = op.kind == "F"
            receives, sends = (stage == 1) == forward, (stage == 0) == forward
            before = [Op("recv_forward" if forward else "recv_backward", stage, op.microbatch)] * receives
            after = [Op("send_forward" if forward else "send_backward", stage, op.microbatch)] * sends
            lists[-1] += [*before, op, *after]
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at send_forward.*rank 1 at send_backward"):
        verify(lists, range(2), 2, 3)
    with pytest.raises(Broken, match="deadlock"):
        interpret(lists, range(2), 3, backward=True)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="0 microbatches"):
        build("gpipe", 2, 0)
    with pytest.raises(ValueError, match="do not fit 3 stages"):
        verify(build("gpipe", 2, 2), range(2), 3, 2)
    with pytest.raises(ValueError, match="has no place on rank 0"):
        verify(build("gpipe", 2, 2), range(2), 2, 2, backward=False)
    with pytest.raises(ValueError, match=r"no pass can start: rank 0 at B\(stage 0, microbatch 0\)"):
        simulate([[Op("B", 0, 0), Op("F", 0, 0)]], [0], duration)
    with pytest.raises(ValueError, match="no message"):
        other_end(Op("F", 0, 0))


@pytest.mark.parametrize("placement", [(0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 2, 2)])
def test_several_stages_on_a_rank(placement: tuple[int, ...]) -> None:
    """Chunks: passes in depth order for each microbatch; neighbours on one rank exchange no message."""
    lists: Lists = [[] for _ in range(max(placement) + 1)]
    for kind, microbatch in itertools.product(("F", "B"), range(4)):
        for stage in range(len(placement))[:: 1 if kind == "F" else -1]:
            lists[placement[stage]].append(Op(kind, stage, microbatch))
    complete = with_comms(lists, placement)
    verify(complete, placement, len(placement), 4)
    interpret(complete, placement, 4, backward=True)
    hops = sum(a != b for a, b in itertools.pairwise(placement))
    assert sum(map(len, complete)) - sum(map(len, lists)) == 2 * 2 * 4 * hops


def test_render() -> None:
    assert render(build("1f1b", 2, 2), range(2)).splitlines() == [
        "rank 0  F0 F1 ......B0--- ...B1---",
        "rank 1  ...F0 B0--- F1 B1--- ......",
    ]


def test_split_layers() -> None:
    assert split_layers(7, 4) == (2, 2, 2, 1)
    assert split_layers(5, 2) == (3, 2)
    for layers, stages in itertools.product(range(1, 40), range(1, 9)):
        if layers < stages:
            with pytest.raises(ValueError, match=f"{layers} layers cannot fill {stages} stages"):
                split_layers(layers, stages)
            continue
        split = split_layers(layers, stages)
        assert sum(split) == layers and len(split) == stages
        assert max(split) - min(split) <= 1 and list(split) == sorted(split, reverse=True)


@pytest.mark.parametrize("head", [0.0, 0.17, 1.0, 2.65, 7.5])
def test_a_heavy_head_takes_layers_from_the_last_stage(head: float) -> None:
    """No split of the same layers has a faster slowest stage."""
    assert split_layers(4, 2, 2.65) == (3, 1) and split_layers(63 * 2, 2, 0.65) == (63, 63)
    assert split_layers(4, 4, 2.65) == (2, 1, 1, 0) and split_layers(3, 4, head or 0.1) == (1, 1, 1, 0)
    for layers, stages in [(4, 2), (4, 4), (7, 3), (9, 4)]:
        cuts = itertools.combinations(range(1, layers + (head > 0)), stages - 1)
        every = [[b - a for a, b in itertools.pairwise([0, *cut, layers])] for cut in cuts]
        best = min(max(*split[:-1], split[-1] + head) for split in every)
        chosen = split_layers(layers, stages, head)
        assert max(*chosen[:-1], chosen[-1] + head) == best


def test_any_number_of_layers_is_split_at_once() -> None:
    """A checkpoint that anyone may have written says how many there are."""
    began = time.monotonic()
    assert split_layers(10**9, 2) == (10**9 // 2, 10**9 // 2)
    assert split_layers(10**9, 3, 2.65) == (333_333_334, 333_333_334, 333_333_332)
    assert time.monotonic() - began < 60
