"""Megatron-compatible token files: `prefix.bin` holds the tokens, `prefix.idx` says where sequences and documents end.

The one idea: the tokens of all documents lie end to end in the .bin file, so one integer, the flat token position,
names any token, and a document or a split is a range of positions. The .idx file repeats that in Megatron's terms:
lengths of the sequences (int32), their byte offsets (int64), and for each document the index of its first sequence
(int64). A pair is checked whole when it is opened, and appears under its final names only when whole.

Which positions make a sample is data.py's matter; how text becomes tokens, tokenizer.py's and corpus.py's.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron3d.config import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of the tokens, number of sequences, number of documents + 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of the integer types; 6 and 7 are floating-point and hold no tokens."""

LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32
CHUNK = 1 << 20  # entries of an index looked at together: bounds the memory that checking and writing take


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type of the format that holds every id below `vocab_size`: uint16 up to 65,536 ids, else int32."""
    if not 1 <= vocab_size <= 2**31:
        raise ConfigError(f"A vocabulary of {vocab_size} ids cannot be stored: the token files hold 1 to {2**31} ids.")
    return np.dtype(DTYPES[8] if vocab_size <= 2**16 else DTYPES[4])


def bin_path(prefix: str) -> Path:
    """The file of tokens of a pair."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str) -> Path:
    """The file of positions of a pair."""
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """A pair opened for reading; both files are mapped, not loaded.

    `tokens` is the whole .bin file as a flat array in the file's own type, indexed by flat token position. Raises
    ConfigError, naming both files and both sizes, where the pair is damaged, incomplete or of another kind.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        dtype, num_sequences, num_bounds = _read_header(prefix)
        self.lengths: NDArray[np.int32] = _map(idx_path(prefix), "<i4", HEADER.size, num_sequences)
        end_of_lengths = HEADER.size + 4 * num_sequences
        self.offsets: NDArray[np.int64] = _map(idx_path(prefix), "<i8", end_of_lengths, num_sequences)
        self.bounds: NDArray[np.int64] = _map(
            idx_path(prefix), "<i8", end_of_lengths + 8 * num_sequences, num_bounds
        )  # of the documents: the first sequence of each, then the number of sequences
        self.tokens: NDArray[Any] = _map(
            bin_path(prefix), dtype.str, 0, bin_path(prefix).stat().st_size // dtype.itemsize
        )
        if reason := self._find_fault():
            raise _fault(prefix, reason)

    @property
    def num_documents(self) -> int:
        """Documents in the pair, empty ones included."""
        return len(self.bounds) - 1

    @property
    def document_sizes(self) -> NDArray[np.int64]:
        """Tokens of each document, (num_documents,)."""
        ends = np.append(self.offsets, self.tokens.nbytes)
        return np.diff(ends[self.bounds]) // self.tokens.itemsize

    def start(self, document: int) -> int:
        """Flat position of the first token of a document; for `num_documents`, the number of all tokens."""
        sequence = int(self.bounds[document])
        return int(self.offsets[sequence]) // self.tokens.itemsize if sequence < len(self.offsets) else len(self.tokens)

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of a document, whatever sequences it is made of."""
        return self.tokens[self.start(index) : self.start(index + 1)]

    def document_at(self, position: int) -> int:
        """The document of the token at a flat position."""
        sequence = np.searchsorted(self.offsets, position * self.tokens.itemsize, side="right") - 1
        return int(np.searchsorted(self.bounds, sequence, side="right")) - 1

    def _find_fault(self) -> str:
        """What is wrong with lengths, offsets or documents; empty if nothing is."""
        end = 0
        for lengths, offsets in zip(_chunks(self.lengths), _chunks(self.offsets), strict=True):
            if lengths.min() < 0:
                return f"a sequence has the length {lengths.min()}"
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.tokens.itemsize
            if offsets[0] != end or not np.array_equal(offsets[1:], ends[:-1]):
                return "the sequences do not follow each other without gaps"
            end = int(ends[-1])
        if end != self.tokens.nbytes:
            return f"the lengths add up to {end} bytes of tokens"
        if self.bounds[0] != 0 or self.bounds[-1] != len(self.lengths):
            return (
                f"the documents run from sequence {self.bounds[0]} to {self.bounds[-1]} instead of "
                f"from 0 to {len(self.lengths)}"
            )
        if any((np.diff(chunk) < 0).any() for chunk in _chunks(self.bounds, overlap=1)):
            return "the starts of the documents are not in ascending order"
        return ""


class IndexedWriter:
    """Writes a pair, document by document; use as a context manager.

    The files are written aside and renamed when the block ends without an error: .bin first, then .idx, an older .idx
    removed before, so that no moment shows a pair of two kinds. After an error nothing is left. `dtype` is that of
    `token_dtype`. Memory: 4 bytes per document. Folders are made; ConfigError where nothing can be written.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self.lengths = array("i")
        self.num_tokens = 0
        self._asides = [Path(f"{path}.partial") for path in (bin_path(prefix), idx_path(prefix))]
        try:
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._asides[0], "wb")  # noqa: SIM115 (closed in __exit__)
        except OSError as error:
            raise ConfigError(
                f"Cannot write {bin_path(prefix)} ({error.strerror}). Name a prefix in a folder that can be written to."
            ) from None

    def add_document(self, tokens: ArrayLike) -> None:
        """Append one document of any length, zero included; ConfigError where an id does not fit the type."""
        ids = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if ids.size and not (limits.min <= ids.min() and ids.max() <= limits.max):
            raise ConfigError(
                f"Token ids {ids.min()} to {ids.max()} do not fit {self.dtype.name} in {self.prefix}.bin."
            )
        if ids.size > LONGEST_SEQUENCE:
            raise ConfigError(f"A document of {ids.size} tokens is too long: the format ends at {LONGEST_SEQUENCE}.")
        self._bin.write(ids.astype(self.dtype).tobytes())
        self.lengths.append(ids.size)
        self.num_tokens += ids.size

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._bin.close()
            for aside in self._asides:
                aside.unlink(missing_ok=True)

    def _commit(self) -> None:
        _flush(self._bin)
        with open(self._asides[1], "wb") as index:
            self._write_index(index)
            _flush(index)
        idx_path(self.prefix).unlink(missing_ok=True)
        self._asides[0].replace(bin_path(self.prefix))
        self._asides[1].replace(idx_path(self.prefix))

    def _write_index(self, index: BinaryIO) -> None:
        count = len(self.lengths)
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        index.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        lengths = np.frombuffer(self.lengths, dtype="<i4") if count else np.zeros(0, "<i4")
        index.write(lengths.tobytes())
        end = 0
        for chunk in _chunks(lengths):
            ends = end + np.cumsum(chunk, dtype=np.int64) * self.dtype.itemsize
            index.write(np.concatenate(([end], ends[:-1])).astype("<i8").tobytes())
            end = int(ends[-1])
        for first in range(0, count + 1, CHUNK):
            index.write(np.arange(first, min(first + CHUNK, count + 1), dtype="<i8").tobytes())


def _read_header(prefix: str) -> tuple[np.dtype[Any], int, int]:
    """(type of the tokens, number of sequences, number of documents + 1) of a pair of plausible sizes."""
    if not (bin_path(prefix).is_file() and idx_path(prefix).is_file()):
        raise _fault(prefix, "both files must be there")
    try:
        with open(idx_path(prefix), "rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise _fault(prefix, f"the .idx file cannot be read ({error.strerror})") from None
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise _fault(prefix, "the .idx file does not begin like an index of tokens")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != VERSION:
        raise _fault(prefix, f"the index has version {version}, only version {VERSION} can be read")
    if code not in DTYPES:
        raise _fault(prefix, f"the index names type {code}, tokens have one of {sorted(DTYPES)}")
    if num_bounds < 1:
        raise _fault(prefix, "the index has no list of documents")
    dtype = np.dtype(DTYPES[code])
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if idx_path(prefix).stat().st_size != expected:
        raise _fault(
            prefix, f"{num_sequences} sequences and {num_bounds - 1} documents need an index of {expected} bytes"
        )
    if bin_path(prefix).stat().st_size % dtype.itemsize:
        raise _fault(prefix, f"the .bin file is no multiple of {dtype.itemsize} bytes, the size of {dtype.name}")
    return dtype, num_sequences, num_bounds


def _map(path: Path, dtype: str, offset: int, count: int) -> NDArray[Any]:
    """`count` values of a file as a read-only array backed by the file."""
    if count == 0:  # an empty range cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def _chunks(values: NDArray[Any], overlap: int = 0) -> Iterator[NDArray[Any]]:
    """Consecutive parts of an array, none empty; each begins with the last `overlap` values of the one before."""
    for first in range(0, len(values), CHUNK):
        yield values[max(first - overlap, 0) : first + CHUNK]


def _fault(prefix: str, reason: str) -> ConfigError:
    names = " and ".join(
        f"{path} ({path.stat().st_size} bytes)" if path.is_file() else f"{path} (missing)"
        for path in (bin_path(prefix), idx_path(prefix))
    )
    return ConfigError(
        f"The token files {names} are no usable pair: {reason}. Write them again with tools/preprocess_data.py, "
        f"or give the prefix of another pair, without .bin or .idx."
    )


def _flush(file: BinaryIO) -> None:
    """Bring a written file to the disk, so that a rename never precedes the content."""
    file.flush()
    os.fsync(file.fileno())
