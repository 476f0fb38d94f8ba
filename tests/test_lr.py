"""The learning rate's shapes: end points, continuity, and no memory."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron3d.lr import learning_rate

SCHEDULES = ("constant", "linear", "cosine", "wsd")
PEAK, MINIMUM = 3e-4, 1e-5


def curve(schedule: Any, warmup: int = 5, train: int = 41, decay: int = 8, minimum: float = MINIMUM) -> list[float]:
    return [
        learning_rate(
            step,
            peak=PEAK,
            minimum=minimum,
            schedule=schedule,
            warmup_steps=warmup,
            train_steps=train,
            decay_steps=decay,
        )
        for step in range(train)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_warmup_rises_evenly_to_the_peak(schedule: str, warmup: int) -> None:
    rates = curve(schedule, warmup)
    assert rates[warmup] == PEAK == max(rates)
    for step in range(warmup):
        assert rates[step] == pytest.approx(PEAK * (step + 1) / (warmup + 1), rel=1e-15) and rates[step] > 0


@pytest.mark.parametrize("warmup", [0, 1, 5, 39])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_no_update_is_wasted_at_the_minimum(schedule: str, warmup: int) -> None:
    """Each rate is above the minimum, which is reached right after the last update."""
    for minimum in (0.0, MINIMUM):
        assert min(curve(schedule, warmup, minimum=minimum)[warmup:]) > minimum
        lengths: dict[str, Any] = {"warmup_steps": warmup, "train_steps": 41, "decay_steps": 8}
        assert learning_rate(41, peak=PEAK, minimum=minimum, schedule=schedule, **lengths) == minimum
    assert curve(schedule, warmup, minimum=PEAK)[warmup:] == pytest.approx([PEAK] * (41 - warmup), rel=1e-15)


def test_constant_stays() -> None:
    assert curve("constant")[5:] == [PEAK] * 36


def test_cosine_is_torch_cosine_annealing() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=36, eta_min=MINIMUM)
    for rate in curve("cosine")[5:]:
        assert rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_wsd_holds_then_falls_over_the_decay_steps() -> None:
    rates = curve("wsd")
    assert rates[5:33] == [PEAK] * 28
    falls = [a - b for a, b in itertools.pairwise([*rates[32:], MINIMUM])]
    assert falls == pytest.approx([(PEAK - MINIMUM) / 9] * 9)


def test_wsd_falls_right_after_the_warmup() -> None:
    """The shortest run that validate.py allows, and one of nothing but both ramps."""
    assert curve("wsd", warmup=1, train=2, decay=1, minimum=0.0) == [PEAK / 2, PEAK / 2]
    thirds = [PEAK * height for height in (1 / 3, 2 / 3, 3 / 4, 2 / 4, 1 / 4)]
    assert curve("wsd", warmup=2, train=5, decay=3, minimum=0.0) == pytest.approx(thirds)


def test_linear_falls_evenly() -> None:
    falls = [a - b for a, b in itertools.pairwise([*curve("linear")[5:], MINIMUM])]
    assert falls == pytest.approx([(PEAK - MINIMUM) / 36] * 36)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_jumps(schedule: str) -> None:
    """No step changes the rate by more than the steepest of its straight or cosine parts does."""
    rates = curve(schedule, warmup=100, train=1001, decay=100)
    steepest = math.pi / 2 * PEAK / 100
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < steepest
    assert rates[:101] == sorted(rates[:101]) and rates[100:] == sorted(rates[100:], reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_room_for_the_decay(schedule: str) -> None:
    """Runs shorter than their warm-up or than warm-up and decay together stay finite and below the peak."""
    for warmup, train, decay in itertools.product((0, 1, 3, 9), (1, 2, 4), (0, 1, 9)):
        rates = curve(schedule, warmup, train, decay)
        assert all(0 < rate <= PEAK for rate in rates)
        if train <= warmup:
            assert rates == [pytest.approx(PEAK * (step + 1) / (warmup + 1)) for step in range(train)]


def test_beyond_the_last_step() -> None:
    lengths: dict[str, Any] = {"warmup_steps": 2, "train_steps": 9, "decay_steps": 3}
    for schedule in ("linear", "cosine", "wsd"):
        assert learning_rate(1000, peak=PEAK, minimum=MINIMUM, schedule=schedule, **lengths) == MINIMUM


def test_resumed_equals_uninterrupted() -> None:
    """RES-01: steps 11..20 asked for alone, in a fresh process, equal those of the whole run to the last bit."""
    program = (
        "from megatron3d.lr import learning_rate\n"
        "for step in range(11, 21):\n"
        f"    print(learning_rate(step, peak={PEAK}, minimum={MINIMUM}, schedule='cosine', warmup_steps=5,"
        " train_steps=41, decay_steps=8).hex())\n"
    )
    resumed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert resumed.split() == [rate.hex() for rate in curve("cosine")[11:21]]
