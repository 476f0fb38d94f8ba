"""Checkpoints: files of boxes and an index of them; written aside and renamed, loaded onto any layout.

The one idea: a checkpoint is a set of global tensors, each tiled by boxes (layout.py). A rank writes the boxes it owns,
so that every value is written once; a rank that loads copies, from each stored box, what meets the boxes it holds. No
layout is part of the format, and nothing is pickled: loading never runs code.

    <folder>/latest                       name of the newest checkpoint
    <folder>/step-00000200/index.json     {"format", "meta": {step, counts, config}, "tensors": kind -> name -> boxes}
    <folder>/step-00000200/rank-00003.safetensors

Kinds: "weight" in the model's dtype; "master" in fp32 where it is kept apart; "exp_avg", "exp_avg_sq".
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron3d.comm import agree, gather_objects, gather_to_first
from megatron3d.config import Config, JobError
from megatron3d.config_io import from_dict, to_dict
from megatron3d.layout import Box, Run, box_shape, intersect, relative, runs, volume
from megatron3d.mesh import Axis, Mesh
from megatron3d.optimizer import Optimizer, Span
from megatron3d.params import ParamSpec, param_table
from megatron3d.resume import FORMAT, Index, newest, read_index
from megatron3d.weights import FlatWeights

T = TypeVar("T")
Stored = Mapping[str, Any]
"""One box in the index: box, file, key, crc32."""


# Saving ---------------------------------------------------------------------------------------------------------------


def save(folder: str | Path, config: Config, counts: Mapping[str, Any], optimizer: Optimizer, mesh: Mesh) -> Path:
    """Writes a checkpoint of `counts["step"]`; a collective call. Returns its folder.

    It appears under its final name only when every rank's file is on the disk, and `latest` names it only after that.
    Raises JobError on all ranks if any of them failed; `latest` then names the checkpoint it named before.
    """
    optimizer.weights.finish_gather()
    root = Path(folder)
    final = root / f"step-{counts['step']:08d}"
    aside = root / f".{final.name}.partial"
    _together("saving", lambda: _make_room(aside) if mesh.is_main else None, mesh.control)
    entries = _together("saving", lambda: _write_rank(aside, optimizer, mesh), mesh.control)
    everyones = [entry for rank in gather_to_first(entries, mesh.control) for entry in rank]
    meta = {**counts, "adam_count": optimizer.count, "config": to_dict(config)}
    _together("saving", lambda: _commit(root, aside, final, meta, everyones) if mesh.is_main else None, mesh.control)
    return final


def _together(doing: str, action: Callable[[], T], control: Axis) -> T:
    """The result of `action`, once it has succeeded on all ranks; else all raise JobError with the first words."""
    results: list[T] = []
    problem = None
    try:
        results.append(action())
    except Exception as error:
        problem = f"{doing} failed: {type(error).__name__}: {error}"
    agree(problem, control)
    return results[0]


def _make_room(aside: Path) -> None:
    """An empty folder to write to; what interrupted saves have left behind goes."""
    for left in aside.parent.glob(".step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_rank(folder: Path, optimizer: Optimizer, mesh: Mesh) -> list[dict[str, Any]]:
    """Writes the boxes this rank owns to its file and returns their index entries."""
    file = f"rank-{mesh.rank:05d}.safetensors"
    tensors, entries = {}, []
    for kind, run, element, box, values in _owned_boxes(optimizer):
        key = f"{kind}/{run.part.spec.name}/{element}"
        tensors[key] = values.detach().to("cpu", copy=True).contiguous()
        entries.append(
            {
                "kind": kind,
                "name": run.part.spec.name,
                "dtype": str(values.dtype).removeprefix("torch."),
                "box": [list(extent) for extent in box],
                "file": file,
                "key": key,
                "crc32": _crc(tensors[key]),
            }
        )
    save_file(tensors, str(folder / file))
    _sync(folder / file)
    return entries


def _owned_boxes(optimizer: Optimizer) -> Iterator[tuple[str, Run, int, Box, Tensor]]:
    """(kind, run, first element, box, values) of everything this rank answers for."""
    for buffer, span in zip(optimizer.weights.buckets, optimizer.spans, strict=True):
        for run in span.owned:
            for element, box in run.boxes():
                yield "weight", run, element, box, _view(buffer, element, box)
                for kind, tensor in _state(span).items():
                    yield kind, run, element, box, _view(tensor, element - span.start, box)


def _state(span: Span) -> dict[str, Tensor]:
    """The span's tensors besides the weights, by kind."""
    found = {"exp_avg": span.exp_avg, "exp_avg_sq": span.exp_avg_sq}
    if span.master is not span.weight:
        found["master"] = span.master
    return {kind: tensor for kind, tensor in found.items() if tensor is not None}


def _view(tensor: Tensor, start: int, box: Box) -> Tensor:
    return tensor[start : start + volume(box)].view(box_shape(box))


def _commit(root: Path, aside: Path, final: Path, meta: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Writes the index, then moves the folder and `latest` to their final names."""
    specs = {spec.name: spec for spec in param_table(from_dict(meta["config"]).model)}
    tensors = _tensor_index(entries, specs)
    _write_synced(aside / "index.json", json.dumps({"format": FORMAT, "meta": meta, "tensors": tensors}, indent=1))
    _sync(aside)
    replaced = root / f".{final.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)  # a crash may have left one
    if final.exists():
        final.rename(replaced)
    try:
        aside.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    _write_synced(root / "latest.tmp", final.name + "\n")
    (root / "latest.tmp").replace(root / "latest")
    _sync(root)
    shutil.rmtree(replaced, ignore_errors=True)


def _tensor_index(entries: list[dict[str, Any]], specs: Mapping[str, ParamSpec]) -> dict[str, dict[str, Any]]:
    """kind -> name -> shape, dtype and boxes; refuses a set that does not hold every value exactly once."""
    tensors: dict[str, dict[str, Any]] = {}
    for entry in entries:
        spec = specs[entry["name"]]
        tensor = tensors.setdefault(entry["kind"], {}).setdefault(
            spec.name, {"shape": list(spec.shape), "dtype": entry["dtype"], "boxes": []}
        )
        tensor["boxes"].append({key: entry[key] for key in ("box", "file", "key", "crc32")})
    for kind, named in tensors.items():
        for name, spec in specs.items():
            written = sum(volume(_box(stored)) for stored in named[name]["boxes"]) if name in named else 0
            if written != spec.size:
                raise RuntimeError(f"{written} of {spec.size} values of {kind} {name} were written")
    return tensors


def _box(stored: Stored) -> Box:
    return tuple((start, stop) for start, stop in stored["box"])


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Loading --------------------------------------------------------------------------------------------------------------


@dataclass
class _Wanted:
    """A box this rank needs, and the memory it goes to."""

    kind: str
    name: str
    box: Box
    into: Tensor
    missing: int


def load(folder: str | Path, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """Fills weights and optimizer state from a checkpoint of any layout; a collective call. Returns its meta.

    Raises JobError on all ranks if any of them found no checkpoint, a box damaged or a value missing.
    """
    found = _together("loading", lambda: str(newest(folder)) if mesh.is_main else "", mesh.control)
    path = Path(gather_objects(found, mesh.control)[0])
    index = _together("loading", lambda: read_index(path), mesh.control)
    problem = _attempt_load(path, index, [*_wanted_weights(optimizer.weights, index), *_wanted_state(optimizer, index)])
    agree(problem, mesh.control)
    optimizer.count = index["meta"]["adam_count"]
    meta: dict[str, Any] = index["meta"]
    return meta


def load_weights(folder: str | Path, weights: FlatWeights) -> dict[str, Any]:
    """Fills weights alone, for inference; returns the checkpoint's meta. Raises JobError for a damaged one."""
    path = newest(folder)
    index = read_index(path)
    problem = _attempt_load(path, index, list(_wanted_weights(weights, index)))
    if problem is not None:
        raise JobError(problem)
    meta: dict[str, Any] = index["meta"]
    return meta


def _wanted_weights(weights: FlatWeights, index: Index) -> Iterator[_Wanted]:
    """All weights; from the masters if those are stored and this run's dtype can hold them."""
    for bucket, buffer in zip(weights.layout.buckets, weights.buckets, strict=True):
        exact = "master" in index["tensors"] and buffer.dtype in (torch.float32, torch.float64)
        yield from _wanted("master" if exact else "weight", runs(bucket, 0, bucket.size), buffer, 0)


def _wanted_state(optimizer: Optimizer, index: Index) -> Iterator[_Wanted]:
    """Masters (from the weights if none are stored) and moments of this rank's spans."""
    for bucket, span in zip(optimizer.weights.layout.buckets, optimizer.spans, strict=True):
        for kind, tensor in _state(span).items():
            stored = "weight" if kind == "master" and kind not in index["tensors"] else kind
            yield from _wanted(stored, runs(bucket, span.start, span.start + len(tensor)), tensor, span.start)


def _wanted(kind: str, found: list[Run], tensor: Tensor, first: int) -> Iterator[_Wanted]:
    for run in found:
        for element, box in run.boxes():
            yield _Wanted(kind, run.part.spec.name, box, _view(tensor, element - first, box), volume(box))


def _attempt_load(path: Path, index: Index, wanted: list[_Wanted]) -> str | None:
    """Copies every stored box that meets a wanted one; says what is damaged or missing."""
    by_tensor: dict[tuple[str, str], list[_Wanted]] = {}
    for want in wanted:
        by_tensor.setdefault((want.kind, want.name), []).append(want)
    by_file: dict[str, list[tuple[Stored, list[_Wanted]]]] = {}
    reading = path / "index.json"
    try:
        for (kind, name), wants in by_tensor.items():
            for stored in index["tensors"].get(kind, {}).get(name, {"boxes": []})["boxes"]:
                if any(intersect(_box(stored), want.box) for want in wants):
                    by_file.setdefault(stored["file"], []).append((stored, wants))
        for file, found in by_file.items():
            reading = path / file
            _copy_from(reading, found)
    except Exception as error:
        return f"loading {reading} failed: {type(error).__name__}: {error}"
    missing = sorted({f"{want.kind} of {want.name}" for want in wanted if want.missing})
    if missing:
        return f"{path} lacks values of {len(missing)} tensors: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}"
    return None


def _copy_from(path: Path, found: list[tuple[Stored, list[_Wanted]]]) -> None:
    """Copies stored boxes of one file to where they are wanted, each read once and checked."""
    with safe_open(str(path), framework="pt") as file:
        for stored, wants in found:
            box = _box(stored)
            values: Tensor = file.get_tensor(stored["key"])
            if tuple(values.shape) != box_shape(box) or _crc(values) != stored["crc32"]:
                raise ValueError(f"{stored['key']} is damaged: its checksum or shape differs from the index")
            for want in wants:
                common = intersect(box, want.box)
                if common is not None:
                    want.into[relative(common, want.box)] = values[relative(common, box)].to(want.into)
                    want.missing -= volume(common)
