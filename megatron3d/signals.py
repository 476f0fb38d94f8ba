"""Requests to stop: signals and clocks, noted here and acted on by all ranks at the same step.

The one idea: a handler only makes a note, so that neither a first nor a second signal can break a step or a save. The
note rides on the message that every step sends anyway (optimizer.py); a note on one rank is then known to all.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

STOPPED = 75
"""Exit code of a run that was asked to stop and has saved its state (EX_TEMPFAIL of sysexits.h: try again)."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Whether this process has been asked to stop, by a signal or because its time is up."""

    def __init__(self, exit_after_seconds: float = 0.0) -> None:
        self.reason = ""
        self._deadline = time.monotonic() + exit_after_seconds if exit_after_seconds else 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, the signals make a note instead of ending the process."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def __bool__(self) -> bool:
        if not self.reason and self._deadline and time.monotonic() >= self._deadline:
            self.reason = "--exit-after-seconds"
        return bool(self.reason)
