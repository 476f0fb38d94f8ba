"""The index of a checkpoint: which tensors there are, which boxes tile them, and in which file each box lies.

The one idea: a checkpoint is judged whole or not by JSON and headers alone, before torch is imported: the index has a
checksum of its own, its boxes tile every tensor without gap or overlap, and each file holds just the boxes that the
index expects there, to its last byte. What the bytes of the boxes are is checked by whoever reads them (archive.py).

    index.json = {"format": 2, "crc32": of the content, "content": {"meta": ..., "tensors": ..., "companions": ...}}

docs/checkpoints.md describes it for other readers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron3d.config import ConfigError
from megatron3d.crc import crc32
from megatron3d.layout import Box, box_shape, intersect, volume, whole
from megatron3d.loss_scale import LossScale
from megatron3d.tensor_header import ITEM_SIZES, read_header

FORMAT = 2
INDEX = "index.json"
COMPANIONS = "companions"
"""Folder within a checkpoint for files that belong to the model: a tokenizer, another library's config."""
COUNTS = ("step", "consumed_samples", "consumed_tokens", "skipped_steps", "bad_steps", "adam_count")
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")
"""Of tensors, in the order in which they are told."""
CHUNK = 1 << 20  # bytes of a box under one checksum, rounded down to whole rows
PLAIN_NAME = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*")
"""Of a file in a checkpoint: never hidden, never a path that leads out of it."""
MOST_DIMS = 8
MOST_CORNERS = 1 << 21  # of a tensor's boxes: in two dims three boxes of each of 170,000 ranks
MOST_PAIRS = 100_000  # of boxes that are looked at for two that overlap, once it is known that something is wrong
Companions = Mapping[str, bytes]
"""Files that a checkpoint keeps beside its tensors, by name."""
MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading JSON of any other structure may raise."""


class Stored(NamedTuple):
    """One box of a tensor, in one file."""

    box: Box
    file: str
    key: str
    """The box's name in the file."""
    checksums: tuple[int, ...]
    """crc32 of each chunk of rows."""


@dataclass(frozen=True)
class Tensors:
    """One global tensor: shape without padding, type as in file headers, and the boxes that tile it."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Stored, ...]


@dataclass(frozen=True)
class Index:
    """All that a checkpoint says of itself."""

    meta: Mapping[str, Any]
    """Step, counts, config, versions."""
    tensors: Mapping[str, Mapping[str, Tensors]]
    """Kind -> canonical name -> tensor."""
    companions: Mapping[str, int] = field(default_factory=dict)
    """File in the folder COMPANIONS -> crc32."""

    @property
    def files(self) -> dict[str, list[tuple[str, Tensors, Stored]]]:
        """File -> (kind and name, tensor, box) of each box in it."""
        found: dict[str, list[tuple[str, Tensors, Stored]]] = {}
        for kind, named in self.tensors.items():
            for name, tensor in named.items():
                for stored in tensor.boxes:
                    found.setdefault(stored.file, []).append((f"{kind} of {name}", tensor, stored))
        return found


def chunk_rows(box: Box, dtype: str) -> int:
    """Rows of a box that share a checksum."""
    return max(1, CHUNK // max(1, ITEM_SIZES[dtype] * math.prod(box_shape(box)[1:])))


def num_chunks(box: Box, dtype: str) -> int:
    """Checksums of a box."""
    return -(-box_shape(box)[0] // chunk_rows(box, dtype))


# JSON -----------------------------------------------------------------------------------------------------------------


def dump(index: Index) -> str:
    """The text of index.json."""
    content = {
        "meta": dict(index.meta),
        "tensors": {
            kind: {
                name: {
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "boxes": [
                        {"box": [list(extent) for extent in box], "file": file, "key": key, "crc32": list(checksums)}
                        for box, file, key, checksums in tensor.boxes
                    ],
                }
                for name, tensor in named.items()
            }
            for kind, named in index.tensors.items()
        },
        "companions": dict(index.companions),
    }
    content = json.loads(json.dumps(content))  # as it will be read: tuples are lists, keys are strings
    return json.dumps({"format": FORMAT, "crc32": _checksum(content), "content": content}, indent=1) + "\n"


def _checksum(content: Any) -> int:
    """Of JSON in one canonical spelling, so that white space and order do not matter."""
    return crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_index(folder: Path) -> Index:
    """Of one checkpoint folder, checked in itself. Raises ConfigError naming the file and what is wrong with it."""
    path = folder / INDEX
    try:
        told = json.loads(read_plain(path).decode())
        version = told["format"]
        if version == FORMAT:
            content = told["content"]
            if told["crc32"] != _checksum(content):
                raise ValueError("its content is not what its checksum was made of")
            return _parse(content)
    except MALFORMED as error:
        raise ConfigError(f"{path} is not a whole checkpoint's index: {_words(error)}.") from error
    raise ConfigError(f"{path} has format {version!r}, and this version reads format {FORMAT}.")


def _words(error: BaseException) -> str:
    """A ValueError of ours speaks for itself."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _parse(content: Any) -> Index:
    meta = content["meta"]
    if lacking := [name for name in (*COUNTS, "loss_scale", "wandb_id", "config") if name not in meta]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    for name in COUNTS:
        _count(meta[name])
    scale = {field.name: type(field.default) for field in fields(LossScale)}
    if {name: type(value) for name, value in meta["loss_scale"].items()} != scale or type(meta["wandb_id"]) is not str:
        raise ValueError("its loss scale or its W&B run is not understood")
    if unknown := content["tensors"].keys() - KINDS:
        raise ValueError(f"it has tensors of the unknown kind {min(unknown)!r}; there are {', '.join(KINDS)}")
    tensors = {
        kind: {name: _parse_tensor(f"{kind} of {name}", said) for name, said in named.items()}
        for kind, named in content["tensors"].items()
    }
    if "weight" not in tensors:
        raise ValueError("it has no weights")
    companions = {_plain(name): int(crc) for name, crc in content["companions"].items()}
    return Index(meta, tensors, companions)


def _parse_tensor(what: str, said: Any) -> Tensors:
    boxes = tuple(
        Stored(
            tuple((_count(start), _count(stop)) for start, stop in stored["box"]),
            _plain(stored["file"]),
            str(stored["key"]),
            tuple(map(_count, stored["crc32"])),
        )
        for stored in said["boxes"]
    )
    tensor = Tensors(tuple(map(_count, said["shape"])), said["dtype"], boxes)
    if len(tensor.shape) > MOST_DIMS:
        raise ValueError(f"{what} has {len(tensor.shape)} dims")
    if tensor.dtype not in ITEM_SIZES:
        raise ValueError(f"{what} has the unknown type {tensor.dtype!r}")
    if fault := tiling_fault(tensor.shape, [stored.box for stored in boxes]):
        raise ValueError(f"{what}: {fault}")
    if any(len(stored.checksums) != num_chunks(stored.box, tensor.dtype) for stored in boxes):
        raise ValueError(f"{what} has another number of checksums than chunks")
    return tensor


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return value


def _plain(name: Any) -> str:
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint")
    return name


# Tiles ----------------------------------------------------------------------------------------------------------------


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """What keeps these boxes from covering a tensor exactly once; empty if they do.

    Boxes cover the same values equally often if and only if their signed corners add up to the same: a box is the
    running sum, over every dim, of +1 where it begins and -1 behind where it ends. So one look at each box is enough.
    """
    for box in boxes:
        inside = len(box) == len(shape) and all(
            0 <= start < stop <= extent for (start, stop), extent in zip(box, shape, strict=True)
        )
        if not inside:
            return f"the box {list(map(list, box))} is no part of the shape {list(shape)}"
    if len(boxes) << len(shape) > MOST_CORNERS:
        return f"it is cut into {len(boxes)} boxes, more than any job would write"
    left: Counter[tuple[int, ...]] = Counter()
    for box, sign in (*((box, 1) for box in boxes), *((box, -1) for box in [whole(shape)] if volume(box))):
        for corner, signs in zip(itertools.product(*box), itertools.product((1, -1), repeat=len(box)), strict=True):
            left[corner] += sign * math.prod(signs)
    return _untiled(shape, sorted(boxes)) if any(left.values()) else ""


def _untiled(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """What is wrong with boxes that are known to be no tiling: two that overlap, or how many values they have."""
    pairs = (
        (box, other)
        for i, box in enumerate(boxes)
        for other in itertools.takewhile(
            lambda other, box=box: not box or other[0][0] < box[0][1],  # type: ignore[misc]
            (boxes[j] for j in range(i + 1, len(boxes))),
        )
    )
    for box, other in itertools.islice(pairs, MOST_PAIRS):
        if intersect(box, other) is not None:
            return f"the boxes {list(map(list, box))} and {list(map(list, other))} overlap"
    covered, values = sum(map(volume, boxes)), math.prod(shape)
    return f"{covered} of {values} values are there{', some of them twice' if covered >= values else ''}"


# The files it speaks of -----------------------------------------------------------------------------------------------


def check_plain(path: Path) -> None:
    """ValueError unless a file is a plain one: a pipe or a device would keep its reader waiting. OSError if there is
    none."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a plain file")


def read_plain(path: Path) -> bytes:
    """All of a plain file."""
    check_plain(path)
    return path.read_bytes()


def check_files(folder: Path, index: Index) -> None:
    """Each file is there and holds just the boxes that the index expects in it. ConfigError naming the one that does
    not."""
    for file, expected in index.files.items():
        with _reading(folder / file):
            check_plain(folder / file)
            entries = read_header(folder / file)
            for what, tensor, stored in expected:
                found = entries.pop(stored.key, None)
                if found is None or (found.dtype, found.shape) != (tensor.dtype, box_shape(stored.box)):
                    raise ValueError(f"it does not hold {what} as the index says, under {stored.key}")
            if entries:
                raise ValueError(f"the index does not know {min(entries)}")
    for name, crc in index.companions.items():
        with _reading(folder / COMPANIONS / name):
            if crc32(read_plain(folder / COMPANIONS / name)) != crc:
                raise ValueError("it is not what its checksum was made of")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what reading a file raises into a ConfigError that names it."""
    try:
        yield
    except MALFORMED as error:
        raise ConfigError(f"{path}, of the checkpoint, is damaged: {_words(error)}.") from error
