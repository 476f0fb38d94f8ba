"""Checks that need a CUDA device: the same training on one GPU and on the CPU. They skip themselves without one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from megatron3d.mesh import Mesh
from megatron3d.rng import dropout_mask
from megatron3d.trainer import Trainer
from tests import toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MODELS = {"llama": toy.LLAMA, "gpt2": toy.GPT2}


@pytest.fixture
def _repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def losses(model: str, device: str, steps: int = 5, **knobs: object) -> list[float]:
    """Losses of a one-process run."""
    config = toy.config(MODELS[model], micro_batch_size=4, **knobs)
    trainer = Trainer(config, Mesh.single(device), toy.datasets(config.model))
    trainer.weights.load(toy.random_weights(config.model))
    trainer.optimizer.reset_masters()
    return [trainer.step().loss for _ in range(steps)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_fp32_training_equals_the_cpu(model: str, recompute: str) -> None:
    on_gpu, on_cpu = losses(model, "cuda", recompute=recompute), losses(model, "cpu")
    assert on_gpu == pytest.approx(on_cpu, rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_training_follows_fp32(model: str) -> None:
    in_bf16, in_fp32 = losses(model, "cuda", dtype="bf16"), losses(model, "cuda")
    assert all(math.isfinite(loss) for loss in in_bf16)
    assert in_bf16 == pytest.approx(in_fp32, rel=2e-2)


@pytest.mark.usefixtures("_repeatable")
def test_deterministic_runs_are_equal() -> None:
    knobs = {"dtype": "bf16", "optimizer": "adamw", "lr": 1e-3}
    assert losses("llama", "cuda", **knobs) == losses("llama", "cuda", **knobs)


def test_dropout_drops_the_same_values_on_both_devices() -> None:
    masks = [
        dropout_mask((8, 2, 64), seed=3, samples=(5, 9), layer=1, site=2, first_row=4, keep=0.9, hidden=64, device=on)
        for on in (torch.device("cpu"), torch.device("cuda"))
    ]
    assert torch.equal(masks[0], masks[1].cpu())
