"""Layout never changes the maths: runs on any layout against the serial reference, one rank, and each other.

The one idea: a case of knobs.py is run as it stands. Turning all its exact knobs back must change no bit; the reference
(or one rank, where the case has what the reference has not: dropout, AdamW) must be met up to rounding, and once more
in fp64, ten thousand times closer, which shows that it is rounding. What these tests can see, test_mutations.py shows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron3d.config import Config, ModelConfig, RopeScaling
from tests import knobs, reference, toy
from tests.knobs import Case, at_base, case, label, model_of, pairwise, run_of
from tests.lone import reference_run

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
"""Relative, of every loss, gradient norm and tensor, by dtype; bf16 knows exact comparisons only."""


class Course(NamedTuple):
    """What a run gave."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def course(config: Config, steps: int) -> Course:
    """Of the library, from toy's random weights."""
    run = toy.train(config, steps=steps)
    return Course(run.losses, run.norms, run.weights)


def reference_course(config: Config, steps: int) -> Course:
    """Of the serial reference in fp64, from the same weights on the same samples."""
    assert config.model.dropout == 0 and config.optim.optimizer == "sgd"
    return Course(*reference_run(dataclasses.replace(config, run=dataclasses.replace(config.run, dtype="fp64")), steps))


def assert_same(got: Course, wanted: Course) -> None:
    """To the last bit."""
    assert got.losses == wanted.losses
    assert got.norms == wanted.norms
    differing = [name for name, value in wanted.weights.items() if not torch.equal(got.weights[name], value)]
    assert not differing, f"weights differ: {differing}"


def assert_close(got: Course, wanted: Course, dtype: str) -> None:
    """Up to the rounding of a run in `dtype`."""
    gaps = {
        f"{what} of step {step}": abs(a - b) / abs(b)
        for what, ours, theirs in (("loss", got.losses, wanted.losses), ("norm", got.norms, wanted.norms))
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True))
    }
    ours, theirs = ({name: value.double() for name, value in run.weights.items()} for run in (got, wanted))
    largest, name = toy.largest_gap(ours, theirs)
    beyond = {what: gap for what, gap in {**gaps, name: largest}.items() if not gap <= TOLERANCE[dtype]}
    assert not beyond, f"gaps beyond {TOLERANCE[dtype]} in {dtype}: {beyond}"


def check_exact(turned: Case, steps: int = 20, **settings: Any) -> Course:
    """Turning the exact knobs back changes nothing; returns what the case gave."""
    got = course(run_of(turned, **settings), steps)
    assert_same(got, course(run_of(at_base(turned, "exact"), model_of(turned), **settings), steps))
    return got


def check_rounding(turned: Case, steps: int = 20, got: Course | None = None, **settings: Any) -> None:
    """The case, or what it gave, is the reference's course, or that of one rank, up to rounding."""
    config = run_of(turned, **settings)
    if config.model.dropout == 0 and config.optim.optimizer == "sgd":
        wanted = reference_course(config, steps)
    else:
        wanted = course(run_of(at_base(turned, "exact", "rounding"), config.model, **settings), steps)
    assert_close(got or course(config, steps), wanted, turned["dtype"])


# Single knobs, a few steps --------------------------------------------------------------------------------------------

FULL_GPT2: dict[str, Any] = {"family": "gpt2", "bias": "all", "tied_embeddings": True}

ROUNDING = {
    "llama": case(),
    "gpt2": case(**FULL_GPT2),
    "tp": case(tp=2, qk_norm=True),
    "tp gpt2": case(tp=2, **FULL_GPT2),
    "sp": case(tp=2, sp=True, bias="qkv", num_query_groups=2),
    "sp gpt2": case(tp=2, sp=True, **FULL_GPT2),
    "kv below tp": case(tp=3, num_query_groups=2, bias="qkv"),
    "dp": case(dp=2, tied_embeddings=True),
    "tied": case(pp=2, dp=2, tied_embeddings=True),
    "dropout sp": case(tp=2, sp=True, dropout=0.1),
    "dropout dp": case(dp=2, micro_batch_size=6, dropout=0.1),
}
EXACT = {
    "pp": case(pp=2, split="uneven"),
    "tied": case(pp=2, tied_embeddings=True),
    "schedule": case(pp=2, schedule="gpipe"),
    "zero": case(dp=2, zero=0),
    "overlap": case(dp=2, overlap=False),
    "buckets": case(dp=3, micro_batch_size=2, bucket_size=1),
    "selective": case(recompute="selective", dropout=0.1),
    "full": case(recompute="full", dropout=0.1),
    "dropout pp": case(pp=2, dropout=0.1),
    "bf16": case(pp=2, dp=2, zero=0, dtype="bf16"),
}


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding(name: str) -> None:
    check_rounding({**ROUNDING[name], "dtype": "fp64"}, steps=3)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    check_exact(EXACT[name], steps=3)


# The matrix -----------------------------------------------------------------------------------------------------------

MATRIX = pairwise(seed=2)
BATTERY = [turned for seed in range(3, 9) for turned in pairwise(seed, offers=5)]


def _params(cases: list[Case], *marks: Any) -> list[Any]:
    return [pytest.param(turned, id=label(turned), marks=marks) for turned in cases]


@pytest.mark.slow
@pytest.mark.parametrize("turned", _params(MATRIX) + _params(BATTERY, pytest.mark.soak))
def test_matrix(turned: Case) -> None:
    """20 steps in the case's dtype, exact and up to rounding; three more in fp64 if that is another one."""
    got = check_exact(turned)
    if turned["dtype"] in TOLERANCE:
        check_rounding(turned, got=got)
    if turned["dtype"] != "fp64":
        check_rounding({**turned, "dtype": "fp64"}, steps=3)


def test_the_matrix_has_every_possible_pair() -> None:
    possible = knobs.possible_pairs()
    covered = {pair for turned in MATRIX for pair in knobs.pairs(turned)}
    assert len(possible) > 1000 and len(MATRIX) > 20
    assert set(possible) == covered
    assert all(knobs.is_legal(turned) for turned in MATRIX)


@pytest.mark.parametrize(("pp", "split"), [key for key in knobs.STAGES if key[1] not in knobs.ASKED_FOR])
def test_splits_are_those_of_the_library(pp: int, split: str) -> None:
    """What the table of stages calls even and uneven is what --pp alone gives: 5 layers over 2, 7 over 4."""
    assert run_of(case(pp=pp, split=split)).parallel.stage_layers == knobs.STAGES[pp, split]


# AdamW ----------------------------------------------------------------------------------------------------------------

ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1}
ADAMW_CASES = [
    case(dp=3, pp=2, micro_batch_size=2, split="uneven", bucket_size=1, tied_embeddings=True),
    case(dp=2, pp=2, zero=0, schedule="gpipe", overlap=False, recompute="full", dtype="bf16", **FULL_GPT2),
    case(tp=2, sp=True, dp=2, zero=0, recompute="selective", qk_norm=True, num_query_groups=1, dropout=0.1),
]


@pytest.mark.slow
@pytest.mark.parametrize("turned", _params(ADAMW_CASES))
def test_adamw(turned: Case) -> None:
    """Adam hides a wrong scale but shows a stale moment. No rounding in fp32: where a gradient is nothing but rounding,
    as that of a key's bias, Adam makes it a step of full size."""
    check_exact(turned, **ADAMW)
    check_rounding({**turned, "dtype": "fp64"}, steps=10, **ADAMW)


def test_adamw_on_one_rank_is_torch_adamw() -> None:
    """Against autograd through the reference and torch's own optimizer, with its groups for decay and none."""
    config = run_of(case(dtype="fp64", **FULL_GPT2), clip_grad=0.0, **ADAMW)
    weights = {name: value.double().requires_grad_() for name, value in toy.random_weights(config.model).items()}
    groups = [
        {"params": [value for value in weights.values() if value.dim() == dim], "weight_decay": decay}
        for dim, decay in ((2, config.optim.weight_decay), (1, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, config.optim.lr, (config.optim.beta1, config.optim.beta2), config.optim.eps)
    losses, norms = [], []
    for step in range(10):
        loss = reference.loss(*toy.global_batch(config.model, step * 12, 12), weights, config.model)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        squares = [value.grad.square().sum().item() for value in weights.values() if value.grad is not None]
        norms.append(math.sqrt(sum(squares)))
        optimizer.step()
    wanted = Course(losses, norms, {name: value.detach() for name, value in weights.items()})
    assert_close(course(config, 10), wanted, "fp64")


# One rank against the reference ---------------------------------------------------------------------------------------

LLAMA, GPT2 = model_of(case()), model_of(case(**FULL_GPT2))
WIDE_HEADS = dataclasses.replace(LLAMA, head_dim=8)  # 12 heads of 8 in a hidden size of 48
VARIATIONS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "gpt2": (GPT2, {}),
    "llama tied": (dataclasses.replace(LLAMA, tied_embeddings=True), {}),
    "gpt2 untied without biases": (dataclasses.replace(GPT2, tied_embeddings=False, bias="none"), {}),
    "qwen2": (dataclasses.replace(LLAMA, bias="qkv", num_query_groups=2), {}),
    "qwen3": (dataclasses.replace(WIDE_HEADS, qk_norm=True, num_query_groups=6), {}),
    "mqa": (dataclasses.replace(LLAMA, num_query_groups=1), {}),
    "gpt2 mqa qk norm": (dataclasses.replace(GPT2, num_query_groups=1, qk_norm=True), {}),
    "gelu with rope": (dataclasses.replace(LLAMA, activation="gelu"), {}),
    "gelu_tanh with rmsnorm": (dataclasses.replace(LLAMA, activation="gelu_tanh", bias="all"), {}),
    "swiglu with layernorm": (dataclasses.replace(GPT2, activation="swiglu"), {}),
    "longer position table": (dataclasses.replace(GPT2, max_position=40), {}),
    "large epsilon": (dataclasses.replace(LLAMA, norm_epsilon=0.1), {}),
    # Wavelengths of 6, 20, 63 and 199 tokens: one is kept, one blended, two are slowed.
    "llama-3 scaling": (
        dataclasses.replace(
            WIDE_HEADS,
            rope_theta=100.0,
            rope_scaling=RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
        ),
        {},
    ),
    "clip always": (LLAMA, {"clip_grad": 0.1}),
    "clip never": (LLAMA, {"clip_grad": 100.0}),
    "no clipping": (GPT2, {"clip_grad": 0.0}),
    "no decay": (GPT2, {"weight_decay": 0.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIATIONS)
def test_one_rank_is_the_reference(name: str) -> None:
    model, settings = VARIATIONS[name]
    configs = {dtype: toy.config(model, lr=0.05, micro_batch_size=4, dtype=dtype, **settings) for dtype in TOLERANCE}
    wanted = reference_course(configs["fp64"], steps=20)
    for dtype, config in configs.items():
        assert_close(course(config, steps=20), wanted, dtype)


# Exact knobs at the bench shape ---------------------------------------------------------------------------------------

BENCH = ModelConfig(hidden_size=256, ffn_hidden_size=688, vocab_size=8192, seq_length=256, num_attention_heads=8)
BENCH_RUN = {"global_batch_size": 4, "micro_batch_size": 1}
BENCH_CASES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2},
    "tied over stages": {"pp": 2, "tied_embeddings": True},
    "stages and schedule": {"pp": 4, "schedule": "gpipe"},
    "recompute selective": {"recompute": "selective"},
    "recompute full": {"recompute": "full"},
    "zero": {"dp": 2, "zero": 0},
    "overlap and buckets": {"dp": 2, "overlap": False, "bucket_size": 1},
}


def bench_course(tied_embeddings: bool = False, dp: int = 1, **layout: Any) -> Course:
    """Two steps of four samples."""
    model = dataclasses.replace(BENCH, tied_embeddings=tied_embeddings)
    return course(toy.config(model, lr=0.05, dp=dp, **BENCH_RUN, **layout), steps=2)


bench_base = functools.cache(bench_course)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCH_CASES)
def test_exact_at_the_bench_shape(name: str) -> None:
    """Some paths agree at tiny sizes by luck: a product added to a sum rounds like one that is fused with it."""
    turned = BENCH_CASES[name]
    base = {name: turned[name] for name in ("tied_embeddings", "dp") if name in turned}
    assert_same(bench_course(**turned), bench_base(**base))
