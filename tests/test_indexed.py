"""indexed.py against files that Megatron-core wrote and against an independent reader and writer (data/idx_tool.py)."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron3d.config import ConfigError
from megatron3d.indexed import IndexedDataset, IndexedWriter, token_dtype
from tests.data import idx_tool

FIXTURES = Path(__file__).parent / "data" / "megatron_data"
NAMES = ["small_uint16", "wide_int32", "with_empty", "sentences"]


def flat(document: list[int] | list[list[int]]) -> list[int]:
    """A document's ids, whether it is a list of ids or of sequences."""
    return [token for part in document for token in (part if isinstance(part, list) else [part])]


@pytest.mark.parametrize("name", NAMES)
def test_reads_what_megatron_wrote(name: str) -> None:
    documents = [flat(document) for document in json.loads((FIXTURES / f"{name}.json").read_text())]
    indexed = IndexedDataset(str(FIXTURES / name))
    assert indexed.num_documents == len(documents)
    assert indexed.document_sizes.tolist() == [len(document) for document in documents]
    assert indexed.document_sizes.dtype == np.int64
    assert [indexed.document(index).tolist() for index in range(len(documents))] == documents
    assert indexed.tokens.tolist() == flat(documents)
    assert [indexed.start(index) for index in range(len(documents) + 1)] == [
        sum(map(len, documents[:index])) for index in range(len(documents) + 1)
    ]


@pytest.mark.parametrize("name", NAMES[:3])
def test_writes_the_bytes_that_megatron_wrote(name: str, tmp_path: Path) -> None:
    documents = json.loads((FIXTURES / f"{name}.json").read_text())
    with IndexedWriter(str(tmp_path / name), IndexedDataset(str(FIXTURES / name)).tokens.dtype) as writer:
        for document in documents:
            writer.add_document(document)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"{name}{suffix}").read_bytes() == (FIXTURES / f"{name}{suffix}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.idx"]


def test_ids_beyond_16_bits_are_kept(tmp_path: Path) -> None:
    """INT-05: a vocabulary above 65,536 ids is stored as int32, and the ids around the limit come back."""
    assert [token_dtype(size).name for size in (257, 65536, 65537, 70000)] == ["uint16", "uint16", "int32", "int32"]
    ids = [65535, 65536, 69999]
    with IndexedWriter(str(tmp_path / "wide"), token_dtype(70000)) as writer:
        writer.add_document(ids)
    assert idx_tool.read(tmp_path / "wide") == (4, [[ids]])
    assert IndexedDataset(str(tmp_path / "wide")).tokens.tolist() == ids
    with IndexedWriter(str(tmp_path / "narrow"), token_dtype(65536)) as writer:
        writer.add_document([0, 65535])
        with pytest.raises(ConfigError, match="65536"):
            writer.add_document([65536])
        with pytest.raises(ConfigError, match="-1"):
            writer.add_document([-1])
    assert idx_tool.read(tmp_path / "narrow") == (8, [[[0, 65535]]])


def test_unstorable_vocabulary_is_refused() -> None:
    for size in (0, 2**31 + 1):
        with pytest.raises(ConfigError, match=str(size)):
            token_dtype(size)


def test_a_failed_write_leaves_nothing_and_a_good_one_replaces(tmp_path: Path) -> None:
    prefix = tmp_path / "set"
    idx_tool.write(prefix, [[1, 2], [3]])
    before = idx_tool.read(prefix)

    def interrupted() -> None:
        with IndexedWriter(str(prefix), token_dtype(10)) as writer:
            writer.add_document([9])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert idx_tool.read(prefix) == before
    with IndexedWriter(str(prefix), token_dtype(10)) as writer:
        assert idx_tool.read(prefix) == before
        writer.add_document([9])
    assert idx_tool.read(prefix) == (8, [[[9]]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_memory_of_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DATA-12, small: at most 12 bytes per document beside a constant; and an index of many chunks is a valid one."""
    monkeypatch.setattr("megatron3d.indexed.CHUNK", 1000)
    count = 30_500
    tracemalloc.start()
    with IndexedWriter(str(tmp_path / "many"), token_dtype(10)) as writer:
        token = np.array([7], np.uint16)
        for _ in range(count):
            writer.add_document(token)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * count + 300_000  # a list of Python ints alone would take 40 bytes each
    assert idx_tool.read(tmp_path / "many") == (8, [[[7]]] * count)
    assert IndexedDataset(str(tmp_path / "many")).num_documents == count


def test_positions_beyond_32_bits(tmp_path: Path) -> None:
    """2,200 documents of a million tokens, 4.4e9 bytes without disk (a file of holes): the last one reads back."""
    count, length = 2200, 10**6
    with open(tmp_path / "huge.bin", "wb") as file:
        file.truncate(2 * count * length - 16)
        file.seek(0, 2)
        file.write(struct.pack("<8H", *range(1, 9)))
    offsets = np.arange(count, dtype="<i8") * 2 * length
    (tmp_path / "huge.idx").write_bytes(
        idx_tool.MAGIC
        + struct.pack("<QBQQ", 1, 8, count, count + 1)
        + np.full(count, length, "<i4").tobytes()
        + offsets.tobytes()
        + np.arange(count + 1, dtype="<i8").tobytes()
    )
    indexed = IndexedDataset(str(tmp_path / "huge"))
    assert indexed.start(count) == count * length
    assert indexed.document(count - 1)[-9:].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def cut(suffix: str, by: int) -> Callable[[Path], None]:
    """Damage: shorten one file of a pair."""

    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}{suffix}")
        path.write_bytes(path.read_bytes()[:-by])

    return damage


def empty(prefix: Path) -> None:
    """Damage: zero bytes in both files."""
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").write_bytes(b"")


def other_index(prefix: Path) -> None:
    """Damage: the .idx file of another set."""
    idx_tool.write(prefix.with_name("other"), [[1, 2, 3], [4, 5, 6, 7, 8]])
    prefix.with_name("other.idx").replace(f"{prefix}.idx")


def rewritten(**fields: object) -> Callable[[Path], None]:
    """Damage: a field of the index is wrong."""
    return lambda prefix: idx_tool.write(prefix, [[1, 2], [3, 4], [5]], **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut(".bin", 10), "add up to 10 bytes"),
        (cut(".bin", 1), "no multiple of 2"),
        (cut(".idx", 8), "need an index of"),
        (cut(".idx", 100), "does not begin like an index"),
        (empty, "does not begin like an index"),
        (other_index, "add up to 16 bytes"),
        (rewritten(magic=b"MMIDIDX\x00\x01"), "does not begin like an index"),
        (rewritten(version=2), "version 2"),
        (lambda prefix: Path(f"{prefix}.bin").unlink(), "both files must be there"),
        (lambda prefix: Path(f"{prefix}.idx").unlink(), "both files must be there"),
        (rewritten(offsets=[0, 4, 6]), "without gaps"),
        (rewritten(offsets=[2, 4, 8]), "without gaps"),
        (rewritten(lengths=[2, -2, 5]), "length -2"),
        (rewritten(documents=[]), "no list of documents"),
        (rewritten(documents=[0, 1, 2]), "from sequence 0 to 2 instead of from 0 to 3"),
        (rewritten(documents=[1, 2, 3]), "from sequence 1 to 3 instead of from 0 to 3"),
        (rewritten(documents=[0, 2, 1, 3]), "not in ascending order"),
    ],
)
def test_a_damaged_pair_is_refused(damage: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    """DATA-16, DATA-17: refused when opened, naming both files, both sizes and the reason."""
    prefix = tmp_path / "set"
    rewritten()(prefix)
    IndexedDataset(str(prefix))
    damage(prefix)
    with pytest.raises(ConfigError) as error:
        IndexedDataset(str(prefix))
    message = str(error.value)
    assert reason in message
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}{suffix}")
        assert f"{path} ({f'{path.stat().st_size} bytes' if path.exists() else 'missing'})" in message


def test_a_type_that_holds_no_tokens_is_refused(tmp_path: Path) -> None:
    idx_tool.write(tmp_path / "set", [[1]])
    raw = bytearray((tmp_path / "set.idx").read_bytes())
    raw[17] = 7  # float32
    (tmp_path / "set.idx").write_bytes(raw)
    with pytest.raises(ConfigError, match="type 7"):
        IndexedDataset(str(tmp_path / "set"))
