"""Checkpoints of Megatron-LM: a folder of either kind as a source of our tensors.

The one idea: what a folder should hold follows from its args alone (megatron_args.py, megatron_lm.py), so opening it
compares that with what is there before any tensor is read. How folders are laid out is in megatron_legacy.py and
megatron_dist.py; one is written in megatron_write.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron3d.config import Config, ConfigError
from megatron3d.index import read_plain
from megatron3d.interop import dealt
from megatron3d.megatron_args import model_of
from megatron3d.megatron_dist import open_dist
from megatron3d.megatron_fit import misfits
from megatron3d.megatron_legacy import LATEST, open_legacy
from megatron3d.megatron_lm import OUTPUT, WORDS, Shared, shared_tensors
from megatron3d.megatron_stored import Kept, Whole
from megatron3d.params import param_table
from megatron3d.validate import resolve

COUNTED = {"iteration": "step", "consumed_train_samples": "consumed_samples"}
"""Their count -> ours."""
MOST = 1 << 62  # of which checkpoints here have counts below
LEFT_OVER = 8  # parts of fused tensors that are kept for their turn


def checkpoint_folder(path: Path) -> Path:
    """The folder of one checkpoint that `path` means: `path` itself, or the one that Megatron-LM's tracker names.

    ConfigError where there is none.
    """
    if any(path.glob("mp_rank_*")) or _is_dist(path):
        return path
    tracker = path / LATEST
    if not tracker.exists():
        raise ConfigError(
            f"{path} is no checkpoint of Megatron-LM: it has no {LATEST}, no folder mp_rank_00 or mp_rank_00_000, and "
            "no metadata.json. Give the folder that --save named, or one of those in it."
        )
    try:
        word = read_plain(tracker).decode().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tracker} cannot be read: {error}.") from error
    if word != "release" and not (word.isascii() and word.isdigit()):
        raise ConfigError(f"{tracker} must hold the number of an iteration or the word release, not {word[:80]!r}.")
    folder = path / (word if word == "release" else f"iter_{int(word[:20]):07d}")
    if not folder.is_dir():
        raise ConfigError(f"{tracker} names {folder.name}, but there is no folder {folder}.")
    return folder


def _is_dist(folder: Path) -> bool:
    return (folder / ".metadata").exists() or (folder / "metadata.json").exists()


def open_checkpoint(path: Path) -> Kept:
    """What the folder holds that `path` means, of either kind. ConfigError says what is wrong with it."""
    folder = checkpoint_folder(path)
    if any(folder.glob("mp_rank_*")):
        return open_legacy(folder)
    if _is_dist(folder):
        return open_dist(folder)
    raise ConfigError(f"{folder} holds neither folders mp_rank_... (torch) nor a metadata.json (torch_dist).")


class MegatronSource:
    """A checkpoint of Megatron-LM, legacy or distributed, as an `interop.Source`: weights only.

    `path`: the folder that --save named, or one iteration's. `vocab_size`: the tokenizer's, where args do not have it;
    rows beyond it are padding and left out. Raises ConfigError for a model that is not built here, and one that lists
    every missing, unexpected and misshapen tensor. Threads may read at once.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None) -> None:
        self.kinds: tuple[str, ...] = ("weight",)
        self._kept = kept = open_checkpoint(Path(path))
        try:
            asked = model_of(kept.args, vocab_size)
            if asked.num_layers > len(kept.tensors):
                raise ConfigError(
                    f"{len(kept.tensors)} tensors are too few for the {asked.num_layers} layers of its args."
                )
            self.config: Config = resolve(Config(model=asked), world_size=1)
        except ConfigError as error:
            raise ConfigError(f"{kept.folder}: {error}") from None
        model = self.config.model
        shared = shared_tensors(model, kept.fused)
        if found := list(misfits(kept, model, shared)):
            raise ConfigError(f"{kept.folder} does not hold the model that its args describe: {'; '.join(found)}.")
        self.meta: Mapping[str, Any] = dict(_counts(kept))
        said = kept.args.get("tokenizer_type")
        self.tokenizer_type: str | None = said if isinstance(said, str) else None
        self.notes = (*kept.notes, *_notes(kept))
        self._specs = {spec.name: spec for spec in param_table(model)}
        self._shared = {name: one for one in shared for name in one.foreign.parts}
        self._tied_copy = kept.tensors.get(OUTPUT) if model.tied_embeddings else None
        self._left: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Type of a weight as it is stored."""
        return self._stored(kind, name).dtype

    def read(self, kind: str, name: str) -> Tensor:
        """A whole weight, without padding. The other parts of a fused tensor are kept for a while."""
        self._stored(kind, name)
        with self._lock:
            if name not in self._left:
                self._left |= self._read(self._shared[name])
            part = self._left.pop(name)
            for oldest in list(self._left)[:-LEFT_OVER]:
                del self._left[oldest]
        return part

    def _stored(self, kind: str, name: str) -> Whole:
        if kind not in self.kinds:
            raise KeyError(kind)
        return self._kept.tensors[self._shared[name].foreign.name]

    def _read(self, shared: Shared) -> dict[str, Tensor]:
        """The parts of a tensor, each in memory of its own."""
        foreign, stored = shared.foreign, self._kept.tensors[shared.foreign.name]
        parts = {name: torch.empty(self._specs[name].shape, dtype=stored.dtype) for name in foreign.parts}
        pieces = dealt(foreign, [*parts.values()])
        stored.fill(pieces)
        if foreign.name == WORDS and self._tied_copy is not None:
            self._tied_copy.check(pieces, f"{OUTPUT} in {self._kept.folder}")
        return parts


def _counts(kept: Kept) -> Iterator[tuple[str, int]]:
    """How far the run had come that saved it. ConfigError for a number that no run has come to."""
    told = {"iteration": kept.iteration, "consumed_train_samples": kept.args.get("consumed_train_samples")}
    for name, value in told.items():
        if type(value) is not int:
            continue
        if not 0 <= value < MOST:
            raise ConfigError(
                f"{kept.folder} says {name} {value}, which no run has come to: what is read is 0 to {MOST - 1}."
            )
        yield COUNTED[name], value


def _notes(kept: Kept) -> Iterator[str]:
    if dropout := kept.args.get("attention_dropout"):
        yield f"attention_dropout is {dropout!r}, but attention has no dropout here: training goes on without it."
