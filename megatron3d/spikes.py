"""Loss spikes: a loss far above its recent course.

The one idea: the course is the mean and the standard deviation of the last losses; a spike does not enter them, so that
it cannot hide the next one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

LEAST = 10  # losses before there is a course to compare with


class SpikeDetector:
    """Watches the losses of a run. `sigmas` 0 never finds anything."""

    def __init__(self, *, window: int, sigmas: float) -> None:
        self.sigmas = sigmas
        self._recent: deque[float] = deque(maxlen=window)

    def see(self, loss: float) -> float:
        """How many standard deviations above the course `loss` is if that is a spike, else 0."""
        if not self.sigmas or not math.isfinite(loss):
            return 0.0
        if len(self._recent) >= min(LEAST, self._recent.maxlen or LEAST):
            mean, deviation = statistics.fmean(self._recent), statistics.pstdev(self._recent)
            height = (loss - mean) / max(deviation, 1e-3 * abs(mean), 1e-12)
            if height > self.sigmas:
                return height
        self._recent.append(loss)
        return 0.0
