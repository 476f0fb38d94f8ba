"""What needs no peers: one rank of any mesh by itself, a trainer in this process, the reference's run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron3d.config import Config, ParallelConfig
from megatron3d.data import Datasets
from megatron3d.grid import Grid
from megatron3d.mesh import Axis, Mesh
from megatron3d.trainer import Trainer
from tests import reference, toy


def lone_rank(parallel: ParallelConfig, rank: int) -> Mesh:
    """Rank `rank` of the mesh of `parallel`; its axes have sizes and positions, but nobody to talk to."""
    grid = Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp)

    def axis(name: str, *along: str) -> Axis:
        members = next(group for group in grid.groups(*along) if rank in group)
        return Axis(name, len(members), members.index(rank), tuple(members), None)

    everyone = ("pp", "dp", "tp")
    return replace(
        Mesh.single(),
        grid=grid,
        rank=rank,
        tp=axis("tp", "tp"),
        dp=axis("dp", "dp"),
        pp=axis("pp", "pp"),
        pp_back=axis("pp_back", "pp"),
        world=axis("world", *everyone),
        control=axis("control", *everyone),
    )


def lone_trainer(config: Config, weights: dict[str, Tensor] | None = None, data: Datasets | None = None) -> Trainer:
    """A trainer of a one-rank `config` in this process, from random `weights` (default: toy's)."""
    assert config.parallel.tp * config.parallel.pp * config.parallel.dp == 1
    trainer = Trainer(config, Mesh.single(), toy.datasets(config.model) if data is None else data)
    trainer.weights.load(toy.random_weights(config.model) if weights is None else weights)
    trainer.optimizer.reset_masters()
    return trainer


def reference_weights(config: Config) -> dict[str, Tensor]:
    """Toy's random weights in the dtype that the reference computes in beside `config`."""
    dtype = torch.float64 if config.run.dtype == "fp64" else torch.float32
    return {name: value.to(dtype) for name, value in toy.random_weights(config.model).items()}


def reference_run(config: Config, steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights that the independent reference has for an SGD run on toy's data."""
    size, optim = config.batch.global_batch_size, config.optim
    batches = [toy.global_batch(config.model, step * size, size) for step in range(steps)]
    return reference.train(
        reference_weights(config),
        config.model,
        batches,
        lr=lambda _: optim.lr,
        clip=optim.clip_grad,
        decay=optim.weight_decay,
    )


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """All weights of a one-rank trainer by canonical name."""
    trainer.weights.finish_gather()
    return {name: values for name, _, values in toy.local_boxes(trainer)}
