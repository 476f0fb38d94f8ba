"""Pickles from elsewhere: nothing in them runs, whatever they name, and damaged files are told by name."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import io
import os
import pathlib
import pickle
import random
import signal
import struct
import sys
import types
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron3d.config import ConfigError
from megatron3d.torch_file import TorchFile
from megatron3d.unpickle import ADMITTED, Items, Opaque, Storage, StoredTensor, loads
from megatron3d.unpickle import Namespace as Kept

FIXTURE = Path(__file__).parent / "fixtures" / "megatron" / "llama" / "legacy_tp1_pp1" / "iter_0000007" / "mp_rank_00"


# What is read ---------------------------------------------------------------------------------------------------------


def saved(path: Path, value: Any) -> Any:
    """What is read of `value` after torch.save."""
    torch.save(value, path)
    return TorchFile(path).value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[1:3, 2:],
        torch.arange(24).reshape(4, 6).t(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0, 3, dtype=torch.float16),
        torch.tensor([True, False]),
    ],
    ids=["whole", "a part", "transposed", "a number", "empty", "truth values"],
)
def test_tensors(tmp_path: Path, tensor: Tensor) -> None:
    stored = saved(tmp_path / "a.pt", {"x": tensor})["x"]
    assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype)
    read = stored.read()
    assert read.dtype == tensor.dtype and torch.equal(read, tensor) and read.is_contiguous()
    assert read.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tensors_that_are_not_plain(tmp_path: Path) -> None:
    marked = torch.arange(3.0)
    marked.partition_dim = 0  # type: ignore[attr-defined]  # as parameters of an optimizer have
    found = saved(tmp_path / "a.pt", [torch.nn.Parameter(torch.ones(2)), marked])
    assert torch.equal(found[0].read(), torch.ones(2)) and torch.equal(found[1].read(), marked)


def test_part_of_a_file(tmp_path: Path) -> None:
    content = io.BytesIO()
    values = torch.arange(20_000)  # long: an archive is looked for in the last 64 KiB
    torch.save(values, content)
    path = tmp_path / "several"
    path.write_bytes(b"before it" + content.getvalue() + b"after it")
    stored = TorchFile(path, len("before it"), len(content.getvalue())).value
    assert torch.equal(stored.read(), values)
    with pytest.raises(ConfigError, match=r"several cannot be read: EOFError"):
        TorchFile(path, len("before it"), 10**6)


def test_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What checkpoints hold beside tensors is read over, args are kept."""
    for package in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    module = types.ModuleType("megatron.core.transformer.enums")
    module.AttnBackend = enum.Enum("AttnBackend", "flash auto", module=module.__name__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    value = {
        "args": Namespace(num_layers=4, dtype=torch.bfloat16, backend=module.AttnBackend.flash, signal=signal.SIGTERM),
        "rng": [("MT19937", np.arange(4, dtype=np.uint32)), np.float64(2.0), torch.get_rng_state(), {1, 2}, b"bytes"],
        "extra": io.BytesIO(b"state"),
        "path": pathlib.PosixPath("/a/b"),
        "size": torch.Size([2, 3]),
        "ordered": collections.OrderedDict(a=1),
        "time": datetime.timedelta(seconds=3),
    }
    found = saved(tmp_path / "a.pt", value)
    assert isinstance(found["args"], Kept)
    fields = found["args"].fields
    assert (fields["num_layers"], fields["dtype"]) == (4, torch.bfloat16)
    assert isinstance(fields["backend"], Opaque) and isinstance(fields["signal"], Opaque)
    assert found["size"] == (2, 3) and found["ordered"] == {"a": 1}
    assert isinstance(found["extra"], Opaque) and isinstance(found["rng"][2], StoredTensor)


def test_opening_reads_no_values_and_reading_checks_them(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"whole": torch.full((64,), 7.0), "damaged": torch.full((64,), 9.0)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<f", 9.0) * 8) + 5] ^= 1
    path.write_bytes(content)
    found = TorchFile(path).value
    assert torch.equal(found["whole"].read(), torch.full((64,), 7.0))
    with pytest.raises(ConfigError, match=r"a\.pt.* checksum of its member data/1 is wrong"):
        found["damaged"].read()


# Hostile pickles ------------------------------------------------------------------------------------------------------


class Calls:
    """Pickled as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def stacked(module: str, name: str, argument: str) -> bytes:
    """A call of what STACK_GLOBAL finds under a name that may be dotted."""
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def hostile(command: str) -> dict[str, tuple[bytes, str]]:
    """Pickles that run `command` or make an unlisted call where pickle loads them, and the names in refusals."""
    code = f"__import__('os').system({command!r})"
    inner = pickle.dumps(Calls(os.system, command))
    return {
        "os.system": (inner, "posix.system"),
        "eval": (pickle.dumps(Calls(eval, code)), "builtins.eval"),
        "exec, protocol 2": (pickle.dumps(Calls(exec, code), protocol=2), "__builtin__.exec"),
        "within a list": (pickle.dumps([1, {"a": Calls(os.system, command)}]), "posix.system"),
        "dotted": (stacked("torch", "os.system", command), "torch.os.system"),
        "dotted, of an admitted class": (stacked("argparse", "Namespace.__init__.__globals__", ""), "argparse.Name"),
        "dotted within an admitted module": (stacked("torch._utils", "sys.modules", "x"), "torch._utils.sys.modules"),
        "loader of pickles": (pickle.dumps(Calls(torch.storage._load_from_bytes, inner)), "torch.storage._load_from_b"),
        "inst": (b"(S'%s'\nios\nsystem\n." % command.encode(), "os.system"),
        "obj": (b"(cos\nsystem\nS'%s'\no." % command.encode(), "os.system"),
        "getattr": (pickle.dumps(Calls(getattr, "a", "upper")), "builtins.getattr"),
        "import": (pickle.dumps(Calls(__import__, "antigravity")), "builtins.__import__"),
        "an unlisted neighbour": (b"\x80\x02ctorch.nn.parameter\nBuffer\n.", "torch.nn.parameter.Buffer"),
        "the unpickler itself": (pickle.dumps(Calls(pickle.loads, inner)), "_pickle.loads"),
    }


def archive(path: Path, pickled: bytes, **members: bytes) -> Path:
    """A file as torch.save makes them, with this pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for name, content in members.items():
            file.writestr(f"archive/data/{name.removeprefix('_')}", content)
    return path


@pytest.mark.parametrize("name", list(hostile("")))
def test_hostile_pickles_run_nothing(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    pickled, refused = hostile(f"touch {marker}")[name]
    path = archive(tmp_path / "evil.pt", pickled)
    with pytest.raises(ConfigError) as caught:
        TorchFile(path)
    assert str(path) in str(caught.value) and refused in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["os.system", "eval", "exec, protocol 2", "inst", "obj", "dotted", "loader of pickles"]
)
def test_the_hostile_pickles_are_hostile(tmp_path: Path, name: str) -> None:
    """Loaded by pickle itself they do run: the test above can fail."""
    marker = tmp_path / "marker"
    with contextlib.suppress(RuntimeError):  # what comes back may be no tensor; by then it has run
        pickle.loads(hostile(f"touch {marker}")[name][0])
    assert marker.exists()


def test_admitted_names_are_stand_ins() -> None:
    """Nothing in the table is a class or a function of another library, tuples and types of values apart."""
    for key, value in ADMITTED.items():
        own = getattr(value, "__module__", None) == "megatron3d.unpickle"
        assert own or value is tuple or isinstance(value, torch.dtype), key


def test_states_reach_nothing_that_acts(tmp_path: Path) -> None:
    """BUILD on a function of the table, on a tensor, and on a class is refused; on the others it is forgotten."""
    state = b"}" + text("__defaults__") + b"K\x01sb."
    function = b"\x80\x04" + text("torch._utils") + text("_rebuild_tensor_v2") + b"\x93"
    for pickled in (function + state, function + b"N" + state[:-2] + b"\x86b."):
        with pytest.raises(ConfigError, match="gives a _Maker a state"):
            loads(pickled, "a file")
    kind = b"\x80\x04" + text("argparse") + text("Namespace") + b"\x93"
    with pytest.raises(ConfigError, match="TypeError"):
        loads(kind + state, "a file")
    assert Kept.fields == {} and not hasattr(Kept, "__defaults__")
    storage = Storage(torch.float32, 1, lambda start, pieces: None)
    with pytest.raises(ConfigError, match="gives a Storage a state"):
        loads(b"\x80\x04NQ" + state, "a file", lambda _: storage)
    shadow = kind + b")\x81}" + text("__setstate__") + text("posix") + text("system") + b"\x93sb."
    with pytest.raises(ConfigError, match=r"posix\.system"):
        loads(shadow, "a file")
    ordered = b"\x80\x04" + text("collections") + text("OrderedDict") + b"\x93)R" + state
    assert type(loads(ordered, "a file")) is Items


class PersistentIds(pickle.Pickler):
    """Pickles a tuple of "persistent" and anything as a persistent id."""

    def persistent_id(self, value: Any) -> Any:
        return value[1] if isinstance(value, tuple) and value[:1] == ("persistent",) else None


def with_id(value: Any) -> bytes:
    content = io.BytesIO()
    PersistentIds(content, protocol=2).dump(("persistent", value))
    return content.getvalue()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (("module", int, "file.py", "source"), "int"),
        (("storage", torch.FloatStorage, "0", "cpu", 2**63), "9223372036854775808 values of torch.float32"),
        (("storage", torch.FloatStorage, "0", "cpu", -1), "-1 values"),
        (("storage", torch.FloatStorage, "0", "cpu", 3), "3 values .* data/0, which has 8 bytes"),
        (("storage", torch.FloatStorage, "1", "cpu", 2), "no member data/1"),
        (("storage", torch.FloatStorage, "../data.pkl", "cpu", 2), "no member"),
        (("storage", "float", "0", "cpu", 2), "not understood"),
        (("storage", torch.FloatStorage, "0", "cpu", "2"), "not understood"),
        ("storage", "ValueError"),
        (7, "TypeError"),
    ],
)
def test_persistent_ids_are_checked(tmp_path: Path, key: Any, told: str) -> None:
    path = archive(tmp_path / "evil.pt", with_id(key), _0=bytes(8))
    with pytest.raises(ConfigError, match=rf"evil\.pt.*{told}"):
        TorchFile(path)


def test_calls_within_persistent_ids_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = archive(tmp_path / "evil.pt", with_id(("storage", Calls(os.system, f"touch {marker}"), "0", "cpu", 2)))
    with pytest.raises(ConfigError, match=r"posix\.system"):
        TorchFile(path)
    assert not marker.exists()


def test_an_index_has_no_persistent_ids() -> None:
    with pytest.raises(ConfigError, match="outside itself"):
        loads(with_id(("storage", 1)), "the index")


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [
        (0, (3,), (1,)),
        (1, (2,), (1,)),
        (0, (2**62, 2), (0, 0)),
        (-1, (1,), (1,)),
        (0, (1,), (1, 1)),
        (0, [1], [1]),
        (0, (1, 2), (2**63, 1)),
    ],
)
def test_tensors_lie_within_their_values(tmp_path: Path, offset: Any, shape: Any, stride: Any) -> None:
    class Rebuilt:
        def __reduce__(self) -> Any:
            storage = ("persistent", ("storage", torch.FloatStorage, "0", "cpu", 2))
            return torch._utils._rebuild_tensor_v2, (storage, offset, shape, stride, False, None)

    content = io.BytesIO()
    PersistentIds(content, protocol=2).dump(Rebuilt())
    with pytest.raises(ConfigError, match=r"evil\.pt is damaged"):
        TorchFile(archive(tmp_path / "evil.pt", content.getvalue(), _0=bytes(8)))


# Damaged files --------------------------------------------------------------------------------------------------------


def test_files_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"a\.pt is in the old format of torch\.save"):
        TorchFile(path)
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"a\.pt is no file of torch\.save"):
        TorchFile(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.pt is no file of torch\.save"):
        TorchFile(path)
    with pytest.raises(ConfigError, match=r"missing\.pt cannot be read: FileNotFoundError"):
        TorchFile(tmp_path / "missing.pt")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps([0] * 10_000))
    with pytest.raises(ConfigError, match=r"a\.pt.* compressed"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/version", "3")
    with pytest.raises(ConfigError, match=r"a\.pt.* no member data\.pkl"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(0))
        file.writestr("archive/byteorder", "big")
    with pytest.raises(ConfigError, match=r"a\.pt was written with byte order 'big'"):
        TorchFile(path)


def test_damaged_files_are_told_or_harmless(tmp_path: Path) -> None:
    """Cut anywhere, or with a bit flipped anywhere, a file is refused by name or gives the same tensors."""
    whole = tmp_path / "whole.pt"
    tensors = {f"tensor {i}": torch.randn(3, i) for i in range(1, 5)}
    torch.save({"args": Namespace(a=1), **tensors}, whole)
    content, path, draws = whole.read_bytes(), tmp_path / "damaged.pt", random.Random(5)
    refused: list[str] = []
    for _ in range(400):
        damaged = bytearray(content)
        if draws.random() < 0.3:
            del damaged[draws.randrange(len(damaged)) :]
        else:
            damaged[draws.randrange(len(damaged))] ^= 1 << draws.randrange(8)
        path.write_bytes(damaged)
        try:
            found = TorchFile(path).value
            assert {name: found[name].read().tolist() for name in tensors} == {
                n: t.tolist() for n, t in tensors.items()
            }
        except ConfigError as error:
            refused.append(str(error))
    assert 100 < len(refused) < 400 and all(str(path) in told for told in refused)


def test_the_fixture_is_read_as_torch_reads_it() -> None:
    path = FIXTURE / "model_optim_rng.pt"
    found, expected = TorchFile(path).value, torch.load(path, weights_only=False)
    assert found["args"].fields == vars(expected["args"])
    for name, tensor in expected["model"].items():
        stored = found["model"][name]
        assert stored is None if tensor is None else torch.equal(stored.read(), tensor)
