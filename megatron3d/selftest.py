"""Whether this machine computes right: a tiny model trained on every layout that the job's processes can form.

The one idea: layout never changes the maths, so each device can check itself. Every rank trains the model alone, on its
own device, and the ranks must agree; then all of them train it together on each layout, and each rank compares what it
holds with what it had alone. Where only exact knobs differ, every bit is compared, else up to rounding by dtype. The
flags and the table are in tools/selftest.py; the same promises are proven more widely in tests/, which a user may lack.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron3d.comm import gather_objects
from megatron3d.config import BatchConfig, Config, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from megatron3d.data import IGNORE, Datasets, Ids
from megatron3d.dtypes import DTYPES
from megatron3d.launch import Launch
from megatron3d.layout import Box, Run, box_shape, relative
from megatron3d.mesh import Mesh
from megatron3d.params import param_table
from megatron3d.replicas import find_differences, hash_all, held
from megatron3d.trainer import Trainer
from megatron3d.validate import resolve

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 3e-2}
"""Relative, of losses, norms and weights, where the order of sums differs."""

LAYERS, MOST_TP = 4, 8
HEAD_DIM = 8

FAMILIES = {
    "llama": ModelConfig(num_query_groups=2),  # fewer than most tp: keys and values held whole
    "gpt2": ModelConfig(
        activation="gelu_tanh",
        normalization="layernorm",
        position_embedding="learned",
        bias="all",
        tied_embeddings=True,
    ),
    "qwen": ModelConfig(num_query_groups=1, qk_norm=True, bias="qkv", dropout=0.1),
}

ALL_EXACT: dict[str, Any] = {
    "schedule": "gpipe",
    "zero": 0,
    "overlap": False,
    "bucket_size": 1,
    "recompute": "full",
}
"""Knobs that change no bit, each turned away from its default."""

ACTS_ON = {"schedule": "pp", "zero": "dp", "overlap": "dp"}
"""Axes without which turning a knob does nothing; the others always act."""

SHORT_KINDS = [("llama", "fp32"), ("gpt2", "fp32")]
SHORT_STEPS, FULL_STEPS = 3, 5


# The plan, without processes ------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Sizes of a mesh."""

    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"{self.tp} x {self.pp} x {self.dp}"


def layouts(processes: int) -> list[Layout]:
    """Every mesh of all `processes` that the tiny models fit on."""
    found = []
    for tp in _tensor_sizes(processes):
        for pp in (size for size in range(1, LAYERS + 1) if processes // tp % size == 0):
            found.append(Layout(tp, pp, processes // tp // pp))
    return found


def kinds(full: bool) -> list[tuple[str, str]]:
    """Models and dtypes to train."""
    return [(family, dtype) for family in FAMILIES for dtype in TOLERANCE if full or (family, dtype) in SHORT_KINDS]


def variants(layout: Layout, *, singly: bool) -> list[dict[str, Any]]:
    """Settings with which a run on `layout` must give the same bits: all knobs at once, if `singly` also each alone."""
    acting = {
        name: value for name, value in ALL_EXACT.items() if name not in ACTS_ON or getattr(layout, ACTS_ON[name]) > 1
    }
    return [acting, *({name: value} for name, value in acting.items() if singly)]


def _tensor_sizes(processes: int) -> list[int]:
    return [size for size in range(1, MOST_TP + 1) if processes % size == 0]


def tiny(family: str, processes: int) -> ModelConfig:
    """A model whose heads every tensor-parallel size of `processes` divides."""
    heads = math.lcm(8, *_tensor_sizes(processes))
    return dataclasses.replace(
        FAMILIES[family],
        num_layers=LAYERS,
        num_attention_heads=heads,
        hidden_size=HEAD_DIM * heads,
        ffn_hidden_size=3 * HEAD_DIM * heads,
        vocab_size=131,
        seq_length=2 * heads,
    )


def config_of(family: str, dtype: str, layout: Layout, processes: int, **knobs: Any) -> Config:
    """The resolved run; every layout takes the same samples, in microbatches of 2."""
    parallel = ParallelConfig(tp=layout.tp, pp=layout.pp, dp=layout.dp, timeout_seconds=120)
    config = Config(
        model=tiny(family, processes),
        parallel=dataclasses.replace(parallel, **knobs),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=4 * processes),
        optim=OptimConfig(optimizer="sgd", lr=0.05, lr_schedule="constant", weight_decay=0.01),
        run=RunConfig(dtype=dtype),  # type: ignore[arg-type]
    )
    return resolve(config, world_size=layout.tp * layout.pp * layout.dp)


class Gaps(NamedTuple):
    """Largest relative differences; infinite where something is not a number."""

    loss: float
    norm: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison, over all ranks."""

    gaps: Gaps
    limit: float
    """The largest gap allowed; 0: equal to the last bit."""
    model: str
    dtype: str
    layout: str
    knobs: str
    """What was turned."""
    against: str
    """What it was compared with."""
    note: str = ""
    """What else is wrong, and where."""

    @property
    def passed(self) -> bool:
        """Whether all gaps are within the limit, and nothing else is wrong."""
        return all(gap <= self.limit for gap in self.gaps) and not self.note


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomData:
    """Endless random tokens; a random share of each sample's labels is masked."""

    vocab_size: int
    seq_length: int
    size: int = 0

    def sample(self, index: int) -> tuple[Ids, Ids]:
        """A pure function of the index."""
        generator = np.random.default_rng([11, index])
        ids = generator.integers(0, self.vocab_size, self.seq_length + 1)
        labels = ids[1:].copy()
        labels[generator.random(self.seq_length) < generator.random()] = IGNORE
        return ids[:-1], labels


def random_weights(model: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole weights by name: norms and biases are random too, since ones and zeros would hide swaps."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for spec in param_table(model):
        noise = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        center, scale = {"normal": (0.0, 0.05), "ones": (1.0, 0.3), "zeros": (0.0, 0.1)}[spec.init]
        weights[spec.name] = (center + scale * noise).to(dtype)
    return weights


@dataclass(frozen=True)
class Course:
    """What a run gave on this rank."""

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, tuple[Box, Tensor]]
    """By name: the part that this rank holds, in fp64 on the CPU."""
    note: str
    """Copies that differ over the ranks."""


def course(config: Config, mesh: Mesh, steps: int) -> Course:
    """Trains from random weights; a collective call."""
    data = RandomData(config.model.vocab_size, config.model.seq_length)
    trainer = Trainer(config, mesh, Datasets(data, None, "there is none"))
    trainer.weights.load(random_weights(config.model, DTYPES[config.run.dtype]))
    trainer.optimizer.reset_masters()
    results = [trainer.step() for _ in range(steps)]
    differing = find_differences(config, trainer.weights, mesh)
    return Course(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        {run.part.spec.name: (run.part.box, _values(trainer, i, run)) for i, run in held(trainer.weights.layout)},
        str(differing[0]) if differing else "",
    )


def _values(trainer: Trainer, bucket: int, run: Run) -> Tensor:
    flat = trainer.weights.buckets[bucket][run.start : run.stop]
    return flat.view(box_shape(run.part.box)).to("cpu", torch.float64, copy=True)


# Comparisons ----------------------------------------------------------------------------------------------------------


def gaps(got: Course, wanted: Course) -> Gaps:
    """Of two runs, over what this rank holds of `got`; `wanted` holds as much or more."""
    weights = []
    for name, (box, values) in got.weights.items():
        frame, whole = wanted.weights[name]
        other = whole[relative(box, frame)]
        weights.append(((values - other).abs().max() / other.abs().max()).item())
    return Gaps(_largest_gap(got.losses, wanted.losses), _largest_gap(got.norms, wanted.norms), _worst(weights))


def _largest_gap(ours: list[float], theirs: list[float]) -> float:
    return _worst([abs(a - b) / abs(b) if b else math.inf for a, b in zip(ours, theirs, strict=True)])


def _worst(values: Iterable[float]) -> float:
    return max(value if math.isfinite(value) else math.inf for value in values)


def compare(got: Course, wanted: Course, mesh: Mesh, limit: float, **labels: str) -> Row:
    """The row of a comparison, the same on every rank; a collective call."""
    every = gather_objects(gaps(got, wanted), mesh.control)
    worst = Gaps(*(max(column) for column in zip(*every, strict=True)))
    return Row(gaps=worst, limit=limit, note=got.note, **labels)


def compare_ranks(course: Course, mesh: Mesh, **labels: str) -> Row:
    """Whether all ranks, each by itself, had the same to the last bit; a collective call."""
    digest = hash_all([values.flatten() for _, values in course.weights.values()])
    every = gather_objects((course.losses, course.norms, digest), mesh.control)
    differing = [str(rank) for rank, other in enumerate(every) if other != every[0]]
    found = Gaps(
        _worst(_largest_gap(losses, every[0][0]) for losses, _, _ in every),
        _worst(_largest_gap(norms, every[0][1]) for _, norms, _ in every),
        math.inf if any(other != every[0][2] for _, _, other in every) else 0.0,
    )
    note = f"on process {', '.join(differing)}" if differing else ""
    return Row(gaps=found, limit=0.0, note=note, **labels)


# The test -------------------------------------------------------------------------------------------------------------


def stages(processes: int) -> int:
    """How many times `selftest` yields."""
    return 1 + len(layouts(processes))


def selftest(launch: Launch, device: torch.device, *, full: bool) -> Iterator[list[Row]]:
    """Rows of each rank alone, then of each layout; the same on every rank; every step is a collective call.

    On GPUs the caller has made torch deterministic; there, sums in the back-end's own order are tried too.
    """
    size = launch.world_size
    # Open until the end: the other meshes share its connections.
    everyone = Mesh.create(ParallelConfig(dp=size), launch, device, deterministic=True)
    alone, rows = _alone(everyone, size, full)
    yield rows
    for layout in layouts(size):
        yield list(_together(layout, everyone, launch, alone, full))
    everyone.close()


def _alone(everyone: Mesh, size: int, full: bool) -> tuple[dict[tuple[str, str], Course], list[Row]]:
    """The course of each model on one process, and how ranks, and GPU and CPU, agree on it."""
    courses, rows = {}, []
    for family, dtype in kinds(full):
        config = config_of(family, dtype, Layout(1, 1, 1), size)
        labels = {"model": family, "dtype": dtype, "layout": "each alone", "knobs": ""}
        mine = courses[family, dtype] = course(config, Mesh.single(everyone.device), _steps(full))
        if size > 1:
            rows.append(compare_ranks(mine, everyone, against="process 0", **labels))
        if everyone.device.type != "cpu":
            on_cpu = course(config, Mesh.single(), _steps(full))
            rows.append(compare(mine, on_cpu, everyone, TOLERANCE[dtype], against="its CPU", **labels))
    return courses, rows


def _together(
    layout: Layout, everyone: Mesh, launch: Launch, alone: Mapping[tuple[str, str], Course], full: bool
) -> Iterator[Row]:
    """All processes on one layout."""
    parallel = ParallelConfig(tp=layout.tp, pp=layout.pp, dp=layout.dp)
    native_sums = everyone.device.type != "cpu" and _rounds(layout)
    for ordered in (True, False) if native_sums else (True,):
        mesh = Mesh.create(parallel, launch, everyone.device, deterministic=ordered)
        for (family, dtype), wanted in alone.items():
            yield from _one_model(family, dtype, layout, mesh, wanted, full)
        mesh.close()


def _one_model(family: str, dtype: str, layout: Layout, mesh: Mesh, wanted: Course, full: bool) -> Iterator[Row]:
    """A model on one mesh: against one process, and with knobs turned."""

    def run(**knobs: Any) -> Course:
        return course(config_of(family, dtype, layout, mesh.grid.size, **knobs), mesh, _steps(full))

    labels = {"model": family, "dtype": dtype, "layout": str(layout)}
    limit = TOLERANCE[dtype] if _rounds(layout) else 0.0
    ordered, base = mesh.world.ordered, run()
    knobs = "" if ordered else "sums in any order"
    yield compare(base, wanted, mesh, limit, knobs=knobs, against="one process", **labels)
    if not ordered:
        return
    for turned in variants(layout, singly=full and dtype == "fp32"):
        words = "all exact knobs" if len(turned) > 1 else "".join(f"{name}={turned[name]}" for name in turned)
        yield compare(run(**turned), base, mesh, 0.0, knobs=words, against="this layout", **labels)
    if full and layout.tp > 1:
        yield compare(run(sp=False), wanted, mesh, limit, knobs="sp=False", against="one process", **labels)


def _rounds(layout: Layout) -> bool:
    """Whether sums are cut into other parts than on one process."""
    return layout.tp > 1 or layout.dp > 1


def _steps(full: bool) -> int:
    return FULL_STEPS if full else SHORT_STEPS
