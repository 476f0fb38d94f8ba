"""Reads and writes Megatron .bin/.idx pairs with struct and lists: an oracle that shares nothing with the library.

An .idx file is little-endian: 9 bytes of magic, version (8 bytes), type of the tokens (1), number of sequences (8),
number of documents + 1 (8); then the sequences' lengths (4 bytes each), their offsets in the .bin file in bytes (8),
and for each document the number of sequences before it (8), closed by the number of all sequences.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path

MAGIC = b"MMIDIDX\x00\x00"
FORMATS = {4: "i", 5: "q", 8: "H"}  # type of the tokens -> letter of the struct module


def write(
    prefix: Path,
    sequences: Sequence[Sequence[int]],
    *,
    code: int = 8,
    version: int = 1,
    magic: bytes = MAGIC,
    lengths: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    documents: Sequence[int] | None = None,
) -> None:
    """Write a pair of sequences, one a document unless `documents` says otherwise; any field can be given wrong."""
    size = struct.calcsize(FORMATS[code])
    if lengths is None:
        lengths = [len(sequence) for sequence in sequences]
    if offsets is None:
        offsets = [size * sum(lengths[:index]) for index in range(len(lengths))]
    if documents is None:
        documents = range(len(lengths) + 1)
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{FORMATS[code]}", *tokens))
    Path(f"{prefix}.idx").write_bytes(
        magic
        + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def read(prefix: Path) -> tuple[int, list[list[list[int]]]]:
    """(type of the tokens, documents as lists of sequences as lists of ids) of a pair."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == MAGIC
    version, code, num_sequences, num_bounds = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    offsets = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    bounds = struct.unpack_from(f"<{num_bounds}q", index, 34 + 12 * num_sequences)
    assert len(index) == 34 + 12 * num_sequences + 8 * num_bounds
    tokens = Path(f"{prefix}.bin").read_bytes()
    sequences = [
        list(struct.unpack_from(f"<{length}{FORMATS[code]}", tokens, offset))
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    return code, [sequences[first:end] for first, end in itertools.pairwise(bounds)]
