"""From any source of tensors to a checkpoint of this project, cut into files as a layout asks for.

The one idea: a conversion never builds a model and has no process group. Each tensor is read whole, turned into the
type that is wanted, cut into the boxes of a layout (layout.py) and written to its place, so that the memory of a
conversion is a tensor or two per job. How foreign libraries keep their tensors is in interop.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron3d import shelf
from megatron3d.ahead import ahead
from megatron3d.archive import Written, checksums, key_of, rank_file, seal
from megatron3d.config import Config, ConfigError
from megatron3d.config_io import to_toml
from megatron3d.dtypes import DTYPES
from megatron3d.index import Companions, Stored
from megatron3d.interop import Source, cast
from megatron3d.layout import Box, box_shape, relative, shard_box, whole
from megatron3d.loss_scale import LossScale
from megatron3d.params import ParamSpec, param_table, stage_sites
from megatron3d.tensor_file import NAMES, TensorWriter
from megatron3d.validate import resolve

MODEL = "model.toml"
Progress = Callable[[int, int], object]
"""Told of the bytes that have been written, and of all."""


class Kept(NamedTuple):
    """What a converted checkpoint has of each tensor, and out of what it is made."""

    kind: str
    source: str
    """Kind."""
    dtype: torch.dtype | None
    """None: as in the source."""


def kept(source: Source, dtype: torch.dtype | None, *, optimizer: bool) -> list[Kept]:
    """Kinds of the result. Weights come from the masters where those hold more; masters are kept apart where weights
    are of half precision, and are the weights elsewhere."""
    exact = "master" if "master" in source.kinds else "weight"
    halves = (torch.bfloat16, torch.float16)
    found = [Kept("weight", exact if dtype else "weight", dtype)]
    moments = [kind for kind in ("exp_avg", "exp_avg_sq") if kind in source.kinds]
    if not optimizer or (not moments and exact == "weight"):
        return found
    if dtype in halves or (dtype is None and exact == "master"):
        found.append(Kept("master", exact, torch.float32))
    wide = dtype and (torch.float64 if dtype == torch.float64 else torch.float32)
    return found + [Kept(kind, kind, wide) for kind in moments]


@dataclass(frozen=True)
class Cut:
    """A box of a tensor, and the rank of the layout whose file it goes to."""

    rank: int
    box: Box


def cuts(config: Config) -> dict[str, list[Cut]]:
    """Canonical name -> boxes that tile the tensor, as the ranks of a resolved config own them."""
    parallel = config.parallel
    found: dict[str, list[Cut]] = {}
    for spec in param_table(config.model, tp=parallel.tp, sp=bool(parallel.sp)):
        stage = next(s for s in range(parallel.pp) if spec.sites[0] in stage_sites(parallel.stage_layers, s))
        shards = range(parallel.tp) if "tp" in spec.shard else range(1)
        boxes = [(tp, shard_box(spec, {"tp": parallel.tp}, {"tp": tp})) for tp in shards]
        found[spec.name] = [Cut(stage * parallel.tp + tp, box) for tp, box in boxes if 0 not in box_shape(box)]
    return found


def write_native(
    source: Source,
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: torch.dtype | None = None,
    optimizer: bool = True,
    jobs: int = 1,
    companions: Companions | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Writes a checkpoint into `folder`, whose name it has when it is whole, and returns it. The file MODEL beside it
    has the model's settings, for --config of a run that begins with it.

    `jobs` tensors are dealt with at a time. ConfigError where the folder is not new, cannot be written, or the layout
    is impossible.
    """
    _check_new(folder)
    config, kinds = _config(source, tp, pp, dtype), kept(source, dtype, optimizer=optimizer)
    counts = _counts(source, config)
    aside, final = shelf.aside(folder, counts["step"]), folder / shelf.name_of(counts["step"])
    try:
        (folder / MODEL).unlink(missing_ok=True)  # before what tells that it is an interrupted conversion's
        shelf.make_room(aside)
        written = _write_files(source, aside, config, kinds, jobs, progress)
        shelf.write(folder / MODEL, to_toml(config, "model"))  # so that no checkpoint is ever without it
        seal(aside, final, config, counts, written, companions or {})
    except OSError as error:
        raise ConfigError(f"Writing {folder} failed: {error}.") from error
    finally:
        _tidy(aside, final)
    return final


def _tidy(aside: Path, final: Path) -> None:
    """Of a conversion that has failed nothing stays."""
    if aside.is_dir() and not final.exists():
        (aside.parent / MODEL).unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)


def _check_new(folder: Path) -> None:
    """ConfigError unless the folder is new, or empty but for what an interrupted conversion has left."""
    if shelf.checkpoints(folder):
        raise ConfigError(f"--save {folder} has checkpoints already. Save elsewhere, or remove them.")
    present = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.name] if folder.exists() else []
    left = [name for name in present if name.startswith(".step-")]
    if set(present) - {*left, *([MODEL] if left else [])}:
        raise ConfigError(f"--save {folder} exists and is not an empty folder. Name a new one: nothing is overwritten.")


def _config(source: Source, tp: int, pp: int, dtype: torch.dtype | None) -> Config:
    """The source's, on another layout; ConfigError where that is impossible."""
    config = source.config
    names = {kind: name for name, kind in DTYPES.items()}
    kept_type = source.dtype("weight", param_table(config.model)[0].name)
    run = replace(config.run, dtype=names.get(dtype or kept_type, config.run.dtype))
    parallel = replace(config.parallel, tp=tp, pp=pp, dp=1, sp=False, stage_layers=())
    return resolve(replace(config, parallel=parallel, run=run), world_size=tp * pp)


def _counts(source: Source, config: Config) -> dict[str, Any]:
    """The source's counts; those of a run that has not begun where it has none."""
    fresh = {
        "step": 0,
        "consumed_samples": 0,
        "consumed_tokens": 0,
        "skipped_steps": 0,
        "bad_steps": 0,
        "loss_scale": LossScale.initial(fp16=config.run.dtype == "fp16").state(),
        "wandb_id": "",
        "adam_count": 0,
    }
    return {**fresh, **source.meta}


def _write_files(
    source: Source, aside: Path, config: Config, kinds: list[Kept], jobs: int, progress: Progress
) -> list[Written]:
    """Every box to its file."""
    specs, boxes = param_table(config.model), cuts(config)
    types = {(one.kind, s.name): one.dtype or source.dtype(one.source, s.name) for one in kinds for s in specs}
    contents: dict[int, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for (kind, name), dtype in types.items():
        for cut in boxes[name]:
            contents.setdefault(cut.rank, {})[key_of(kind, name, cut.box)] = (dtype, box_shape(cut.box))
    with ExitStack() as stack:
        files = {
            rank: stack.enter_context(TensorWriter(aside / rank_file(rank), tensors))
            for rank, tensors in contents.items()
        }

        def convert(one: Kept, spec: ParamSpec) -> list[Written]:
            values = source.read(one.source, spec.name)
            if tuple(values.shape) != spec.shape:
                raise ConfigError(f"{spec.name} has shape {tuple(values.shape)}, the model needs {spec.shape}.")
            values = cast(spec.name, values, types[one.kind, spec.name])
            return [_put(files[cut.rank], one.kind, spec, cut, values) for cut in boxes[spec.name]]

        def size(one: Kept, spec: ParamSpec) -> int:
            read = source.dtype(one.source, spec.name).itemsize
            return spec.size * max(read, types[one.kind, spec.name].itemsize)

        written: list[Written] = []
        todo = [(one, spec) for spec in specs for one in kinds]
        total, done = sum(types[one.kind, spec.name].itemsize * spec.size for one, spec in todo), 0
        results = ahead(lambda pair: convert(*pair), todo, jobs, size=lambda pair: size(*pair))
        for (one, spec), entries in zip(todo, results, strict=True):
            written += entries
            done += types[one.kind, spec.name].itemsize * spec.size
            progress(done, total)
    return written


def _put(file: TensorWriter, kind: str, spec: ParamSpec, cut: Cut, values: Tensor) -> Written:
    part = values[relative(cut.box, whole(spec.shape))].contiguous()
    key = key_of(kind, spec.name, cut.box)
    file.put(key, part)
    return kind, spec.name, NAMES[part.dtype], Stored(cut.box, rank_file(cut.rank), key, checksums(part))
