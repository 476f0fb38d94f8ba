"""The update: one norm over all layouts, decay groups, pieces, skipped steps, memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d.config import Config, ModelConfig
from megatron3d.data import Datasets
from megatron3d.layout import ALIGNMENT, runs
from megatron3d.mesh import Mesh
from megatron3d.params import num_parameters, param_table
from megatron3d.trainer import Trainer
from tests import reference, toy
from tests.lone import lone_trainer, reference_run, whole_weights
from tests.ranks import on_mesh

FOUR_KV = replace(toy.LLAMA, num_query_groups=4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 1}, {"tp": 2}, {"tp": 2, "sp": False}, {"tp": 4}], ids=str)
def test_the_norm_counts_replicated_weights_once(layout: dict[str, Any]) -> None:
    """GRP-01: the gradient norm at tp 1, 2, 4 is the reference's; with SGD and clip 0.01 so are the updated weights."""
    for clip in (0.0, 0.01):
        config = toy.config(FOUR_KV, global_batch_size=2, micro_batch_size=2, clip_grad=clip, lr=3.0, **layout)
        steps = 1 if clip == 0 else 2
        outcome = toy.train(config, steps=steps)
        _, norms, weights = reference_run(config, steps)
        assert min(norms) > 0.01, "the clip acts"
        assert outcome.norms == pytest.approx(norms, rel=1e-5)
        assert toy.largest_gap(outcome.weights, weights)[0] < 1e-5


@pytest.mark.slow
def test_the_norm_of_bf16_gradients() -> None:
    """GRP-03: bf16 weights at pp 2 and tp 2: the norm is summed in more than bf16 and agrees to 1e-3."""
    layouts: list[dict[str, Any]] = [{}, {"pp": 2}, {"tp": 2}]
    configs = [toy.config(dtype="bf16", global_batch_size=4, micro_batch_size=2, **layout) for layout in layouts]
    norms = [toy.train(config, steps=1).norms[0] for config in configs]
    assert norms[1] == norms[0]
    assert norms[2] == pytest.approx(norms[0], rel=1e-3)


class OneBatch(toy.RandomData):
    """The same samples in every step."""

    def sample(self, index: int) -> Any:
        return super().sample(index % 2)


@pytest.mark.slow
def test_gradients_are_fresh_in_every_step() -> None:
    """GRP-08: bf16, ZeRO-0 and ZeRO-1 agree in the norms of 5 steps; with no learning rate they are all the same."""
    for lr in (0.3, 1e-30):
        norms = {}
        for zero in (0, 1):
            config = toy.config(dtype="bf16", dp=2, zero=zero, lr=lr, global_batch_size=2, weight_decay=0.0)
            data = Datasets(OneBatch(config.model.vocab_size, config.model.seq_length), None, "")
            norms[zero] = toy.train(config, steps=5, data=data).norms
        assert norms[0] == norms[1]
        assert (len(set(norms[0])) == 1) == (lr == 1e-30)


def loss_after_step(trainer: Trainer) -> tuple[float, dict[str, Any]]:
    """What evaluation sees right after another step, while gathers may still be running; then the weights."""
    trainer.step()
    loss = trainer.evaluate()
    return loss, {name: (box, value) for name, box, value in toy.local_boxes(trainer)}


@pytest.mark.slow
def test_overlap_changes_nothing() -> None:
    """GRP-10: 20 steps at ZeRO-1, dp 2 with and without overlap are bit-equal, and so is an evaluation right after a
    step, which sees the updated weights."""
    outcomes = []
    for overlap in (True, False):
        config = toy.config(dp=2, zero=1, overlap=overlap, global_batch_size=4, micro_batch_size=2, train_steps=30)
        outcomes.append((config, toy.train(config, steps=20, after=loss_after_step)))
    (config, on), (_, off) = outcomes
    assert on.losses == off.losses and on.norms == off.norms
    assert all(torch.equal(on.weights[name], off.weights[name]) for name in off.weights)
    (loss, held), (loss_too, _) = on.extra
    assert loss == loss_too == off.extra[0][0]
    alone = lone_trainer(toy.config(global_batch_size=4), {name: value for name, (_, value) in held.items()})
    assert loss == pytest.approx(alone.evaluate(), rel=1e-6)
    assert not torch.equal(held["layers.0.mlp.up.weight"][1], on.weights["layers.0.mlp.up.weight"]), "a step was taken"


def update_without_gradient(mesh: Mesh, config: Config, change: Callable[[Trainer], None] | None = None) -> Any:
    """One update from gradients of zero, for weights of toy's; returns (result, boxes)."""
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    trainer.weights.load(toy.random_weights(config.model))
    trainer.optimizer.reset_masters()
    trainer.grads.begin(1)
    if change is not None:
        change(trainer)
    sums = torch.tensor([3.0, 10.0], dtype=torch.float64) * trainer.pipeline.counts_loss
    result = trainer.optimizer.step(config.optim.lr, sums, 10)
    trainer.weights.finish_gather()
    return result, toy.local_boxes(trainer)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "model",
    [replace(toy.LLAMA, qk_norm=True, num_layers=2), replace(toy.GPT2, qk_norm=True, num_layers=2)],
    ids=["rmsnorm", "layernorm"],
)
def test_decay_without_gradient(model: ModelConfig, zero: int) -> None:
    """GRP-13: zero gradients, weight decay 0.1, one step: norms and biases of every kind are unchanged, every matrix
    shrinks by lr x decay, whole (ZeRO-0) or cut into flat pieces (ZeRO-1)."""
    for optimizer in ("adamw", "sgd"):
        config = toy.config(model, dp=2, zero=zero, optimizer=optimizer, weight_decay=0.1, lr=0.5, global_batch_size=2)
        ranks = on_mesh(config.parallel, update_without_gradient, config)
        assert all(result.applied and result.grad_norm == 0 and result.loss == 0.3 for result, _ in ranks)
        after = toy.assemble(param_table(config.model), [boxes for _, boxes in ranks])
        for name, before in toy.random_weights(config.model).items():
            if before.dim() == 2:
                torch.testing.assert_close(after[name], before * (1 - 0.5 * 0.1), rtol=1e-6, atol=0)
            else:
                assert torch.equal(after[name], before), name


def padding(trainer: Trainer, buffers: list[Tensor]) -> list[Tensor]:
    """Masks of the elements of each bucket's buffer that hold no value."""
    masks = []
    for bucket, buffer in zip(trainer.weights.layout.buckets, buffers, strict=True):
        mask = torch.ones(bucket.size, dtype=torch.bool)
        for run in runs(bucket, 0, bucket.size):
            mask[run.start : run.stop] = False
        assert len(buffer) == bucket.size
        masks.append(mask)
    return masks


def poison_padding(trainer: Trainer) -> None:
    """Fills the padding of the gradient buffers with garbage, as if something had leaked into it."""
    finish = trainer.grads.finish

    def finish_and_poison() -> None:
        finish()
        for mask, buffer in zip(padding(trainer, trainer.grads.buckets), trainer.grads.buckets, strict=True):
            buffer[mask] = math.nan

    trainer.grads.finish = finish_and_poison  # type: ignore[method-assign]


def state_in_padding(trainer: Trainer) -> tuple[list[int], list[int], float]:
    """Sizes of this rank's pieces, real values in them, and the largest absolute padding value of any state."""
    largest, sizes, real = 0.0, [], []
    for bucket, mask, span, weight in zip(
        trainer.weights.layout.buckets,
        padding(trainer, trainer.weights.buckets),
        trainer.optimizer.spans,
        trainer.weights.buckets,
        strict=True,
    ):
        piece = mask[span.start : span.start + len(span.weight)]
        sizes.append(len(span.weight))
        real.append(sum(run.stop - run.start for run in runs(bucket, span.start, span.start + len(span.weight))))
        assert int((~piece).sum()) == real[-1]
        assert span.exp_avg is not None and span.exp_avg_sq is not None
        tensors = [(span.master, piece), (span.exp_avg, piece), (span.exp_avg_sq, piece), (weight, mask)]
        for tensor, where in tensors:
            largest = max([largest, *tensor[where].abs().tolist()])
    return sizes, real, largest


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 3}, {"dp": 3, "tp": 2}], ids=str)
def test_odd_data_parallel_size(layout: dict[str, int]) -> None:
    """DIV-10: dp 3, and dp 3 with tp 2 on 6 ranks: trains and equals the reference; pieces are equal and differ in
    padding only; padding is in no norm, no update, and stays 0."""
    model = replace(toy.LLAMA, num_layers=1)
    assert num_parameters(param_table(toy.config(model).model)) % 3
    config = toy.config(model, zero=1, global_batch_size=3, **layout)
    outcome = toy.train(config, steps=3, before=poison_padding)
    losses, norms, weights = reference_run(config, 3)
    assert outcome.losses == pytest.approx(losses, rel=1e-5) and outcome.norms == pytest.approx(norms, rel=1e-5)
    assert toy.largest_gap(outcome.weights, weights)[0] < 1e-5

    adam = replace(config, optim=replace(config.optim, optimizer="adamw", lr=0.01))
    outcome = toy.train(adam, steps=2, before=poison_padding, after=state_in_padding)
    sizes, real, largest = zip(*outcome.extra, strict=True)
    tp = config.parallel.tp
    for rank in range(tp):
        assert sizes[rank] == sizes[rank + tp] == sizes[rank + 2 * tp], "equal pieces"
    assert set(largest) == {0.0}
    held = sum(sum(one) for one in real)
    replicated = sum(spec.size for spec in param_table(config.model, tp=tp, sp=tp > 1) if not spec.shard)
    assert held == num_parameters(param_table(config.model)) + (tp - 1) * replicated


def test_weights_move_after_the_last_microbatch() -> None:
    """LOSS-08: 4 microbatches from step 0 on: the weights stand still within a step; the first update is the
    reference's."""
    config = toy.config(global_batch_size=4, dtype="fp64")
    trainer = lone_trainer(config)
    snapshots: list[list[Tensor]] = []

    finish = trainer.grads.finish

    def snapshot(*_: Any) -> None:
        snapshots.append([buffer.clone() for buffer in trainer.weights.buckets])

    def snapshot_and_finish() -> None:
        snapshot()
        finish()

    trainer.stage.register_forward_hook(snapshot)  # microbatches run one after the other: after each but the last
    trainer.grads.finish = snapshot_and_finish  # type: ignore[method-assign]
    trainer.step()
    first = whole_weights(trainer)
    trainer.step()
    assert len(snapshots) == 10

    def equal(a: int, b: int) -> bool:
        return all(torch.equal(x, y) for x, y in zip(snapshots[a], snapshots[b], strict=True))

    assert all(equal(0, i) for i in range(5)) and all(equal(5, i) for i in range(5, 10)) and not equal(4, 5)
    assert toy.largest_gap(first, reference_run(config, 1)[2])[0] < 1e-9


def infect(rank: int, value: float) -> Callable[[Trainer], None]:
    """At the second step, one gradient element of one world rank becomes `value` before any sum."""

    def prepare(trainer: Trainer) -> None:
        finish = trainer.grads.finish

        def finish_infected() -> None:
            if trainer.steps == 1 and trainer.mesh.rank == rank:
                trainer.grads.buckets[-1][0] = value
            finish()

        trainer.grads.finish = finish_infected  # type: ignore[method-assign]

    return prepare


def counts(trainer: Trainer) -> tuple[int, ...]:
    return trainer.steps, trainer.consumed_samples, trainer.skipped_steps, trainer.optimizer.count


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_non_finite_gradient_is_skipped_by_all_alike(value: float) -> None:
    """One bad element on one rank of four: nobody updates, Adam's count stands still, step, samples and lr go on."""
    config = toy.config(
        dp=2, pp=2, optimizer="adamw", lr=0.01, lr_schedule="linear", train_steps=4, global_batch_size=4, overlap=False
    )
    skipped = toy.train(config, steps=2, before=infect(3, value), after=counts)
    assert skipped.extra == [(2, 8, 1, 1)] * 4
    assert [step.applied for step in skipped.steps] == [True, False] and not math.isfinite(skipped.norms[1])
    one = toy.train(config, steps=1)
    assert all(torch.equal(skipped.weights[name], one.weights[name]) for name in one.weights)
    on = toy.train(config, steps=4, before=infect(3, value), after=counts)
    assert on.extra == [(4, 16, 1, 3)] * 4
    assert all(math.isfinite(norm) for norm in on.norms[2:])
    assert all(value.isfinite().all() for value in on.weights.values())


def test_learning_rate_moves_on_over_a_skipped_step() -> None:
    config = toy.config(lr=0.1, lr_schedule="linear", train_steps=5, global_batch_size=1)
    trainer = lone_trainer(config)
    infect(0, math.nan)(trainer)
    rates = []
    for _ in range(3):
        rates.append(trainer.learning_rate())
        trainer.step()
    assert rates == pytest.approx([0.1, 0.08, 0.06])
    assert counts(trainer) == (3, 3, 1, 2)


class NothingValid(toy.RandomData):
    def sample(self, index: int) -> Any:
        tokens, labels = super().sample(index)
        return tokens, labels * 0 - 100


def test_a_batch_without_a_valid_token_is_skipped() -> None:
    config = toy.config(global_batch_size=2)
    trainer = lone_trainer(config, data=Datasets(NothingValid(131, 32), None, ""))
    before = [buffer.clone() for buffer in trainer.weights.buckets]
    result = trainer.step()
    assert not result.applied and math.isnan(result.loss) and math.isnan(result.grad_norm) and result.valid_tokens == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.weights.buckets, strict=True))
    assert counts(trainer) == (1, 2, 1, 0)


def state_bytes(mesh: Mesh, config: Config) -> tuple[int, int]:
    """(bytes of masters and moments on this rank, bytes of them that are padding)."""
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    total = padded = 0
    for bucket, span in zip(trainer.weights.layout.buckets, trainer.optimizer.spans, strict=True):
        kept = [span.master] if span.master is not span.weight else []
        assert span.exp_avg is not None and span.exp_avg_sq is not None
        for tensor in [*kept, span.exp_avg, span.exp_avg_sq]:
            total += tensor.untyped_storage().nbytes()
            real = sum(run.stop - run.start for run in runs(bucket, span.start, span.start + len(tensor)))
            padded += (len(tensor) - real) * tensor.element_size()
    return total, padded


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bytes_each"), [("bf16", 12), ("fp32", 8)])
def test_memory_of_the_sharded_optimizer(dtype: str, bytes_each: int) -> None:
    """ZeRO-1 at dp 4, 10 M parameters: masters and moments are a quarter of 12 bytes (fp32: 8) each, plus padding."""
    model = replace(
        toy.LLAMA, hidden_size=384, num_attention_heads=6, ffn_hidden_size=1056, num_layers=6, vocab_size=1009
    )
    config = toy.config(model, dp=4, dtype=dtype, optimizer="adamw", global_batch_size=4)
    parameters = num_parameters(param_table(config.model))
    assert parameters >= 10_000_000
    fair = bytes_each * parameters / 4
    measured = on_mesh(config.parallel, state_bytes, config)
    tensors = 8 * model.num_layers + 3
    vocabulary = 2 * (1024 - 1009) * model.hidden_size
    padding_limit = bytes_each * (vocabulary + ALIGNMENT * 5 * tensors)
    for total, _ in measured:
        assert total == pytest.approx(fair, rel=0.01)
    assert len({total for total, _ in measured}) == 1
    assert sum(total - padded for total, padded in measured) == bytes_each * parameters
    assert sum(padded for _, padded in measured) <= padding_limit


def test_zero_0_keeps_everything_and_zero_1_its_share() -> None:
    for zero, share in ((0, 1), (1, 2)):
        config = toy.config(dp=2, zero=zero, optimizer="adamw", lr=0.01, global_batch_size=2)
        totals = [total for total, _ in on_mesh(config.parallel, state_bytes, config)]
        buckets = lone_trainer(toy.config(global_batch_size=2)).weights.buckets
        assert totals[0] == totals[1]
        assert totals[0] * share == pytest.approx(8 * sum(map(len, buckets)), rel=0.02)


def test_clipping_scales_the_whole_gradient() -> None:
    """A limit of half the norm halves the update; a limit above the norm, and 0, change nothing."""
    free = lone_trainer(toy.config(clip_grad=0.0, weight_decay=0.0, global_batch_size=2, dtype="fp64"))
    norm = free.step().grad_norm
    moves = {}
    for limit in (0.0, norm / 2, norm * 2):
        trainer = lone_trainer(toy.config(clip_grad=limit, weight_decay=0.0, global_batch_size=2, dtype="fp64"))
        before = [buffer.clone() for buffer in trainer.weights.buckets]
        assert trainer.step().grad_norm == norm, "the norm reported is the one before clipping"
        moves[limit] = [a - b for a, b in zip(trainer.weights.buckets, before, strict=True)]
    for free_move, half, same in zip(*(moves[limit] for limit in moves), strict=True):
        assert torch.equal(free_move, same)
        torch.testing.assert_close(half, free_move / 2, rtol=1e-5, atol=1e-15)


def test_every_knob_reaches_adamw() -> None:
    """Two steps of AdamW in this process against torch's own, for each setting alone."""
    for knobs in ({}, {"beta1": 0.5}, {"beta2": 0.6}, {"eps": 0.1}, {"weight_decay": 0.3}):
        base: dict[str, Any] = {
            "dtype": "fp64",
            "optimizer": "adamw",
            "lr": 0.05,
            "clip_grad": 0.0,
            "weight_decay": 0.1,
        }
        config = toy.config(replace(toy.LLAMA, num_layers=1), global_batch_size=2, **base | knobs)
        optim, trainer = config.optim, lone_trainer(config)
        leaves = {name: value.clone().requires_grad_() for name, value in whole_weights(trainer).items()}
        decaying, others = (
            [leaf for leaf in leaves.values() if (leaf.dim() == 2) == matrix] for matrix in (True, False)
        )
        groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
        settings: dict[str, Any] = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps}
        torch_adamw = torch.optim.AdamW(groups, lr=optim.lr, weight_decay=optim.weight_decay, **settings)
        for step in range(2):
            trainer.step()
            torch_adamw.zero_grad()
            reference.loss(*toy.global_batch(config.model, step * 2, 2), leaves, config.model).backward()
            torch_adamw.step()
        gap, worst = toy.largest_gap(whole_weights(trainer), {name: leaf.detach() for name, leaf in leaves.items()})
        assert gap < 1e-9, (knobs, worst)


def test_combinations_are_all_applied() -> None:
    """A step is applied for every optimizer, dtype and ZeRO stage on one rank, and weights move."""
    for optimizer, dtype, zero in itertools.product(("adamw", "sgd"), ("fp32", "bf16", "fp64"), (0, 1)):
        trainer = lone_trainer(toy.config(optimizer=optimizer, dtype=dtype, zero=zero, lr=0.1, global_batch_size=1))
        before = [buffer.clone() for buffer in trainer.weights.buckets]
        assert trainer.step().applied
        assert not any(torch.equal(a, b) for a, b in zip(before, trainer.weights.buckets, strict=True))
