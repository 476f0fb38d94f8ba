"""The trainer: builds everything in order, and the loop around one step.

The one idea: a step is the sentence in `Trainer.step`; each part of it lives in a file of its own. The state of a run
is its weights, the optimizer's, and two counts: steps taken and samples consumed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron3d import checkpoint, resume
from megatron3d.comm import all_reduce
from megatron3d.config import Config
from megatron3d.cost import flops_per_token
from megatron3d.data import Dataset, Datasets, OnePass, load_microbatch, microbatch_start, num_eval_batches
from megatron3d.grads import FlatGrads
from megatron3d.layout import flat_layout, local_tensors
from megatron3d.lr import learning_rate
from megatron3d.mesh import Mesh
from megatron3d.metrics import MetricsLog, Row, peak_memory_bytes, peak_tflops, rates
from megatron3d.model import GPTStage
from megatron3d.optimizer import Optimizer, StepResult
from megatron3d.params import EMBEDDING, HEAD, num_parameters, param_table, stage_sites
from megatron3d.pipeline import Feed, MicroBatch, Pipeline
from megatron3d.schedule import build
from megatron3d.weights import FlatWeights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Parts:
    """This rank's part of the model."""

    sites: list[str]
    stage: GPTStage
    weights: FlatWeights


def build_model(config: Config, mesh: Mesh) -> Parts:
    """This rank's stage with its flat weights, not yet filled."""
    model, parallel, dtype = config.model, config.parallel, DTYPES[config.run.dtype]
    sp = bool(parallel.sp)
    table = param_table(model, tp=mesh.tp.size, sp=sp)
    sites = stage_sites(parallel.stage_layers, mesh.pp.rank)
    tensors = local_tensors(table, sites, mesh.grid.sizes, mesh.coordinates)
    stage = GPTStage(
        model,
        sites,
        tensors,
        axis=mesh.tp,
        sp=sp,
        recompute=parallel.recompute,
        dtype=dtype,
        device=mesh.device,
        seed=config.run.seed,
    )
    layout = flat_layout(tensors, bucket_size=parallel.bucket_size, dp=mesh.dp.size)
    return Parts(sites, stage, FlatWeights(stage, layout, dtype=dtype, device=mesh.device, dp=mesh.dp))


class Trainer:
    """One rank of a run described by a resolved `config` on `mesh`."""

    def __init__(self, config: Config, mesh: Mesh, datasets: Datasets) -> None:
        self.config, self.mesh, self.datasets = config, mesh, datasets
        parts = build_model(config, mesh)
        self.stage, self.weights = parts.stage, parts.weights
        self.weights.initialise(config.run.seed)
        parallel, dtype = config.parallel, DTYPES[config.run.dtype]
        self.grads = FlatGrads(
            self.stage,
            self.weights.layout,
            dtype=dtype,
            device=mesh.device,
            tp=mesh.tp,
            dp=mesh.dp,
            pp=mesh.pp,
            tied_peer=_tied_peer(config, mesh),
            overlap=parallel.overlap,
            gather=parallel.zero == 0,
        )
        self.optimizer = Optimizer(
            config.optim, self.weights, self.grads, sites=parts.sites, mesh=mesh, zero=parallel.zero
        )
        rows = config.model.seq_length // (mesh.tp.size if parallel.sp else 1)
        self.pipeline = Pipeline(self.stage, mesh, rows=rows, hidden=config.model.hidden_size, dtype=dtype)
        self.ops = build(parallel.schedule, parallel.pp, config.num_microbatches)[mesh.pp.rank]
        self.eval_ops = build("forward", parallel.pp, config.num_microbatches)[mesh.pp.rank]
        self.steps = self.skipped_steps = self.consumed_samples = self.consumed_tokens = 0

    def step(self) -> StepResult:
        """One optimizer step on the next global batch."""
        batch = self.config.batch
        tokens = batch.global_batch_size * self.config.model.seq_length
        self.grads.begin(self.config.num_microbatches)
        feed = self._feed(self.datasets.train, self.consumed_samples)
        sums = self.pipeline.train(self.ops, feed, micro_batch_size=batch.micro_batch_size, seed=1 / tokens)
        self.grads.finish()
        result = self.optimizer.step(self.learning_rate(), sums, tokens)
        if not self.config.parallel.overlap:
            self.weights.finish_gather()
        self.steps += 1
        self.consumed_samples += batch.global_batch_size
        self.consumed_tokens += tokens
        self.skipped_steps += not result.applied
        return result

    def learning_rate(self) -> float:
        """Of the next step."""
        optim = self.config.optim
        return learning_rate(
            self.steps,
            peak=optim.lr,
            minimum=optim.min_lr,
            schedule=optim.lr_schedule,
            warmup_steps=optim.warmup_steps,
            train_steps=self.config.run.train_steps,
            decay_steps=optim.decay_steps,
        )

    def evaluate(self) -> float:
        """Mean loss over the valid tokens of the validation set, or of its first eval_steps global batches."""
        assert self.datasets.valid is not None
        valid, size = OnePass(self.datasets.valid), self.config.batch.global_batch_size
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for k in range(num_eval_batches(valid.size, size, self.config.run.eval_steps)):
            feed = self._feed(valid, k * size)
            total += self.pipeline.evaluate(self.eval_ops, feed, micro_batch_size=self.config.batch.micro_batch_size)
        loss_sum, tokens = all_reduce(total, self.mesh.world).tolist()
        return float(loss_sum / tokens) if tokens else math.nan

    def _feed(self, dataset: Dataset, first: int) -> Feed:
        """Microbatches of this data-parallel rank of the global batch that begins at sample `first`."""
        batch, mesh = self.config.batch, self.mesh

        def feed(microbatch: int) -> MicroBatch:
            start = microbatch_start(
                first,
                mesh.dp.rank,
                microbatch,
                global_batch_size=batch.global_batch_size,
                micro_batch_size=batch.micro_batch_size,
                dp=mesh.dp.size,
            )
            tokens, labels = load_microbatch(dataset, start, batch.micro_batch_size)
            samples = tuple(range(start, start + batch.micro_batch_size))
            return MicroBatch(tokens.to(mesh.device), labels.to(mesh.device), samples)

        return feed

    def save(self, folder: str) -> Path:
        """Writes a checkpoint of the whole run; a collective call."""
        counts = {
            "step": self.steps,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "skipped_steps": self.skipped_steps,
        }
        return checkpoint.save(folder, self.config, counts, self.optimizer, self.mesh)

    def load(self, folder: str) -> None:
        """Goes on from a checkpoint of the same model, saved by any layout; a collective call."""
        meta = checkpoint.load(folder, self.optimizer, self.mesh)
        self.steps, self.skipped_steps = meta["step"], meta["skipped_steps"]
        self.consumed_samples, self.consumed_tokens = meta["consumed_samples"], meta["consumed_tokens"]

    def run(self) -> None:
        """Trains to `train_steps`, evaluating, logging and saving on the way; a run that was loaded goes on."""
        config, run = self.config, self.config.run
        if config.checkpoint.load:
            self.load(config.checkpoint.load)
        log = MetricsLog(config, self.steps, enabled=self.mesh.is_main)
        log.say(describe(config, self.mesh, self.steps))
        if run.eval_interval and self.datasets.valid is None:
            log.say(f"No evaluation: {self.datasets.no_valid_reason}")
        saved = self.steps if resume.continues(config) else -1
        try:
            while self.steps < run.train_steps:
                log.write(self._timed_step())
                every = config.checkpoint.save_interval
                if config.checkpoint.save and every and self.steps % every == 0:
                    log.say(f"saved {self.save(config.checkpoint.save)}")
                    saved = self.steps
            if config.checkpoint.save and saved != self.steps:
                log.say(f"saved {self.save(config.checkpoint.save)}")
        finally:
            log.close()

    def _timed_step(self) -> Row:
        """A step and its row in the metrics."""
        config, run, device = self.config, self.config.run, self.mesh.device
        lr, begin = self.learning_rate(), time.perf_counter()
        result = self.step()
        seconds = time.perf_counter() - begin
        row: Row = {
            "step": self.steps,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "loss_scale": 1.0,
            "skipped_steps": self.skipped_steps,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            **rates(config, seconds, self.mesh.grid.size, peak_tflops(device, config.log.peak_tflops)),
            "peak_memory_bytes": peak_memory_bytes(device),
        }
        due = run.eval_interval and (self.steps % run.eval_interval == 0 or self.steps == run.train_steps)
        if due and self.datasets.valid is not None:
            row["eval_loss"] = self.evaluate()
        return row


def _tied_peer(config: Config, mesh: Mesh) -> int | None:
    """Position on the pipeline axis of the stage that holds the other copy of a tied embedding."""
    layers, here = config.parallel.stage_layers, mesh.pp.rank
    holders = [stage for stage in range(len(layers)) if {EMBEDDING, HEAD} & set(stage_sites(layers, stage))]
    if not config.model.tied_embeddings or here not in holders:
        return None
    return next((stage for stage in holders if stage != here), None)


def describe(config: Config, mesh: Mesh, steps: int) -> str:
    """The run in a few lines, for the console."""
    model, parallel, batch = config.model, config.parallel, config.batch
    layers = ",".join(map(str, parallel.stage_layers))
    return (
        f"model: {num_parameters(param_table(model)):,} parameters, {model.num_layers} layers, hidden "
        f"{model.hidden_size}, vocabulary {model.vocab_size:,}, sequence {model.seq_length:,}, {config.run.dtype}\n"
        f"mesh: tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp} on {mesh.grid.size} x {mesh.device.type}, "
        f"layers per stage {layers}, {parallel.schedule}, ZeRO-{parallel.zero}, "
        f"sequence parallel {'on' if parallel.sp else 'off'}\n"
        f"step: {batch.global_batch_size} samples = {config.num_microbatches} microbatches of {batch.micro_batch_size} "
        f"on {parallel.dp} data-parallel ranks; from step {steps} to {config.run.train_steps}\n"
        f"work: {flops_per_token(model) / 1e6:,.1f} MFLOP per token, causal attention counted once "
        f"({flops_per_token(model, full_attention=True) / 1e6:,.1f} if counted in full, as many publications do)"
    )
