"""What a safetensors file says it holds, read and checked without torch.

The one idea: a header is believed only where it fits the file: names once, types known, every tensor as long as its
shape asks for, side by side from the first byte to the last. Whoever then reads by position reads what is meant. The
format: 8 bytes with the header's length, the header in JSON, the tensors' bytes. The bytes are read in tensor_file.py.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_DIMS = 64
LONGEST_HEADER = 100_000_000  # bytes, by the format's specification
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Type in a header -> bytes of a value."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """As headers call it: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """Its first byte within the file."""
    size: int
    """Its bytes."""


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> tensor of a safetensors file. Raises ValueError saying what does not fit, OSError if it is unreadable."""
    with path.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(0)
        words = file.read(8)
        (size,) = struct.unpack("<Q", words) if len(words) == 8 else (0,)
        if not 2 <= size <= min(LONGEST_HEADER, length - 8):
            raise ValueError(f"its header should have {size} bytes, and the file has {length}")
        text = file.read(size)
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of tensors")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, said, 8 + size) for name, said in header.items()}
    end = 8 + size
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != end:
            raise ValueError(f"{name} should begin at byte {end}, and its header says {entry.start}")
        end += entry.size
    if end != length:
        raise ValueError(f"its tensors end at byte {end}, and the file has {length}")
    return entries


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _entry(name: str, said: Any, first: int) -> Entry:
    try:
        dtype, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
        if len(shape) > MOST_DIMS:
            raise ValueError(f"{len(shape)} dims")
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        size = ITEM_SIZES[dtype] * math.prod(shape) if whole else -1
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"what its header says of {name} is not understood: {type(error).__name__}: {error}") from None
    if size != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes by its header, and its shape and type need {size}")
    return Entry(dtype, tuple(shape), first + begin, size)


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file of these tensors (name -> type and shape, in the order of the file), and where each
    will lie. Tensors begin at a multiple of 8 bytes as long as their sizes allow."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + ITEM_SIZES[dtype] * math.prod(shape)
        said[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    entries = {name: _entry(name, said[name], 8 + len(text)) for name in tensors}
    return struct.pack("<Q", len(text)) + text, entries
