"""Files of torch.save that are written tensor by tensor: torch reads them as its own, and so do we."""

from __future__ import annotations

import argparse
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatron3d.torch_file import TorchFile
from megatron3d.torch_writer import ALIGNMENT, Later, TorchWriter
from megatron3d.unpickle import StoredTensor


def test_torch_reads_it_as_its_own(tmp_path: Path) -> None:
    tensors = [
        torch.rand(5, 7),
        torch.rand(3).bfloat16(),
        torch.arange(6).view(2, 3),
        torch.tensor(2.0, dtype=torch.float64),
        torch.rand(0, 4),
        torch.rand(2, 3, 4).half(),
    ]
    later = [Later(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    value = {
        "args": argparse.Namespace(a=1, dtype=torch.bfloat16),
        "model": OrderedDict((str(i), one) for i, one in enumerate(later)),
        "none": None,
    }
    path = tmp_path / "file.pt"
    with TorchWriter(path, value) as file:
        for tensor in tensors:
            file.put(tensor)
    for mapped in (False, True):
        read = torch.load(path, weights_only=False, mmap=mapped)
        assert read["args"] == value["args"] and read["none"] is None and type(read["model"]) is OrderedDict
        for name, tensor in zip(read["model"], tensors, strict=True):
            assert torch.equal(read["model"][name], tensor) and read["model"][name].dtype == tensor.dtype
    ours = TorchFile(path).value
    for name, tensor in zip(ours["model"], tensors, strict=True):
        stored = ours["model"][name]
        assert isinstance(stored, StoredTensor) and torch.equal(stored.read(), tensor)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            with path.open("rb") as raw:
                raw.seek(info.header_offset + 26)
                name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            assert (info.header_offset + 30 + name + extra) % ALIGNMENT == 0, info.filename


def test_tensors_in_parts_that_lie_anywhere(tmp_path: Path) -> None:
    """Columns of a matrix, rows of several, a transposed one: as if each had been put together before."""
    wide, rows = torch.rand(3000, 1200), torch.rand(700, 8)
    tensors = [
        [wide[:, 600:]],
        [rows[:3], rows[600:].t().contiguous().t(), torch.zeros(1, 8)],
        [wide[:5].t()],
        [torch.rand(2), torch.rand(3)],
        [torch.rand(6)[::2]],
    ]
    whole = [torch.cat(parts) for parts in tensors]
    with TorchWriter(tmp_path / "file.pt", [Later(tensor.dtype, tuple(tensor.shape)) for tensor in whole]) as file:
        for parts in tensors:
            file.put(*parts)
    for read, stored, tensor in zip(
        torch.load(tmp_path / "file.pt"), TorchFile(tmp_path / "file.pt").value, whole, strict=True
    ):
        assert torch.equal(read, tensor) and torch.equal(stored.read(), tensor)
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None


def test_what_is_not_all_written_is_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="1 tensors were not written"),
        TorchWriter(tmp_path / "file.pt", [Later(torch.float32, (2,))] * 1),
    ):
        pass
