"""The tensors of checkpoints as values: boxes into files with checksums, and out of them into any boxes.

The one idea: a reader names boxes of global tensors and the memory they go to; each chunk of rows that meets one of
them is read once, held against its checksum, and copied to all that want part of it. So no more is read than what is
needed, rounded to chunks, and nothing unchecked is used. Which boxes there are is in index.py, who owns which is the
trainer's (checkpoint.py) or the converter's (convert.py) business.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron3d import __version__, shelf
from megatron3d.config import Config, JobError
from megatron3d.config_io import to_dict
from megatron3d.crc import crc32
from megatron3d.index import (
    COMPANIONS,
    INDEX,
    KINDS,
    Companions,
    Index,
    Stored,
    Tensors,
    check_files,
    check_plain,
    chunk_rows,
    dump,
    read_index,
    tiling_fault,
)
from megatron3d.layout import Box, box_shape, intersect, relative, whole
from megatron3d.params import ParamSpec, param_table, stage_sites
from megatron3d.resume import saved_run
from megatron3d.tensor_file import NAMES, TYPES, TensorFile, TensorWriter, raw

# Writing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One box to be written."""

    kind: str
    name: str
    box: Box
    dtype: torch.dtype
    values: Callable[[], Tensor]
    """Makes them: contiguous, on the CPU, in the box's shape."""

    @property
    def key(self) -> str:
        """In its file."""
        return key_of(self.kind, self.name, self.box)


def key_of(kind: str, name: str, box: Box) -> str:
    """Of a box in its file."""
    return "/".join([kind, name, *(str(start) for start, _ in box)])


def rank_file(rank: int) -> str:
    """Of the boxes of one rank."""
    return f"rank-{rank:05d}.safetensors"


Written = tuple[str, str, str, Stored]
"""Kind, name, type and place of a box that has been written."""


def write_pieces(path: Path, pieces: Sequence[Piece]) -> list[Written]:
    """Writes a file of boxes, one after the other, and forces it to the disk."""
    written = []
    try:
        with TensorWriter(path, {piece.key: (piece.dtype, box_shape(piece.box)) for piece in pieces}) as file:
            for piece in pieces:
                values = piece.values()
                file.put(piece.key, values)
                stored = Stored(piece.box, path.name, piece.key, checksums(values))
                written.append((piece.kind, piece.name, NAMES[piece.dtype], stored))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # which a failed write itself does not name
    return written


def checksums(values: Tensor) -> tuple[int, ...]:
    """Of each chunk of rows of a contiguous tensor on the CPU."""
    if not values.numel():
        return ()
    rows = chunk_rows(whole(values.shape), NAMES[values.dtype])
    size = rows * (values.numel() // values.shape[0]) * values.element_size()
    content = raw(values)
    return tuple(crc32(content[at : at + size]) for at in range(0, len(content), size))


def collect(written: Iterable[Written], specs: Iterable[ParamSpec]) -> dict[str, dict[str, Tensors]]:
    """The index's tensors; RuntimeError unless each kind has every value of every parameter exactly once."""
    boxes: dict[str, dict[str, list[Stored]]] = {}
    types: dict[tuple[str, str], str] = {}
    for kind, name, dtype, stored in written:
        boxes.setdefault(kind, {}).setdefault(name, []).append(stored)
        types[kind, name] = dtype
    tensors: dict[str, dict[str, Tensors]] = {kind: {} for kind in boxes}
    for spec in specs:
        for kind, named in boxes.items():
            stored_boxes = named.get(spec.name, [])
            if fault := tiling_fault(spec.shape, [stored.box for stored in stored_boxes]):
                raise RuntimeError(f"{kind} of {spec.name}: {fault}")
            tensors[kind][spec.name] = Tensors(spec.shape, types[kind, spec.name], tuple(sorted(stored_boxes)))
    return tensors


def seal(
    aside: Path,
    final: Path,
    config: Config,
    counts: Mapping[str, Any],
    written: Iterable[Written],
    companions: Companions,
) -> None:
    """Makes a checkpoint of a folder in which all boxes have been written: files beside them, the index, the last
    check, the name `final`. RuntimeError or ConfigError if it is not whole."""
    if companions:
        (aside / COMPANIONS).mkdir()
    for name, content in companions.items():
        shelf.write(aside / COMPANIONS / name, content)
    tensors = collect(written, param_table(config.model))
    meta = {**counts, **_description(config)}
    index = Index(meta, tensors, {name: crc32(content) for name, content in companions.items()})
    shelf.write(aside / INDEX, dump(index))
    check_files(aside, index)
    shelf.publish(aside, final)


def _description(config: Config) -> dict[str, Any]:
    """What the index says of a run beside its counts."""
    layers = config.parallel.stage_layers
    return {
        "config": to_dict(config),
        "stages": [stage_sites(layers, stage) for stage in range(len(layers))],
        "versions": {"megatron3d": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


# Reading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Want:
    """A box, and the memory it goes to, whose type may be another."""

    kind: str
    name: str
    box: Box
    into: Tensor


class OpenFiles:
    """Files of a checkpoint, from which threads may read at once. Those that were used last stay open: of as many
    ranks as there may be not all files, or a process would have more of them than it is allowed."""

    def __init__(self, folder: Path, most: int = 32) -> None:
        self._folder, self._most = folder, most
        self._files: dict[str, TensorFile] = {}
        """Used last comes last."""
        self._readers: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, name: str) -> Iterator[TensorFile]:
        """An open file, which stays so while inside. ValueError for one that is damaged, OSError for one that cannot be
        read."""
        with self._lock:
            file = self._files.pop(name, None)
            if file is None:
                self._close_idle(self._most - 1)
                check_plain(self._folder / name)
                file = TensorFile(self._folder / name)
            self._files[name] = file
            self._readers[name] += 1
        try:
            yield file
        finally:
            with self._lock:
                self._readers[name] -= 1

    def close(self) -> None:
        """All that nobody reads from."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, left: int) -> None:
        idle = [name for name in self._files if not self._readers[name]]
        for name in idle[: max(0, len(self._files) - left)]:
            self._files.pop(name).close()


def fill(folder: Path, index: Index, wants: Iterable[Want], files: OpenFiles | None = None) -> int:
    """Copies what is wanted; returns the bytes read. ValueError naming the file that is damaged, OSError for one that
    cannot be read; the memory of the wants is then filled in part. Files are left open in `files`, if given; else there
    is one at a time.
    """
    by_tensor: dict[tuple[str, str], list[Want]] = {}
    for want in wants:
        by_tensor.setdefault((want.kind, want.name), []).append(want)
    absent = [f"{kind} of {name}" for kind, name in by_tensor if name not in index.tensors.get(kind, {})]
    if absent:
        raise ValueError(f"{folder} has no {', '.join(absent)}")
    by_file: dict[str, list[tuple[Stored, str, list[Want]]]] = {}
    for (kind, name), found in by_tensor.items():
        tensor = index.tensors[kind][name]
        for stored in tensor.boxes:
            if meeting := [want for want in found if intersect(stored.box, want.box)]:
                by_file.setdefault(stored.file, []).append((stored, tensor.dtype, meeting))
    lender = files or OpenFiles(folder, most=1)
    try:
        return sum(_fill_from(folder / file, boxes, lender) for file, boxes in by_file.items())
    finally:
        if files is None:
            lender.close()


def _fill_from(path: Path, boxes: Sequence[tuple[Stored, str, list[Want]]], files: OpenFiles) -> int:
    read = 0
    try:
        with files.lend(path.name) as file:
            for stored, dtype, wants in boxes:
                for chunk, values in _chunks(file, stored, dtype, wants):
                    read += values.nbytes
                    for want in wants:
                        if common := intersect(chunk, want.box):
                            want.into[relative(common, want.box)].copy_(values[relative(common, chunk)])
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return read


def _chunks(file: TensorFile, stored: Stored, dtype: str, wants: Sequence[Want]) -> Iterator[tuple[Box, Tensor]]:
    """(its box, its values) of each chunk of a stored box that meets a wanted one."""
    if (file.entries[stored.key].dtype, file.entries[stored.key].shape) != (dtype, box_shape(stored.box)):
        raise ValueError(f"{stored.key} has another type or shape than the index says")
    (first, last), rows = stored.box[0], chunk_rows(stored.box, dtype)
    for start, checksum in zip(range(first, last, rows), stored.checksums, strict=True):
        chunk = ((start, min(start + rows, last)), *stored.box[1:])
        if any(intersect(chunk, want.box) for want in wants):
            values = file.rows(stored.key, start - first, chunk[0][1] - first)
            if crc32(raw(values)) != checksum:
                raise ValueError(
                    f"rows {start} to {chunk[0][1]} of {stored.key} are not what their checksum was made of"
                )
            yield chunk, values


class NativeSource:
    """A checkpoint of this project as an interop.Source."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder, self.index = folder, index or read_index(folder)
        if index is None:
            check_files(folder, self.index)
        self.config: Config = saved_run(folder, self.index)
        self._files = OpenFiles(folder)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Of the index."""
        return self.index.meta

    @property
    def kinds(self) -> tuple[str, ...]:
        """Weights first."""
        return tuple(sorted(self.index.tensors, key=KINDS.index))

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """As stored."""
        return TYPES[self.index.tensors[kind][name].dtype]

    def read(self, kind: str, name: str) -> Tensor:
        """A whole tensor. JobError naming the file that is damaged."""
        tensor = self.index.tensors[kind][name]
        values = torch.empty(tensor.shape, dtype=TYPES[tensor.dtype])
        try:
            fill(self.folder, self.index, [Want(kind, name, whole(tensor.shape), values)], self._files)
        except (ValueError, OSError) as error:
            raise JobError(str(error)) from error
        return values
