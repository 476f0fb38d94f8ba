"""Tensors of a safetensors file, read and written by position: as much memory as what is asked for.

The one idea: rows of a tensor are bytes at a known place (tensor_header.py), so they are read straight into a tensor's
memory, and written in any order, by several threads if need be. Nothing is mapped: the memory of a process that streams
through a model stays that of one tensor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron3d.tensor_header import Entry, make_header, read_header

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
AT_ONCE = 1 << 20  # bytes of one write: for larger ones the system may find room only slowly
NAMES = {dtype: name for name, dtype in TYPES.items()}
"""torch's type -> its name in a header."""


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """An open safetensors file, from which several threads may read. Raises ValueError for one that is damaged, OSError
    for one that is unreadable."""

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, Entry] = read_header(path)
        self._file = path.open("rb", buffering=0)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends reading; so does the end of the object."""
        self._file.close()

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        entry = self.entries[name]
        return self._read(entry, entry.shape, 0)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor of at least one dim."""
        entry = self.entries[name]
        each = entry.size // entry.shape[0] if entry.shape[0] else 0
        return self._read(entry, (stop - start, *entry.shape[1:]), start * each)

    def _read(self, entry: Entry, shape: tuple[int, ...], first: int) -> Tensor:
        tensor = torch.empty(shape, dtype=TYPES[entry.dtype])
        wanted = raw(tensor)
        done = 0
        while done < len(wanted):
            got = os.preadv(self._file.fileno(), [wanted[done:]], entry.start + first + done)
            if got == 0:
                raise ValueError("the file ends before its tensors do")
            done += got
        return tensor


class TensorWriter:
    """A safetensors file in the making: its tensors are known, their values come in any order.

    On leaving the `with` block it is forced to the disk; RuntimeError if a tensor has not been written by then.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        first, self._entries = make_header({name: (NAMES[dtype], shape) for name, (dtype, shape) in tensors.items()})
        self._missing = set(tensors)
        self._one_at_a_time = threading.Lock()  # as the system has it anyway, but there those who wait keep a core busy
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._put(memoryview(first), 0)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None and self._missing:
                raise RuntimeError(f"{len(self._missing)} tensors were not written, e.g. {min(self._missing)}")
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def put(self, name: str, values: Tensor) -> None:
        """Writes a tensor: contiguous, on the CPU, of the shape and type that were announced; threads may do so at
        once."""
        entry = self._entries[name]
        assert (NAMES[values.dtype], tuple(values.shape)) == (entry.dtype, entry.shape), name
        self._put(raw(values), entry.start)
        self._missing.remove(name)

    def _put(self, content: memoryview, place: int) -> None:
        done = 0
        with self._one_at_a_time:
            while done < len(content):
                done += os.pwrite(self._descriptor, content[done : done + AT_ONCE], place + done)
