"""What a run does about gradients that are not finite, and about spikes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d import crashes, kernels
from megatron3d.config import CheckpointConfig, Config, ConfigError, JobError, LogConfig
from megatron3d.loss_scale import FLOOR, LossScale
from megatron3d.mesh import Mesh
from megatron3d.spikes import SpikeDetector
from megatron3d.trainer import Trainer
from tests import toy


def lone(config: Config, break_at: int = 0, broken: str = "layers.1.mlp.down.weight") -> Trainer:
    """A trainer in which, from some step on, every gradient that `broken` gets is NaN."""
    trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
    if break_at:
        module, _, name = broken.rpartition(".")
        slot = getattr(trainer.stage.get_submodule(module), f"{name}_grad")
        deposit = slot.deposit

        def poisoned(add: Any) -> None:
            deposit(add)
            if trainer.steps + 1 >= break_at:
                slot.view[0] = math.nan

        slot.deposit = poisoned
    return trainer


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_a_bad_step(
    value: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the gradients of the same step are finite."""
    merge = kernels.cross_entropy_merge

    def overflowing(stats: Tensor, labels: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        loss, share = merge(stats, labels, rank)
        loss[0] = value
        return loss, share

    monkeypatch.setattr(kernels, "cross_entropy_merge", overflowing)
    trainer = lone(tiny(max_bad_steps=2))
    before = [span.master.clone() for span in trainer.optimizer.spans]
    with pytest.raises(JobError, match="2 steps in a row, up to step 2, had no finite gradient or loss"):
        trainer.run()
    assert all(torch.equal(span.master, one) for span, one in zip(trainer.optimizer.spans, before, strict=True))
    assert f"step 1 skipped, 1 in a row: loss {value}, gradient norm " in capsys.readouterr().out


def tiny(**knobs: Any) -> Config:
    return toy.config(replace(toy.LLAMA, num_layers=2), global_batch_size=2, train_steps=12, **knobs)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_dead_run_ends_and_says_where(clip: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FAIL-07: the step is skipped, counted, named; after --max-bad-steps the run ends, and nothing of it is saved."""
    config = tiny(max_bad_steps=3, clip_grad=clip)
    config = replace(
        config,
        checkpoint=CheckpointConfig(save=str(tmp_path / "save"), save_interval=2),
        log=LogConfig(log_dir=str(tmp_path)),
    )
    with pytest.raises(JobError, match="3 steps in a row, up to step 7, had no finite gradient or loss"):
        lone(config, break_at=5).run()
    out = capsys.readouterr().out
    assert "step 5 skipped, 1 in a row: gradient of layers.1.mlp.down.weight is not finite (rank 0, stage 0)" in out
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [0, 0, 0, 0, 1, 2, 3] and rows[4]["grad_norm"] is None
    trainer = lone(config)
    trainer.load(str(tmp_path / "save"))
    assert trainer.steps == 6 and trainer.bad_steps == 2
    assert all(torch.isfinite(buffer).all() for buffer in trainer.weights.buckets)


def test_good_steps_forgive_bad_ones() -> None:
    trainer = lone(tiny(max_bad_steps=2))
    for step in range(6):
        trainer.grads.buckets[0].fill_(0.0)
        if step % 2:
            trainer.consumed_samples = 0
        trainer.step()
    assert trainer.bad_steps == 0


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer = lone(tiny())
    trainer.save(str(tmp_path))
    trainer.steps = 1
    trainer.weights.buckets[-1][0] = math.inf
    with pytest.raises(JobError, match=r"is not finite at step 1: not saved"):
        trainer.save(str(tmp_path))
    assert (tmp_path / "latest").read_text().strip() == "step-00000000"


def test_the_first_layer_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = lone(tiny(find_nan=True, max_bad_steps=1))
    trainer.weights.initialise(1)
    trainer.stage.get_parameter("layers.1.attention.qkv.weight").data[0, 0] = math.nan
    with pytest.raises(JobError):
        trainer.run()
    assert "first seen in the output of layers.1" in capsys.readouterr().out


def test_fp16_ends_only_at_the_floor() -> None:
    """RES-16: overflows above the floor look for the scale; at the floor they are counted and end the run."""
    trainer = lone(tiny(dtype="fp16", max_bad_steps=3), break_at=1)
    for _ in range(4):
        trainer.step()
    assert trainer.bad_steps == 0 and trainer.loss_scale.value < 2**16
    trainer.loss_scale = LossScale(enabled=True, value=FLOOR)
    with pytest.raises(JobError, match="3 steps in a row"):
        trainer.run()


def test_spikes_stand_out_and_do_not_hide_the_next() -> None:
    spikes = SpikeDetector(window=20, sigmas=6)
    losses = [5.0 + 0.01 * (i % 3) for i in range(20)]
    assert not any(spikes.see(loss) for loss in losses)
    assert spikes.see(9.0) > 6 and spikes.see(9.0) > 6 and not spikes.see(5.01)
    assert not spikes.see(math.nan) and not spikes.see(1.0)
    assert not any(SpikeDetector(window=20, sigmas=0).see(loss) for loss in [*losses, 100.0])


def test_a_spike_is_warned_of_or_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    for stop in (False, True):
        trainer = lone(tiny(spike_sigmas=4.0, spike_window=10, stop_on_spike=stop))
        step, raised = trainer.step, 0

        def spiking(step: Any = step, trainer: Trainer = trainer) -> Any:
            result = replace(step(), loss=50.0 if trainer.steps == 12 else 5.0)
            trainer.result = result
            return result

        trainer.step = spiking  # type: ignore[method-assign]
        try:
            trainer.run()
        except JobError as error:
            raised = "step 12" in str(error)
        assert bool(raised) == stop
        assert ("warning: step 12: loss 50.0000" in capsys.readouterr().out) == (not stop)


def test_a_crash_that_repeats_is_given_up(tmp_path: Path) -> None:
    crashes.check(tmp_path)
    crashes.note(tmp_path, 7, crashes.read(tmp_path))
    crashes.check(tmp_path)
    crashes.note(tmp_path, 7, crashes.read(tmp_path))
    with pytest.raises(ConfigError, match="failed 2 times in a row at step 7"):
        crashes.check(tmp_path)
    crashes.forgive(tmp_path, 6)
    assert crashes.read(tmp_path) == (7, 2)
    crashes.forgive(tmp_path, 7)
    crashes.check(tmp_path)
    crashes.note(tmp_path, 7, crashes.read(tmp_path))
    crashes.note(tmp_path, 9, crashes.read(tmp_path))
    assert crashes.read(tmp_path) == (9, 1)
