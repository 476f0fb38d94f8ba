"""Gradient buckets: when they are reduced, and that every sum runs over the right ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron3d import comm, grads
from megatron3d.config import Config, ModelConfig
from megatron3d.mesh import Mesh
from megatron3d.pipeline import MicroBatch
from megatron3d.trainer import Trainer
from tests import toy
from tests.lone import lone_trainer, reference_run
from tests.ranks import on_mesh

TIED = replace(toy.LLAMA, tied_embeddings=True)


def microbatch(trainer: Trainer) -> MicroBatch:
    return trainer._feed(trainer.datasets.train, 0)(0)


def backward(trainer: Trainer) -> None:
    data = microbatch(trainer)
    trainer.stage(data.tokens, data.labels, data.samples).sum().backward()


def test_a_missing_or_extra_contribution_is_an_error() -> None:
    trainer = lone_trainer(toy.config(global_batch_size=2))
    trainer.grads.begin(2)
    backward(trainer)
    with pytest.raises(RuntimeError, match="contributions missing"):
        trainer.grads.finish()
    backward(trainer)
    trainer.grads.finish()
    trainer.grads.begin(1)
    backward(trainer)
    backward(trainer)
    with pytest.raises(RuntimeError, match="contributions missing"):
        trainer.grads.finish()


def test_contributions_add_up_and_begin_clears_them() -> None:
    """Two microbatches give twice one; the next step starts from zero."""
    for model in (TIED, toy.GPT2, toy.LLAMA):
        trainer = lone_trainer(toy.config(model, global_batch_size=2, dtype="fp64"))
        buckets = trainer.grads.buckets
        trainer.grads.begin(1)
        backward(trainer)
        trainer.grads.finish()
        once = [buffer.clone() for buffer in buckets]
        assert all(buffer.abs().sum() > 0 for buffer in once)
        trainer.grads.begin(2)
        backward(trainer)
        backward(trainer)
        trainer.grads.finish()
        for buffer, one in zip(buckets, once, strict=True):
            torch.testing.assert_close(buffer, 2 * one, rtol=1e-12, atol=1e-15)


def watched_step(mesh: Mesh, config: Config) -> list[tuple[int, list[int]]]:
    """(bucket reduced, contributions that each bucket still awaited at that moment) of one step."""
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    seen: list[tuple[int, list[int]]] = []
    reduce = trainer.grads._reduce

    def watch(i: int) -> None:
        seen.append((i, list(trainer.grads._missing)))
        reduce(i)

    trainer.grads._reduce = watch  # type: ignore[method-assign]
    trainer.step()
    return seen


def test_buckets_are_reduced_behind_the_backward_pass() -> None:
    """Each at its own last contribution, in the order of the backward, the late bucket in finish(); else all there."""
    config = toy.config(toy.GPT2, global_batch_size=3)
    overlapped = watched_step(Mesh.single(), config)
    total = len(overlapped)
    assert [i for i, _ in overlapped] == list(range(total)), "buckets are numbered in the order of the backward"
    for i, missing in overlapped[:-1]:
        assert missing[i] == 0 and all(missing[later] > 0 for later in range(i + 1, total))
    assert not any(overlapped[-1][1])
    at_the_end = watched_step(Mesh.single(), toy.config(toy.GPT2, global_batch_size=3, overlap=False))
    assert [missing for _, missing in at_the_end] == [[0] * total] * total


def matches_reference(config: Config, steps: int) -> None:
    """Losses, norms and weights of a run on forked ranks against the reference; replicas must agree to the last bit."""
    outcome = toy.train(config, steps=steps)
    losses, norms, weights = reference_run(config, steps)
    limit = 1e-9 if config.run.dtype == "fp64" else 1e-5
    assert outcome.losses == pytest.approx(losses, rel=limit)
    assert outcome.norms == pytest.approx(norms, rel=limit)
    gap, worst = toy.largest_gap(outcome.weights, weights)
    assert gap < limit, worst


@pytest.mark.slow
@pytest.mark.parametrize("model", [TIED, toy.GPT2], ids=["llama", "gpt2"])
def test_tied_embeddings_over_stages_with_zero_1(model: ModelConfig) -> None:
    """GRP-04: tied, pp 2, dp 2, ZeRO-1, 3 SGD steps, other data on each rank: the matrix equals the reference's on both
    stages and all ranks (the assembly of the outcome compares the copies)."""
    for dtype in ("fp32", "fp64"):
        matches_reference(toy.config(model, pp=2, dp=2, zero=1, global_batch_size=4, dtype=dtype), 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", [replace(toy.LLAMA, qk_norm=True), toy.GPT2], ids=["llama", "gpt2"])
def test_norm_gradients_are_summed_over_the_sequence_shards(model: ModelConfig) -> None:
    """GRP-06: tp 2 with sequence parallelism, 10 SGD steps: norm weights agree over ranks (asserted in the assembly),
    and with the reference, which averages would not."""
    config = toy.config(model, tp=2, sp=True, global_batch_size=2, micro_batch_size=2, dtype="fp64")
    matches_reference(config, 10)


def test_kv_heads_below_tp() -> None:
    """DIV-06: heads 8, kv 2, tp 4 works and equals the reference."""
    model = replace(toy.LLAMA, num_attention_heads=8, num_layers=2)
    matches_reference(toy.config(model, tp=4, global_batch_size=2, dtype="fp64"), 2)


def sums_on_mesh(mesh: Mesh, config: Config) -> list[int]:
    """Elements that each tp sum of one step carries."""
    carried: list[int] = []
    whole = comm.all_reduce

    def watch(x: torch.Tensor, axis: object) -> torch.Tensor:
        assert axis is mesh.tp
        carried.append(x.numel())
        return whole(x, mesh.tp)

    vars(grads)["all_reduce"] = watch  # in this forked rank alone
    Trainer(config, mesh, toy.datasets(config.model)).step()
    return carried


def test_partial_gradients_travel_in_one_message() -> None:
    """At tp 2 with sp: two norms a layer, the last norm, and nothing that is whole on its rank."""
    config = toy.config(tp=2, global_batch_size=1)
    assert on_mesh(config.parallel, sums_on_mesh, config) == [[64 * (2 * 4 + 1)]] * 2
