"""Pipeline execution: few microbatches, uneven stages, messages as they really travel, forward-only evaluation."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d import pipeline
from megatron3d.cli import parse
from megatron3d.comm import Pending, start_receive
from megatron3d.config import Config, ConfigError, ModelConfig, ParallelConfig, RunConfig
from megatron3d.launch import Launch
from megatron3d.mesh import Axis, Mesh
from megatron3d.params import param_table
from megatron3d.trainer import Trainer
from tests import reference, toy
from tests.lone import lone_trainer, reference_run, reference_weights
from tests.ranks import on_mesh


def train_in_turn(mesh: Mesh, configs: list[Config], steps: int) -> list[Any]:
    """(results, boxes) of a run of each config, one after the other on the same ranks."""
    return [
        toy._train_rank(mesh, config, steps, toy.random_weights(config.model), None, None, toy.datasets(config.model))
        for config in configs
    ]


def assert_reference(config: Config, ranks: list[Any], steps: int) -> None:
    """Losses, norms and assembled weights of one run equal the reference's in fp64."""
    losses, norms, weights = reference_run(config, steps)
    for results, _, _ in ranks:
        assert [result.loss for result in results] == pytest.approx(losses, rel=1e-9)
        assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-9)
    found = toy.assemble(param_table(config.model), [boxes for _, boxes, _ in ranks])
    assert toy.largest_gap(found, weights)[0] < 1e-9


def compare(configs: list[Config], steps: int) -> None:
    """All configs, of one mesh, against the reference."""
    ranks = on_mesh(configs[0].parallel, train_in_turn, configs, steps)
    for number, config in enumerate(configs):
        assert_reference(config, [rank[number] for rank in ranks], steps)


@pytest.mark.parametrize("model", [toy.LLAMA, pytest.param(toy.GPT2, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_fewer_microbatches_than_stages(model: ModelConfig) -> None:
    """PIPE-01: pp 4 with 1, 2, 3 microbatches, both schedules: no hang, gradients equal the reference."""
    knobs: dict[str, Any] = {"pp": 4, "dtype": "fp64"}
    compare(
        [
            toy.config(model, global_batch_size=batch, schedule=schedule, **knobs)
            for batch in (1, 2, 3)
            for schedule in ("1f1b", "gpipe")
        ],
        steps=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "pp", "stage_layers"), [(5, 2, ()), (5, 2, (1, 4)), (7, 4, ()), (1, 2, (1, 0))], ids=str
)
def test_uneven_stages(layers: int, pp: int, stage_layers: tuple[int, ...]) -> None:
    """DIV-01: 5 layers over 2 stages, 7 over 4, and splits by hand, one of them with a stage of the head alone."""
    model = replace(toy.LLAMA, num_layers=layers)
    config = toy.config(model, pp=pp, stage_layers=stage_layers, global_batch_size=4, dtype="fp64")
    assert sum(config.parallel.stage_layers) == layers
    compare([config], steps=2)


def test_losses_are_summed_in_double_precision() -> None:
    """The loss of a step is the sum of its fp32 token losses in fp64, to the last bit."""
    config = toy.config(micro_batch_size=6, global_batch_size=12)
    trainer, total, valid = lone_trainer(config), 0.0, 0
    for first in (0, 6):
        tokens, labels = (value.t().contiguous() for value in toy.global_batch(config.model, first, 6))
        total += trainer.stage(tokens, labels).double().sum().item()
        valid += int((labels >= 0).sum())
    result = trainer.step()
    assert (result.loss, result.valid_tokens) == (total / valid, valid)


def watch_buffers(mesh: Mesh, config: Config) -> tuple[list[tuple[str, tuple[int, ...], torch.dtype]], Any]:
    """(direction, shape, dtype) of every receive buffer of a step, and the step's result with the boxes after it."""
    seen: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def watch(buffer: Tensor, axis: Axis, peer: int) -> Pending:
        seen.append((axis.name, tuple(buffer.shape), buffer.dtype))
        return start_receive(buffer, axis, peer)

    vars(pipeline)["start_receive"] = watch  # in this forked rank alone
    return seen, train_in_turn(mesh, [config], 1)[0]


@pytest.mark.slow
def test_buffers_hold_sequence_shards() -> None:
    """PIPE-08: tp 2, pp 2, sequence parallel, seq 32, 2 samples: [seq / tp, mbs, hidden] both ways, loss equals REF."""
    config = toy.config(tp=2, pp=2, micro_batch_size=2, global_batch_size=4, dtype="fp64")
    ranks = on_mesh(config.parallel, watch_buffers, config)
    for rank, (seen, _) in enumerate(ranks):
        assert seen == [("pp" if rank >= 2 else "pp_back", (16, 2, 64), torch.float64)] * 2
    assert_reference(config, [result for _, result in ranks], 1)


def test_messages_have_the_type_of_the_model() -> None:
    """PIPE-09: bf16 travels as bf16, and there is no option that says otherwise."""
    config = toy.config(pp=2, global_batch_size=2, dtype="bf16")
    for seen, _ in on_mesh(config.parallel, watch_buffers, config):
        assert [(shape, dtype) for _, shape, dtype in seen] == [((32, 1, 64), torch.bfloat16)] * 2


@pytest.mark.parametrize("option", ["--fp32-residual-connection", "--fp32-residual", "--residual-dtype=fp32"])
def test_there_is_no_other_residual_type(option: str) -> None:
    """PIPE-09: an unknown flag is refused, under Megatron-LM's name too."""
    launch = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
    with pytest.raises(ConfigError, match=f"There is no option {option.partition('=')[0]}"):
        parse([option, "--mock-data"], launch)
    names = {field.name for section in (ModelConfig, ParallelConfig, RunConfig) for field in fields(section)}
    assert not any("residual" in name for name in names)


def evaluate_in_turn(mesh: Mesh, cases: list[tuple[Config, int]]) -> list[tuple[float, bool]]:
    """(loss, whether the next training step is as if there had been none) of evaluating `size` samples."""
    found = []
    for config, size in cases:
        data = toy.datasets(config.model, valid_size=size)
        trainer, untouched = (Trainer(config, mesh, data) for _ in range(2))
        for each in (trainer, untouched):
            each.weights.load(toy.random_weights(config.model))
        losses = {trainer.evaluate() for _ in range(2)}
        assert len(losses) == 1, "the same every time"
        found.append((losses.pop(), trainer.step() == untouched.step()))
    return found


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_evaluation_is_a_mean_over_tokens(pp: int) -> None:
    """LOSS-05: the same 8 samples as 1, 2, 4, 8 microbatches; LOSS-07: 9 samples in global batches of 4, the last one
    mostly padding; one and two stages: always the token-weighted mean of the reference, and no trace in training."""
    knobs: dict[str, Any] = {"pp": pp, "dtype": "fp64"}
    cases = [(toy.config(global_batch_size=8, micro_batch_size=size, **knobs), 8) for size in (8, 4, 2, 1)]
    cases += [(toy.config(global_batch_size=4, micro_batch_size=size, **knobs), 9) for size in (4, 2, 1)]
    model = cases[0][0].model
    expected = {}
    for size in (8, 9):
        tokens, labels = toy.global_batch(model, 0, size)
        expected[size] = reference.loss(tokens, labels, reference_weights(cases[0][0]), model).item()
    assert not math.isclose(expected[8], expected[9], rel_tol=1e-4)
    for found in on_mesh(cases[0][0].parallel, evaluate_in_turn, cases):
        for (_, size), (loss, untouched) in zip(cases, found, strict=True):
            assert loss == pytest.approx(expected[size], rel=1e-12) and untouched


@pytest.mark.slow
def test_evaluation_over_data_parallel_ranks() -> None:
    """LOSS-07 at dp 2 and tp 2: 9 samples, of which the second rank's last share is padding alone."""
    cases = [(toy.config(tp=2, dp=2, global_batch_size=4, dtype="fp64"), 9)]
    tokens, labels = toy.global_batch(cases[0][0].model, 0, 9)
    expected = reference.loss(tokens, labels, reference_weights(cases[0][0]), cases[0][0].model).item()
    for ((loss, untouched),) in on_mesh(cases[0][0].parallel, evaluate_in_turn, cases):
        assert loss == pytest.approx(expected, rel=1e-12) and untouched


def counts_loss(mesh: Mesh) -> bool:
    config = toy.config(tp=2, pp=2)
    return Trainer(config, mesh, toy.datasets(config.model)).pipeline.counts_loss


def test_the_loss_of_each_sample_counts_on_one_rank() -> None:
    """The stage with the head, first tensor rank: one per data-parallel rank."""
    assert on_mesh(ParallelConfig(tp=2, pp=2, dp=1, timeout_seconds=60), counts_loss) == [False, False, True, False]
