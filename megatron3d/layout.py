"""Who holds what, as pure data: boxes of global tensors, local tensors, flat buffers and their pieces.

The one idea: a *box* (start and stop per dim of a global tensor) names any part of the state. The local tensor of a
rank is a concatenation of boxes; tensors lie in flat *buckets*; a bucket is cut into one equal *piece* per
data-parallel rank; and a piece is again a list of boxes. `owned()` says which values a rank alone answers for: these it
counts in the gradient norm and writes into a checkpoint. Nothing here needs torch or processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron3d.params import TIED_USE, ParamSpec

ALIGNMENT = 64  # elements: each tensor, and each piece, starts at a multiple of this in its bucket

Box = tuple[tuple[int, int], ...]


# Boxes ----------------------------------------------------------------------------------------------------------------


def whole(shape: Sequence[int]) -> Box:
    """The box that covers all of a tensor."""
    return tuple((0, extent) for extent in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Extents of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of values in a box."""
    return math.prod(box_shape(box))


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes of one tensor, or None."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shift(box: Box, origin: Sequence[int]) -> Box:
    """The same box seen from a frame whose zero lies at -origin: adds `origin` to every start and stop."""
    return tuple((start + by, stop + by) for (start, stop), by in zip(box, origin, strict=True))


def relative(box: Box, frame: Box) -> tuple[slice, ...]:
    """Slices that pick `box` out of a tensor holding `frame`."""
    return tuple(slice(b[0] - f[0], b[1] - f[0]) for b, f in zip(box, frame, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[int, Box]]:
    """Boxes that tile elements [start, stop) of a row-major tensor of 1 or 2 dims, with the element each begins at.

    A range of a matrix is at most three boxes: the end of a row, whole rows, the start of a row.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [(start, ((start, stop),))]
    columns = shape[1]
    row, column = divmod(start, columns)
    if column or stop - start < columns:
        end = min(stop, (row + 1) * columns)
        return [(start, ((row, row + 1), (column, column + end - start))), *flat_boxes(shape, end, stop)]
    rows = stop // columns
    return [(start, ((row, rows), (0, columns))), *flat_boxes(shape, rows * columns, stop)]


def shard_extent(spec: ParamSpec, dim: int, sizes: Mapping[str, int]) -> int:
    """Local, padded extent of dim `dim`."""
    parts = math.prod(sizes[axis] for axis, split in spec.shard.items() if split == dim)
    return _round_up(-(-spec.shape[dim] // parts), spec.multiple if dim == 0 else 1)


def shard_box(spec: ParamSpec, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Box:
    """The values of `spec` that the rank at `coordinates` holds (padding left out; may be empty for tiny tensors)."""
    box = []
    for dim, extent in enumerate(spec.shape):
        index = 0
        for axis, split in spec.shard.items():
            if split == dim:
                index = index * sizes[axis] + coordinates[axis]
        local = shard_extent(spec, dim, sizes)
        box.append((min(index * local, extent), min((index + 1) * local, extent)))
    return tuple(box)


# Local tensors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A parameter's share of a local tensor: rows [offset / columns, ...) of it; padding follows the real values."""

    spec: ParamSpec
    box: Box
    shape: tuple[int, ...]
    offset: int
    """First element of the part within the local tensor."""

    @property
    def size(self) -> int:
        """Real values; those that pad the shard come after them."""
        return volume(self.box)


@dataclass(frozen=True)
class LocalTensor:
    """One tensor of a stage module on one rank."""

    name: str
    site: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return math.prod(self.shape)

    @property
    def is_tied_use(self) -> bool:
        """Whether this is the head's use of the embedding matrix."""
        return self.parts[0].spec.sites[0] != self.site


def local_tensors(
    table: Iterable[ParamSpec], sites: Sequence[str], sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> list[LocalTensor]:
    """Tensors of the stage that holds `sites`, on the rank at `coordinates`, in depth order."""
    uses: dict[str, tuple[str, list[ParamSpec]]] = {}
    for spec in table:
        for place, site in enumerate(spec.sites):
            if site in sites:
                uses.setdefault(spec.tensor if place == 0 else TIED_USE, (site, []))[1].append(spec)
    tensors = [_local_tensor(name, site, specs, sizes, coordinates) for name, (site, specs) in uses.items()]
    return sorted(tensors, key=lambda tensor: sites.index(tensor.site))


def _local_tensor(
    name: str, site: str, specs: list[ParamSpec], sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> LocalTensor:
    parts, offset = [], 0
    for spec in specs:
        shape = tuple(shard_extent(spec, dim, sizes) for dim in range(len(spec.shape)))
        parts.append(Part(spec, shard_box(spec, sizes, coordinates), shape, offset))
        offset += math.prod(shape)
    rows = sum(part.shape[0] for part in parts)
    return LocalTensor(name, site, (rows, *parts[0].shape[1:]), tuple(parts))


# Flat buckets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where a local tensor lies in its bucket."""

    tensor: LocalTensor
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced and gathered together; `site` is None for the last bucket, which spans the stage."""

    site: str | None
    slots: tuple[Slot, ...]
    size: int
    """Elements, a multiple of ALIGNMENT x data-parallel size."""

    def piece(self, rank: int, parts: int) -> tuple[int, int]:
        """Elements that belong to data-parallel rank `rank` of `parts`."""
        length = self.size // parts
        return rank * length, (rank + 1) * length


@dataclass(frozen=True)
class FlatLayout:
    """Buckets in the order in which the backward pass completes them, and the tied use that has no slot of its own."""

    buckets: tuple[Bucket, ...]
    tied_use: LocalTensor | None
    """The head's use of an embedding matrix that this stage also embeds with: same weight, its own gradient."""


def flat_layout(tensors: Sequence[LocalTensor], *, bucket_size: int, dp: int) -> FlatLayout:
    """Lays a stage's tensors into buckets.

    A bucket never spans layers. Tensors with partial or shared gradients sit in a last bucket of their own: their sums
    over tp and over the tied copies must be complete before the data-parallel reduction, so they cannot overlap with
    it.
    """
    held = {part.spec.name for tensor in tensors if not tensor.is_tied_use for part in tensor.parts}
    tied = [tensor for tensor in tensors if tensor.is_tied_use and tensor.parts[0].spec.name in held]
    stored = [tensor for tensor in tensors if tensor not in tied]
    early = [tensor for tensor in stored if not _is_late(tensor)]
    late = [tensor for tensor in stored if _is_late(tensor)]
    buckets = []
    for site, of_site in itertools.groupby(reversed(early), key=lambda tensor: tensor.site):
        buckets += [_bucket(site, chunk, dp) for chunk in _chunks(list(of_site), bucket_size)]
    if late:
        buckets.append(_bucket(None, late, dp))
    return FlatLayout(tuple(buckets), tied[0] if tied else None)


def _is_late(tensor: LocalTensor) -> bool:
    return any(part.spec.partial or len(part.spec.sites) > 1 for part in tensor.parts)


def _chunks(tensors: list[LocalTensor], limit: int) -> Iterator[list[LocalTensor]]:
    chunk: list[LocalTensor] = []
    for tensor in tensors:
        if chunk and sum(other.size for other in chunk) + tensor.size > limit:
            yield chunk
            chunk = []
        chunk.append(tensor)
    yield chunk


def _bucket(site: str | None, tensors: Sequence[LocalTensor], dp: int) -> Bucket:
    slots, offset = [], 0
    for tensor in tensors:
        slots.append(Slot(tensor, offset))
        offset += _round_up(tensor.size, ALIGNMENT)
    return Bucket(site, tuple(slots), _round_up(offset, ALIGNMENT * dp))


# Ranges of a bucket ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a bucket, all real values of one part."""

    part: Part
    origin: int
    """Element of the bucket at which the part begins."""
    start: int
    stop: int

    def boxes(self) -> list[tuple[int, Box]]:
        """The run as boxes of the global tensor, each with the element of the bucket it begins at."""
        first = [start for start, _ in self.part.box]
        tiles = flat_boxes(self.part.shape, self.start - self.origin, self.stop - self.origin)
        return [(self.origin + element, shift(box, first)) for element, box in tiles]


def runs(bucket: Bucket, start: int, stop: int) -> list[Run]:
    """Real values of all parts within elements [start, stop) of a bucket; padding is left out."""
    found = []
    for slot in bucket.slots:
        for part in slot.tensor.parts:
            origin = slot.offset + part.offset
            low, high = max(start, origin), min(stop, origin + part.size)
            if low < high:
                found.append(Run(part, origin, low, high))
    return found


def owned(bucket: Bucket, piece: tuple[int, int], sites: Sequence[str], coordinates: Mapping[str, int]) -> list[Run]:
    """Runs of `piece` that this rank alone answers for.

    Over all ranks, each value of each parameter is owned exactly once: of replicas along an axis the first rank owns
    them, of a tied matrix the stage of its first site.
    """

    def is_owner(spec: ParamSpec) -> bool:
        replicas = [axis for axis in coordinates if axis not in spec.shard]
        return spec.sites[0] in sites and all(coordinates[axis] == 0 for axis in replicas)

    return [run for run in runs(bucket, *piece) if is_owner(run.part.spec)]


def merge(found: Iterable[Run], keep: Callable[[ParamSpec], bool] = lambda spec: True) -> list[tuple[int, int]]:
    """Ranges of elements covered by the runs whose parameter satisfies `keep`, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for run in found:
        if not keep(run.part.spec):
            continue
        if ranges and ranges[-1][1] == run.start:
            ranges[-1] = (ranges[-1][0], run.stop)
        else:
            ranges.append((run.start, run.stop))
    return ranges


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
