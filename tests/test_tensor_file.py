"""Files of tensors: the same as safetensors' own, read in parts, and refused where they do not fit their header."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron3d.tensor_file import NAMES, TYPES, TensorFile, TensorWriter
from megatron3d.tensor_header import ITEM_SIZES, read_header


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(7, 5), (3,), (), (2, 3, 4), (0, 4), (4, 0)]
    values = torch.rand(64, generator=generator) * 100
    found = {}
    for i, (name, dtype) in enumerate(TYPES.items()):
        shape = shapes[i % len(shapes)]
        found[f"t.{name}"] = values[: int(torch.tensor(shape).prod())].reshape(shape).to(dtype)
    return found


def test_our_files_are_theirs(tmp_path: Path) -> None:
    """Both directions, every type; written in another order than announced."""
    tensors = some_tensors()
    with TensorWriter(tmp_path / "ours", {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}) as file:
        for name in reversed(tensors):
            file.put(name, tensors[name])
    theirs = load_file(tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    with TensorFile(tmp_path / "theirs") as file_of_theirs:
        for name, tensor in tensors.items():
            assert torch.equal(theirs[name], tensor) and torch.equal(file_of_theirs.read(name), tensor), name
            assert file_of_theirs.read(name).dtype == theirs[name].dtype == tensor.dtype
    assert set(ITEM_SIZES) == set(TYPES) and all(ITEM_SIZES[NAMES[t]] == t.itemsize for t in TYPES.values())


def test_rows_are_read_alone(tmp_path: Path) -> None:
    matrix = torch.arange(35.0).view(7, 5)
    save_file({"m": matrix, "other": torch.ones(1000)}, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file:
        assert torch.equal(file.rows("m", 2, 6), matrix[2:6])
        assert file.rows("m", 3, 3).shape == (0, 5)


def test_a_file_that_is_not_all_written_is_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"1 tensors were not written, e.g. b"),
        TensorWriter(tmp_path / "file", {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}) as file,
    ):
        file.put("a", torch.ones(2))


def packed(header: Any, content: bytes = b"12345678") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def of(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty": (b"", "header should have 0 bytes"),
    "too short": (b"\x01" * 7, "header"),
    "a header of 2^63 bytes": (struct.pack("<Q", 2**63) + b"{}", "9223372036854775808 bytes"),
    "a header longer than the file": (struct.pack("<Q", 100) + b"{}", "should have 100 bytes"),
    "no JSON": (packed(b"nonsense"), "not JSON"),
    "endless brackets": (packed(b"[" * 100_000), "not JSON"),
    "no table": (packed([1, 2]), "not a table"),
    "a name twice": (packed(b'{"a": 1, "a": 2}'), "twice"),
    "no offsets": (packed({"a": {"dtype": "F32", "shape": [2]}}), "not understood"),
    "an unknown type": (packed({"a": of(dtype="F4")}), "not understood"),
    "a negative size": (packed({"a": of(shape=[-2])}), "8 bytes by its header"),
    "a size of 2^63": (packed({"a": of(shape=[2**63])}), "8 bytes by its header"),
    "sizes whose product wraps around to 2": (packed({"a": of(shape=[2**63, 2, 2**62 + 1])}), "8 bytes by its header"),
    "a fraction": (packed({"a": of(shape=[2.0])}), "8 bytes by its header"),
    "true as a size": (packed({"a": of(shape=[True, 2])}), "8 bytes by its header"),
    "very many dims": (packed({"a": of(shape=[2**62] * 100_000)}), "100000 dims"),
    "too few bytes": (packed({"a": of(shape=[3])}), "its shape and type need 12"),
    "a hole": (packed({"a": of(offsets=[4, 12])}, b"1" * 12), "should begin at"),
    "overlap": (packed({"a": of(), "b": of(offsets=[4, 12])}, b"1" * 12), "should begin at"),
    "beyond the end": (packed({"a": of()}, b"1234567"), "end at byte"),
    "more than it says": (packed({"a": of()}, b"123456789"), "end at byte"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_does_not_fit_its_header_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_header(tmp_path / "file")


def test_a_file_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    save_file({"m": torch.ones(10)}, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file:
        with (tmp_path / "file").open("r+b") as other:
            other.truncate((tmp_path / "file").stat().st_size - 4)
        with pytest.raises(ValueError, match="ends before"):
            file.read("m")
