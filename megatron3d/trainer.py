"""The trainer: builds everything in order, and the loop around one step.

The one idea: a step is the sentence in `Trainer.step`; each part of it lives in a file of its own. The state of a run
is its weights, the optimizer's, and two counts: steps taken and samples consumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron3d import checkpoint, crashes, resume
from megatron3d.comm import all_reduce, gather_objects, gather_to_first, on_host
from megatron3d.config import Config, ConfigError, JobError
from megatron3d.cost import flops_per_token
from megatron3d.data import Dataset, Datasets, OnePass, load_microbatch, microbatch_start, num_eval_batches
from megatron3d.dtypes import DTYPES
from megatron3d.grads import FlatGrads
from megatron3d.layout import flat_layout, local_tensors
from megatron3d.loss_scale import FLOOR, LossScale
from megatron3d.lr import learning_rate
from megatron3d.mesh import Mesh
from megatron3d.metrics import MetricsLog, Row, peak_memory_bytes, peak_tflops, rates
from megatron3d.model import GPTStage
from megatron3d.nonfinite import LayerWatch
from megatron3d.optimizer import Optimizer, StepResult
from megatron3d.params import EMBEDDING, HEAD, num_parameters, param_table, stage_sites
from megatron3d.pipeline import Feed, MicroBatch, Pipeline
from megatron3d.policy import Policy
from megatron3d.replicas import check_replicas
from megatron3d.saver import Saver
from megatron3d.schedule import build
from megatron3d.signals import StopRequest
from megatron3d.timers import Timer, Timers, untimed
from megatron3d.weights import FlatWeights


@dataclass(frozen=True)
class Parts:
    """This rank's part of the model."""

    sites: list[str]
    stage: GPTStage
    weights: FlatWeights


def build_model(config: Config, mesh: Mesh, timer: Timer = untimed) -> Parts:
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
    weights = FlatWeights(stage, layout, dtype=dtype, device=mesh.device, dp=mesh.dp, timer=timer)
    return Parts(sites, stage, weights)


class Trainer:
    """One rank of a run described by a resolved `config` on `mesh`."""

    def __init__(self, config: Config, mesh: Mesh, datasets: Datasets) -> None:
        self.config, self.mesh, self.datasets = config, mesh, datasets
        self.timers = Timers(_settle(mesh.device)) if config.log.log_level else None
        self.timer = timer = self.timers or untimed
        parts = build_model(config, mesh, timer)
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
        self.pipeline = Pipeline(self.stage, mesh, rows=rows, hidden=config.model.hidden_size, dtype=dtype, timer=timer)
        self.ops = build(parallel.schedule, parallel.pp, config.num_microbatches)[mesh.pp.rank]
        self.eval_ops = build("forward", parallel.pp, config.num_microbatches)[mesh.pp.rank]
        self.steps = self.skipped_steps = self.bad_steps = self.consumed_samples = self.consumed_tokens = 0
        self.wandb_id = ""
        self.saver = Saver(config, self.optimizer, mesh, timer)
        self.loss_scale = LossScale.initial(fp16=config.run.dtype == "fp16")
        self.stop = StopRequest(config.run.exit_after_seconds)
        self.result = StepResult(math.nan, math.nan, 0, applied=True)  # of the last step
        self.watch = LayerWatch(self.stage) if config.run.find_nan else None

    def step(self) -> StepResult:
        """One optimizer step on the next global batch."""
        batch = self.config.batch
        self.mesh.recorder.step = self.steps + 1
        if self.watch is not None:
            self.watch.begin()
        tokens = batch.global_batch_size * self.config.model.seq_length
        self.grads.begin(self.config.num_microbatches)
        feed = self._feed(self.datasets.train, self.consumed_samples)
        scale = self.loss_scale.value
        sums = self.pipeline.train(self.ops, feed, micro_batch_size=batch.micro_batch_size, seed=scale / tokens)
        with self.timer("reduce"):
            self.grads.finish()
        with self.timer("optimizer"):
            result = self.optimizer.step(
                self.learning_rate(),
                sums,
                tokens,
                loss_scale=scale,
                stop=bool(self.stop),
                written=self.saver.has_written,
            )
        if not self.config.parallel.overlap:
            self.weights.finish_gather()
        self.steps += 1
        self.consumed_samples += batch.global_batch_size
        self.consumed_tokens += tokens
        self.skipped_steps += not result.applied
        expected = self.loss_scale.enabled and self.loss_scale.value > FLOOR  # an overflow finds the scale
        self.bad_steps = 0 if result.applied else self.bad_steps + (not expected)
        self.loss_scale = self.loss_scale.after(finite=result.applied)
        self.result = result
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
        loss_sum, tokens = on_host(all_reduce(total, self.mesh.world), self.mesh.world)
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
            samples = tuple(range(start, start + batch.micro_batch_size))
            try:
                tokens, labels = load_microbatch(dataset, start, batch.micro_batch_size)
            except ConfigError as error:  # of this rank's samples alone: a failure, for which the others do not wait
                raise RuntimeError(f"samples {samples[0]} to {samples[-1]}: {error}") from None
            return MicroBatch(tokens.to(mesh.device), labels.to(mesh.device), samples)

        return feed

    def save(self, folder: str) -> Path:
        """Writes a checkpoint of the whole run; a collective call. Raises JobError for weights that are not finite."""
        self.saver.begin(folder, self._counts())
        path = self.saver.finish()
        assert path is not None
        return path

    def _counts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run beside its tensors and config."""
        return {
            "step": self.steps,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "skipped_steps": self.skipped_steps,
            "bad_steps": self.bad_steps,
            "loss_scale": self.loss_scale.state(),
            "wandb_id": self.wandb_id,
        }

    def load(self, folder: str, *, weights_only: bool = False) -> checkpoint.Loaded:
        """Goes on from a checkpoint of the same model, saved by any layout; a collective call. `weights_only`: begins
        with its weights and nothing else of it."""
        loaded = checkpoint.load(folder, self.optimizer, self.mesh, self.config, weights_only=weights_only)
        self.saver.companions = {**loaded.companions, **self.saver.companions}
        if weights_only:
            return loaded
        meta = loaded.meta
        self.wandb_id = meta["wandb_id"]
        self.steps, self.skipped_steps, self.bad_steps = meta["step"], meta["skipped_steps"], meta["bad_steps"]
        saved_scale = LossScale(**meta["loss_scale"])
        if saved_scale.enabled and self.loss_scale.enabled:
            self.loss_scale = saved_scale
        self.consumed_samples, self.consumed_tokens = meta["consumed_samples"], meta["consumed_tokens"]
        return loaded

    def run(self) -> bool:
        """Trains to `train_steps`, evaluating, logging and saving on the way; a run that was loaded goes on.

        Returns whether it got there: False if it was asked to stop before (signals.py), its state saved.
        """
        with self.saver.alone():
            return self._run()

    def _run(self) -> bool:
        config, run, save = self.config, self.config.run, self.config.checkpoint.save
        # As the first rank says: ranks may see a shared disk differently.
        load, weights_only = gather_objects(
            (config.checkpoint.load, config.checkpoint.load_weights_only), self.mesh.control
        )[0]
        passed_over = self.load(load, weights_only=weights_only).passed_over if load else ()
        log = MetricsLog(config, self.steps, enabled=self.mesh.is_main, wandb_id=self.wandb_id)
        self.wandb_id = log.wandb_id
        for said in passed_over:
            log.say(f"--load: passed over: {said}")
        log.say(describe(config, self.mesh, self.steps))
        if run.eval_interval and self.datasets.valid is None:
            log.say(f"No evaluation: {self.datasets.no_valid_reason}")
        policy = Policy(run, self.optimizer, self.mesh, log.say)
        saved = self.steps if load and resume.continues(config) else -1
        with log:
            try:
                while self.steps < run.train_steps and not self._should_stop():
                    self._logged_step(log, policy)
                    if self._save_if_due(log):
                        saved = self.steps
                self._commit(log)
            except JobError:  # all ranks know of it, so that what they have begun to save is still kept
                self._commit(log)
                raise
            if save and saved != self.steps:
                log.say(f"saved {self.save(save)}")
            if self.steps < run.train_steps:
                log.say(f"stopped after step {self.steps}, as asked{f' ({self.stop.reason})' if self.stop else ''}")
            if save and self.mesh.is_main:
                crashes.forgive(Path(save), self.steps)
            return self.steps >= run.train_steps

    def _logged_step(self, log: MetricsLog, policy: Policy) -> None:
        """A step, what is said of it, and whether it is one to go on from."""
        every = self.config.run.check_replicas_every
        row = self._timed_step()
        log.write(row)
        policy.judge(self.steps, self.result, self.loss_scale, self.bad_steps, self.watch)
        if every and self.steps % every == 0:
            check_replicas(self.config, self.weights, self.mesh, self.steps)
        if self.timers is not None and log.shows(row):
            log.write_phases(self.steps, gather_to_first(self.timers.take(), self.mesh.control))

    def _save_if_due(self, log: MetricsLog) -> bool:
        """Commits what all ranks have written; begins the next save if this step has one, and says so."""
        keep = self.config.checkpoint
        due = bool(keep.save and keep.save_interval) and self.steps % keep.save_interval == 0
        if due or self.result.written_votes == self.mesh.grid.size:
            self._commit(log)
        if due:
            self.saver.begin(keep.save, self._counts(), behind=keep.async_save)
            if not keep.async_save:
                self._commit(log)
        return due

    def _commit(self, log: MetricsLog) -> None:
        path = self.saver.finish()
        if path is not None:
            log.say(f"saved {path}")

    def _should_stop(self) -> bool:
        """Whether some rank was asked to stop, or this is the step to stop at."""
        return self.result.stop_votes > 0 or 0 < self.config.run.exit_step <= self.steps

    def _timed_step(self) -> Row:
        """A step and its row in the metrics."""
        config, run, device = self.config, self.config.run, self.mesh.device
        lr, scale, begin = self.learning_rate(), self.loss_scale.value, time.perf_counter()
        result = self.step()
        seconds = time.perf_counter() - begin
        row: Row = {
            "step": self.steps,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "loss_scale": scale,
            "skipped_steps": self.skipped_steps,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            **rates(config, seconds, self.mesh.grid.size, peak_tflops(device, config.log.peak_tflops)),
            "peak_memory_bytes": peak_memory_bytes(device),
        }
        due = run.eval_interval and (self.steps % run.eval_interval == 0 or self.steps == run.train_steps)
        if due and self.datasets.valid is not None:
            with self.timer("evaluate"):
                row["eval_loss"] = self.evaluate()
        return row


def _settle(device: torch.device) -> Callable[[], object] | None:
    """What waits for the work that a device has queued; None where a call returns when its work is done."""
    return None if device.type == "cpu" else lambda: torch.accelerator.current_stream(device).synchronize()


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
