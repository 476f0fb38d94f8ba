"""The knobs of a run, what turning each may change, and cases in which every pair of their values occurs.

The one idea: the promise that layout never changes the maths is a table, and test_parity.py reads it. A *case* is a
value for each knob. Knobs of class "exact" change no bit, "rounding" no more than the order of sums, and "model" knobs
choose what is computed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

from megatron3d.config import Config, ModelConfig
from tests import toy

Case = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass(frozen=True)
class Knob:
    """What turning it may change, and its values; the first one is the base."""

    kind: Literal["exact", "rounding", "model"]
    values: tuple[Any, ...]


KNOBS = {
    "tp": Knob("rounding", (1, 2, 3, 4)),
    "sp": Knob("rounding", (False, True)),
    "dp": Knob("rounding", (1, 2, 3, 4)),
    "micro_batch_size": Knob("rounding", (3, 2, 6)),
    "pp": Knob("exact", (1, 2, 4)),
    "split": Knob("exact", ("even", "uneven", "skewed", "bare")),
    "schedule": Knob("exact", ("1f1b", "gpipe")),
    "zero": Knob("exact", (1, 0)),
    "overlap": Knob("exact", (True, False)),
    "bucket_size": Knob("exact", (25_000_000, 1)),  # one for each layer; one for each tensor
    "recompute": Knob("exact", ("none", "selective", "full")),
    "family": Knob("model", ("llama", "gpt2")),
    "tied_embeddings": Knob("model", (False, True)),
    "qk_norm": Knob("model", (False, True)),
    "bias": Knob("model", ("none", "qkv", "all")),
    "num_query_groups": Knob("model", (12, 6, 2, 1)),  # of 12 heads: fewer than tp, or not divided by it, too
    "dropout": Knob("model", (0.0, 0.1)),
    "dtype": Knob("model", ("fp32", "bf16", "fp64")),
}
BASE = {name: knob.values[0] for name, knob in KNOBS.items()}

STAGES = {
    (1, "even"): (2,),
    (2, "even"): (1, 1),
    (4, "even"): (1, 1, 1, 1),
    (2, "uneven"): (3, 2),
    (4, "uneven"): (2, 2, 2, 1),
    (2, "skewed"): (1, 2),
    (4, "skewed"): (1, 2, 1, 1),
    (2, "bare"): (2, 0),
    (4, "bare"): (2, 1, 1, 0),
}
"""Layers of each stage by pp and split."""
ASKED_FOR = ("skewed", "bare")
"""Splits that --stage-layers names; the others are what --pp gives."""

FAMILIES = {
    "llama": ModelConfig(ffn_hidden_size=72),
    "gpt2": ModelConfig(
        ffn_hidden_size=96, activation="gelu_tanh", normalization="layernorm", position_embedding="learned"
    ),
}
GLOBAL_BATCH = 12
MOST_RANKS = 8
CONSTRAINED = ("tp", "sp", "dp", "micro_batch_size", "pp", "split")  # the others go with anything


# Cases ----------------------------------------------------------------------------------------------------------------


def case(**turned: Any) -> Case:
    """The base with some knobs turned."""
    assert turned.keys() <= KNOBS.keys(), f"no such knobs: {turned.keys() - KNOBS.keys()}"
    return BASE | turned


def at_base(case: Case, *kinds: str) -> Case:
    """`case` with the knobs of these classes turned back."""
    return {name: BASE[name] if knob.kind in kinds else case[name] for name, knob in KNOBS.items()}


def label(case: Case) -> str:
    """The knobs that are turned, as a test's name: "tp=2,sp=True,family=gpt2"."""
    return ",".join(f"{name}={value}" for name, value in case.items() if value != BASE[name]) or "base"


def model_of(case: Case) -> ModelConfig:
    """The model of `case`: 12 heads, so that 2, 3 and 4 ranks share them; an odd vocabulary."""
    return dataclasses.replace(
        FAMILIES[case["family"]],
        num_layers=sum(STAGES[case["pp"], case["split"]]),
        hidden_size=48,
        num_attention_heads=12,
        vocab_size=131,
        seq_length=24,
        **{name: case[name] for name in ("tied_embeddings", "qk_norm", "bias", "num_query_groups", "dropout")},
    )


def run_of(case: Case, model: ModelConfig | None = None, **settings: Any) -> Config:
    """The resolved config of `case`, or of another `model` on its layout; `settings` as in toy.config."""
    layout = {name: case[name] for name, knob in KNOBS.items() if knob.kind != "model" and name != "split"}
    stages = STAGES[case["pp"], case["split"]] if case["split"] in ASKED_FOR else ()
    defaults = {"global_batch_size": GLOBAL_BATCH, "dtype": case["dtype"], "lr": 0.05, "stage_layers": stages}
    return toy.config(model or model_of(case), **{**defaults, **layout, **settings})


# Pairs ----------------------------------------------------------------------------------------------------------------


def is_legal(layout: Case) -> bool:
    """Whether values of the constrained knobs make a layout."""
    ranks = layout["tp"] * layout["pp"] * layout["dp"]
    return (
        ranks <= MOST_RANKS
        and (layout["tp"] > 1 or not layout["sp"])
        and GLOBAL_BATCH % (layout["dp"] * layout["micro_batch_size"]) == 0
        and (layout["pp"], layout["split"]) in STAGES
    )


def layouts() -> list[Case]:
    """Every legal combination of the constrained knobs."""
    values = product(*(KNOBS[name].values for name in CONSTRAINED))
    return [layout for row in values if is_legal(layout := dict(zip(CONSTRAINED, row, strict=True)))]


def pairs(case: Case) -> set[Pair]:
    """The pairs of knob values that occur in a case."""
    return set(combinations(((name, case[name]) for name in KNOBS), 2))


def possible_pairs() -> list[Pair]:
    """The pairs of values of two knobs that some legal case has."""
    values = [(name, value) for name, knob in KNOBS.items() for value in knob.values]
    legal = layouts()
    return [
        pair
        for pair in combinations(values, 2)
        if pair[0][0] != pair[1][0] and any(_has(layout, pair) for layout in legal)
    ]


def pairwise(seed: int, offers: int = 50) -> list[Case]:
    """Cases in which every possible pair occurs. Greedy: of random cases around a pair that is still missing, the one
    that brings most missing pairs, less its seconds."""
    generator, legal, missing, cases = random.Random(seed), layouts(), possible_pairs(), list[Case]()
    while missing:
        offered = [_around(generator.choice(missing), legal, generator) for _ in range(offers)]
        wanted = set(missing)
        best = max(offered, key=lambda case: len(pairs(case) & wanted) - seconds(case))
        missing = [pair for pair in missing if pair not in pairs(best)]
        cases.append(best)
    return cases


def seconds(case: Case) -> float:
    """Roughly, what the tensor-parallel messages of 20 steps take on two cores; all else takes a second or two."""
    collectives = (10 if case["sp"] else 4) + 4 * (case["recompute"] == "full")  # of a layer and microbatch
    layers, microbatches = sum(STAGES[case["pp"], case["split"]]), GLOBAL_BATCH / case["micro_batch_size"]
    messages = case["tp"] * (case["tp"] - 1)
    return float(20 * layers * microbatches * collectives * messages * 0.2e-3)


def _around(pair: Pair, legal: Iterable[Case], generator: random.Random) -> Case:
    """A random legal case that has the pair."""
    layout = generator.choice([layout for layout in legal if _has(layout, pair)])
    free = {name: generator.choice(knob.values) for name, knob in KNOBS.items()}
    return case(**{**free, **dict(pair), **layout})


def _has(layout: Case, pair: Pair) -> bool:
    """Whether a layout agrees with a pair, as far as it speaks of the pair's knobs."""
    return all(layout.get(name, value) == value for name, value in pair)
