"""Megatron-LM's distributed checkpoints (`--ckpt-format torch_dist`): tensors in chunks, found by an index.

    metadata.json       which library wrote the tensors
    common.pt           args, iteration: what is the same on all ranks
    .metadata           the index: a pickle; tensors with their shapes, chunks, and where each chunk lies
    __R_N.distcp        chunks, each a whole file of torch.save within the file

The one idea: the index already speaks of whole tensors, so reading it is renaming: layers that are stacked along a
first dim become one tensor each, and the halves of a fused tensor that are kept apart become one.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron3d.config import ConfigError
from megatron3d.index import read_plain, tiling_fault
from megatron3d.layout import Box, shift
from megatron3d.megatron_lm import IGNORED, local_name
from megatron3d.megatron_stored import WEIGHTS_ONLY, Find, Kept, Whole
from megatron3d.torch_file import TorchFile
from megatron3d.unpickle import Namespace, Record, StoredTensor, TensorEntry, loads

OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\b")
STATE = re.compile(r"(rng_state|rerun_state_machine|opt_param_scheduler)")
STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
HALF = re.compile(r"(.+\.mlp\.linear_fc1\.(?:weight|bias))_([wv])")  # w: the gate, v: what it multiplies
FIELDS = (LookupError, TypeError, ValueError, AttributeError)


class _Chunk(NamedTuple):
    """Part of a tensor, and where it lies."""

    box: Box
    file: Path
    start: int
    length: int


class _Tensor(NamedTuple):
    """A tensor of the index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


def open_dist(folder: Path) -> Kept:
    """What `folder` holds. ConfigError names the file that does not fit."""
    _check_backend(folder)
    common = TorchFile(folder / "common.pt").value
    args = common.get("args") if isinstance(common, dict) else None
    if not isinstance(args, Namespace):
        raise ConfigError(f"{folder / 'common.pt'} does not say what model it is of: it has no args.")
    index, others = _index(folder)
    iteration = common.get("iteration")
    return Kept(
        folder=folder,
        args=args.fields,
        iteration=iteration if type(iteration) is int else None,
        tensors=_joined(_once(_by_layer(index, folder), folder)),
        fused=1,
        notes=(WEIGHTS_ONLY,) * ("optimizer" in common or any(map(OPTIMIZER.match, others))),
    )


def _check_backend(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        backend = json.loads(read_plain(path).decode())["sharded_backend"]
    except (OSError, *FIELDS, RecursionError) as error:
        raise ConfigError(
            f"{path} does not say which library wrote the tensors ({type(error).__name__}: {error}). What is read is "
            "--ckpt-format torch_dist, which writes it, and torch."
        ) from error
    if backend != "torch_dist":
        raise ConfigError(f"{path}: the tensors were written by {backend!r}. What is read is torch_dist.")


def _index(folder: Path) -> tuple[dict[str, _Tensor], list[str]]:
    """The weights in the index by their names, and the names of everything else."""
    path = folder / ".metadata"
    try:
        saved = loads(read_plain(path), str(path)).fields
        places = dict(_places(saved["storage_data"], folder))
        entries = saved["state_dict_metadata"]
        names = [name for name in entries if not _is_other(name)]
        stateless = [name for name in names if not isinstance(entries[name], TensorEntry)]
        if stateless:
            raise ConfigError(f"{path}: {stateless[0]} is no tensor.")
        return {name: _tensor(name, entries[name], places) for name in names}, [*(entries.keys() - set(names))]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ConfigError:
        raise
    except FIELDS as error:
        raise ConfigError(f"{path} is no index of tensors: {type(error).__name__}: {error}.") from error


def _is_other(name: str) -> bool:
    return bool(OPTIMIZER.match(name) or STATE.match(name) or IGNORED.search(name))


def _places(storage: Mapping[Record, Record], folder: Path) -> Iterator[tuple[tuple[str, Any], _Chunk]]:
    """(name, offsets) of a chunk -> where it lies, its box still to be told."""
    for index, info in storage.items():
        file, offsets = info.fields["relative_path"], index.fields.get("offset")
        if Path(file).name != file:
            raise ConfigError(
                f"{folder / '.metadata'} says that tensors lie in {file!r}, which leads out of the folder."
            )
        if info.fields.get("transform_descriptors"):
            raise ConfigError(f"{folder / file}: its tensors are compressed or encrypted, which is not read.")
        start, length = info.fields["offset"], info.fields["length"]
        if not (type(start) is type(length) is int and min(start, length) >= 0):
            raise ValueError(f"a chunk of {file} begins at {start!r} and is {length!r} bytes long")
        yield (index.fields["fqn"], offsets), _Chunk((), folder / file, start, length)


def _tensor(name: str, entry: TensorEntry, places: Mapping[tuple[str, Any], _Chunk]) -> _Tensor:
    shape, dtype = tuple(entry.fields["size"]), entry.fields["properties"].fields[""][0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has values of no known type")
    chunks = []
    for chunk in entry.fields["chunks"]:
        offsets, sizes = chunk.fields["offsets"], chunk.fields["sizes"]
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        chunks.append(places[name, offsets]._replace(box=box))
    if fault := tiling_fault(shape, [chunk.box for chunk in chunks]):
        raise ConfigError(f"{name} is not whole: {fault}.")
    return _Tensor(shape, dtype, tuple(chunks))


def _by_layer(index: Mapping[str, _Tensor], folder: Path) -> Iterator[tuple[str, Whole]]:
    """The index's tensors in the spelling of the local layers, those that are stacked over layers one by one."""
    room = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    for name, tensor in index.items():
        match = STACKED.fullmatch(name)
        if match is None or not tensor.shape:
            parts = tuple((chunk.box, _finder(chunk, tensor.dtype)) for chunk in tensor.chunks)
            yield local_name(name), Whole(tensor.shape, tensor.dtype, parts)
            continue
        if math.prod(tensor.shape) * tensor.dtype.itemsize > room:  # or there would be no end of layers
            raise ConfigError(
                f"{folder} is not whole: {name} has shape {tensor.shape}, more than all its files hold ({room} bytes)."
            )
        stacks = [(chunk.box, functools.cache(_finder(chunk, tensor.dtype))) for chunk in tensor.chunks]
        for layer in range(tensor.shape[0]):
            held = [(box, find) for box, find in stacks if box[0][0] <= layer < box[0][1]]
            parts = tuple((box[1:], _row(find, layer - box[0][0])) for box, find in held)
            yield local_name(f"decoder.layers.{layer}.{match[1]}"), Whole(tensor.shape[1:], tensor.dtype, parts)


def _once(named: Iterator[tuple[str, Whole]], folder: Path) -> dict[str, Whole]:
    found: dict[str, Whole] = {}
    for name, tensor in named:
        if name in found:
            raise ConfigError(f"{folder} has {name} under two names.")
        found[name] = tensor
    return found


def _finder(chunk: _Chunk, dtype: torch.dtype) -> Find:
    """Opens a chunk."""

    def find() -> StoredTensor:
        stored = TorchFile(chunk.file, chunk.start, chunk.length).value
        shape = tuple(stop - start for start, stop in chunk.box)
        if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (shape, dtype):
            raise ConfigError(
                f"{chunk.file} has at byte {chunk.start} something else than the {dtype} of shape {shape} that the "
                "index speaks of."
            )
        return stored

    return find


def _row(find: Find, index: int) -> Find:
    """One layer of a chunk of several."""
    return lambda: find().row(index)


def _joined(tensors: Mapping[str, Whole]) -> dict[str, Whole]:
    """The tensors, halves that are kept apart put together: first the gate, then what it multiplies."""
    found = dict(tensors)
    for name in tensors:
        match = HALF.fullmatch(name)
        if match is None or match[2] == "v" or f"{match[1]}_v" not in found or match[1] in found:
            continue
        gate, up = found.pop(name), found.pop(f"{match[1]}_v")
        if not gate.shape or (gate.shape, gate.dtype) != (up.shape, up.dtype):
            raise ConfigError(
                f"{name} has shape {gate.shape} and type {gate.dtype}, but {match[1]}_v {up.shape} and {up.dtype}: "
                "they must be the equal halves of one tensor."
            )
        below = (gate.shape[0], *(0 for _ in gate.shape[1:]))
        parts = (*gate.parts, *((shift(box, below), find) for box, find in up.parts))
        found[match[1]] = Whole((gate.shape[0] + up.shape[0], *gate.shape[1:]), gate.dtype, parts)
    return found
