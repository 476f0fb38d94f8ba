"""Copies of weights: who holds them, hashes that see every change, and one flipped bit named on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron3d import replicas
from megatron3d.config import Config, JobError, ModelConfig
from megatron3d.layout import Box
from megatron3d.mesh import Mesh
from megatron3d.params import param_table
from megatron3d.trainer import Trainer
from megatron3d.weights import FlatWeights
from tests import toy
from tests.ranks import on_mesh

ONE_KV_HEAD = dataclasses.replace(toy.LLAMA, num_query_groups=1, qk_norm=True)


# Who holds what -------------------------------------------------------------------------------------------------------


def holders(model: ModelConfig, **layout: Any) -> dict[str, list[list[int]]]:
    """Ranks of the copies of each part, by parameter."""
    found: dict[str, list[list[int]]] = {}
    for (name, _), ranks in replicas.holders(replicas.copies_by_rank(toy.config(model, **layout))).items():
        found.setdefault(name, []).append(ranks)
    return found


def test_one_rank_has_no_copies() -> None:
    assert holders(toy.GPT2) == {}


def test_data_parallel_ranks_hold_copies_of_everything() -> None:
    assert holders(toy.LLAMA, dp=3) == {spec.name: [[0, 1, 2]] for spec in param_table(toy.config().model)}


def test_tensor_parallel_ranks_hold_copies_of_what_is_not_split() -> None:
    """KV heads that tp does not divide are held whole; so are norms and the biases of row-parallel layers."""
    parts = (
        "attention_norm",
        "mlp_norm",
        *(f"attention.{part}" for part in ("key", "value", "query_norm", "key_norm")),
    )
    expected = {"head.norm.weight", *(f"layers.{i}.{part}.weight" for i in range(4) for part in parts)}
    assert set(holders(ONE_KV_HEAD, tp=2)) == expected
    assert "layers.0.mlp.down.bias" in holders(toy.GPT2, tp=2)
    assert "layers.0.mlp.up.bias" not in holders(toy.GPT2, tp=2)


def test_a_tied_matrix_has_copies_on_two_stages() -> None:
    """tp varies fastest, pp slowest: each half of the matrix is on both stages and both data-parallel ranks."""
    assert holders(toy.GPT2, pp=4) == {"embedding.word.weight": [[0, 3]]}
    assert holders(toy.GPT2, tp=2, pp=2, dp=2)["embedding.word.weight"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_first_parameter_comes_first_and_the_odd_rank_last() -> None:
    table = param_table(toy.config().model)
    first, second = (table[3].name, ((0, 4), (0, 2))), (table[5].name, ((0, 9),))
    hashes: list[dict[tuple[str, Box], int]] = [{second: rank % 2, first: 1} for rank in range(4)]
    hashes[1][first] = 2
    found = replicas.differences([[second, first]] * 4, hashes, table)
    assert [str(difference).partition(" is not the same on the ranks that hold it: ")[::2] for difference in found] == [
        (f"{table[3].name}[0:4, 0:2]", "ranks 0, 2 and 3 against rank 1"),
        (f"{table[5].name}[0:9]", "ranks 0 and 2 against ranks 1 and 3"),
    ]


# Hashes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("chunk", [1 << 20, 16])
def test_every_flipped_bit_changes_the_hash(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every element, across the borders of chunks too, and each in a way of its own."""
    monkeypatch.setattr(replicas, "CHUNK", chunk)
    values = torch.randn(37, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = set(replicas.hash_all([values]))
    for byte in values.view(torch.uint8).split(1):
        for bit in range(8):
            byte ^= 1 << bit
            seen.update(replicas.hash_all([values]))
            byte ^= 1 << bit
    assert len(seen) == 1 + 37 * 8 * dtype.itemsize


def test_the_order_and_small_scattered_differences_count() -> None:
    """Two swapped values; a unit more here and less there, which a sum with even weights would cancel."""
    values = torch.arange(1.0, 65.0)
    seen = set(replicas.hash_all([values]))
    for i in range(63):
        swapped = values.clone()
        swapped[i], swapped[i + 1] = values[i + 1], values[i]
        balanced = values.clone()
        balanced.view(torch.int32)[[i, i + 1, (i + 2) % 64]] += torch.tensor([1, -2, 1], dtype=torch.int32)
        seen.update(replicas.hash_all([swapped, balanced]))
    assert len(seen) == 1 + 2 * 63


# Faults ---------------------------------------------------------------------------------------------------------------


def flip(weights: FlatWeights, name: str) -> None:
    """One bit, the last one of the first value that this rank holds of the parameter."""
    [(i, run)] = [(i, run) for i, run in replicas.held(weights.layout) if run.part.spec.name == name]
    weights.buckets[i][run.start : run.stop].view(torch.int32)[0] ^= 1


def train_and_flip(mesh: Mesh, config: Config, name: str, on: int) -> tuple[list[Any], str]:
    """Differences after two steps, and what the check says after a flip on rank `on`."""
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    trainer.step()
    trainer.step()
    clean = replicas.find_differences(config, trainer.weights, mesh)
    if mesh.rank == on:
        flip(trainer.weights, name)
    with pytest.raises(JobError) as caught:
        replicas.check_replicas(config, trainer.weights, mesh, trainer.steps)
    return clean, str(caught.value)


@pytest.mark.parametrize(
    ("name", "model", "layout", "sides"),
    [
        ("layers.1.mlp_norm.weight", toy.LLAMA, {"tp": 2}, "rank 0 against rank 1"),
        ("layers.2.attention.value.weight", ONE_KV_HEAD, {"tp": 2}, "rank 0 against rank 1"),
        ("layers.3.mlp.down.weight", toy.LLAMA, {"dp": 3}, "ranks 0 and 2 against rank 1"),
        ("embedding.word.weight", toy.GPT2, {"pp": 2}, "rank 0 against rank 1"),
    ],
    ids=["tp", "kv held whole", "dp", "tied"],
)
def test_one_flipped_bit_is_named_on_every_rank(
    name: str, model: ModelConfig, layout: dict[str, int], sides: str
) -> None:
    config = toy.config(model, **layout)
    results = on_mesh(config.parallel, train_and_flip, config, name, 1)
    assert all(clean == [] for clean, _ in results)
    assert {text for _, text in results} == {results[0][1]}
    assert results[0][1].startswith(f"After step 2, {name}[") and f": {sides}." in results[0][1]


def run_with_a_fault(mesh: Mesh, config: Config) -> tuple[int, str]:
    """A whole run in which rank 3's memory fails after step 3."""
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    step = trainer.step

    def faulty() -> Any:
        result = step()
        trainer.weights.finish_gather()
        if mesh.rank == 3 and trainer.steps == 3:
            flip(trainer.weights, "head.norm.weight")
        return result

    trainer.step = faulty  # type: ignore[method-assign]
    with pytest.raises(JobError) as caught:
        trainer.run()
    return trainer.steps, str(caught.value)


def test_a_run_stops_at_the_next_check() -> None:
    """The fault of step 3 is found at step 4 by --check-replicas-every 2. (Under ZeRO-1 the gather of step 4 would
    repair a bit that is not in the rank's own piece.)"""
    config = toy.config(toy.LLAMA, tp=2, dp=2, check_replicas_every=2, zero=0, train_steps=6)
    results = on_mesh(config.parallel, run_with_a_fault, config)
    assert [steps for steps, _ in results] == [4] * 4
    assert all("head.norm.weight[0:64]" in text and "against rank 3" in text for _, text in results)
