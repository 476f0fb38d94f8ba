"""The flight recorder: the last messages of a rank, and a watchdog that tells when one of them never ends.

The one idea: a hang is a message that somebody waits for. comm.py enters every message here when it starts and strikes
it out when it has ended, so a rank that is stuck can say at which step, in which operation and for whom it waits. Pure
Python: it works when everything else is stuck.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

KEPT = 64  # messages a rank remembers
FAILED = 1  # exit code of a rank that ends itself
GRACE_SECONDS = 10.0  # after its time-out the back-end may still speak for itself


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

    def open(self) -> list[Message]:
        """Messages that have not ended, oldest first."""
        return [message for message in list(self._messages) if message.ended is None]

    def dump(self, path: Path) -> None:
        """Writes all messages as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        aside.write_text(json.dumps([asdict(message) for message in self._messages], indent=1) + "\n")
        aside.replace(path)


def flight_file(folder: str, rank: int) -> Path:
    """Where a rank leaves its record."""
    return Path(folder) / f"flight-rank-{rank}.json"


@contextlib.contextmanager
def watchdog(recorder: FlightRecorder, *, rank: int, timeout: float, folder: str) -> Iterator[None]:
    """While inside, a thread ends this process once a message has been waited for `timeout` seconds and some grace."""
    done = threading.Event()
    limit = timeout + GRACE_SECONDS

    def watch() -> None:
        while not done.wait(min(1.0, limit / 10)):
            stuck = [message for message in recorder.open() if time.time() - message.began > limit]
            if stuck:
                _give_up(recorder, stuck[0], rank, folder)

    thread = threading.Thread(target=watch, daemon=True, name="watchdog")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _give_up(recorder: FlightRecorder, stuck: Message, rank: int, folder: str) -> None:
    print(f"rank {rank}: no end after the time-out: {stuck}", file=sys.stderr, flush=True)
    if folder:
        recorder.dump(flight_file(folder, rank))
    os._exit(FAILED)  # a stuck main thread cannot be asked to leave
