"""The steady state: messages, bytes, host reads and tensors of one step, counted, against closed forms."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron3d.config import Config
from megatron3d.layout import FlatLayout
from megatron3d.mesh import Mesh
from megatron3d.model import GPTStage
from megatron3d.trainer import Trainer
from tests import toy
from tests.ranks import on_mesh

Traffic = Counter[tuple[str, str, int]]
"""(operation, axis, bytes of the tensor handed in) -> number of messages."""

HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
FP32, FP64 = 4, 8

LAYOUTS = {
    "dp": {"dp": 2},
    "tp": {"tp": 2, "sp": False},
    "tp with sp": {"tp": 2, "sp": True},
    "pp": {"pp": 2},
    "dp tp pp": {"dp": 2, "tp": 2, "pp": 2, "sp": True},
}


@contextmanager
def watched(mesh: Mesh) -> Iterator[tuple[Traffic, Counter[str]]]:
    """Counts messages and reads of tensors by the host while inside."""
    traffic: Traffic = Counter()
    reads: Counter[str] = Counter()
    begin = mesh.recorder.begin

    def counted(operation: str, axis: str, peers: tuple[int, ...], size: int) -> Any:
        traffic[operation, axis, size] += 1
        return begin(operation, axis, peers, size)

    def trap(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads[name] += 1
            return original(self, *args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh.recorder, "begin", counted)
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, trap(name))
        yield traffic, reads


def tensors_alive() -> tuple[int, int]:
    """Number of tensors and their bytes."""
    gc.collect()
    sizes = [x.numel() * x.element_size() for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return len(sizes), sum(sizes)


def third_step(mesh: Mesh, config: Config) -> tuple[Traffic, Traffic, Counter[str], tuple[int, int], tuple[int, int]]:
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    for _ in range(2):
        trainer.step()
    trainer.weights.finish_gather()
    before = tensors_alive()
    with watched(mesh) as (traffic, reads):
        trainer.step()
        trainer.weights.finish_gather()
    expected = closed_form(config, mesh, trainer.stage, trainer.weights.layout)
    return traffic, expected, reads, before, tensors_alive()


def closed_form(config: Config, mesh: Mesh, stage: GPTStage, layout: FlatLayout) -> Traffic:
    """Messages of one step of this rank, each counted where it is started."""
    model, parallel = config.model, config.parallel
    tokens = config.batch.micro_batch_size * model.seq_length
    whole = tokens * model.hidden_size * FP32
    shard = whole // parallel.tp if parallel.sp else whole
    traffic: Traffic = Counter()
    per_microbatch: Traffic = Counter()
    if parallel.tp > 1:
        embedding, head, layers = stage.has_embedding, stage.has_head, len(stage.layers)
        if parallel.sp:
            # Two column linears a layer and the head gather their input in both passes, two row linears their gradient;
            # row linears and the embedding scatter their sums, column linears and the head those of their gradients.
            per_microbatch["all_gather", "tp", shard] = embedding + layers * (2 * 2 + 2) + head * 2
            per_microbatch["reduce_scatter", "tp", whole] = embedding + layers * (2 + 2) + head
            norms = (2 * layers + head) * model.hidden_size * FP32
            traffic["all_reduce", "tp", norms] += 1
        else:
            per_microbatch["all_reduce", "tp", whole] = embedding + layers * (2 + 2) + head
        per_microbatch["all_gather", "tp", 3 * tokens * FP32] += head  # what the loss needs of each shard
    if not stage.has_embedding:
        per_microbatch["receive", "pp", shard] += 1
        per_microbatch["send", "pp_back", shard] += 1
    if not stage.has_head:
        per_microbatch["send", "pp", shard] += 1
        per_microbatch["receive", "pp_back", shard] += 1
    for message, count in per_microbatch.items():
        traffic[message] += count * config.num_microbatches
    for bucket in layout.buckets if parallel.dp > 1 else ():
        traffic["reduce_scatter", "dp", bucket.size * FP32] += 1
        traffic["all_gather", "dp", bucket.size * FP32 // parallel.dp] += 1
    traffic["all_reduce", "world", 5 * FP64] += 1  # norm, loss, valid tokens, votes to stop, ranks that have written
    return +traffic


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_costs_what_it_must(name: str) -> None:
    config = toy.config(global_batch_size=8, micro_batch_size=2, optimizer="adamw", **LAYOUTS[name])
    for traffic, expected, reads, before, after in on_mesh(config.parallel, third_step, config):
        assert traffic == expected
        assert reads == {"tolist": 1}, "whether a step is applied is decided once, on the host, from four sums"
        assert after == before, "a step leaves no tensor behind"
