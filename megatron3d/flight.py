"""The flight recorder: the last messages of a rank, and a watchdog that tells when one of them never ends.

The one idea: a hang is a message that somebody waits for. comm.py enters every message here when it starts and strikes
it out when it has ended, so a rank that is stuck can say at which step, in which operation and for whom it waits. Pure
Python: it works when everything else is stuck.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron3d.words import tell

KEPT = 64  # messages a rank remembers
FAILED = 1  # exit code of a rank that ends itself
GRACE_SECONDS = 10.0  # after its time-out the back-end may still speak for itself
LOST_SECONDS = 5.0  # and so it may after a connection has gone
WATCH_SECONDS = 1.0  # between two looks of the watchdog, at most
SPOKEN_SECONDS = LOST_SECONDS + 2 * WATCH_SECONDS
"""After a failure, by then every rank that can still speak has done so, even one that waits for the watchdog."""


class PeerError(RuntimeError):
    """Another rank did not answer: it has died, left, or stands still beyond the time-out."""


@dataclass
class Message:
    """One collective or message."""

    number: int
    operation: str
    axis: str
    peers: tuple[int, ...]
    """World ranks it needs."""
    size: int
    """Bytes of the tensor handed in."""
    step: int
    began: float
    """Seconds since the epoch."""
    ended: float | None = None

    def __str__(self) -> str:
        state = "ended" if self.ended else f"waiting for {time.time() - self.began:.1f} s"
        return f"step {self.step}, {self.operation} over {self.axis} with ranks {list(self.peers)}: {state}"


class FlightRecorder:
    """The last messages of one rank. `step` is kept current by the trainer."""

    def __init__(self) -> None:
        self.step = 0
        self._count = 0
        self._messages: deque[Message] = deque(maxlen=KEPT)

    def begin(self, operation: str, axis: str, peers: tuple[int, ...], size: int) -> Message:
        """Enters a message."""
        self._count += 1
        message = Message(self._count, operation, axis, peers, size, self.step, time.time())
        self._messages.append(message)
        return message

    @contextlib.contextmanager
    def waiting(self, operation: str, axis: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Enters a message that the caller waits for inside. Raises PeerError if a peer does not answer."""
        message = self.begin(operation, axis, peers, 0)
        with answering(message, peers):
            yield
        message.ended = time.time()

    def open(self) -> list[Message]:
        """Messages that have not ended, oldest first."""
        return [message for message in list(self._messages) if message.ended is None]

    def dump(self, path: Path) -> None:
        """Writes all messages as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        aside.write_text(json.dumps([asdict(message) for message in list(self._messages)], indent=1) + "\n")
        aside.replace(path)


@contextlib.contextmanager
def answering(message: Message | None, peers: Sequence[int]) -> Iterator[None]:
    """Turns the back-end's words about a lost connection into whom this rank was waiting for, in what."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).strip().splitlines()[0]
        reason = words.split(".cc:")[-1].partition("] ")[2].partition(". ")[0] or words
        raise PeerError(f"no answer from rank {', '.join(map(str, peers))}; {message}; {reason}") from error


def flight_file(folder: str, rank: int) -> Path:
    """Where a rank leaves its record."""
    return Path(folder) / f"flight-rank-{rank}.json"


@contextlib.contextmanager
def watchdog(
    recorder: FlightRecorder,
    *,
    rank: int,
    timeout: float,
    folder: str,
    lost: Callable[[], bool],
    farewell: Callable[[], object],
    grace: float = GRACE_SECONDS,
) -> Iterator[None]:
    """While inside, a thread ends this process once a message has been waited for `timeout` seconds and some grace, or
    LOST_SECONDS in spite of a `lost` connection. `farewell` is called before the end.
    """
    done = threading.Event()
    limit = timeout + grace

    def watch() -> None:
        since = math.inf  # when a connection was first seen to be lost
        while not done.wait(min(WATCH_SECONDS, limit / 10)):
            waiting, now = recorder.open(), time.time()
            since = min(since, now) if waiting and lost() else math.inf
            for message in waiting[:1]:
                if now - message.began > limit:
                    _give_up(recorder, f"no end after the time-out: {message}", rank, folder, farewell)
                if now - max(message.began, since) > LOST_SECONDS:
                    _give_up(recorder, f"no end after a connection was lost: {message}", rank, folder, farewell)

    thread = threading.Thread(target=watch, daemon=True, name="watchdog")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _give_up(recorder: FlightRecorder, why: str, rank: int, folder: str, farewell: Callable[[], object]) -> None:
    try:
        tell(f"rank {rank}: {why}\n")
        if folder:
            recorder.dump(flight_file(folder, rank))
        farewell()
    finally:  # whatever else is broken
        os._exit(FAILED)  # a stuck main thread cannot be asked to leave
