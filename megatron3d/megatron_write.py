"""Writing a legacy folder of Megatron-LM (`--ckpt-format torch`), for any layout that divides the model.

The one idea: a stage's files are open side by side, and each tensor is read once, cut, and put into all of them, so the
memory needed is that of a tensor or two. The folder is written aside and gets its name when it is whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron3d import shelf
from megatron3d.ahead import ahead
from megatron3d.config import ConfigError
from megatron3d.interop import Source
from megatron3d.megatron_args import TOKENIZER, tokenizer_args
from megatron3d.megatron_cut import (
    Plan,
    check_layout,
    extra_states,
    layout_args,
    share_of,
    shares,
    size_of,
    stage_tensors,
)
from megatron3d.megatron_legacy import FILE, LATEST
from megatron3d.megatron_lm import Shared, shared_tensors
from megatron3d.params import param_table
from megatron3d.torch_writer import Later, TorchWriter

VERSION = 3.0  # of the order of queries, keys and values: by group
Progress = Callable[[int, int], object]
"""Told of the bytes that are done, and of all."""


def write_megatron(
    source: Source,
    folder: str | Path,
    *,
    tp: int,
    pp: int,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done, total: None,
    transformer_engine: bool = False,
    threads: int = 1,
    tokenizer_type: str = TOKENIZER,
) -> Path:
    """Writes the weights of `source` as a legacy folder for tp x pp ranks, whole or not at all; returns it.

    In it is the iteration of the source's step, or `release` where it has none. `dtype`: of all weights, from a run's
    masters where there are any; None: as they are kept. `transformer_engine`: names of its layers instead of the local
    ones; Megatron-LM must be run with the same --transformer-impl, since it passes over names that it does not know.
    `progress` is told the bytes done and their total; `threads` read tensors ahead. `tokenizer_type`: what Megatron-LM
    calls the tokenizer, which it compares with its own where that is told by --vocab-file.

    ConfigError for sizes that do not divide, for a model that Megatron-LM cannot express, and for a folder that is not
    empty or cannot be written.
    """
    target = Path(os.path.abspath(folder))
    check_layout(source.config.model, tp, pp)
    specs = {spec.name: spec for spec in param_table(source.config.model)}
    tensors = shared_tensors(source.config.model, tp)
    plan = Plan(source, specs, tensors, tp, pp, dtype, transformer_engine)
    args = layout_args(plan) | tokenizer_args(tokenizer_type, source.config.model)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder. Name a new one: nothing is overwritten.")
    step = source.meta.get("step")
    aside = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)  # an interrupted call may have left one
        _write_ranks(plan, aside / ("release" if step is None else f"iter_{step:07d}"), args, progress, threads)
        shelf.write(aside / LATEST, "release" if step is None else str(step))
        for path in (*(path for path in aside.rglob("*") if path.is_dir()), aside):
            shelf.sync(path)
        aside.rename(target)
        shelf.sync(target.parent)
    except OSError as error:
        raise ConfigError(f"Writing {folder} failed: {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _write_ranks(plan: Plan, folder: Path, args: Mapping[str, Any], progress: Progress, threads: int) -> None:
    """The files of all ranks, stage by stage; those of a stage are forced to the disk while the next one is written."""
    stages = [list(stage_tensors(plan, stage)) for stage in range(plan.pp)]
    total, done = plan.tp * sum(share_of(plan, shared).nbytes for tensors in stages for _, shared in tensors), 0
    with ThreadPoolExecutor(1) as disk, ThreadPoolExecutor(threads) as pool:
        synced: list[Future[None]] = []
        for stage, tensors in enumerate(stages):
            paths = [_path(plan, folder, rank, stage) for rank in range(plan.tp)]
            with ExitStack() as stack:
                files = [stack.enter_context(TorchWriter(path, _state(plan, args, stage, tensors))) for path in paths]
                cut = ahead(
                    lambda named: shares(plan, named[1]), tensors, threads, size=lambda named: size_of(plan, named[1])
                )
                for (_, shared), parts in zip(tensors, cut, strict=True):
                    progress(done, total)
                    list(pool.map(lambda file, share: file.put(*share), files, parts))
                    parts.clear()  # the loop holds the list until the next one is there
                    done += plan.tp * share_of(plan, shared).nbytes
            synced += [disk.submit(shelf.sync, path) for path in paths]
        for one in synced:
            one.result()
    progress(total, total)


def _path(plan: Plan, folder: Path, rank: int, stage: int) -> Path:
    """Of a rank's file, in a folder that is there."""
    path = folder / f"mp_rank_{rank:02d}{f'_{stage:03d}' * (plan.pp > 1)}" / FILE
    path.parent.mkdir(parents=True)
    return path


def _state(plan: Plan, args: Mapping[str, Any], stage: int, tensors: Sequence[tuple[str, Shared]]) -> dict[str, Any]:
    """What the file of a rank holds, the values of its tensors to come."""
    weights: OrderedDict[str, Later | None] = OrderedDict()
    weights.update((name, share_of(plan, shared)) for name, shared in tensors)
    weights.update(dict.fromkeys(extra_states(plan, stage)))
    return {
        "args": argparse.Namespace(**args),
        "checkpoint_version": VERSION,
        "iteration": args["iteration"],
        "model": weights,
    }
