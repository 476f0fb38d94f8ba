"""Whether copies of a weight are still copies: a hash of each on its own rank, compared by name and box.

The one idea: who holds what is pure data, so every rank knows what every other rank's hashes belong to, and a check is
one pass over the weights and one message of 8 bytes per copy. Copies are what layout.py says they are: every weight on
the data-parallel ranks; norms, row biases and key/value heads held whole on the tensor-parallel ones; a tied matrix on
its two stages. They are equal to the last bit as long as memory, links and this program are right, and nothing else
notices when they are not: a run with drifted copies goes on, a little wrong. Optimizer state is not looked at; what is
wrong in it shows in the weights of the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron3d.comm import gather_objects
from megatron3d.config import Config, JobError
from megatron3d.grid import Grid
from megatron3d.layout import Box, FlatLayout, Run, flat_layout, local_tensors, runs
from megatron3d.mesh import Mesh
from megatron3d.params import ParamSpec, param_table, stage_sites
from megatron3d.weights import FlatWeights
from megatron3d.words import listed

CHUNK = 1 << 20  # integers hashed at a time: the largest temporary is 8 MiB, whatever the size of the weights
INTEGERS = {
    2: torch.int16,
    4: torch.int32,
    8: torch.int32,
}  # two halves of 8 bytes: times any odd factor, bit 63 is bit 63
ODD = (0x9E3779B97F4A7C15 - 2**64, 0x5851F42D4C957F2D)  # multipliers that spread bits over all of an int64

Copy = tuple[str, Box]
"""A parameter and the part of it that a rank holds: equal copies have equal names and boxes."""


# Who holds what, without processes ------------------------------------------------------------------------------------


def held(layout: FlatLayout) -> list[tuple[int, Run]]:
    """Everything a rank with these buckets holds, as (bucket, run), in the order of the buckets."""
    return [(i, run) for i, bucket in enumerate(layout.buckets) for run in runs(bucket, 0, bucket.size)]


def copies_by_rank(config: Config) -> list[list[Copy]]:
    """For each rank of a resolved `config` what it holds, in the order of `held`."""
    model, parallel = config.model, config.parallel
    grid = Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp)
    table = param_table(model, tp=parallel.tp, sp=bool(parallel.sp))
    known: dict[tuple[int, int], list[Copy]] = {}
    found = []
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        if (key := (at["pp"], at["tp"])) not in known:  # the same on all data-parallel ranks
            tensors = local_tensors(table, stage_sites(parallel.stage_layers, at["pp"]), grid.sizes, at)
            layout = flat_layout(tensors, bucket_size=parallel.bucket_size, dp=parallel.dp)
            known[key] = [copy_of(run) for _, run in held(layout)]
        found.append(known[key])
    return found


def copy_of(run: Run) -> Copy:
    """What a run of a whole bucket is a copy of."""
    return run.part.spec.name, run.part.box


def holders(by_rank: Iterable[Iterable[Copy]]) -> dict[Copy, list[int]]:
    """The ranks of each copy, where there are several."""
    ranks: dict[Copy, list[int]] = {}
    for rank, copies in enumerate(by_rank):
        for copy in copies:
            ranks.setdefault(copy, []).append(rank)
    return {copy: of_copy for copy, of_copy in ranks.items() if len(of_copy) > 1}


@dataclass(frozen=True)
class Difference:
    """Copies that are not equal: `sides` are the ranks that agree with each other, most of them first."""

    name: str
    box: Box
    sides: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        where = ", ".join(f"{start}:{stop}" for start, stop in self.box)
        sides = " against ".join(f"{'ranks' if len(side) > 1 else 'rank'} {_ranks(side)}" for side in self.sides)
        return f"{self.name}[{where}] is not the same on the ranks that hold it: {sides}"


def differences(
    by_rank: Sequence[Sequence[Copy]], hashes: Sequence[Mapping[Copy, int]], table: Iterable[ParamSpec]
) -> list[Difference]:
    """Copies whose hashes differ, in the order of the parameters in `table`."""
    depth = {spec.name: place for place, spec in enumerate(table)}
    found = []
    for (name, box), ranks in holders(by_rank).items():
        sides: dict[int, list[int]] = {}
        for rank in ranks:
            sides.setdefault(hashes[rank][name, box], []).append(rank)
        if len(sides) > 1:
            ordered = sorted(sides.values(), key=lambda side: (-len(side), side))
            found.append(Difference(name, box, tuple(map(tuple, ordered))))
    return sorted(found, key=lambda difference: (depth[difference.name], difference.box))


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks in words, a long list cut short."""
    return listed(ranks if len(ranks) <= most else [*ranks[:most], f"{len(ranks) - most} more"], "and")


# The check ------------------------------------------------------------------------------------------------------------


def check_replicas(config: Config, weights: FlatWeights, mesh: Mesh, step: int) -> None:
    """Raises JobError on all ranks alike if copies of a weight differ after `step`; a collective call.

    Reads the weights that have copies once and sends 8 bytes for each; a device's work is waited for.
    """
    found = find_differences(config, weights, mesh)
    if found:
        more = f" (and {len(found) - 1} more parts of parameters differ)" if len(found) > 1 else ""
        raise JobError(
            f"After step {step}, {found[0]}{more}. Copies are equal to the last bit unless memory, a link or the "
            f"program is at fault. Run tools/selftest.py on these machines, and resume from a checkpoint of the time "
            f"when they still were."
        )


def find_differences(config: Config, weights: FlatWeights, mesh: Mesh) -> list[Difference]:
    """All copies of weights that are not equal, the same on every rank; a collective call."""
    weights.finish_gather()
    by_rank = copies_by_rank(config)
    several = holders(by_rank)
    mine = [(i, run) for i, run in held(weights.layout) if copy_of(run) in several]
    hashes = hash_all([weights.buckets[i][run.start : run.stop] for i, run in mine])
    gathered = gather_objects(hashes, mesh.control)
    labelled = [
        dict(zip((copy for copy in copies if copy in several), values, strict=True))
        for copies, values in zip(by_rank, gathered, strict=True)
    ]
    return differences(by_rank, labelled, param_table(config.model))


def hash_all(tensors: Sequence[Tensor]) -> list[int]:
    """A hash of the bits and the order of each flat tensor; the same on every device.

    The bits, read as integers, are multiplied by odd weights that depend on the place and added up modulo 2^64: the
    order of the additions does not matter, so it needs no care on any device, and no change of a single element goes
    unseen.
    """
    if not tensors:
        return []
    bits = [tensor.detach().view(INTEGERS[tensor.element_size()]) for tensor in tensors]
    weights = _place_weights(min(CHUNK, max(each.numel() for each in bits)), tensors[0].device)
    return torch.stack([_hash(each, weights) for each in bits]).tolist()


def _hash(bits: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        total = total * ODD[1] + (chunk * weights[: chunk.numel()]).sum()
    return total


def _place_weights(size: int, device: torch.device) -> Tensor:
    """Odd integers that do not grow evenly, lest small differences at neighbouring places cancel."""
    place = torch.arange(1, size + 1, device=device) * ODD[0]
    return ((place ^ (place >> 29)) * ODD[1]) | 1
