"""Tiny models and data for tests, and runs of them on any layout.

Weights are random everywhere, norms and biases too (ones and zeros hide swaps); samples have unequal numbers of valid
tokens; the optimizer is SGD unless a test says otherwise (Adam hides a wrong scale).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron3d.config import BatchConfig, Config, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from megatron3d.data import IGNORE, Datasets
from megatron3d.layout import Box, relative, runs, volume, whole
from megatron3d.mesh import Mesh
from megatron3d.optimizer import StepResult
from megatron3d.params import ParamSpec, param_table
from megatron3d.trainer import Trainer
from megatron3d.validate import resolve
from tests.ranks import on_mesh

LLAMA = ModelConfig(num_query_groups=2, ffn_hidden_size=176)
GPT2 = ModelConfig(
    activation="gelu_tanh",
    normalization="layernorm",
    position_embedding="learned",
    bias="all",
    tied_embeddings=True,
    ffn_hidden_size=96,
)


def config(model: ModelConfig = LLAMA, **knobs: Any) -> Config:
    """A resolved config; every knob is a field of some section, e.g. tp=2, micro_batch_size=1, dtype="fp64"."""
    sections: dict[str, Any] = {
        "model": model,
        "parallel": ParallelConfig(dp=1, timeout_seconds=60),
        "batch": BatchConfig(micro_batch_size=1, global_batch_size=12),
        "optim": OptimConfig(optimizer="sgd", lr=0.3, lr_schedule="constant", weight_decay=0.01, clip_grad=1.0),
        "run": RunConfig(train_steps=20),
    }
    for name, section in sections.items():
        fields = {field.name for field in dataclasses.fields(section)} & knobs.keys()
        sections[name] = dataclasses.replace(section, **{field: knobs.pop(field) for field in fields})
    assert not knobs, f"no such settings: {list(knobs)}"
    parallel = sections["parallel"]
    return resolve(Config(**sections), world_size=parallel.tp * parallel.pp * parallel.dp)


@dataclass(frozen=True)
class RandomData:
    """Random tokens; of each sample's labels a random share is masked, of some nearly all."""

    vocab_size: int
    seq_length: int
    size: int = 0

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng([7, index])
        ids = generator.integers(0, self.vocab_size, self.seq_length + 1)
        labels = ids[1:].copy()
        labels[generator.random(self.seq_length) < generator.random()] = IGNORE
        return ids[:-1], labels


def datasets(model: ModelConfig, valid_size: int = 9) -> Datasets:
    """Endless random training data and a small validation set."""
    train = RandomData(model.vocab_size, model.seq_length)
    return Datasets(train, dataclasses.replace(train, size=valid_size), "")


def global_batch(model: ModelConfig, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Samples [first, first + size) as (tokens, labels), (B, S) each."""
    samples = [RandomData(model.vocab_size, model.seq_length).sample(i) for i in range(first, first + size)]
    tokens, labels = (torch.from_numpy(np.stack(rows)) for rows in zip(*samples, strict=True))
    return tokens, labels


def random_weights(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Whole, global weights by canonical name, none of them 0 or 1."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for spec in param_table(model):
        noise = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        center, scale = {"normal": (0.0, 0.08), "ones": (1.0, 0.3), "zeros": (0.0, 0.1)}[spec.init]
        weights[spec.name] = (center + scale * noise).to(dtype)
    return weights


@dataclass
class Outcome:
    """What a run gave, assembled over ranks."""

    steps: list[StepResult]
    weights: dict[str, Tensor]
    extra: list[Any]
    """What `after` returned on each rank."""

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def norms(self) -> list[float]:
        return [step.grad_norm for step in self.steps]


def train(
    config: Config,
    *,
    steps: int = 20,
    weights: dict[str, Tensor] | None = None,
    before: Callable[[Trainer], None] | None = None,
    after: Callable[[Trainer], Any] | None = None,
    data: Datasets | None = None,
    timeout: float = 400,
) -> Outcome:
    """Trains on forked ranks from `weights` (default: random ones); the final weights are assembled and replicas must
    agree to the last bit. `before` and `after` are called on every rank with its trainer."""
    weights = random_weights(config.model) if weights is None else weights
    data = datasets(config.model) if data is None else data
    results = on_mesh(config.parallel, _train_rank, config, steps, weights, before, after, data, timeout=timeout)
    outcomes = [result[0] for result in results]
    for rank, outcome in enumerate(outcomes):
        assert repr(outcome) == repr(outcomes[0]), f"rank {rank} reports other results than rank 0"
    table = param_table(config.model)
    return Outcome(outcomes[0], assemble(table, [result[1] for result in results]), [result[2] for result in results])


def _train_rank(
    mesh: Mesh,
    config: Config,
    steps: int,
    weights: dict[str, Tensor],
    before: Callable[[Trainer], None] | None,
    after: Callable[[Trainer], Any] | None,
    data: Datasets,
) -> Any:
    trainer = Trainer(config, mesh, data)
    if weights:
        trainer.weights.load(weights)
        trainer.optimizer.reset_masters()
    if before:
        before(trainer)
    outcome = [trainer.step() for _ in range(steps)]
    trainer.weights.finish_gather()
    return outcome, local_boxes(trainer), after(trainer) if after else None


def local_boxes(trainer: Trainer) -> list[tuple[str, Box, Tensor]]:
    """Every parameter box this rank holds."""
    found = []
    for bucket, buffer in zip(trainer.weights.layout.buckets, trainer.weights.buckets, strict=True):
        for run in runs(bucket, 0, bucket.size):
            box = run.part.box
            shape = [stop - start for start, stop in box]
            found.append((run.part.spec.name, box, buffer[run.start : run.stop].view(shape).clone()))
    return found


def assemble(table: list[ParamSpec], ranks: list[list[tuple[str, Box, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' boxes; each element must be there, and replicas must be equal to the last bit."""
    total: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for rank, boxes in enumerate(ranks):
        for name, box, values in boxes:
            spec = next(spec for spec in table if spec.name == name)
            here = relative(box, whole(spec.shape))
            if name not in total:
                total[name] = torch.zeros(spec.shape, dtype=values.dtype)
                seen[name] = torch.zeros(spec.shape, dtype=torch.bool)
            overlap = seen[name][here]
            same = torch.equal(total[name][here][overlap], values[overlap])
            assert same, f"rank {rank} holds other values of {name} than the ranks before it"
            total[name][here] = values
            seen[name][here] = True
    for spec in table:
        held = int(seen[spec.name].sum()) if spec.name in seen else 0
        assert held == volume(whole(spec.shape)), f"{spec.name}: {held} of {spec.size} values are held"
    return total


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    """Largest ||a - b|| / ||b|| over tensors, and the tensor's name."""
    gaps = {name: ((a[name] - b[name]).norm() / b[name].norm()).item() for name in b}
    worst = max(gaps, key=lambda name: gaps[name])
    return gaps[worst], worst
