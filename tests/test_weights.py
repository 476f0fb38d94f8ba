"""Flat weights: initial values that no layout changes, loading, views, and the gather that completes a bucket."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron3d.config import Config, ModelConfig, ParallelConfig
from megatron3d.layout import Box, owned
from megatron3d.mesh import Mesh
from megatron3d.params import param_table
from megatron3d.trainer import Parts, build_model
from tests import toy
from tests.lone import lone_rank
from tests.ranks import on_mesh

# Sizes that 2, 3 and 4 divide, but for 2 key/value heads and 131 ids.
LLAMA = replace(toy.LLAMA, num_attention_heads=12, hidden_size=48, ffn_hidden_size=192, qk_norm=True, seq_length=24)
GPT2 = replace(toy.GPT2, num_attention_heads=12, hidden_size=48, seq_length=24)


def every_rank(config: Config) -> list[Parts]:
    """The model parts of all ranks of a layout, built without processes."""
    parallel = config.parallel
    return [build_model(config, lone_rank(parallel, rank)) for rank in range(parallel.tp * parallel.pp * parallel.dp)]


def boxes(parts: Parts) -> list[tuple[str, Box, Tensor]]:
    return toy.local_boxes(SimpleNamespace(weights=parts.weights))  # type: ignore[arg-type]


def gathered(config: Config) -> dict[str, Tensor]:
    """Whole initial weights; replicas are asserted equal to the last bit."""
    ranks = every_rank(config)
    for parts in ranks:
        parts.weights.initialise(seed=3)
    return toy.assemble(param_table(config.model), [boxes(parts) for parts in ranks])


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_initial_weights_do_not_depend_on_the_layout(model: ModelConfig) -> None:
    """NUM-12: gathered initial weights are the same for tp 1, 2, 3, 4 (and pp, dp, bucket sizes); replicas agree."""
    whole = gathered(toy.config(model))
    for tp, pp, dp in ((2, 1, 1), (3, 1, 2), (4, 1, 1), (1, 3, 1), (2, 4, 3)):
        other = gathered(toy.config(model, tp=tp, pp=pp, dp=dp, bucket_size=3000))
        assert all(torch.equal(other[name], value) for name, value in whole.items()), f"tp {tp}, pp {pp}, dp {dp}"


def test_initial_values_are_as_the_table_says() -> None:
    config = toy.config(replace(LLAMA, num_layers=8))
    whole = gathered(config)
    for spec in param_table(config.model):
        value = whole[spec.name]
        if spec.init == "normal":
            assert abs(value.mean()) < 5 * spec.std / spec.size**0.5, spec.name
            assert value.std().item() == pytest.approx(spec.std, rel=5 / (2 * spec.size) ** 0.5), spec.name
        else:
            assert torch.equal(value, torch.full(spec.shape, 1.0 if spec.init == "ones" else 0.0))


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_are_not_copies(tp: int) -> None:
    """NUM-12: the tensor ranks' shards of queries, MLP and embedding differ; what is replicated is equal."""
    ranks = every_rank(toy.config(LLAMA, tp=tp))
    for parts in ranks:
        parts.weights.initialise(seed=3)
    held = [{name: (box, value) for name, box, value in boxes(parts)} for parts in ranks]
    for spec in param_table(ranks[0].stage.model, tp=tp, sp=True):
        for a, b in itertools.combinations([rank[spec.name] for rank in held if spec.name in rank], 2):
            if spec.shard:
                rows = min(a[1].shape[0], b[1].shape[0])
                assert a[0] != b[0] and not torch.equal(a[1][:rows], b[1][:rows]), spec.name
            else:
                assert a[0] == b[0] and torch.equal(a[1], b[1]), spec.name


def test_loading_takes_this_ranks_boxes_and_leaves_padding_alone() -> None:
    """DIV-04: 131 rows over 2, 3, 4 ranks; rows that pad a shard stay zero."""
    for model, tp in itertools.product((LLAMA, GPT2), (2, 3, 4)):
        config = toy.config(model, tp=tp, pp=2, dp=1)
        weights, ranks = toy.random_weights(config.model), every_rank(config)
        for parts in ranks:
            parts.weights.load(weights)
        loaded = toy.assemble(param_table(config.model), [boxes(parts) for parts in ranks])
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
        for parts in ranks:
            held = sum(value.numel() for _, _, value in boxes(parts))
            assert held == sum(int((buffer != 0).sum()) for buffer in parts.weights.buckets)


def test_parameters_are_views_of_the_buckets() -> None:
    """Nothing is held twice, and a tied matrix on one stage is one tensor."""
    parts = build_model(toy.config(toy.GPT2), Mesh.single())
    stage, weights = parts.stage, parts.weights
    assert (
        stage.get_parameter("head.output.weight").data_ptr() == stage.get_parameter("embedding.word.weight").data_ptr()
    )
    storages = {buffer.untyped_storage().data_ptr() for buffer in weights.buckets}
    for name, parameter in stage.named_parameters():
        assert parameter.untyped_storage().data_ptr() in storages, name
    for buffer in weights.buckets:
        buffer.fill_(7.0)
    assert all((parameter == 7).all() for parameter in stage.parameters())


def check_gather(mesh: Mesh, config: Config) -> list[tuple[int, int]]:
    """Each rank sets its pieces; a site must see all pieces the moment it runs, and none is waited for too early."""
    parts = build_model(config, mesh)
    weights, layout = parts.weights, parts.weights.layout
    for bucket, buffer in zip(layout.buckets, weights.buckets, strict=True):
        start, stop = bucket.piece(mesh.dp.rank, mesh.dp.size)
        buffer.zero_()[start:stop] = mesh.dp.rank + 1
    weights.start_gather()
    remaining = []
    for site in ("embedding", "layers.0", "layers.3", "head"):
        module = parts.stage.get_submodule(site)
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
        for bucket, buffer in zip(layout.buckets, weights.buckets, strict=True):
            if bucket.site in (site, None):
                pieces = buffer.view(mesh.dp.size, -1)
                assert all((pieces[rank] == rank + 1).all() for rank in range(mesh.dp.size)), f"{site} sees old weights"
        remaining.append(len(weights._gathering))
    weights.finish_gather()
    assert not weights._gathering
    return [(remaining[0], len(layout.buckets)), (remaining[-1], 0)]


def test_a_site_waits_for_its_own_buckets() -> None:
    """GRP-10: behind the forward pass, each site waits for its weights, and for no others but the late bucket's."""
    config = toy.config(toy.GPT2, dp=3, pp=1)
    for (after_first, total), (after_last, _) in on_mesh(config.parallel, check_gather, config):
        assert after_first == total - 2, "the embedding waits for its positions and for the late bucket (it is tied)"
        assert after_last == 2, "layers 1 and 2 have not run, and nobody has waited for them"


def test_pieces_over_data_parallel_ranks_are_owned_once() -> None:
    """The ranks' owned runs of one bucket are disjoint and cover its real values."""
    parallel = ParallelConfig(tp=1, pp=1, dp=3)
    parts = build_model(toy.config(LLAMA, dp=3), lone_rank(parallel, 0))
    for bucket in parts.weights.layout.buckets:
        count = torch.zeros(bucket.size)
        for rank in range(3):
            for run in owned(bucket, bucket.piece(rank, 3), parts.sites, {"tp": 0}):
                count[run.start : run.stop] += 1
        assert int(count.sum()) == sum(part.size for slot in bucket.slots for part in slot.tensor.parts)
        assert count.max() == 1
