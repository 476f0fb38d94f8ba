"""The loop around a step: when it evaluates and saves, what it says, and that a run can be taken up again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.config import CheckpointConfig, Config, LogConfig
from megatron3d.data import Datasets, load_microbatch
from megatron3d.lr import learning_rate
from megatron3d.mesh import Mesh
from megatron3d.shelf import find
from megatron3d.trainer import Trainer
from tests import reference, toy
from tests.lone import lone_trainer, reference_weights, whole_weights
from tests.ranks import on_mesh


def keeping(config: Config, folder: Path, **settings: Any) -> Config:
    """`config` with checkpoints in folder/checkpoints and a log in folder/log."""
    return replace(
        config,
        checkpoint=CheckpointConfig(save=str(folder / "checkpoints"), **settings),
        log=LogConfig(log_dir=str(folder / "log"), progress=False),
    )


def run(config: Config) -> Trainer:
    trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
    trainer.run()
    return trainer


def steps_logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("interval", "expected"), [(0, [5]), (2, [2, 4, 5]), (5, [5])])
def test_saves_every_so_often_and_at_the_end(interval: int, expected: list[int], tmp_path: Path) -> None:
    config = toy.config(global_batch_size=1, train_steps=5)
    trainer = run(keeping(config, tmp_path, save_interval=interval))
    assert saved_steps(tmp_path) == ["latest", *(f"step-{step:08d}" for step in expected)]
    assert find(tmp_path / "checkpoints").index.meta["step"] == trainer.steps == 5


def test_a_run_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    """Six steps in one go, and three and three: same losses, norms, learning rates and weights to the last bit."""
    config = toy.config(
        global_batch_size=2, train_steps=6, optimizer="adamw", lr=0.01, lr_schedule="cosine", warmup_steps=4
    )
    whole = run(keeping(config, tmp_path / "whole"))
    half = keeping(config, tmp_path / "halves", save_interval=3)
    Trainer.step, step = interrupted_after(3), Trainer.step  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            run(half)
    finally:
        Trainer.step = step  # type: ignore[method-assign]
    assert len(steps_logged(tmp_path / "halves")) == 3
    resumed = run(replace(half, checkpoint=replace(half.checkpoint, load=half.checkpoint.save)))
    assert resumed.steps == 6 and resumed.optimizer.count == 6
    logs = [steps_logged(tmp_path / name) for name in ("whole", "halves")]
    for key in ("step", "loss", "grad_norm", "lr", "consumed_samples", "consumed_tokens"):
        assert [row[key] for row in logs[0]] == [row[key] for row in logs[1]], key
    after = whole_weights(resumed)
    assert all(torch.equal(after[name], value) for name, value in whole_weights(whole).items())


def interrupted_after(steps: int) -> Any:
    """A Trainer.step that is interrupted instead of taking step `steps` + 1."""
    step = Trainer.step

    def step_or_stop(self: Trainer) -> Any:
        if self.steps == steps:
            raise KeyboardInterrupt
        return step(self)

    return step_or_stop


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    """Resumed at its last step it neither trains nor writes the same checkpoint again."""
    config = keeping(toy.config(global_batch_size=1, train_steps=2), tmp_path)
    run(config)
    written = [path.stat().st_mtime_ns for path in sorted((tmp_path / "checkpoints").rglob("*"))]
    trainer = run(replace(config, checkpoint=replace(config.checkpoint, load=config.checkpoint.save)))
    assert trainer.steps == 2 and len(steps_logged(tmp_path)) == 2
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "checkpoints").rglob("*"))] == written


def test_a_validation_set_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is said once, and no step evaluates."""
    config = keeping(toy.config(global_batch_size=1, train_steps=2, eval_interval=1), tmp_path)
    data = Datasets(toy.RandomData(131, 32), None, "three documents are too few")
    Trainer(config, Mesh.single(), data).run()
    assert capsys.readouterr().out.count("No evaluation: three documents are too few") == 1
    assert not any("eval_loss" in row for row in steps_logged(tmp_path))


def test_the_run_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(toy.config(global_batch_size=4, train_steps=1))
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    count = sum(value.numel() for value in toy.random_weights(toy.config().model).values())
    assert first == f"model: {count:,} parameters, 4 layers, hidden 64, vocabulary 131, sequence 32, fp32"
    assert second == "mesh: tp 1 x pp 1 x dp 1 on 1 x cpu, layers per stage 4, 1f1b, ZeRO-1, sequence parallel off"
    assert third == "step: 4 samples = 4 microbatches of 1 on 1 data-parallel ranks; from step 0 to 1"


def test_steps_take_the_samples_in_order() -> None:
    """Global batch k holds the samples k x size and on, whatever the microbatch size."""
    for micro in (1, 2, 3):
        config = toy.config(global_batch_size=6, micro_batch_size=micro)
        trainer = lone_trainer(config)
        trainer.consumed_samples = 12
        feed = trainer._feed(trainer.datasets.train, trainer.consumed_samples)
        batches = [feed(i) for i in range(6 // micro)]
        assert [sample for batch in batches for sample in batch.samples] == list(range(12, 18))
        tokens, labels = load_microbatch(trainer.datasets.train, 12, 6)
        assert torch.equal(torch.cat([batch.tokens for batch in batches], 1), tokens)
        assert torch.equal(torch.cat([batch.labels for batch in batches], 1), labels)


def test_the_learning_rate_is_that_of_the_step() -> None:
    config = toy.config(lr_schedule="wsd", lr=0.2, min_lr=0.02, warmup_steps=3, decay_steps=4, train_steps=10)
    trainer = lone_trainer(config)
    for step in range(10):
        trainer.steps = step
        assert trainer.learning_rate() == learning_rate(
            step, peak=0.2, minimum=0.02, schedule="wsd", warmup_steps=3, train_steps=10, decay_steps=4
        )


def test_updates_use_the_rate_of_their_step() -> None:
    """Warm-up and decay in the weights themselves: the reference's with the same rates, written by hand."""
    config = toy.config(
        replace(toy.LLAMA, num_layers=1), dtype="fp64", lr=0.4, lr_schedule="linear", warmup_steps=1, train_steps=4,
        global_batch_size=2, weight_decay=0.0, clip_grad=0.0,
    )  # fmt: skip
    trainer = lone_trainer(config)
    for _ in range(4):
        trainer.step()
    batches = [toy.global_batch(config.model, 2 * step, 2) for step in range(4)]
    rates = [0.2, 0.4, 0.4 * 2 / 3, 0.4 / 3]
    *_, expected = reference.train(reference_weights(config), config.model, batches, lr=rates.__getitem__, clip=0.0)
    assert toy.largest_gap(whole_weights(trainer), expected)[0] < 1e-9


def test_the_seed_decides_weights_and_dropout() -> None:
    losses: dict[int, set[float]] = {}
    for seed in (1, 1, 2):
        config = toy.config(replace(toy.LLAMA, dropout=0.1), seed=seed, global_batch_size=2)
        trainer = Trainer(config, Mesh.single(), toy.datasets(config.model))
        losses.setdefault(seed, set()).add(trainer.step().loss)
    assert len(losses[1]) == 1 and losses[1] != losses[2]


def resumed_step(mesh: Mesh, config: Config) -> int:
    """The step a run begins at; rank 1 sees a folder without checkpoints, as on a shared disk that lags behind."""
    if mesh.rank == 1:
        config = replace(config, checkpoint=CheckpointConfig())
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    begun: list[int] = []
    take = trainer.step
    trainer.step = lambda: (begun.append(trainer.steps), take())[1]  # type: ignore[method-assign]
    trainer.run()
    return begun[0]


def test_the_main_rank_decides_whether_to_resume(tmp_path: Path) -> None:
    """CKPT-12: ranks that see different folders do not part ways."""
    config = toy.config(replace(toy.LLAMA, num_layers=1), global_batch_size=2, train_steps=2)
    run(keeping(replace(config, run=replace(config.run, train_steps=1)), tmp_path))
    resuming = toy.config(replace(toy.LLAMA, num_layers=1), dp=2, global_batch_size=2, train_steps=2)
    resuming = replace(resuming, checkpoint=CheckpointConfig(load=str(tmp_path / "checkpoints")))
    assert on_mesh(resuming.parallel, resumed_step, resuming) == [1, 1]
