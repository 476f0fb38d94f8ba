"""The learning rate of a step.

The one idea: it is a pure function of the step's number, so a resumed run takes up the curve where it was left and
there is no scheduler state to save. Weight decay is constant; which parameters it touches is said in params.py.
"""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    minimum: float,
    schedule: Literal["constant", "linear", "cosine", "wsd"],
    warmup_steps: int,
    train_steps: int,
    decay_steps: int,
) -> float:
    """Learning rate of update number `step`, counted from 0.

    Warm-up is linear: peak * (step + 1) / (warmup_steps + 1), so no update is wasted on a rate of 0 and the peak is
    reached at step warmup_steps. Then `constant` stays there; `linear` and `cosine` fall to `minimum`, which they reach
    at the last step, train_steps - 1; `wsd` (warm-up, stable, decay) holds the peak and falls linearly over the last
    decay_steps. Warm-up comes first where there is no room for both. Beyond the last step the rate stays what it was.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    last = train_steps - 1
    start = max(warmup_steps, last - decay_steps) if schedule == "wsd" else warmup_steps
    progress = min(max((step - start) / max(last - start, 1), 0.0), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return peak * height + minimum * (1 - height)
