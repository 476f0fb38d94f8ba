"""Work done ahead of who consumes it: in threads, in order, and never more of it than is soon needed.

The one idea: what is under way is bounded by bytes, not by threads alone, so that more of them take no more memory; one
item may always be. And since freed memory lies in holes which need not fit what comes next, it goes back to the system
once the process has grown too far.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

UNDER_WAY = 1 << 27
"""Bytes of the items that have begun and whose results have not been consumed."""
GROWTH = 3 << 26
"""Bytes by which the process may grow before holes go back to the system."""
QUEUE = 3
"""Items for each thread that have begun or wait to: while a large one is still to come, others go on."""
AGAIN = 1 << 26
"""Bytes by which it must grow after that before it is tried again."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    work: Callable[[Item], Result], items: Iterable[Item], jobs: int, size: Callable[[Item], int] = lambda item: 0
) -> Iterator[Result]:
    """work(item) of each item, in order, by `jobs` threads: QUEUE times as many results live at once, with the
    one consumed.

    `size`: bytes of an item, of which UNDER_WAY are under way, or a single larger item.
    """
    todo, waiting, heap = deque(items), deque[tuple[int, Future[Result]]](), _Heap()
    with ThreadPoolExecutor(jobs) as pool:

        def begin() -> None:
            while todo and len(waiting) < QUEUE * jobs:
                taken, more = sum(bytes_ for bytes_, _ in waiting), size(todo[0])
                if waiting and taken + more > UNDER_WAY:
                    return
                heap.make_room(more)
                waiting.append((more, pool.submit(work, todo.popleft())))

        try:
            begin()
            while waiting:
                yield waiting[0][1].result()
                waiting.popleft()
                begin()
        finally:
            for _, future in waiting:
                future.cancel()


class _Heap:
    """The process's memory, with a limit to its growth from now on."""

    def __init__(self) -> None:
        _give_back()
        self._most = self._limit = _resident() + GROWTH

    def make_room(self, size: int) -> None:
        """Gives holes back if the process would grow beyond the limit by so many bytes."""
        if _resident() + size > self._limit:
            _give_back()
            self._limit = max(self._most, _resident() + size + AGAIN)


def _resident() -> int:
    """Bytes of memory that the process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _give_back() -> None:
    """Frees the pages within the heap that nothing lies in, where the system's library can; its end stays."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(1 << 62))
