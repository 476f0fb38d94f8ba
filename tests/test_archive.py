"""Boxes in and out of files: any cut to any other without a process, no more read than needed, nothing unchecked."""

from __future__ import annotations

import itertools
import os
import resource
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron3d import archive, checkpoint
from megatron3d.archive import NativeSource, Piece, Want, collect, fill, write_pieces
from megatron3d.config import Config
from megatron3d.config_io import to_dict
from megatron3d.index import CHUNK, Index, chunk_rows
from megatron3d.layout import Box, intersect, relative, volume, whole
from megatron3d.params import ParamSpec, param_table
from megatron3d.trainer import Trainer
from tests import toy
from tests.lone import lone_rank

# Files ----------------------------------------------------------------------------------------------------------------


def spec(name: str, *shape: int) -> ParamSpec:
    return ParamSpec(name=name, tensor=name, shape=shape, sites=("head",))


def written(folder: Path, *files: list[tuple[str, Tensor, Box]], specs: list[ParamSpec]) -> Index:
    """An index of files of weights, each a list of (name, whole tensor, box)."""
    entries = []
    for rank, boxes in enumerate(files):
        pieces = [
            Piece(
                "weight", name, box, tensor.dtype, lambda t=tensor, b=box: t[relative(b, whole(t.shape))].contiguous()
            )  # type: ignore[misc]
            for name, tensor, box in boxes
        ]
        entries += write_pieces(folder / archive.rank_file(rank), pieces)
    return Index({}, collect(entries, specs))


def test_only_the_chunks_that_are_needed_are_read(tmp_path: Path) -> None:
    """Each once, though several boxes lie in one; the last of a box is shorter."""
    rows = CHUNK // (4 * 256)
    matrix = torch.rand(5 * rows + 3, 256)
    index = written(tmp_path, [("m", matrix, whole(matrix.shape))], specs=[spec("m", *matrix.shape)])
    into = torch.zeros_like(matrix)
    boxes = [((rows + 1, rows + 2), (0, 256)), ((rows + 2, rows + 4), (0, 7)), ((5 * rows, 5 * rows + 3), (250, 256))]
    read = fill(tmp_path, index, [Want("weight", "m", box, into[relative(box, whole(matrix.shape))]) for box in boxes])
    assert read == CHUNK + 3 * 1024
    for box in boxes:
        where = relative(box, whole(matrix.shape))
        assert torch.equal(into[where], matrix[where])
    assert into.count_nonzero() == sum(map(volume, boxes))


def test_a_flipped_bit_is_found_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    matrix = torch.rand(3 * CHUNK // 4, 1)
    index = written(tmp_path, [("m", matrix, whole(matrix.shape))], specs=[spec("m", *matrix.shape)])
    path = tmp_path / archive.rank_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)
    rows = CHUNK // 4

    def read(start: int, stop: int) -> None:
        fill(tmp_path, index, [Want("weight", "m", ((start, stop), (0, 1)), torch.zeros(stop - start, 1))])

    read(0, 2 * rows)
    with pytest.raises(ValueError, match=rf"{path} is damaged: rows {2 * rows} to {3 * rows} of weight/m/0/0"):
        read(2 * rows, 2 * rows + 1)


def test_what_is_not_there_is_listed(tmp_path: Path) -> None:
    ones = torch.ones(4)
    index = written(tmp_path, [("a", ones, ((0, 4),))], specs=[spec("a", 4)])
    wants = [Want("weight", "b", ((0, 4),), ones), Want("exp_avg", "a", ((0, 4),), ones)]
    with pytest.raises(ValueError, match="has no weight of b, exp_avg of a"):
        fill(tmp_path, index, wants)


@contextmanager
def at_most_open(more: int) -> Iterator[None]:
    """So many files more than there are now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = itertools.islice((number for number in itertools.count() if number not in taken), more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))  # the limit is on the numbers, not on how many
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_may_be_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Each of 100 has a row of every tensor: to a rank that loads them all, and to threads that convert."""
    tensors = {spec.name: value("master", spec.name) for spec in param_table(MODEL)}
    files: list[list[tuple[str, Tensor, Box]]] = [[] for _ in range(100)]
    for name, tensor in tensors.items():
        edges = sorted({len(tensor) * i // 100 for i in range(101)})
        for file, extent in zip(files, itertools.pairwise(edges), strict=False):
            file.append((name, tensor, (extent, *whole(tensor.shape)[1:])))
    index = written(tmp_path, *files, specs=param_table(MODEL))
    wants = [Want("weight", name, whole(t.shape), torch.zeros_like(t)) for name, t in tensors.items()]
    config = replace(config_of((1, 1, 1)), run=replace(config_of((1, 1, 1)).run, dtype="fp32"))
    source = NativeSource(tmp_path, Index({"config": to_dict(config)}, index.tensors))
    with at_most_open(8):
        fill(tmp_path, index, wants)
    assert all(torch.equal(want.into, tensors[want.name]) for want in wants)
    with at_most_open(48), ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda name: source.read("weight", name), tensors))
    assert all(torch.equal(a, b) for a, b in zip(found, tensors.values(), strict=True))


@pytest.mark.parametrize("boxes", [[((0, 2),)], [((0, 2),), ((1, 4),)], [((0, 4),), ((0, 4),)]])
def test_a_set_that_is_not_every_value_once_is_no_checkpoint(boxes: list[Box], tmp_path: Path) -> None:
    ones = torch.ones(4)
    files = [[("a", ones, box)] for box in boxes]
    with pytest.raises(RuntimeError, match=r"weight of a: .*(overlap|values are there)"):
        written(tmp_path, *files, specs=[spec("a", 4)])


# All layouts, without processes ---------------------------------------------------------------------------------------

MODEL = toy.config(replace(toy.LLAMA, num_layers=4, tied_embeddings=True)).model  # 2 of 4 heads are of keys, 131 ids
LAYOUTS = list(itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3)))  # tp, pp, dp
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")


def config_of(layout: tuple[int, int, int]) -> Config:
    tp, pp, dp = layout
    return toy.config(MODEL, tp=tp, pp=pp, dp=dp, dtype="bf16", optimizer="adamw", global_batch_size=dp)


@cache
def value(kind: str, name: str) -> Tensor:
    """The whole tensor of a kind: different everywhere."""
    shape = next(spec.shape for spec in param_table(MODEL) if spec.name == name)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    return torch.rand(shape, generator=generator).to(torch.bfloat16 if kind == "weight" else torch.float32)


@cache
def ranks(layout: tuple[int, int, int]) -> list[Trainer]:
    """What each rank of a layout holds, with nobody to talk to."""
    config = config_of(layout)
    size = layout[0] * layout[1] * layout[2]
    return [Trainer(config, lone_rank(config.parallel, rank), toy.datasets(MODEL)) for rank in range(size)]


def saved_from(layout: tuple[int, int, int], folder: Path) -> Index:
    """A checkpoint of the values above, each rank writing what it owns."""
    entries = []
    for rank, trainer in enumerate(ranks(layout)):
        pieces = [
            replace(p, values=lambda p=p: value(p.kind, p.name)[relative(p.box, whole(value(p.kind, p.name).shape))])
            for p in checkpoint.owned_pieces(trainer.optimizer)
        ]
        pieces = [replace(p, values=lambda p=p: p.values().contiguous()) for p in pieces]
        entries += write_pieces(folder / archive.rank_file(rank), pieces)
    return Index({}, collect(entries, param_table(MODEL)))


def bytes_of_chunks(index: Index, wants: list[Want]) -> int:
    """Of the chunks that have any value that is wanted, each once."""
    found = 0
    for (kind, name), boxes in itertools.groupby(sorted((w.kind, w.name, w.box) for w in wants), lambda w: w[:2]):
        wanted, tensor = [box for *_, box in boxes], index.tensors[kind][name]
        for stored in tensor.boxes:
            (first, last), rows = stored.box[0], chunk_rows(stored.box, tensor.dtype)
            for start in range(first, last, rows):
                chunk = ((start, min(start + rows, last)), *stored.box[1:])
                if any(intersect(chunk, box) for box in wanted):
                    found += volume(chunk) * archive.TYPES[tensor.dtype].itemsize
    return found


def check_load(layout: tuple[int, int, int], folder: Path, index: Index) -> None:
    """Each rank gets exactly what it holds, bit by bit, and reads no byte of a file twice."""
    for trainer in ranks(layout):
        wants = checkpoint.wanted(trainer.optimizer, index)
        for want in wants:
            want.into.fill_(-1)
        assert fill(folder, index, wants) == bytes_of_chunks(index, wants)
        for want in wants:
            expected = value(want.kind, want.name)
            assert torch.equal(want.into, expected[relative(want.box, whole(expected.shape))]), (layout, want.name)


CI_PAIRS = [(a, LAYOUTS[(i * 7 + 5) % 27]) for i, a in enumerate(LAYOUTS)]


@pytest.mark.slow
def test_from_each_layout_to_another(tmp_path: Path) -> None:
    """CONV-01, CONV-08, CONV-11, RES-12, DIV-04: SwiGLU, GQA (held whole at tp 4), tied, vocabulary 131: weights,
    masters and moments of all 27 layouts are written whole, and read by another. What is read is what was written, so
    going there and back is too."""
    assert {b for _, b in CI_PAIRS} == set(LAYOUTS)
    for a, b in CI_PAIRS:
        folder = tmp_path / "-".join(map(str, a))
        folder.mkdir()
        check_load(b, folder, saved_from(a, folder))


@pytest.mark.soak
@pytest.mark.parametrize("a", LAYOUTS, ids=str)
def test_from_every_layout_to_every_other(a: tuple[int, int, int], tmp_path: Path) -> None:
    index = saved_from(a, tmp_path)
    for b in LAYOUTS:
        check_load(b, tmp_path, index)


def test_a_rank_of_the_same_layout_reads_what_it_keeps(tmp_path: Path) -> None:
    """Nobody's state is somebody else's. Bytes read are those of its weights, masters and moments.
    (With two stages the second copy of the tied matrix is cut elsewhere: some chunks are read for a part of them.)"""
    layout = (2, 1, 2)
    index = saved_from(layout, tmp_path)
    for trainer in ranks(layout):
        wants = checkpoint.wanted(trainer.optimizer, index)
        kept = sum(want.into.numel() * want.into.element_size() for want in wants)
        assert fill(tmp_path, index, wants) == kept


def test_as_a_source(tmp_path: Path) -> None:
    config = config_of((2, 2, 2))
    index = saved_from((2, 2, 2), tmp_path)
    source = NativeSource(tmp_path, Index({"config": to_dict(config)}, index.tensors))
    assert source.kinds == KINDS and source.config == config
    for kind, spec_ in itertools.product(KINDS, param_table(MODEL)):
        assert torch.equal(source.read(kind, spec_.name), value(kind, spec_.name))
        assert source.dtype(kind, spec_.name) == value(kind, spec_.name).dtype
