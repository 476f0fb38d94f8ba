"""Folders of Hugging Face checkpoints: one as a Source of weights, and a Source written as one.

The one idea: both directions go tensor by tensor through the family's table, with the memory of about one tensor, and
nothing is half done: a folder is read only if all of it fits its config.json, and a new one has its name only when it
is whole. Settings are translated in huggingface.py; the files of a folder are read in huggingface_stored.py.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron3d import shelf
from megatron3d.ahead import ahead
from megatron3d.config import ConfigError
from megatron3d.huggingface import NOTHING, choose_family, exported_config, from_huggingface
from megatron3d.huggingface_families import TOKEN_IDS, Family, Module
from megatron3d.huggingface_stored import INDEX, SINGLE, Stored, read_file, read_json, read_stored, same, stored_tensors
from megatron3d.interop import Foreign, Source, cast, pack, unpack
from megatron3d.params import ParamSpec, param_table
from megatron3d.tensor_file import TYPES, TensorFile, TensorWriter
from megatron3d.words import listed

CONFIG = "config.json"
GENERATION = "generation_config.json"
HEAD = "lm_head.weight"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
    "LICENSE*",
)
"""Files that go where the weights go."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""What weights may be of, as files call it."""


# Reading --------------------------------------------------------------------------------------------------------------


class HuggingFaceSource:
    """A folder of Hugging Face's as a Source (interop.py): it is checked whole on construction, and read by tensor.

    `notes` are sentences for the user; `family` and `raw` say how the folder is written.
    """

    def __init__(self, folder: Path | str, *, seq_length: int = 0) -> None:
        self.folder = Path(folder)
        self.raw = read_json(self.folder / CONFIG)
        self.family, self.config, self.notes = from_huggingface(
            self.raw, source=str(self.folder / CONFIG), seq_length=seq_length
        )
        self.meta: Mapping[str, Any] = NOTHING
        self.kinds: tuple[str, ...] = ("weight",)
        stored = stored_tensors(self.folder)
        if self.config.model.num_layers > len(stored):
            raise ConfigError(
                f"{self.folder} has {len(stored)} tensors, too few for the {self.config.model.num_layers} layers of "
                f"its {CONFIG}."
            )
        self._specs = {spec.name: spec for spec in param_table(self.config.model)}
        self._found = self._match(stored)
        self._opened: dict[Path, TensorFile] = {}

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Of a tensor as it is kept."""
        assert kind == "weight"
        return TYPES[self._found[name][1].entry.dtype]

    def read(self, kind: str, name: str) -> Tensor:
        """The whole tensor, on the CPU, in memory of its own."""
        assert kind == "weight"
        foreign, stored = self._found[name]
        return unpack(foreign, read_stored(stored, self._opened), self._specs, only=name)[name]

    def _match(self, stored: Mapping[str, Stored]) -> dict[str, tuple[Foreign, Stored]]:
        """Canonical name -> the tensor it is part of. ConfigError with all that is missing, too much or misshapen."""
        full = {_full(name, self.family): name for name in stored}
        missing, unexpected, misshapen = [], set(stored), []
        found: dict[str, tuple[Foreign, Stored]] = {}
        for module in self.family.tensors(self.config.model):
            name = full.get(module.name)
            if name is None:
                missing.append(module.name)
                continue
            unexpected.discard(name)
            tensor, shape = stored[name], _shape(module, self._specs)
            if tensor.entry.shape != shape or tensor.entry.dtype not in FLOATS:
                misshapen.append(f"{name} is {tensor.entry.dtype} {tensor.entry.shape} instead of a float {shape}")
            found |= {part: (Foreign(*module), tensor) for part in module.parts}
        surplus = [name for name in stored if name in unexpected and not self._is_redundant(name, stored, found)]
        _raise_misfits(self.folder, missing, surplus, misshapen)
        return found

    def _is_redundant(
        self, name: str, stored: Mapping[str, Stored], found: Mapping[str, tuple[Foreign, Stored]]
    ) -> bool:
        """Whether a tensor that the model does not need tells nothing new."""
        word = found.get("embedding.word.weight")
        if name == HEAD and word is not None:
            return self.config.model.tied_embeddings and same(stored[name], word[1])
        return any(fnmatchcase(name, pattern) for pattern in self.family.ignored)


def _full(name: str, family: Family) -> str:
    """A tensor's name in the model with its head."""
    return name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name


def _shape(module: Module, specs: Mapping[str, ParamSpec]) -> tuple[int, ...]:
    shapes = [specs[part].shape for part in module.parts]
    stacked = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return stacked[::-1] if module.transposed else stacked


def _raise_misfits(folder: Path, missing: Sequence[str], surplus: Sequence[str], misshapen: Sequence[str]) -> None:
    parts = [f"Missing: {', '.join(missing)}."] if missing else []
    parts += [f"Of another shape or type: {'; '.join(misshapen)}."] if misshapen else []
    parts += [f"Unexpected: {', '.join(surplus)}."] if surplus else []
    if HEAD in surplus:
        parts.append(
            f"{CONFIG} says that {HEAD} is the embedding, but it differs; tie_word_embeddings false keeps both."
        )
    if parts:
        raise ConfigError(f"The tensors in {folder} are not those of its {CONFIG}. {' '.join(parts)}")


def companions_in(folder: Path) -> dict[str, bytes]:
    """Files in a folder that go where the weights go, by name. ConfigError for one that cannot be read."""
    found = ((path, pattern) for pattern in COMPANIONS for path in sorted(folder.glob(pattern)))
    return {path.name: read_file(path) for path, pattern in found if path.name == pattern or path.is_file()}


# Writing --------------------------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    """One tensor to write, and what of the source it is made of."""

    foreign: Foreign
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def most(self, source: Source) -> int:
        """Bytes, as it is read or as it is written."""
        read = max(source.dtype(self.kind, part).itemsize for part in self.foreign.parts)
        return math.prod(self.shape) * max(read, self.dtype.itemsize)

    def values(self, source: Source) -> Tensor:
        """The tensor as it is to be written. ConfigError if its type cannot hold the values."""
        packed = pack(self.foreign, [source.read(self.kind, part) for part in self.foreign.parts])
        return cast(self.foreign.name, packed, self.dtype)


def write_huggingface(
    source: Source,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    family: str | None = None,
    extras: Path | None = None,
    shard_bytes: int = 5_000_000_000,
    token_ids: Mapping[str, int] = NOTHING,
    progress: Callable[[int, int], object] = lambda done, total: None,
    threads: int = 1,
) -> tuple[str, ...]:
    """Writes a model of `source` as a new folder, whole or not at all; returns sentences for the user.

    `dtype`: of all tensors; None: as they are kept. Masters are written where they are exact and weights are not.
    `family`: a model_type; None: the one of `extras`, else one that can express the model.
    `extras`: a folder with config.json and tokenizer files of an earlier import, which are carried along.
    `token_ids`: bos_token_id and the like, before those of an earlier import.
    `progress` is told the bytes written and their total; `threads`: tensors in work at a time.
    ConfigError where something cannot be written or expressed.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder. Name a new one: nothing is overwritten.")
    if shard_bytes < 1:
        raise ConfigError(f"Files of at most {shard_bytes} bytes cannot be written. Choose at least 1.")
    model, carried = source.config.model, companions_in(extras) if extras is not None else {}
    remembered = read_json(extras / CONFIG) if extras is not None and (extras / CONFIG).exists() else NOTHING
    chosen = choose_family(model, family, remembered.get("model_type"))
    jobs = _jobs(source, chosen, dtype)
    kept = str(jobs[0].dtype).removeprefix("torch.")
    config = exported_config(model, chosen, dtype=kept, remembered=remembered, token_ids=token_ids)
    aside = folder.parent / f".{folder.name}.partial"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write_shards(source, jobs, aside, shard_bytes, progress, threads)
        _write_json(aside / CONFIG, config)
        _write_json(aside / GENERATION, {"_from_model_config": True, **{name: config[name] for name in TOKEN_IDS}})
        for name, content in carried.items():
            (aside / name).write_bytes(content)
        if token_ids:  # which go before what the companion says
            _write_json(aside / GENERATION, {**read_json(aside / GENERATION), **token_ids})
        for path in (*aside.iterdir(), aside):
            shelf.sync(path)
        aside.rename(folder)
        shelf.sync(folder.parent)
    except OSError as error:
        raise ConfigError(f"Writing {folder} failed: {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return tuple(_notes(config, chosen, model.dropout))


def _jobs(source: Source, family: Family, dtype: torch.dtype | None) -> list[_Job]:
    """All tensors in depth order."""
    specs = {spec.name: spec for spec in param_table(source.config.model)}
    jobs = []
    for module in family.tensors(source.config.model):
        kept = functools.reduce(torch.promote_types, [source.dtype("weight", part) for part in module.parts])
        exact = dtype is not None and dtype != kept and "master" in source.kinds
        kind = "master" if exact else "weight"
        jobs.append(_Job(Foreign(*module), kind, dtype or kept, _shape(module, specs)))
    return jobs


def _write_shards(
    source: Source,
    jobs: Sequence[_Job],
    folder: Path,
    shard_bytes: int,
    progress: Callable[[int, int], object],
    threads: int,
) -> None:
    """One file, or several and an index of them; so many tensors at a time."""
    shards = _shards(jobs, shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE]
    total, done = sum(job.size for job in jobs), 0
    progress(done, total)
    for name, shard in zip(names, shards, strict=True):
        wide_first = sorted(shard, key=lambda job: -job.dtype.itemsize)  # so each begins at a multiple of its width
        with TensorWriter(folder / name, {job.foreign.name: (job.dtype, job.shape) for job in wide_first}) as file:

            def write(job: _Job, file: TensorWriter = file) -> int:
                file.put(job.foreign.name, job.values(source))
                return job.size

            for size in ahead(write, shard, threads, size=lambda job: job.most(source)):
                done += size
                progress(done, total)
    if len(shards) > 1:
        file_of = {job.foreign.name: name for name, shard in zip(names, shards, strict=True) for job in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})


def _shards(jobs: Sequence[_Job], shard_bytes: int) -> list[list[_Job]]:
    """Consecutive tensors of at most so many bytes together, or a single larger one."""
    shards: list[list[_Job]] = [[]]
    room = shard_bytes
    for job in jobs:
        if shards[-1] and job.size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(job)
        room -= job.size
    return shards


def _notes(config: Mapping[str, Any], family: Family, dropout: float) -> list[str]:
    notes = []
    if unknown := [name for name in TOKEN_IDS if config[name] is None]:
        notes.append(f"{listed(unknown, 'and')} not known, and written as null.")
    if dropout and "dropout" not in family.fields.values():
        notes.append(f"The model was trained with dropout {dropout}, which {family.name} cannot say.")
    return notes


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
