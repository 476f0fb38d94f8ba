"""Files of a folder in Hugging Face's form: JSON, and which tensor lies in which file of safetensors.

The one idea: a folder is somebody else's, so nothing in it is believed before it is checked: files lie beside their
index, are whole, and hold what the index says. Pickles, which run code when they are loaded, are never read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron3d.config import ConfigError
from megatron3d.index import MALFORMED, check_plain, read_plain
from megatron3d.tensor_file import TensorFile, raw
from megatron3d.tensor_header import Entry, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")
PIECE = 1 << 22  # values compared at a time


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    entry: Entry


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder, by stored name. ConfigError names the file with which something is wrong."""
    if (folder / SINGLE).exists():
        return _headed(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        raise ConfigError(_without_weights(folder))
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise ConfigError(f"{index} has no weight_map, from the names of tensors to those of files.")
    for file in file_of.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{index} names the file {file!r}; only .safetensors files beside it are read.")
    headers = {file: _headed(folder / file) for file in sorted(set(file_of.values()))}
    if lost := [f"{name} in {file}" for name, file in file_of.items() if name not in headers[file]]:
        raise ConfigError(f"{index} names tensors that are not there: {', '.join(lost)}.")
    unlisted = {name: tensor for header in headers.values() for name, tensor in header.items() if name not in file_of}
    return unlisted | {name: headers[file][name] for name, file in file_of.items()}


def _headed(path: Path) -> dict[str, Stored]:
    """All tensors of a file, which must be whole."""
    with _named(path):
        check_plain(path)
        return {name: Stored(path, name, entry) for name, entry in read_header(path).items()}


def read_stored(stored: Stored, opened: dict[Path, TensorFile]) -> Tensor:
    """The whole tensor; its file is left in `opened`."""
    with _named(stored.path):
        if stored.path not in opened:
            opened[stored.path] = TensorFile(stored.path)
        return opened[stored.path].read(stored.name)


def same(one: Stored, other: Stored) -> bool:
    """Whether two tensors are equal to the last bit; they are read in pieces."""
    if (one.entry.dtype, one.entry.shape) != (other.entry.dtype, other.entry.shape):
        return False
    rows = max(1, PIECE // max(1, math.prod(one.entry.shape[1:])))
    with _named(one.path), TensorFile(one.path) as first, TensorFile(other.path) as second:
        return all(
            raw(first.rows(one.name, start, min(start + rows, one.entry.shape[0])))
            == raw(second.rows(other.name, start, min(start + rows, one.entry.shape[0])))
            for start in range(0, one.entry.shape[0], rows)
        )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a file, as a mistake that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _without_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickled:
        return f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to read."
    return (
        f"{folder} has its weights only in {pickled[0]}, a pickle: loading one can run any code, so they are not read. "
        'Where you trust it, write it anew as safetensors: python -c "from transformers import AutoModelForCausalLM as '
        f"M; M.from_pretrained('{folder}', torch_dtype='auto').save_pretrained('NEW')\"."
    )


def read_file(path: Path) -> bytes:
    """All of a file; ConfigError names it."""
    with _named(path):
        return read_plain(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError names the file."""
    content = read_file(path)
    try:
        value = json.loads(content.decode())
    except MALFORMED as error:
        raise ConfigError(f"{path} is not JSON: {type(error).__name__}: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value
