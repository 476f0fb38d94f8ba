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

    No update is wasted on the rate at either end. Warm-up is linear, peak * (step + 1) / (warmup_steps + 1), and would
    reach the peak at step warmup_steps. From there `constant` stays; `linear` and `cosine` fall to `minimum`, which
    they reach at step train_steps, one beyond the last; `wsd` (warm-up, stable, decay) holds the peak until the last
    decay_steps updates, which lie evenly between peak and minimum, again reached at step train_steps. Warm-up comes
    first where there is no room for both. Beyond train_steps the rate stays what it was there.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    if step >= train_steps:
        return minimum
    start = train_steps - (decay_steps + 1) if schedule == "wsd" else warmup_steps
    progress = max(step - start, 0) / (train_steps - start)
    height = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return peak * height + minimum * (1 - height)
