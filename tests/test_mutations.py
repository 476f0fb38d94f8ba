"""The tests can fail: each mistake of a list, made on purpose, is seen by a named test of the suite.

The one idea: a mutation replaces functions of the library before ranks are forked, so that all of them inherit it, and
the test that is there to catch it is called as it stands. A crash is no catch: the test's own comparison must fail, or,
where `dies` says so, a check inside the library. SEEN_BY, at the end, lists mutations by the test that sees them.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d import comm, data, grads, kernels, layers, mesh, model, optimizer, pipeline, rng, schedule, trainer
from megatron3d import weights as flat_weights
from megatron3d.params import EMBEDDING, ParamSpec
from tests import test_data, test_optimizer, test_parity, test_trainer, test_weights, toy
from tests.ranks import RankFailure

Killer = Callable[..., None]
Wrap = Callable[[Any], Any]
"""From the original to what replaces it."""


@dataclass(frozen=True)
class Mutation:
    """A mistake."""

    name: str
    patches: tuple[tuple[Any, str, Wrap], ...]
    """Owner, attribute, and what becomes of it."""
    dies: str
    """Words of the library's own check that sees the mistake before any number is compared; empty if none does."""


def mutation(name: str, *patches: tuple[Any, str, Wrap], dies: str = "") -> Mutation:
    return Mutation(name, patches, dies)


def rounding(name: str) -> Killer:
    return partial(test_parity.test_rounding, name)


def exact(name: str) -> Killer:
    return partial(test_parity.test_exact, name)


# Replacements ---------------------------------------------------------------------------------------------------------


def nothing(original: Any) -> Any:
    """Does nothing."""
    return lambda *args, **kwargs: None


def with_arguments(**changes: Callable[[Any], Any]) -> Wrap:
    """The original with some of its arguments changed."""

    def wrap(original: Any) -> Any:
        signature = inspect.signature(original)

        def changed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.arguments.update({name: change(bound.arguments[name]) for name, change in changes.items()})
            return original(*bound.args, **bound.kwargs)

        return changed

    return wrap


def table_with(change: Callable[[ParamSpec], ParamSpec]) -> Wrap:
    """Another parameter table."""
    return lambda original: lambda *args, **kwargs: [change(spec) for spec in original(*args, **kwargs)]


def taken_for_whole(*words: str) -> Wrap:
    """Partial gradients of parameters with one of the words in their names are not summed over tp."""
    return table_with(
        lambda spec: replace(spec, partial=frozenset()) if any(word in spec.name for word in words) else spec
    )


# Replacements: tensor and sequence parallelism ------------------------------------------------------------------------


def own_values(original: Any) -> Any:
    """An all-reduce that forgets the other ranks."""
    return lambda x, axis: x


def own_share(original: Any) -> Any:
    """A reduce-scatter that forgets the other ranks."""
    return lambda x, axis: x.chunk(axis.size)[axis.rank]


def pending(wrap: Wrap) -> Wrap:
    """The same as a started collective."""
    return lambda original: lambda *args: comm.Pending((), lambda: wrap(original)(*args))


def bias_from_every_rank(original: Any) -> Any:
    def forward(self: layers.RowParallelLinear, x: Tensor) -> Tensor:
        y: Tensor = original(self, x)
        return y if self.bias is None else y + self.bias.detach() * (self.axis.size - 1)

    return forward


def everything_is_here(original: Any) -> Any:
    return lambda weight, rows, here, slot: original(weight, rows, torch.ones_like(here), slot)


def gate_and_up_swapped_on_rank_1(original: Any) -> Any:
    def other(name: str) -> str:
        return name.replace(".gate.", ".up.") if ".gate." in name else name.replace(".up.", ".gate.")

    def local_tensors(table: list[ParamSpec], sites: Any, sizes: Any, coordinates: Any) -> Any:
        specs = {spec.name: spec for spec in table}
        swapped = [specs[other(spec.name)] for spec in table]
        return original(swapped if coordinates["tp"] == 1 else table, sites, sizes, coordinates)

    return local_tensors


def first_keys_for_every_rank(original: Any) -> Any:
    def init(self: model.Attention, config: Any, **kwargs: Any) -> None:
        original(self, config, **kwargs)
        if self.key_of_query is not None:
            shared_by = config.num_attention_heads // config.num_query_groups
            self.key_of_query = [i // shared_by for i in range(self.queries)]

    return init


def first_shard_alone(stats: Tensor) -> Tensor:
    """(ranks, 3, N) with all shards but the first one empty."""
    empty = torch.zeros_like(stats[1:])
    empty[:, 0] = -math.inf
    return torch.cat([stats[:1], empty])


def counted_on_every_tensor_rank(original: Any) -> Any:
    return property(lambda self: self.stage.has_head)


# Replacements: dropout ------------------------------------------------------------------------------------------------


def keyed_by_microbatch(original: Any) -> Any:
    def new_feed(self: trainer.Trainer, dataset: Any, first: int) -> pipeline.Feed:
        feed: pipeline.Feed = original(self, dataset, first)

        def numbered(microbatch: int) -> pipeline.MicroBatch:
            batch = feed(microbatch)
            return replace(batch, samples=(microbatch,) * len(batch.samples))

        return numbered

    return new_feed


def drawn_anew(original: Any) -> Any:
    calls = itertools.count()
    return lambda *args, seed, **kwargs: original(*args, seed=seed + next(calls), **kwargs)


def layers_numbered_on_their_stage(original: Any) -> Any:
    def init(self: model.GPTStage, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for number, block in enumerate(self.layers.values()):
            assert isinstance(block, model.Block)
            block.layer = number

    return init


def inexact_recomputation(compute: Any) -> Any:
    return lambda x: compute(x) if torch.is_grad_enabled() else compute(x) * 1.0001


# Replacements: batches, loss and schedule -----------------------------------------------------------------------------


def first_microbatch_twice(original: Any) -> Any:
    def new_feed(self: trainer.Trainer, dataset: Any, first: int) -> pipeline.Feed:
        feed: pipeline.Feed = original(self, dataset, first)
        return lambda microbatch: feed(max(0, microbatch - 1))

    return new_feed


def same_samples_again(original: Any) -> Any:
    def step(self: trainer.Trainer) -> optimizer.StepResult:
        result: optimizer.StepResult = original(self)
        self.consumed_samples = 0
        return result

    return step


def labels_one_later(original: Any) -> Any:
    def load(*args: Any) -> tuple[Tensor, Tensor]:
        tokens, labels = original(*args)
        return tokens, labels.roll(-1, 0)

    return load


def tokens_as_labels(original: Any) -> Any:
    return lambda self, index: (original(self, index)[0],) * 2


def excess(feed: pipeline.Feed, microbatches: Sequence[int]) -> float:
    """All labels of some microbatches / valid ones."""
    labels = torch.stack([feed(microbatch).labels for microbatch in microbatches])
    return labels.numel() / int((labels >= 0).sum())


def mean_of_microbatch_means(original: Any) -> Any:
    def backward(self: pipeline._Run, microbatch: int) -> None:
        seed = self.seed
        assert seed is not None
        self.seed = seed * excess(self.feed, [microbatch])
        original(self, microbatch)
        self.seed = seed

    return backward


def mean_of_rank_means(original: Any) -> Any:
    def train(self: pipeline.Pipeline, ops: Any, feed: pipeline.Feed, *, micro_batch_size: int, seed: float) -> Tensor:
        seed *= excess(feed, sorted({op.microbatch for op in ops}))
        sums: Tensor = original(self, ops, feed, micro_batch_size=micro_batch_size, seed=seed)
        return sums

    return train


def mean_over_all_tokens(original: Any) -> Any:
    def step(
        self: optimizer.Optimizer, lr: float, sums: Tensor, expected_tokens: int, **others: Any
    ) -> optimizer.StepResult:
        valid = comm.all_reduce(sums.clone(), self.mesh.world)[1]
        result: optimizer.StepResult = original(self, lr, sums, int(valid), **others)
        return result

    return step


def without_the_last_microbatch(original: Any) -> Any:
    def build(name: str, stages: int, microbatches: int) -> schedule.Lists:
        lists: schedule.Lists = original(name, stages, microbatches)
        return [[op for op in ops if op.microbatch < microbatches - 1] for ops in lists]

    return build


def backward_from_the_last(original: Any) -> Any:
    def gpipe(stages: int, microbatches: int) -> schedule.Lists:
        lists: schedule.Lists = original(stages, microbatches)
        return [ops[:microbatches] + ops[microbatches:][::-1] for ops in lists]

    return gpipe


# Replacements: gradients, norm and update -----------------------------------------------------------------------------


def kept_gradients(original: Any) -> Any:
    def begin(self: grads.FlatGrads, num_microbatches: int) -> None:
        kept = [buffer.clone() for buffer in self.buckets]
        original(self, num_microbatches)
        for buffer, values in zip(self.buckets, kept, strict=True):
            buffer.copy_(values)

    return begin


def tied_sum_last(original: Any) -> Any:
    def finish(self: grads.FlatGrads) -> None:
        self._sum_tied = lambda: None  # type: ignore[method-assign]
        original(self)
        grads.FlatGrads._sum_tied(self)

    return finish


def own_norm(original: Any) -> Any:
    def all_reduce(x: Tensor, axis: mesh.Axis) -> Tensor:
        total: Tensor = original(x.clone(), axis)
        total[0] = x[0]
        return total

    return all_reduce


def first_element_forgotten(original: Any) -> Any:
    def span(self: optimizer.Optimizer, i: int) -> optimizer.Span:
        found: optimizer.Span = original(self, i)
        return replace(found, ranges=[(max(start, 1), stop, decays) for start, stop, decays in found.ranges])

    return span


def count_moves_on(original: Any) -> Any:
    def step(self: optimizer.Optimizer, *args: Any, **kwargs: Any) -> optimizer.StepResult:
        result: optimizer.StepResult = original(self, *args, **kwargs)
        self.count += not result.applied
        return result

    return step


def when_waited_for(original: Any) -> Any:
    """A gather that arrives no sooner than somebody waits for it, so that a missing wait shows every time."""
    return lambda x, axis, out: comm.Pending((), lambda: original(x, axis, out=out).wait())


def in_training_only(original: Any) -> Any:
    return lambda self, needed: original(self, needed) if torch.is_grad_enabled() else None


# The list -------------------------------------------------------------------------------------------------------------

LATE_GATHER = (flat_weights, "start_all_gather", when_waited_for)
BACKWARDS = (schedule, "gpipe", backward_from_the_last)

SEEN_BY: list[tuple[Killer, list[Mutation]]] = [
    (
        rounding("llama"),
        [
            mutation("a rotation's gradient turns forward", (kernels, "rotary_backward", lambda _: kernels.rotary)),
            mutation(
                "padding columns take part in the softmax",
                (model, "vocab_parallel_cross_entropy", with_arguments(vocab_size=lambda size: 10**6)),
            ),
            mutation(
                "the last microbatch's gradient replaces the sum",
                (kernels, "accumulate_weight_grad", with_arguments(out=torch.zero_)),
            ),
            mutation("gradients of the last step are kept", (grads.FlatGrads, "begin", kept_gradients)),
            mutation(
                "a microbatch is left out",
                (trainer, "build", without_the_last_microbatch),
                dies="gradient contributions missing",
            ),
            mutation("a microbatch is read twice, one never", (trainer.Trainer, "_feed", first_microbatch_twice)),
            mutation("every step reads the first samples", (trainer.Trainer, "step", same_samples_again)),
            mutation("labels are shifted once too often", (trainer, "load_microbatch", labels_one_later)),
            mutation("the loss is a mean of microbatch means", (pipeline._Run, "_backward", mean_of_microbatch_means)),
            mutation("tokens outside the loss are counted", (optimizer.Optimizer, "step", mean_over_all_tokens)),
        ],
    ),
    (
        rounding("gpt2"),
        [
            mutation("tied gradients are not summed on one stage", (grads.FlatGrads, "_sum_tied", nothing)),
            mutation(
                "norms and biases decay",
                (trainer, "param_table", table_with(lambda spec: replace(spec, decay=True))),
            ),
        ],
    ),
    (
        rounding("tp"),
        [
            mutation(
                "a column linear's input gradient is not summed", (layers, "start_all_reduce", pending(own_values))
            ),
            mutation("a row linear's output is not summed", (layers, "all_reduce", own_values)),
            mutation("ids of other shards are looked up too", (layers._Lookup, "apply", everything_is_here)),
            mutation(
                "the softmax is over the first shard",
                (kernels, "cross_entropy_merge", with_arguments(stats=first_shard_alone)),
            ),
            mutation("gate and up are swapped on rank 1", (trainer, "local_tensors", gate_and_up_swapped_on_rank_1)),
            mutation("QK norm gradients are not summed", (trainer, "param_table", taken_for_whole("y_norm."))),
            mutation(
                "every tensor rank counts tokens", (pipeline.Pipeline, "counts_loss", counted_on_every_tensor_rank)
            ),
            mutation(
                "every tensor rank counts replicated weights in the norm",
                (optimizer, "owned", with_arguments(coordinates=lambda coordinates: {"tp": 0})),
            ),
        ],
    ),
    (
        rounding("tp gpt2"),
        [mutation("every rank adds a row linear's bias", (layers.RowParallelLinear, "forward", bias_from_every_rank))],
    ),
    (
        rounding("sp"),
        [
            mutation(
                "a column linear's input gradient is not summed under sp",
                (layers, "start_reduce_scatter", pending(own_share)),
            ),
            mutation("a row linear's output is not summed under sp", (layers, "reduce_scatter", own_share)),
            mutation(
                "rotary positions start anew halfway",
                (kernels, "rotary_tables", with_arguments(positions=lambda positions: positions % 12)),
            ),
            mutation("norm gradients are not summed", (trainer, "param_table", taken_for_whole("_norm."))),
            mutation(
                "partial gradients are averaged",
                (grads, "all_reduce", lambda original: lambda x, axis: original(x, axis) / axis.size),
            ),
        ],
    ),
    (
        rounding("sp gpt2"),
        [
            mutation(
                "learned positions start anew on every shard",
                (
                    layers.PositionEmbedding,
                    "forward",
                    with_arguments(positions=lambda positions: positions - positions[0]),
                ),
            ),
            mutation("position gradients are not summed", (trainer, "param_table", taken_for_whole("position"))),
            mutation(
                "row bias gradients are not summed",
                (trainer, "param_table", taken_for_whole("output.bias", "down.bias")),
            ),
        ],
    ),
    (
        rounding("kv below tp"),
        [
            mutation("every rank uses the first keys", (model.Attention, "__init__", first_keys_for_every_rank)),
            mutation("whole keys' gradients are not summed", (trainer, "param_table", taken_for_whole(".key."))),
            mutation("whole values' gradients are not summed", (trainer, "param_table", taken_for_whole(".value."))),
        ],
    ),
    (
        rounding("dp"),
        [
            mutation(
                "all ranks read the same samples",
                (trainer, "microbatch_start", with_arguments(dp_rank=lambda rank: 0)),
            ),
            mutation(
                "gradients are averaged over dp",
                (grads, "start_reduce_scatter", with_arguments(x=lambda x: x.div_(2))),
            ),
            mutation("the loss is a mean of rank means", (pipeline.Pipeline, "train", mean_of_rank_means)),
            mutation("tied gradients are summed after the reduction", (grads.FlatGrads, "finish", tied_sum_last)),
            mutation(
                "a bucket is reduced after its first microbatch",
                (grads.FlatGrads, "begin", with_arguments(num_microbatches=lambda number: 1)),
                dies="gradient contributions missing",
            ),
            mutation("each rank clips by its own norm", (optimizer, "all_reduce", own_norm)),
            mutation("updated weights are not gathered", (flat_weights.FlatWeights, "start_gather", nothing)),
            mutation(
                "the forward pass does not wait for the gather",
                LATE_GATHER,
                (flat_weights.FlatWeights, "_wait_before_sites", nothing),
            ),
        ],
    ),
    (
        rounding("tied"),
        [
            mutation("tied gradients are not summed over stages", (grads.FlatGrads, "_sum_tied", nothing)),
            mutation(
                "both stages count a tied matrix in the norm",
                (optimizer, "owned", with_arguments(sites=lambda sites: [EMBEDDING, *sites])),
            ),
        ],
    ),
    (
        rounding("dropout sp"),
        [
            mutation(
                "dropout is keyed by the row of the shard",
                (rng, "dropout_mask", with_arguments(first_row=lambda row: 0)),
            )
        ],
    ),
    (
        rounding("dropout dp"),
        [
            mutation("dropout is keyed by the microbatch", (trainer.Trainer, "_feed", keyed_by_microbatch)),
            mutation(
                "dropout is keyed by the place in the microbatch",
                (rng, "dropout_mask", with_arguments(samples=lambda samples: range(len(samples)))),
            ),
        ],
    ),
    (
        exact("dropout pp"),
        [mutation("layers are numbered on their stage", (model.GPTStage, "__init__", layers_numbered_on_their_stage))],
    ),
    (exact("full"), [mutation("dropout is drawn anew", (rng, "dropout_mask", drawn_anew))]),
    (
        exact("selective"),
        [
            mutation(
                "recomputation is inexact",
                (model, "without_saving", with_arguments(compute=inexact_recomputation)),
            )
        ],
    ),
    (
        exact("schedule"),
        [
            mutation("gradients are added from the last", BACKWARDS, dies="out of microbatch order"),
            mutation("gradients are added from the last, unverified", BACKWARDS, (schedule, "verify", nothing)),
        ],
    ),
    (
        exact("buckets"),
        [
            mutation(
                "the back-end chooses the order of sums",
                (grads, "start_reduce_scatter", with_arguments(axis=lambda axis: replace(axis, ordered=False))),
            )
        ],
    ),
    (
        exact("zero"),
        [mutation("a piece begins one element late", (optimizer.Optimizer, "_span", first_element_forgotten))],
    ),
    (
        test_parity.test_adamw_on_one_rank_is_torch_adamw,
        [mutation("Adam counts from 2", (kernels, "adamw", with_arguments(step=lambda step: step + 1)))],
    ),
    (
        test_optimizer.test_a_batch_without_a_valid_token_is_skipped,
        [mutation("Adam counts a skipped step", (optimizer.Optimizer, "step", count_moves_on))],
    ),
    (
        test_optimizer.test_overlap_changes_nothing,
        [
            mutation(
                "an evaluation does not wait for the gather",
                LATE_GATHER,
                (flat_weights.FlatWeights, "_wait", in_training_only),
            )
        ],
    ),
    (
        test_trainer.test_the_learning_rate_is_that_of_the_step,
        [
            mutation(
                "the learning rate is the next step's",
                (trainer, "learning_rate", with_arguments(step=lambda step: step + 1)),
            )
        ],
    ),
    (
        test_data.test_labels_are_the_next_tokens_and_each_token_is_a_label_once,
        [mutation("labels are the tokens themselves", (data.TokenDataset, "sample", tokens_as_labels))],
    ),
    (
        partial(test_weights.test_initial_weights_do_not_depend_on_the_layout, toy.LLAMA),
        [
            mutation(
                "initial values do not know their place",
                (rng, "init_normal", with_arguments(box=lambda box: tuple((0, stop - start) for start, stop in box))),
            )
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killer", "mutation"),
    [pytest.param(killer, each, id=each.name) for killer, mutations in SEEN_BY for each in mutations],
)
def test_a_named_test_sees(killer: Killer, mutation: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for owner, attribute, wrap in mutation.patches:
        monkeypatch.setattr(owner, attribute, wrap(getattr(owner, attribute)))
    folder = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(killer).parameters else {}
    with pytest.raises(AssertionError) as failure:
        killer(**folder)
    if mutation.dies:
        assert mutation.dies in str(failure.value)
    else:
        assert not isinstance(failure.value, RankFailure), "a crash is no catch"
