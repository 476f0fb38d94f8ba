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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron3d.comm import agree, gather_objects
from megatron3d.config import Config, ConfigError
from megatron3d.config_io import from_dict, to_dict
from megatron3d.layout import Box, Run, box_shape, intersect, owned, relative, runs, volume
from megatron3d.mesh import Mesh
from megatron3d.optimizer import Optimizer, Span
from megatron3d.params import ParamSpec, param_table
from megatron3d.weights import FlatWeights

FORMAT = 1
STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
# Fields of the model that do not touch the parameters' meaning: a resumed run may change them.
FREE_MODEL_FIELDS = frozenset({"seq_length", "sliding_window", "dropout", "init_std"})

Index = dict[str, Any]


# Finding and checking, without processes ------------------------------------------------------------------------------


def newest(folder: str | Path) -> Path:
    """The checkpoint that `--load folder` means: `folder` itself, the one `latest` names, or the highest step in it.

    Raises ConfigError where there is none: a wrong path never starts a run from random weights.
    """
    root = Path(folder)
    if (root / "index.json").is_file():
        return root
    if (root / "latest").is_file():
        named = root / (root / "latest").read_text().strip()
        if (named / "index.json").is_file():
            return named
    whole = sorted(path.parent for path in root.glob("step-*/index.json"))
    if not whole:
        raise ConfigError(
            f"--load {folder}: there is no checkpoint. A checkpoint folder has a file `latest` and a folder step-... "
            f"with an index.json in it, as --save writes them"
        )
    return whole[-1]


def read_index(folder: str | Path) -> Index:
    """Index of the checkpoint that `--load folder` means; ConfigError if it is unreadable."""
    path = newest(folder) / "index.json"
    try:
        index: Index = json.loads(path.read_text())
        known = index["format"] == FORMAT and bool(index["meta"]) and bool(index["tensors"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a checkpoint's index: {error}") from error
    if not known:
        raise ConfigError(f"{path} has format {index['format']}, and this version reads format {FORMAT}")
    return index


def saved_config(index: Index) -> Config:
    """The resolved config of the run that saved the checkpoint."""
    return from_dict(index["meta"]["config"], source="the checkpoint's config")


def check_loadable(config: Config) -> list[str]:
    """Refuses (ConfigError) a resume whose model is another one; returns what else differs, as lines to show.

    Needs no processes, so that a mistake costs no start-up.
    """
    index = read_index(config.checkpoint.load)
    saved, now = to_dict(saved_config(index)), to_dict(config)
    differing = [
        f"{name} {saved['model'].get(name)} -> {value}"
        for name, value in now["model"].items()
        if saved["model"].get(name) != value and not _is_free(name, config)
    ]
    if differing:
        raise ConfigError(
            f"--load {config.checkpoint.load}: the checkpoint is of another model: {', '.join(differing)}. "
            f"Use the config it was saved with"
        )
    if index["meta"]["step"] > config.run.train_steps:
        raise ConfigError(
            f"--load {config.checkpoint.load}: the checkpoint is at step {index['meta']['step']}, beyond --train-steps "
            f"{config.run.train_steps}. Give a larger --train-steps to go on"
        )
    return [
        f"{section}.{name}: {saved[section].get(name)} when saved, {value} now"
        for section in ("batch", "optim", "data", "run")
        for name, value in now[section].items()
        if saved[section].get(name) != value and name not in ("device", "eval_interval", "eval_steps", "deterministic")
    ]


def _is_free(field: str, config: Config) -> bool:
    return field in FREE_MODEL_FIELDS or (field == "max_position" and config.model.position_embedding != "learned")


# Saving ---------------------------------------------------------------------------------------------------------------


def save(folder: str | Path, config: Config, counts: Mapping[str, int], optimizer: Optimizer, mesh: Mesh) -> Path:
    """Writes a checkpoint of `counts["step"]`; a collective call. Returns its folder.

    It appears under its final name only when every rank's file is on the disk. Raises RuntimeError on all ranks if any
    of them failed, and then nothing under a final name has changed.
    """
    optimizer.weights.finish_gather()
    root = Path(folder)
    final = root / f"step-{counts['step']:08d}"
    aside = root / f".{final.name}.partial"
    if mesh.is_main:
        agree(_attempt(lambda: _make_empty(aside)), mesh.control)
    else:
        agree(None, mesh.control)
    entries: list[dict[str, Any]] = []
    problem = _attempt(lambda: entries.extend(_write_rank(aside, optimizer, mesh)))
    agree(problem, mesh.control)
    everyones = gather_objects(entries, mesh.control)
    meta = {**counts, "adam_count": optimizer.count, "config": to_dict(config)}
    commit = lambda: _commit(root, aside, final, meta, [entry for rank in everyones for entry in rank])  # noqa: E731
    agree(_attempt(commit) if mesh.is_main else None, mesh.control)
    return final


def _attempt(action: Any) -> str | None:
    """What went wrong in `action`, in words that can travel to the other ranks."""
    try:
        action()
    except Exception as error:
        return f"saving failed: {type(error).__name__}: {error}"
    return None


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_rank(folder: Path, optimizer: Optimizer, mesh: Mesh) -> list[dict[str, Any]]:
    """Writes the boxes this rank owns to its file and returns their index entries."""
    file = f"rank-{mesh.rank:05d}.safetensors"
    tensors, entries = {}, []
    for kind, run, element, box, values in _owned_boxes(optimizer, mesh):
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


def _owned_boxes(optimizer: Optimizer, mesh: Mesh) -> Iterator[tuple[str, Run, int, Box, Tensor]]:
    """(kind, run, first element, box, values) of everything this rank answers for."""
    layout = optimizer.weights.layout
    for bucket, buffer, span in zip(layout.buckets, optimizer.weights.buckets, optimizer.spans, strict=True):
        piece = bucket.piece(mesh.dp.rank, mesh.dp.size)
        for run in owned(bucket, piece, optimizer.sites, {"tp": mesh.tp.rank}):
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
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
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


def _box(stored: Mapping[str, Any]) -> Box:
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

    Raises RuntimeError on all ranks if any of them found a box damaged or a value missing.
    """
    path = Path(gather_objects(str(newest(folder)) if mesh.is_main else "", mesh.control)[0])
    index = read_index(path)
    problem = _attempt_load(path, index, [*_wanted_weights(optimizer.weights, index), *_wanted_state(optimizer, index)])
    agree(problem, mesh.control)
    optimizer.count = index["meta"]["adam_count"]
    meta: dict[str, Any] = index["meta"]
    return meta


def load_weights(folder: str | Path, weights: FlatWeights) -> dict[str, Any]:
    """Fills weights alone, for inference; returns the checkpoint's meta. Raises RuntimeError for a damaged one."""
    path = newest(folder)
    index = read_index(path)
    problem = _attempt_load(path, index, list(_wanted_weights(weights, index)))
    if problem is not None:
        raise RuntimeError(problem)
    meta: dict[str, Any] = index["meta"]
    return meta


def _wanted_weights(weights: FlatWeights, index: Index) -> Iterator[_Wanted]:
    """All weights; from the masters if those are stored and this run's dtype can hold them."""
    for bucket, buffer in zip(weights.layout.buckets, weights.buckets, strict=True):
        exact = "master" in index["tensors"] and buffer.dtype != torch.bfloat16
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
    try:
        for (kind, name), wants in by_tensor.items():
            for stored in index["tensors"].get(kind, {}).get(name, {"boxes": []})["boxes"]:
                _copy(path, stored, wants)
    except Exception as error:
        return f"loading {path} failed: {type(error).__name__}: {error}"
    missing = sorted({f"{want.kind} of {want.name}" for want in wanted if want.missing})
    if missing:
        return f"{path} lacks values of {len(missing)} tensors: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}"
    return None


def _copy(path: Path, stored: Mapping[str, Any], wants: list[_Wanted]) -> None:
    box = _box(stored)
    meeting = [(want, common) for want in wants if (common := intersect(box, want.box)) is not None]
    if not meeting:
        return
    with safe_open(str(path / stored["file"]), framework="pt") as file:
        values = file.get_tensor(stored["key"])
    if _crc(values) != stored["crc32"] or tuple(values.shape) != box_shape(box):
        raise ValueError(
            f"{stored['key']} in {stored['file']} is damaged: its checksum or shape differs from the index"
        )
    for want, common in meeting:
        want.into[relative(common, want.box)] = values[relative(common, box)].to(want.into)
        want.missing -= volume(common)
