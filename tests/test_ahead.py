"""Work ahead: in order, bounded by threads and by bytes, and nothing more of it once its consumer is gone."""

from __future__ import annotations

import threading
import time

import pytest

from megatron3d import ahead as module
from megatron3d.ahead import QUEUE, UNDER_WAY, ahead


def most_under_way(sizes: list[int], jobs: int) -> tuple[int, int]:
    """The most items and bytes that had begun and were not consumed, seen by those who work and who consumes."""
    begun, consumed, seen, lock = 0, 0, list[tuple[int, int]](), threading.Lock()

    def work(place: int) -> int:
        nonlocal begun
        with lock:
            begun += 1
            seen.append((begun - consumed, sum(sizes[consumed:begun])))
        time.sleep(0.002)
        return place

    for place in ahead(work, range(len(sizes)), jobs, size=sizes.__getitem__):
        time.sleep(0.002 * (place % 3))
        with lock:
            assert place == consumed, "in order"
            consumed += 1
    assert consumed == len(sizes)
    return max(count for count, _ in seen), max(size for _, size in seen)


@pytest.mark.parametrize("jobs", [2, 4])
def test_others_go_on_beside_a_long_one(jobs: int) -> None:
    """As far as the queue goes, each by one of the threads."""
    begun, at_work, most, room = 0, 0, 0, threading.Condition()

    def work(place: int) -> None:
        nonlocal begun, at_work, most
        with room:
            begun, at_work = begun + 1, at_work + 1
            most = max(most, at_work)
            room.notify_all()
            if place == 0:
                assert room.wait_for(lambda: begun == QUEUE * jobs, timeout=20)
                assert not room.wait_for(lambda: begun > QUEUE * jobs, timeout=0.02)
        time.sleep(0.002)
        with room:
            at_work -= 1

    assert len([*ahead(work, range(40), jobs)]) == begun == 40
    assert most == jobs


@pytest.mark.parametrize("jobs", [2, 4, 16])
def test_large_items_are_bounded_by_bytes(jobs: int) -> None:
    """More threads take no more memory: three tenths of what may be under way, so three at a time."""
    most, size = most_under_way([UNDER_WAY * 3 // 10] * 12, jobs)
    assert most == 3 and size <= UNDER_WAY


def test_an_item_beyond_all_bounds_goes_alone() -> None:
    """Neither what came before nor what comes after is in work beside it."""
    sizes = [1, 1, UNDER_WAY * 5, 1, 1, 1, UNDER_WAY * 5, UNDER_WAY * 5]
    assert most_under_way(sizes, 4)[1] == UNDER_WAY * 5


def test_holes_go_back_when_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning, and each time that it has grown by so much; not for every item."""
    grown, given = [0], list[int]()
    monkeypatch.setattr(module, "QUEUE", 1)
    monkeypatch.setattr(module, "_resident", lambda: grown[0])
    monkeypatch.setattr(module, "_give_back", lambda: given.append(grown[0]))

    def work(step: int) -> None:
        grown[0] = step * (1 << 20)

    for _ in ahead(work, range(400), 1):
        pass
    after = [size >> 20 for size in given]
    assert after == [0, 193, 258, 323, 388]


def test_memory_is_measured_and_given_back_here() -> None:
    assert module._resident() > 10 << 20
    module._give_back()


def test_a_consumer_that_leaves_ends_the_work() -> None:
    done: list[int] = []
    for place in ahead(done.append, range(1000), 2):
        assert place is None
        break
    count = len(done)
    time.sleep(0.02)
    assert len(done) == count <= 2 * QUEUE + 1
