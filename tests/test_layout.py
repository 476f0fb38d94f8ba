"""Who holds what: exhaustive counts over layouts, flat ranges against numpy, buckets against their rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.config import ModelConfig
from megatron3d.layout import (
    ALIGNMENT,
    Box,
    FlatLayout,
    LocalTensor,
    box_shape,
    flat_boxes,
    flat_layout,
    intersect,
    local_tensors,
    merge,
    owned,
    relative,
    runs,
    shard_box,
    shard_extent,
    shift,
    volume,
    whole,
)
from megatron3d.params import VOCAB_MULTIPLE, all_sites, param_table, stage_sites
from megatron3d.schedule import split_layers
from megatron3d.sizes import resolve_model
from tests import toy

# 12 heads and ffn 24 divide by 1, 2, 3 and 4; 2 key/value heads do not by 3 and 4; 131 ids are padded everywhere.
SHAPE: dict[str, Any] = {"num_layers": 5, "hidden_size": 24, "num_attention_heads": 12, "ffn_hidden_size": 24}
SHAPE |= {"seq_length": 12}
MODELS = {
    "llama": resolve_model(replace(toy.LLAMA, **SHAPE)),
    "tied": resolve_model(replace(toy.LLAMA, tied_embeddings=True, qk_norm=True, **SHAPE | {"num_query_groups": 2})),
    "gpt2": resolve_model(replace(toy.GPT2, **SHAPE)),
}
LAYOUTS = list(itertools.product(range(1, 5), repeat=3))


def stages(
    model: ModelConfig, tp: int, pp: int, dp: int, sp: bool = True, bucket_size: int = 2000
) -> Iterator[tuple[int, int, list[str], list[LocalTensor], FlatLayout]]:
    """(pp rank, tp rank, sites, tensors, buckets) of every stage and tensor rank."""
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    table = param_table(model, tp=tp, sp=sp)
    for stage, rank in itertools.product(range(pp), range(tp)):
        sites = stage_sites(split_layers(model.num_layers, pp), stage)
        tensors = local_tensors(table, sites, sizes, {"pp": stage, "dp": 0, "tp": rank})
        yield stage, rank, sites, tensors, flat_layout(tensors, bucket_size=bucket_size, dp=dp)


@pytest.mark.parametrize("name", MODELS)
def test_shards_tile_each_parameter(name: str) -> None:
    """Over tp the boxes of a split parameter cover it exactly once; the others are whole on every rank."""
    for tp in range(1, 5):
        for spec in param_table(MODELS[name], tp=tp, sp=True):
            count = np.zeros(spec.shape, dtype=int)
            for rank in range(tp):
                box = shard_box(spec, {"tp": tp}, {"tp": rank})
                count[relative(box, whole(spec.shape))] += 1
                for dim, extent in enumerate(box_shape(box)):
                    local = shard_extent(spec, dim, {"tp": tp})
                    assert extent <= local and (spec.shape[0] == 131 or extent == local), "only vocabularies are padded"
            assert (count == (1 if spec.shard else tp)).all(), spec.name


def test_vocabulary_shards_are_padded_to_a_multiple() -> None:
    """DIV-04 as arithmetic: 131 ids on 2, 3, 4 ranks; the last shard's real rows may be few, or none."""
    spec = param_table(MODELS["llama"])[0]
    expected = {
        1: (192, [(0, 131)]),
        2: (128, [(0, 128), (128, 131)]),
        3: (64, [(0, 64), (64, 128), (128, 131)]),
        4: (64, [(0, 64), (64, 128), (128, 131), (131, 131)]),
    }
    for tp, (local, rows) in expected.items():
        assert shard_extent(spec, 0, {"tp": tp}) == local and local % VOCAB_MULTIPLE == 0
        assert [shard_box(spec, {"tp": tp}, {"tp": rank})[0] for rank in range(tp)] == rows


@pytest.mark.parametrize("name", MODELS)
def test_every_value_is_owned_exactly_once(name: str) -> None:
    """What norm and checkpoint rest on, DIV-10 too: over all ranks, of tied, replicated and padded tensors as well."""
    model = MODELS[name]
    for tp, pp, dp in LAYOUTS:
        count = {spec.name: np.zeros(spec.shape, dtype=np.int8) for spec in param_table(model)}
        for _, rank, sites, _, layout in stages(model, tp, pp, dp):
            for bucket, piece in itertools.product(layout.buckets, range(dp)):
                for run in owned(bucket, bucket.piece(piece, dp), sites, {"tp": rank}):
                    for _, box in run.boxes():
                        shape = run.part.spec.shape
                        count[run.part.spec.name][relative(box, whole(shape))] += 1
        for key, values in count.items():
            assert (values == 1).all(), f"{key} at tp {tp}, pp {pp}, dp {dp}"


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_holds_its_whole_shard(name: str) -> None:
    """The runs of a stage are all boxes of its parameters, each at its place in the fused local tensor."""
    model = MODELS[name]
    for tp, pp in itertools.product(range(1, 5), repeat=2):
        seen = set()
        for _, rank, sites, _, layout in stages(model, tp, pp, 3):
            table = {spec.name: spec for spec in param_table(model, tp=tp, sp=True)}
            held = {}
            for bucket in layout.buckets:
                for run in runs(bucket, 0, bucket.size):
                    assert run.start == run.origin, "the real values of a part come before its padding"
                    held[run.part.spec.name] = run.stop - run.start
            coordinates = {"tp": rank}
            due = {
                key: volume(shard_box(spec, {"tp": tp}, coordinates))
                for key, spec in table.items()
                if set(spec.sites) & set(sites)
            }
            assert held == {key: size for key, size in due.items() if size}
            seen |= set(due)
        assert seen == set(table)


@pytest.mark.parametrize("name", MODELS)
def test_buckets_keep_their_rules(name: str) -> None:
    """Never over layers, aligned, equal pieces, partial and tied tensors last, all in the order of the backward."""
    model = MODELS[name]
    order = {site: place for place, site in enumerate(all_sites(model))}
    for (tp, pp, dp), sp, limit in itertools.product(LAYOUTS[::3], (False, True), (1, 2000, 10**9)):
        for _, _, _, tensors, layout in stages(model, tp, pp, dp, sp and tp > 1, limit):
            slots = [slot for bucket in layout.buckets for slot in bucket.slots]
            stored = [slot.tensor.name for slot in slots]
            tied = [layout.tied_use.name] if layout.tied_use else []
            assert sorted(stored + tied) == sorted(tensor.name for tensor in tensors)
            for bucket in layout.buckets:
                assert_well_formed(bucket, dp)
                tensors_size = sum(slot.tensor.size for slot in bucket.slots)
                assert len(bucket.slots) == 1 or bucket.site is None or tensors_size <= limit
            early = [bucket for bucket in layout.buckets if bucket.site is not None]
            places = [order[bucket.site] for bucket in early if bucket.site]
            assert places == sorted(places, reverse=True)
            late = [slot for bucket in layout.buckets[len(early) :] for slot in bucket.slots]
            assert len(layout.buckets) - len(early) <= 1, "one late bucket, and it is the last"
            assert {slot.tensor.name for slot in late} == {
                tensor.name for tensor in tensors if waits_for_another_sum(tensor) and tensor.name not in tied
            }


def assert_well_formed(bucket: Any, dp: int) -> None:
    """Slots follow each other on multiples of 64, gaps are smaller; pieces are equal, aligned, and cover the bucket."""
    end = 0
    for slot in bucket.slots:
        assert slot.offset % ALIGNMENT == 0 and 0 <= slot.offset - end < ALIGNMENT
        assert bucket.site in (None, slot.tensor.site)
        end = slot.offset + slot.tensor.size
    assert 0 <= bucket.size - end < ALIGNMENT * (dp + 1)
    pieces = [bucket.piece(rank, dp) for rank in range(dp)]
    assert [piece[0] for piece in pieces] == [0, *[piece[1] for piece in pieces[:-1]]]
    assert pieces[-1][1] == bucket.size and {(stop - start) % ALIGNMENT for start, stop in pieces} == {0}
    assert len({stop - start for start, stop in pieces}) == 1


def waits_for_another_sum(tensor: LocalTensor) -> bool:
    """Whether a sum over tp or over the tied copies comes before the one over dp."""
    return any(part.spec.partial or part.spec.sites == ("embedding", "head") for part in tensor.parts)


def test_tied_use_on_one_stage_and_on_two() -> None:
    """One stage: the head's use has no memory of its own. Two: it is a tensor of the last stage, in the late bucket."""
    model = MODELS["tied"]
    (_, _, _, _, layout), *_ = stages(model, 1, 1, 2)
    assert layout.tied_use is not None and layout.tied_use.name == "head.output.weight"
    first, last = stages(model, 1, 2, 2)
    for (_, _, _, _, layout), name in ((first, "embedding.word.weight"), (last, "head.output.weight")):
        assert layout.tied_use is None
        assert name in [slot.tensor.name for slot in layout.buckets[-1].slots] and layout.buckets[-1].site is None


def test_piece_sizes_differ_from_a_fair_share_by_padding_only() -> None:
    """DIV-10: at dp 3, with a number of parameters that 3 does not divide, pieces are equal and little is padding."""
    model = replace(MODELS["llama"], hidden_size=25, head_dim=2)
    (_, _, _, tensors, layout), *_ = stages(model, 1, 1, 3, bucket_size=10**9)
    real = sum(spec.size for spec in param_table(model))
    assert real % 3
    share = sum(bucket.size // 3 for bucket in layout.buckets)
    padded_rows = 2 * (192 - 131) * 25  # of the embedding and the head
    assert 0 <= 3 * share - real - padded_rows < ALIGNMENT * (len(tensors) + 3 * len(layout.buckets))


@given(st.data())
def test_flat_boxes_tile_the_range(data: st.DataObject) -> None:
    """Against numpy: the boxes cover exactly [start, stop) of the row-major tensor, in order, and are three at most."""
    shape = data.draw(st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 9), st.integers(1, 9))))
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(0, size))
    boxes = flat_boxes(shape, start, stop)
    elements = np.arange(size).reshape(shape)
    found = []
    for first, box in boxes:
        values = elements[tuple(slice(low, high) for low, high in box)].ravel()
        assert volume(box) == len(values) > 0 and values[0] == first
        found += values.tolist()
    assert found == list(range(start, stop)) and len(boxes) <= 3


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """A box of a 6 x 7 tensor, perhaps empty."""
    return tuple((low, draw(st.integers(low, size))) for size in (6, 7) for low in [draw(st.integers(0, size))])


@given(boxes(), boxes())
def test_intersection_is_that_of_sets(a: Box, b: Box) -> None:
    def cells(box: Box | None) -> set[tuple[int, ...]]:
        return set() if box is None else set(itertools.product(*(range(low, high) for low, high in box)))

    assert cells(intersect(a, b)) == cells(a) & cells(b)
    assert (intersect(a, b) is None) == (not cells(a) & cells(b))


@given(boxes(), st.integers(0, 5), st.integers(0, 5))
def test_shift_and_relative_undo_each_other(box: Box, rows: int, columns: int) -> None:
    frame = ((rows, rows + 20), (columns, columns + 20))
    moved = shift(box, (rows, columns))
    assert relative(moved, frame) == tuple(slice(low, high) for low, high in box)
    assert box_shape(moved) == box_shape(box)


def test_merge_joins_neighbours_that_are_kept() -> None:
    model = MODELS["gpt2"]
    (_, _, _, _, layout), *_ = stages(model, 1, 1, 2, bucket_size=10**9)
    for bucket in layout.buckets:
        found = runs(bucket, 0, bucket.size)
        for wanted in (True, False):
            mask = np.zeros(bucket.size, dtype=bool)
            for run in found:
                mask[run.start : run.stop] |= run.part.spec.decay == wanted
            ranges = merge(found, keep=lambda spec, wanted=wanted: spec.decay == wanted)  # type: ignore[misc]
            again = np.zeros(bucket.size, dtype=int)
            for start, stop in ranges:
                again[start:stop] += 1
            assert (again == mask).all()
            assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "neighbours are one range"
