"""Files of torch.save, or parts of files that are such: their pickle read safely, their tensors where they lie.

The one idea: such a file is a zip archive whose members are stored as they are, so a tensor is a range of bytes of the
file. Opening reads the pickle alone (unpickle.py); a tensor's bytes are read when it is asked for, after the checksum
of all values that it belongs to has been compared once.

    NAME/data.pkl       the pickle; tensors in it name their values by a key
    NAME/data/KEY       values
    NAME/byteorder      little or big
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron3d.config import ConfigError
from megatron3d.crc import crc32
from megatron3d.index import check_plain
from megatron3d.tensor_file import raw
from megatron3d.unpickle import Storage, loads

BLOCK = 1 << 20  # bytes read at once
LOCAL_HEADER = 30  # bytes before a member's name, in front of its content
OLD_FORMAT = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the number with which files older than PyTorch 1.6 begin
UNREADABLE = (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, LookupError, EOFError)


class _Window(io.RawIOBase):
    """Bytes [start, start + length) of a file, as a file of its own."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._start, self.length, self._at = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self.length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(wanted)
        self._at += count
        return count

    def fill(self, buffer: memoryview, at: int) -> None:
        """All of `buffer`, from byte `at` on."""
        self.seek(at)
        done = 0
        while done < len(buffer):
            count = self.readinto(buffer[done:])
            if not count:
                raise EOFError("it ends too early")
            done += count

    def close(self) -> None:
        self._file.close()
        super().close()


class TorchFile:
    """A file of torch.save; `start` and `length`: the part of the file that is one.

    `value` is what was saved, with the stand-ins of unpickle.py for tensors and objects. Raises ConfigError naming the
    file if it is missing, damaged, of another kind, or asks for anything that a checkpoint does not need.
    """

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self.path, self._start = path, start
        self._checked: set[str] = set()
        with self._open(length) as window:
            self._length = window.length
            self._check_kind(window)
            self._members = _members(window)
            self._check_byte_order(window)
            pickled = self._content(window, "data.pkl")
        self.value: Any = loads(pickled, str(path), self._storage)

    @contextlib.contextmanager
    def _open(self, length: int | None) -> Iterator[_Window]:
        """The window, and every fault of the file as a ConfigError."""
        try:
            check_plain(self.path)
            there = self.path.stat().st_size - self._start
            length = there if length is None else length
            if not 0 <= self._start <= self._start + length <= self._start + there:
                raise EOFError(f"bytes {self._start} to {self._start + length} are not all there")
            with _Window(self.path, self._start, length) as window:
                yield window
        except ConfigError:
            raise
        except UNREADABLE as error:
            raise ConfigError(f"{self.path} cannot be read: {type(error).__name__}: {error}.") from error

    def _check_kind(self, window: _Window) -> None:
        first = window.read(len(OLD_FORMAT)) or b""
        if first == OLD_FORMAT:
            raise ConfigError(
                f"{self.path} is in the old format of torch.save (before PyTorch 1.6), which is not read. Load it with "
                "torch.load and save it again with torch.save."
            )
        if not first.startswith(b"PK"):
            raise ConfigError(f"{self.path} is no file of torch.save: it does not begin as a zip archive does.")

    def _check_byte_order(self, window: _Window) -> None:
        order = self._content(window, "byteorder").decode("ascii") if "byteorder" in self._members else "little"
        if order != sys.byteorder:
            raise ConfigError(f"{self.path} was written with byte order {order!r}; this machine's is {sys.byteorder}.")

    def _content(self, window: _Window, name: str) -> bytes:
        """A small member, whole."""
        place = self._place(window, name)
        buffer = bytearray(self._members[name].file_size)
        window.fill(memoryview(buffer), place)
        if crc32(buffer) != self._members[name].CRC:
            raise ValueError(f"the checksum of its member {name} is wrong")
        return bytes(buffer)

    def _place(self, window: _Window, name: str) -> int:
        """Where a member's content begins."""
        if name not in self._members:
            raise LookupError(f"it has no member {name}")
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"its member {name} is compressed, which torch.save never does")
        header = bytearray(LOCAL_HEADER)
        window.fill(memoryview(header), member.header_offset)
        place: int = member.header_offset + LOCAL_HEADER + sum(struct.unpack("<HH", header[26:]))
        if place + member.file_size > self._length:
            raise EOFError(f"it ends within its member {name}")
        return place

    def _storage(self, key: Any) -> Storage:
        """The values that a persistent id names, if they are there."""
        kind, dtype, name, _, size = key
        if (
            kind != "storage"
            or not isinstance(dtype, torch.dtype)
            or not isinstance(name, str)
            or type(size) is not int
        ):
            raise ValueError("it names values in a way that is not understood")
        member = self._members.get(f"data/{name}")
        if member is None:
            raise ConfigError(f"{self.path} is not whole: it has no member data/{name}, the values of a tensor.")
        if size * dtype.itemsize != member.file_size:
            raise ConfigError(
                f"{self.path} is damaged: it speaks of {size} values of {dtype} in its member data/{name}, which has "
                f"{member.file_size} bytes."
            )
        return Storage(dtype, size, lambda start, pieces: self._fill(f"data/{name}", start * dtype.itemsize, pieces))

    def _fill(self, name: str, start: int, pieces: Sequence[Tensor]) -> None:
        """Reads a member from byte `start` on; all of it, as long as its checksum has not been compared."""
        wanted = [raw(piece) for piece in pieces]
        with self._open(self._length) as window:
            place = self._place(window, name)
            if name in self._checked:
                _read(window, place + start, wanted)
                return
            after = self._members[name].file_size - start - sum(map(len, wanted))
            crc = _read(window, place, [*_unwanted(start), *wanted, *_unwanted(after)])
            if crc != self._members[name].CRC:
                raise ValueError(f"the checksum of its member {name} is wrong")
            self._checked.add(name)


def _read(window: _Window, at: int, buffers: Iterable[memoryview]) -> int:
    """Fills buffers with what lies from byte `at` on; its checksum, block by block while they are in the cache."""
    crc = 0
    for buffer in buffers:
        for first in range(0, len(buffer), BLOCK):
            block = buffer[first : first + BLOCK]
            window.fill(block, at)
            crc, at = crc32(block, crc), at + len(block)
    return crc


def _unwanted(size: int) -> Iterator[memoryview]:
    """Room for so many bytes, the same block again and again."""
    block = memoryview(bytearray(min(size, BLOCK)))
    for first in range(0, size, BLOCK):
        yield block[: size - first]


def _members(window: _Window) -> dict[str, zipfile.ZipInfo]:
    """Members by their name below the archive's one folder."""
    window.seek(0)
    with zipfile.ZipFile(window) as archive:
        return {info.filename.partition("/")[2]: info for info in archive.infolist()}
