"""Checkpoints of a running job: every rank writes the boxes it owns, and reads those it needs, on any layout.

The one idea: a checkpoint is a set of global tensors, each tiled by boxes (layout.py), so that no layout is part of it.
A rank that loads copies, from each stored box, what meets the boxes it holds. A save has three parts: all ranks begin,
each writes its own file, all commit. The middle needs nobody else, so it may happen behind training (--async-save),
from values copied at the beginning.

Kinds of tensors: "weight" in the model's dtype; "master" in fp32 where it is kept apart; "exp_avg", "exp_avg_sq".
Values in files are archive.py's, the index is in index.py, folders and names are in shelf.py.
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from megatron3d import shelf
from megatron3d.archive import Piece, Want, Written, fill, rank_file, seal, write_pieces
from megatron3d.comm import agree, gather_objects, gather_to_first
from megatron3d.config import Config, ConfigError, JobError
from megatron3d.index import COMPANIONS, Companions, Index, read_plain
from megatron3d.layout import Bucket, box_shape, runs, volume
from megatron3d.mesh import Axis, Mesh
from megatron3d.optimizer import Optimizer, Span
from megatron3d.resume import check_fallback
from megatron3d.tensor_file import TYPES
from megatron3d.weights import FlatWeights

T = TypeVar("T")


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


# Saving ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a run keeps beside its tensors."""

    config: Config
    counts: Mapping[str, Any]
    """Step, consumed samples and the like."""
    companions: Companions = field(default_factory=dict)


class Save:
    """One save of all ranks. To begin it and to commit it are collective calls; JobError on all ranks if any of them
    failed: `latest` then names the checkpoint that it named before.

    `behind`: this rank's file is written by a thread, from a copy, so that later steps change nothing of it.
    """

    def __init__(
        self, folder: str | Path, state: State, optimizer: Optimizer, mesh: Mesh, *, behind: bool = False
    ) -> None:
        self.step: int = state.counts["step"]
        self._state, self._mesh = state, mesh
        self._counts = {**state.counts, "adam_count": optimizer.count}  # as they are now
        self._doing = f"saving step {self.step}"
        self._aside = shelf.aside(Path(folder), self.step)
        self._written: list[Written] = []
        self._problem: Exception | None = None
        optimizer.weights.finish_gather()
        _together(self._doing, lambda: shelf.make_room(self._aside) if mesh.is_main else None, mesh.control)
        pieces = [_copied(piece) if behind else piece for piece in owned_pieces(optimizer)]
        self._thread = threading.Thread(target=self._write, args=(pieces,), daemon=True, name="save")
        self._thread.start()
        if not behind:
            self._thread.join()

    def _write(self, pieces: list[Piece]) -> None:
        try:
            self._written = write_pieces(self._aside / rank_file(self._mesh.rank), pieces)
        except Exception as error:  # told by commit, to all ranks
            self._problem = error

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return not self._thread.is_alive()

    def commit(self, keep_last: int = 0) -> Path:
        """The checkpoint's folder, once it is whole and `latest` names it; `keep_last` > 0 removes older ones then."""
        self._thread.join()
        control = self._mesh.control
        try:
            _together(self._doing, self._result, control)
            everyones = [entry for rank in gather_to_first(self._written, control) for entry in rank]
            path = _together(self._doing, lambda: self._publish(everyones, keep_last), control)
        except JobError:
            if self._mesh.is_main:
                shutil.rmtree(self._aside, ignore_errors=True)
            raise
        return path

    def _result(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _publish(self, everyones: list[Written], keep_last: int) -> Path:
        final = self._aside.parent / shelf.name_of(self.step)
        if not self._mesh.is_main:
            return final
        seal(self._aside, final, self._state.config, self._counts, everyones, self._state.companions)
        if keep_last:
            shelf.keep_last(final, keep_last)
        return final


def owned_pieces(optimizer: Optimizer) -> Iterator[Piece]:
    """Everything this rank answers for."""
    for buffer, span in zip(optimizer.weights.buckets, optimizer.spans, strict=True):
        for run in span.owned:
            for element, box in run.boxes():
                for kind, tensor, first in [("weight", buffer, 0), *((k, t, span.start) for k, t in _state(span))]:
                    values = tensor[element - first : element - first + volume(box)].detach().view(box_shape(box))
                    yield Piece(kind, run.part.spec.name, box, values.dtype, values.cpu)


def _copied(piece: Piece) -> Piece:
    values = piece.values().clone()
    return Piece(piece.kind, piece.name, piece.box, piece.dtype, lambda: values)


def _state(span: Span) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of the span's tensors besides the weights."""
    if span.master is not span.weight:
        yield "master", span.master
    if span.exp_avg is not None and span.exp_avg_sq is not None:
        yield from (("exp_avg", span.exp_avg), ("exp_avg_sq", span.exp_avg_sq))


# Loading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """Where a run's values came from."""

    path: Path
    meta: Mapping[str, Any]
    companions: Companions
    """On the main rank."""
    bytes_read: int
    """By this rank, of tensors."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer ones."""


def load(folder: str | Path, optimizer: Optimizer, mesh: Mesh, config: Config, *, weights_only: bool = False) -> Loaded:
    """Fills weights and optimizer state from a checkpoint of any layout; a collective call.

    The newest of a folder of several whose values are whole, too, as long as a run of `config` may begin with it.
    `weights_only`: the moments and Adam's count stay as they are. Raises JobError on all ranks if any of them found no
    checkpoint, or none that is whole and fits.
    """
    damaged: dict[Path, str] = {}
    newest = found = _find(folder, damaged, mesh)
    while True:
        wants = wanted(optimizer, found.index)
        if weights_only:
            wants = [want for want in wants if want.kind in ("weight", "master")]
        read = _together("loading", functools.partial(_fill, found, wants), mesh.control)
        fault = next((f"rank {r}: {e}" for r, e in enumerate(gather_objects(read.fault, mesh.control)) if e), "")
        if not fault:
            break
        damaged[found.path] = fault
        found = _find(folder, damaged, mesh)
        check = functools.partial(_check_fallback, config, newest, found, damaged, weights_only)
        _together("loading", check, mesh.control)
    if not weights_only:
        optimizer.count = found.index.meta["adam_count"]
    companions = _together("loading", lambda: read_companions(found) if mesh.is_main else {}, mesh.control)
    return Loaded(found.path, found.index.meta, companions, read.size, (*damaged.values(), *found.passed_over))


def _find(folder: str | Path, damaged: Mapping[Path, str], mesh: Mesh) -> shelf.Found:
    """The newest whole checkpoint but those that are known to be damaged; if there is none, their faults are told."""

    def find() -> shelf.Found:
        try:
            return shelf.find(folder, damaged)
        except ConfigError:
            if damaged:
                raise ConfigError(" ".join(damaged.values())) from None
            raise

    seen = _together("loading", lambda: find() if mesh.is_main else None, mesh.control)
    found: shelf.Found = gather_objects(seen, mesh.control)[0]  # a shared disk may show others something else
    return found


def _check_fallback(
    config: Config, meant: shelf.Found, found: shelf.Found, damaged: Mapping[Path, str], weights_only: bool
) -> None:
    """ConfigError with what is wrong with either, unless one checkpoint can take the place of another."""
    try:
        check_fallback(config, found, weights_only=weights_only)
    except ConfigError as error:
        faults = "; ".join(damaged.values())
        raise ConfigError(f"{faults}; and {found.path} cannot take the place of {meant.path.name}: {error}") from None


class _Filled(NamedTuple):
    size: int
    """Bytes read."""
    fault: str
    """What of it is damaged; empty if all is well."""


def _fill(found: shelf.Found, wants: list[Want]) -> _Filled:
    """Damage leaves older checkpoints to be tried; that a file cannot be read does not: it may be there later."""
    try:
        return _Filled(fill(found.path, found.index, wants), "")
    except ValueError as error:
        return _Filled(0, f"loading failed: {error}")


def load_weights(folder: str | Path, weights: FlatWeights) -> Mapping[str, Any]:
    """Fills weights alone, for inference; returns the checkpoint's meta. Raises ConfigError where there is none, and
    JobError for a damaged one."""
    found = shelf.find(folder)
    try:
        fill(found.path, found.index, _wanted_weights(weights, found.index))
    except (OSError, ValueError) as error:
        raise JobError(f"loading failed: {error}") from error
    return found.index.meta


def read_companions(found: shelf.Found) -> Companions:
    """The files that a checkpoint keeps beside its tensors."""
    return {name: read_plain(found.path / COMPANIONS / name) for name in found.index.companions}


def wanted(optimizer: Optimizer, index: Index) -> list[Want]:
    """Everything this rank holds: all weights of its stage, masters and moments of its spans."""
    return [*_wanted_weights(optimizer.weights, index), *_wanted_state(optimizer, index)]


def _wanted_weights(weights: FlatWeights, index: Index) -> Iterator[Want]:
    """All weights; where this run's dtype is not theirs, from the masters, if those are stored."""
    rounded = {TYPES[tensor.dtype] for tensor in index.tensors["weight"].values()}
    for bucket, buffer in zip(weights.layout.buckets, weights.buckets, strict=True):
        exact = "master" in index.tensors and rounded != {buffer.dtype}
        yield from _wanted("master" if exact else "weight", bucket, buffer, 0)


def _wanted_state(optimizer: Optimizer, index: Index) -> Iterator[Want]:
    """Masters (from the weights if none are stored) and moments of this rank's spans."""
    for bucket, span in zip(optimizer.weights.layout.buckets, optimizer.spans, strict=True):
        for kind, tensor in _state(span):
            stored = "weight" if kind == "master" and kind not in index.tensors else kind
            yield from _wanted(stored, bucket, tensor, span.start)


def _wanted(kind: str, bucket: Bucket, tensor: Tensor, first: int) -> Iterator[Want]:
    """The real values of elements [first, first + length) of a bucket, which `tensor` holds."""
    for run in runs(bucket, first, first + len(tensor)):
        for element, box in run.boxes():
            into = tensor[element - first : element - first + volume(box)].view(box_shape(box))
            yield Want(kind, run.part.spec.name, box, into)
