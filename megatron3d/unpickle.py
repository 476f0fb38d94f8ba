"""Pickles of other libraries' checkpoints, read without running any of their code.

The one idea: all that a pickle can do is to call what `find_class` gives it for the names in it. Here that is a table
of exact pairs of module and name, and each value in the table is a stand-in of this file, which keeps what it is given
or forgets it. So a pickle, however it is made, gets hold of nothing that acts, and no class is ever imported for it. A
tensor stays where it lies until it is read; the files that hold tensors are opened in torch_file.py.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron3d.config import ConfigError
from megatron3d.layout import Box, box_shape

MOST = 1 << 62
"""Of which all numbers of a tensor are below: no file has as many bytes."""
MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
"""What a pickle that is no pickle, or is none of its kind, may raise."""


def loads(data: bytes, source: str, storage: Callable[[Any], Storage] | None = None) -> Any:
    """The value that was pickled, with stand-ins for objects. `storage`: what a persistent id stands for.

    Raises ConfigError, in which `source` names the file, for a damaged pickle and for one that asks for anything
    outside the table.
    """
    try:
        return _Unpickler(data, source, storage).load()
    except ConfigError:
        raise
    except MALFORMED as error:
        raise ConfigError(f"{source} is damaged: its pickle gives {type(error).__name__}: {error}.") from error


class _Unpickler(pickle.Unpickler):
    """Knows no names but those of ADMITTED."""

    def __init__(self, data: bytes, source: str, storage: Callable[[Any], Storage] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._source, self._storage = source, storage

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in; the pair is looked up as it stands, so a dotted name leads nowhere."""
        if (module, name) in ADMITTED:
            return ADMITTED[module, name]
        raise ConfigError(
            f"{self._source} holds {f'{module}.{name}'[:200]!r}, which is not on the list of what is read from a "
            f"checkpoint; nothing of it was run. If you trust the file, load it with the program that wrote it and "
            f"save it again with tensors and plain values only."
        )

    def persistent_load(self, key: Any) -> Storage:
        """Values that lie outside the pickle."""
        if self._storage is None:
            raise pickle.UnpicklingError("it refers to something outside itself")
        return self._storage(key)


# Stand-ins ------------------------------------------------------------------------------------------------------------


class _Sealed:
    """A pickle cannot change it: giving an object a state is what pickles do last."""

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it gives a {type(self).__name__} a state")


class Opaque:
    """Something that nothing here needs: what it is made of is forgotten."""

    def __new__(cls, *_: object, **__: object) -> Opaque:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class Record:
    """An object of whose state the attributes are kept, by name; of any other state, all of it under ""."""

    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.fields = MappingProxyType(state if isinstance(state, dict) else {"": state})


class Namespace(Record):
    """argparse's."""


class TensorEntry(Record):
    """Of a distributed checkpoint: a tensor's type, shape and chunks."""


class Items(dict[Any, Any]):
    """A dictionary with attributes, which are forgotten."""

    def __setstate__(self, state: object) -> None:
        pass


@dataclass(frozen=True)
class Storage(_Sealed):
    """A row of values in a file."""

    dtype: torch.dtype
    size: int
    fill: Callable[[int, Sequence[Tensor]], None]
    """Reads the values from that one on into contiguous tensors, one after the other."""


@dataclass(frozen=True)
class StoredTensor(_Sealed):
    """A tensor that lies in a file, at `offset` values from the start of its storage; it fits into it."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Type of its values."""
        return self.storage.dtype

    def part(self, box: Box) -> StoredTensor:
        """What lies in a box of it."""
        offset = self.offset + sum(start * step for (start, _), step in zip(box, self.stride, strict=True))
        return replace(self, offset=offset, shape=box_shape(box))

    def row(self, index: int) -> StoredTensor:
        """What lies at an index of its first dim."""
        return replace(self, offset=self.offset + index * self.stride[0], shape=self.shape[1:], stride=self.stride[1:])

    def read(self) -> Tensor:
        """Its values, contiguous and in memory of their own. Raises ConfigError for a damaged file."""
        values = torch.empty(self.shape, dtype=self.dtype)
        self.fill([values])
        return values

    def fill(self, pieces: Sequence[Tensor]) -> None:
        """Reads its values into contiguous tensors, one after the other, which hold as many as it has."""
        if torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous():
            self.storage.fill(self.offset, pieces)
            return
        values = torch.empty(_extent(self.shape, self.stride), dtype=self.dtype)
        self.storage.fill(self.offset, [values])
        ordered = values.as_strided(self.shape, self.stride).reshape(-1)
        for piece, part in zip(pieces, ordered.split([piece.numel() for piece in pieces]), strict=True):
            piece.view(-1).copy_(part)


@dataclass(frozen=True)
class _Maker(_Sealed):
    """A function that a pickle may call; sealed, since functions themselves could be given a state."""

    function: Callable[..., object]

    def __call__(self, *arguments: object) -> object:
        return self.function(*arguments)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Values from the first to the last of a tensor, those between included."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: object) -> StoredTensor:
    """A tensor within its storage; whatever else comes with it acts on gradients."""
    known = isinstance(storage, Storage) and type(shape) is type(stride) is tuple
    if not known or not all(type(number) is int and 0 <= number < MOST for number in (offset, *shape, *stride)):
        raise pickle.UnpicklingError("it describes a tensor in a way that is not understood")
    if offset + _extent(shape, stride) > storage.size or math.prod(shape) > storage.size:
        raise pickle.UnpicklingError(
            f"a tensor of shape {shape} does not lie within the {storage.size} values it is said to be made of"
        )
    return StoredTensor(storage, offset, shape, stride)


def _first(value: object, *_: object) -> object:
    """A parameter's tensor."""
    return value


def _with_attributes(function: Any, kind: object, arguments: Any, *_: object) -> object:
    """A tensor that had attributes, made by another function of the table."""
    return function(*arguments) if isinstance(function, _Maker) else Opaque()


# The table ------------------------------------------------------------------------------------------------------------

_TYPES = """
float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn float8_e5m2
"""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_OPAQUE = {
    "torch": "Tensor device",
    "torch.nn.parameter": "Parameter",
    "torch._utils": "_rebuild_tensor_v3",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "torch.distributed.checkpoint.filesystem": "_StoragePrefix",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.dtypes": "UInt32DType",
    "_codecs": "encode",
    "builtins": "set frozenset bytearray bytes complex slice range",
    "__builtin__": "set frozenset bytearray bytes complex slice xrange",
    "_io": "BytesIO",
    "io": "BytesIO",
    "signal": "Signals",
    "pathlib": "Path PosixPath PurePosixPath",
    "datetime": "datetime date timedelta",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreSavePlan",
    "megatron.core.enums": "ModelType",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType CudaGraphScope LayerType ModelType",
    "megatron.model.enums": "AttnMaskType AttnType LayerType ModelType",
    "megatron.legacy.model.enums": "AttnMaskType AttnType LayerType ModelType",
}
_RECORDS = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex ChunkStorageMetadata TensorProperties",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata",
    "types": "SimpleNamespace",
}


def _admitted() -> Iterator[tuple[tuple[str, str], Any]]:
    """(module, name), and what stands for it."""
    for stand_in, table in ((Opaque, _OPAQUE), (Record, _RECORDS)):
        for module, names in table.items():
            yield from (((module, name), stand_in) for name in names.split())
    yield from ((("torch", name), getattr(torch, name)) for name in _TYPES.split())
    yield from (((module, name), dtype) for module in ("torch", "torch.storage") for name, dtype in _STORAGES.items())
    yield ("torch", "Size"), tuple
    yield ("torch._utils", "_rebuild_tensor_v2"), _Maker(_tensor)
    yield ("torch._utils", "_rebuild_parameter"), _Maker(_first)
    yield ("torch._utils", "_rebuild_parameter_with_state"), _Maker(_first)
    yield ("torch._tensor", "_rebuild_from_type_v2"), _Maker(_with_attributes)
    yield ("collections", "OrderedDict"), Items
    yield ("argparse", "Namespace"), Namespace
    yield ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"), TensorEntry


ADMITTED = MappingProxyType(dict(_admitted()))
"""All that a pickle may name -> what it gets."""
