"""What is in a checkpoint, for people and machines: a summary, a tree of tensors, a full check, a comparison.

The one idea: everything is asked of an interop.Source, so that checkpoints of any library can be looked at and
compared under the same names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron3d.config import JobError
from megatron3d.interop import Source
from megatron3d.params import ParamSpec, num_parameters, param_table
from megatron3d.sources import Opened
from megatron3d.tensor_file import raw

LAYER = re.compile(r"layers\.(\d+)\.")


def summary(opened: Opened) -> dict[str, Any]:
    """What a checkpoint says of itself, as JSON types."""
    source, specs = opened.source, param_table(opened.source.config.model)
    found: dict[str, Any] = {
        "path": str(opened.folder),
        "kind": opened.kind,
        "parameters": num_parameters(specs),
        "tensors": {
            kind: {
                "types": sorted({str(source.dtype(kind, spec.name)).removeprefix("torch.") for spec in specs}),
                "bytes": sum(spec.size * source.dtype(kind, spec.name).itemsize for spec in specs),
            }
            for kind in source.kinds
        },
    }
    meta = {key: value for key, value in source.meta.items() if key != "config"}
    parallel = source.config.parallel
    if opened.kind == "native":
        found["saved_from"] = {name: getattr(parallel, name) for name in ("tp", "pp", "dp", "zero", "stage_layers")}
    return {**found, "meta": meta, "notes": list(opened.notes)}


class Line(NamedTuple):
    """One tensor, or the same one of several layers."""

    name: str
    shape: tuple[int, ...]
    types: str
    values: int
    """In all of them."""


def tree(source: Source, *, every_layer: bool = False) -> list[Line]:
    """The tensors in depth order; layers that look the same on one line unless `every_layer`."""
    lines: dict[tuple[str, tuple[int, ...], str], list[ParamSpec]] = {}
    for spec in param_table(source.config.model):
        types = " ".join(str(source.dtype(kind, spec.name)).removeprefix("torch.") for kind in source.kinds)
        name = spec.name if every_layer else LAYER.sub("layers.*.", spec.name)
        lines.setdefault((name, spec.shape, types), []).append(spec)
    return [
        Line(_with_range(name, specs), shape, types, num_parameters(specs))
        for (name, shape, types), specs in lines.items()
    ]


def _with_range(name: str, specs: list[ParamSpec]) -> str:
    numbers = [int(match[1]) for spec in specs if (match := LAYER.match(spec.name))]
    if "*" not in name:
        return name
    return name.replace("*", f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))


def verify(source: Source, progress: Callable[[int, int], object] = lambda done, total: None) -> int:
    """Reads every value; the number of tensors. JobError naming the file that is damaged, or what is not finite."""
    todo = [(kind, spec.name) for kind in source.kinds for spec in param_table(source.config.model)]
    for done, (kind, name) in enumerate(todo):
        progress(done, len(todo))
        if not bool(torch.isfinite(source.read(kind, name)).all()):
            raise JobError(f"{kind} of {name} has values that are not finite")
    return len(todo)


@dataclass(frozen=True)
class Difference:
    """Of one tensor of two checkpoints."""

    kind: str
    name: str
    largest: float | None
    """Absolute; None where there is nothing to compare."""
    relative: float | None
    """Norm of the difference over the norm of the first."""
    what: str = ""
    """Why there is nothing to compare."""


def differences(a: Source, b: Source, *, weights_only: bool = False) -> Iterator[Difference]:
    """Of each tensor that either has, in the first one's order; equal ones have 0.0."""
    shapes = [_shapes(a), _shapes(b)]
    kinds = ["weight"] if weights_only else [*a.kinds, *(kind for kind in b.kinds if kind not in a.kinds)]
    names = [*shapes[0], *(name for name in shapes[1] if name not in shapes[0])]
    for kind in kinds:
        for name in names:
            here, there = (kind in s.kinds and name in shape for s, shape in zip((a, b), shapes, strict=True))
            if not here or not there:
                yield Difference(kind, name, None, None, f"only in the {'first' if here else 'second'}")
            elif shapes[0][name] != shapes[1][name]:
                what = f"{list(shapes[0][name])} and {list(shapes[1][name])}"
                yield Difference(kind, name, None, None, what)
            else:
                yield _difference(kind, name, a, b)


def _shapes(source: Source) -> Mapping[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in param_table(source.config.model)}


def _difference(kind: str, name: str, a: Source, b: Source) -> Difference:
    first, second = a.read(kind, name), b.read(kind, name)
    if first.dtype == second.dtype and raw(first) == raw(second):  # whatever the values are
        return Difference(kind, name, 0.0, 0.0)
    apart, norm = first.double() - second.double(), float(first.double().norm())
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    if not math.isfinite(largest):
        return Difference(kind, name, None, None, "values that are not finite")
    return Difference(kind, name, largest, float(apart.norm()) / norm if norm else float(largest > 0))
