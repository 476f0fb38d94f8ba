"""Clocks of phases: nothing counts twice, nothing is lost, and the trainer's parts run the phases they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron3d.config import Config, LogConfig
from megatron3d.mesh import Mesh
from megatron3d.timers import PHASES, Timers, table_line, untimed
from megatron3d.trainer import Trainer
from tests import toy
from tests.ranks import on_mesh


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_inner_phase_stops_the_outer_clock() -> None:
    clock = Clock()
    timers = Timers(clock=clock)
    with timers("forward"):
        clock.now += 1
        with timers("data"):
            clock.now += 10
        clock.now += 2
    clock.now += 100  # in no phase
    with timers("forward"), timers("gather"):
        clock.now += 20
    assert timers.take() == {"forward": 3, "data": 10, "gather": 20}
    assert timers.take() == {}, "taken once"


def test_a_phase_that_fails_is_closed() -> None:
    clock = Clock()
    timers = Timers(clock=clock)

    def save() -> None:
        with timers("save"):
            clock.now += 4
            raise OSError

    with pytest.raises(OSError):
        save()
    clock.now += 50
    with timers("reduce"):
        clock.now += 1
    assert timers.take() == {"save": 4, "reduce": 1}


def test_queued_work_is_waited_for_at_both_ends() -> None:
    """Work of 5 s queued before a phase is not the phase's; work of 7 s queued in it is."""
    clock, queue = Clock(), [5.0]

    def settle() -> None:
        clock.now += sum(queue)
        queue.clear()

    timers = Timers(settle, clock=clock)
    with timers("backward"):
        queue.append(7.0)
    assert timers.take() == {"backward": 7}


def test_untimed_is_one_object_for_all() -> None:
    """It costs a call: nothing is made or kept."""
    with untimed("forward") as nothing:
        assert nothing is None
    assert untimed("forward") is untimed("save")


def test_the_line_has_least_and_most_per_step() -> None:
    """By hand: 4 steps; a phase that one rank never ran is 0 there; one that would read 0.0 is left out."""
    ranks = [{"forward": 0.4, "pipeline wait": 0.02}, {"forward": 0.5, "gather": 1e-4}, {"forward": 0.1}]
    assert table_line(ranks, 4) == (  # type: ignore[arg-type]
        "ms per step, least-most over ranks: forward 25.0-125.0 | pipeline wait 0.0-5.0"
    )


def seconds_of_two_steps(mesh: Mesh, config: Config, folder: str) -> dict[str, float]:
    """By phase, of two steps and a save; and of all that together."""
    trainer, clock = Trainer(config, mesh, toy.datasets(config.model)), Timers()
    assert trainer.timers is not None
    with clock("forward"):  # any phase: the clock of the whole
        trainer.step()
        trainer.step()
        trainer.weights.finish_gather()
        trainer.save(folder)
    taken: dict[Any, float] = trainer.timers.take()
    return {**taken, "all": clock.take()["forward"]}


@pytest.mark.slow
def test_the_phases_of_a_pipeline(tmp_path: Path) -> None:
    """pp 2 x dp 2: every phase runs where it should, and they add up to most of the whole time, never to more."""
    config = replace(toy.config(pp=2, dp=2, global_batch_size=8), log=LogConfig(log_level=1))
    ranks = on_mesh(config.parallel, seconds_of_two_steps, config, str(tmp_path / "saved"))
    for seconds in ranks:
        whole = seconds.pop("all")
        assert set(seconds) == set(PHASES) - {"evaluate"}
        assert all(value > 0 for value in seconds.values())
        assert 0.5 * whole < sum(seconds.values()) <= whole


def test_level_0_measures_nothing() -> None:
    config = toy.config()
    trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
    assert trainer.timers is None and trainer.pipeline.timer is untimed
    trainer.step()
