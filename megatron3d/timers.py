"""Where the seconds of a step go: a clock per phase, handed down to what does the work.

The one idea: at any moment at most one phase runs. A phase that begins inside another stops the outer one's clock, so
no second counts twice, and what is in no phase is the loop itself. Code is given a `Timer`, any function from a phase
to a context; `untimed`, the default, costs a call and nothing else. Who runs a phase is in pipeline.py, weights.py and
trainer.py; how it is shown, in metrics.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

Phase = Literal["forward", "backward", "pipeline wait", "reduce", "optimizer", "gather", "data", "evaluate", "save"]
"""forward, backward: passes, tensor-parallel messages included. pipeline wait: for a neighbouring stage's message.
reduce: what is left of the gradient sums after the backward pass. optimizer: norm and update. gather: waiting for
updated weights. data: reading samples. evaluate: a whole evaluation. save: a checkpoint."""

Timer = Callable[[Phase], AbstractContextManager[None]]
PHASES: tuple[Phase, ...] = get_args(Phase)

SHOWN = 0.05  # milliseconds a step: what is less on every rank would read 0.0

_NOTHING = nullcontext()


def untimed(phase: Phase) -> AbstractContextManager[None]:
    """A `Timer` that measures nothing."""
    return _NOTHING


class Timers:
    """A `Timer` that adds up the seconds of each phase.

    `settle` is called at both ends of a phase. Work that is only queued when a call returns (a GPU's) must be waited
    for there, else its seconds fall to whichever phase next waits for a result.
    """

    def __init__(
        self, settle: Callable[[], object] | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._settle, self._clock = settle, clock
        self._seconds: dict[Phase, float] = {}
        self._running: list[Phase] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Around the code of `phase`."""
        self._charge()
        self._running.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        """Books the time since the last change on the phase that has been running."""
        if self._settle is not None:
            self._settle()
        now = self._clock()
        if self._running:
            phase = self._running[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[Phase, float]:
        """Seconds of each phase that has run since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


def table_line(ranks: Sequence[Mapping[Phase, float]], steps: int) -> str:
    """What `take` gave on each rank over `steps` steps: least and most over the ranks, in milliseconds a step."""
    parts = []
    for phase in PHASES:
        spent = [1e3 * seconds.get(phase, 0.0) / steps for seconds in ranks]
        if max(spent) >= SHOWN:
            parts.append(f"{phase} {min(spent):.1f}-{max(spent):.1f}")
    return f"ms per step, least-most over ranks: {' | '.join(parts)}"
