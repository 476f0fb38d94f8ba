"""Writing a file of torch.save tensor by tensor: its pickle first, the values as they come.

The one idea: torch.save wants all tensors in memory at once, but the pickle needs to know their types and shapes only.
So it is written from stand-ins (Later), and each tensor's values then become a member of the archive, as large as they
were announced, at a multiple of 64 bytes as torch puts them. They may come in parts that lie anywhere in memory: about
a megabyte is copied at a time. What such a file looks like is told in torch_file.py.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron3d.crc import crc32
from megatron3d.tensor_file import AT_ONCE, raw

FOLDER = "archive"
ALIGNMENT = 64
LOCAL_HEADER, ZIP64 = 30, 20  # bytes in front of a member's name; those that zipfile adds for sizes beyond 4 GB
PADDING = b"FB"  # kind of an extra field that is only there to be skipped; torch's own


@dataclass(frozen=True)
class Later:
    """A tensor whose values come later."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class _Values:
    """What a tensor is a view of: a member of the archive."""

    key: str
    later: Later


class _Pickler(pickle.Pickler):
    """Writes stand-ins as torch.save writes tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.found: dict[str, Later] = {}

    def reducer_override(self, value: Any) -> Any:
        """Of a Later: how torch makes the tensor of its values."""
        if not isinstance(value, Later):
            return NotImplemented
        key = str(len(self.found))
        self.found[key] = value
        stride = torch.empty(value.shape, device="meta").stride()
        arguments = (_Values(key, value), 0, value.shape, stride, False, OrderedDict())  # type: ignore[var-annotated]
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        """Of values: where they are, as torch.load expects it."""
        if not isinstance(value, _Values):
            return None
        storage = torch.storage._dtype_to_storage_type_map()[value.later.dtype]
        return "storage", getattr(torch, storage), value.key, "cpu", value.later.size


class TorchWriter:
    """A file of `value`, in which Later stands for tensors; these are put in the order in which they are met in it.

    On leaving the `with` block it is whole; RuntimeError if a tensor has not been put by then. To have it on the disk
    is left to the caller, who may write the next file meanwhile.
    """

    def __init__(self, path: Path, value: Any) -> None:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(value)
        self._file = path.open("wb")
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._missing: Iterator[tuple[str, Later]] = iter(pickler.found.items())
        for name, content in (
            ("data.pkl", pickled.getvalue()),
            ("byteorder", sys.byteorder.encode()),
            ("version", b"3\n"),
        ):
            self._member(name, len(content), [memoryview(content)])

    def put(self, *parts: Tensor) -> None:
        """The next tensor, on the CPU: its parts, to be stacked along the first dim, as large as was announced."""
        key, later = next(self._missing)
        rows = [part.shape[0] for part in parts if part.dim()]
        shape = (sum(rows), *parts[0].shape[1:]) if rows else ()
        assert (shape, {part.dtype for part in parts}) == (later.shape, {later.dtype}), key
        self._member(f"data/{key}", later.nbytes, (piece for part in parts for piece in _pieces(part)))

    def _member(self, name: str, size: int, content: Iterable[memoryview]) -> None:
        """Adds a member by itself, since zipfile's own way takes zlib's checksum, which is ten times as slow."""
        info = zipfile.ZipInfo(f"{FOLDER}/{name}")
        info.header_offset, info.CRC = self._file.tell(), 0
        info.file_size = info.compress_size = size
        pad = -(info.header_offset + LOCAL_HEADER + len(info.filename) + ZIP64 + 4) % ALIGNMENT
        info.extra = PADDING + struct.pack("<H", pad) + bytes(pad)
        self._file.write(info.FileHeader(zip64=True))
        for piece in content:
            info.CRC = crc32(piece, info.CRC)
            self._file.write(piece)
        self._archive.filelist.append(info)
        self._archive.start_dir = self._file.tell()  # of the list that close() writes
        self._file.seek(info.header_offset)
        self._file.write(info.FileHeader(zip64=True))  # with the checksum that is now known
        self._file.seek(self._archive.start_dir)

    def __enter__(self) -> TorchWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = list(self._missing)
        with self._file:
            self._archive.close()
            if error is None and left:
                raise RuntimeError(f"{len(left)} tensors were not written")


def _pieces(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order, a few rows at a time, of which those that do not lie together are copied."""
    values = values.detach().reshape(-1) if values.is_contiguous() else values
    row = math.prod(values.shape[1:]) * values.element_size()
    for rows in values.split(max(1, AT_ONCE // max(1, row))):
        yield raw(rows.contiguous())
