"""The loss scale of fp16: a pure state, and in runs, where one rank overflows for all and resumes lose nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.loss_scale import FLOOR, HYSTERESIS, INITIAL, WINDOW, LossScale
from megatron3d.optimizer import StepResult
from megatron3d.trainer import Trainer
from tests import toy

FP16: dict[str, Any] = {
    "dtype": "fp16",
    "optimizer": "adamw",
    "lr": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 4,
}


def course(finite: list[bool], state: LossScale | None = None) -> list[float]:
    state, values = state or LossScale.initial(fp16=True), []
    for step in finite:
        state = state.after(finite=step)
        values.append(state.value)
    return values


def test_other_types_have_none() -> None:
    state = LossScale.initial(fp16=False)
    assert state.value == 1 and state.after(finite=False) is state


def test_from_the_second_overflow_on_each_halves() -> None:
    assert course([False, False, False]) == [INITIAL, INITIAL / 2, INITIAL / 4]
    assert course([False, True, False, True, False]) == [INITIAL, INITIAL, INITIAL / 2, INITIAL / 2, INITIAL / 4]


def test_a_window_of_good_steps_doubles_and_restores_patience() -> None:
    values = course([False] + [True] * WINDOW + [False, False])
    assert values[WINDOW - 1] == INITIAL and values[WINDOW] == 2 * INITIAL
    assert values[-2:] == [2 * INITIAL, INITIAL]


def test_an_overflow_begins_the_window_anew() -> None:
    assert course([True] * (WINDOW - 1) + [False] + [True] * (WINDOW - 1))[-1] == INITIAL


def test_the_floor_holds_and_counts() -> None:
    state = LossScale(enabled=True, value=2 * FLOOR, patience=1)
    for hits in range(4):
        state = state.after(finite=False)
        assert (state.value, state.at_floor) == (FLOOR, hits)
    assert state.after(finite=True).at_floor == 0 and HYSTERESIS == 2


def test_state_returns() -> None:
    state = LossScale.initial(fp16=True).after(finite=False)
    assert LossScale(**state.state()) == state  # type: ignore[arg-type]


class Overflow:
    """Puts an infinity into one gradient of one rank at some steps."""

    def __init__(self, rank: int, steps: tuple[int, ...]) -> None:
        self.rank, self.steps = rank, steps

    def __call__(self, trainer: Trainer) -> None:
        module, _, name = trainer.weights.layout.buckets[0].slots[0].tensor.name.rpartition(".")
        slot = getattr(trainer.stage.get_submodule(module), f"{name}_grad")
        deposit = slot.deposit

        def overflowing(add: Any) -> None:
            if trainer.mesh.rank == self.rank and trainer.steps + 1 in self.steps:
                slot.view.view(-1)[0] = math.inf
            deposit(add)

        slot.deposit = overflowing


def counts(trainer: Trainer) -> tuple[Any, ...]:
    return trainer.loss_scale, trainer.skipped_steps, trainer.bad_steps, trainer.optimizer.count


LAYOUTS = [{"tp": 2, "pp": 2, "dp": 2}, {"dp": 3, "global_batch_size": 6}, {"pp": 2, "zero": 0, "dp": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_overflow_on_one_rank_is_everybodys(layout: dict[str, Any]) -> None:
    """Same skipped steps, scale, Adam counts and losses on all ranks and layouts (RES-14; RES-06 is below)."""
    config = toy.config(**{**FP16, **layout})
    one = toy.config(**{**FP16, "global_batch_size": config.batch.global_batch_size})
    alone = toy.train(one, steps=5, before=Overflow(rank=0, steps=(2, 4)))
    run = toy.train(config, steps=5, before=Overflow(rank=1, steps=(2, 4)), after=counts)
    assert [step.applied for step in run.steps] == [True, False, True, False, True]
    assert run.extra == [(LossScale(enabled=True, value=INITIAL / 2, good_steps=1, patience=1), 2, 0, 3)] * len(
        run.extra
    )
    assert run.losses == pytest.approx(alone.losses, rel=2e-3), "what fp16 rounds differently on another layout"
    assert all(torch.isfinite(value).all() for value in run.weights.values())


@pytest.mark.slow
def test_fp16_follows_fp32() -> None:
    fp32 = toy.train(toy.config(**{**FP16, "dtype": "fp32"}), steps=5)
    fp16 = toy.train(toy.config(**FP16, tp=2), steps=5)
    assert fp16.losses == pytest.approx(fp32.losses, rel=5e-3)
    assert fp16.norms == pytest.approx(fp32.norms, rel=2e-2)


def run_in_one(config: Any, steps: int, folder: str = "", load: str = "") -> tuple[list[StepResult], Trainer]:
    from megatron3d.mesh import Mesh

    trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
    if load:
        trainer.load(load)
    Overflow(0, (2, 3, 5))(trainer)
    results = [trainer.step() for _ in range(steps)]
    if folder:
        trainer.save(folder)
    return results, trainer


def test_resume_in_mid_window_is_bit_equal(tmp_path: Path) -> None:
    """RES-06: scale, counter and hysteresis go on where they were; RES-08: also from a save before the first update."""
    config = toy.config(replace(toy.LLAMA, num_layers=1), **FP16)
    through, whole = run_in_one(config, 6)
    for cut in (2, 4):
        first, _ = run_in_one(config, cut, folder=str(tmp_path / str(cut)))
        second, resumed = run_in_one(config, 6 - cut, load=str(tmp_path / str(cut)))
        assert first + second == through
        assert resumed.loss_scale == whole.loss_scale and resumed.optimizer.count == whole.optimizer.count


def test_saving_before_the_first_update_works(tmp_path: Path) -> None:
    """RES-08: all steps so far were skipped."""
    config = toy.config(replace(toy.LLAMA, num_layers=1), **FP16)

    def skipping(load: str = "", steps: int = 2) -> Trainer:
        from megatron3d.mesh import Mesh

        trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
        if load:
            trainer.load(load)
        Overflow(0, (1, 2))(trainer)
        for _ in range(steps):
            trainer.step()
        return trainer

    early = skipping()
    assert early.optimizer.count == 0 and early.loss_scale.value == INITIAL / 2
    early.save(str(tmp_path))
    resumed, through = skipping(str(tmp_path), steps=2), skipping(steps=4)
    assert resumed.result == through.result and resumed.loss_scale == through.loss_scale
