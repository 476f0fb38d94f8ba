"""`resolve`: from settings as a user gave them to a `Config` with no open question, or one readable refusal.

The one idea: everything that can be known before a process group exists is judged here, on plain values: each number by
itself (`RANGES`), the sizes together (sizes.py), and that no option is given where it has no effect. A refusal is one
paragraph: what is wrong, the numbers, a legal choice. Only `check_can_train` looks at files; wrong types are refused
where they come in (config_io.py, cli.py).

An option has no effect where another one rules it out: a beta under SGD, an interval without a folder, --sp where there
is no tp to save memory with. An option that says how a thing is done, or how often, merely states a fact where this run
is too small for the thing to occur, and is accepted, so that one set of flags serves the job and its trial on one
process: --schedule and --stage-layers at pp 1; --zero, --overlap and --bucket-size at dp 1; --no-sp at tp 1;
--deterministic on a CPU; --timeout-seconds and --check-replicas-every for one process; --save-interval and
--eval-interval beyond --train-steps, at whose end both act anyway.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron3d.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from megatron3d.sizes import resolve_batch, resolve_mesh, resolve_model, resolve_split
from megatron3d.words import flag, listed


@dataclass(frozen=True)
class Range:
    """Values from `low` (itself allowed unless `above`) to below `high`; neither infinity nor NaN lies in any range."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value < self.high

    def __str__(self) -> str:
        low = f"greater than {self.low}" if self.above else f"at least {self.low}"
        return low if self.high == math.inf else f"{low} and below {self.high}"


COUNT, OPTIONAL = Range(1, 2**31), Range(0, 2**31)  # integers that everything they meet can hold
POSITIVE, NOT_NEGATIVE, FRACTION = Range(0, above=True), Range(0), Range(0, 1)

RANGES = {
    name: legal
    for legal, names in (
        (COUNT, "num_layers hidden_size num_attention_heads vocab_size seq_length"),
        (OPTIONAL, "ffn_hidden_size num_query_groups head_dim max_position sliding_window"),
        (POSITIVE, "norm_epsilon rope_theta init_std"),
        (FRACTION, "dropout"),
        (COUNT, "tp pp bucket_size timeout_seconds micro_batch_size"),
        (OPTIONAL, "dp global_batch_size"),
        (POSITIVE, "lr eps"),
        (OPTIONAL, "warmup_steps decay_steps"),
        (NOT_NEGATIVE, "min_lr weight_decay clip_grad"),
        (FRACTION, "beta1 beta2"),
        (COUNT, "max_bad_steps spike_window"),
        (NOT_NEGATIVE, "exit_after_seconds spike_sigmas peak_tflops"),
        (COUNT, "train_steps log_interval"),
        (Range(0, 2), "log_level"),
        (OPTIONAL, "save_interval keep_last eval_interval eval_steps exit_step check_replicas_every"),
        (Range(0, 2**63), "seed"),
    )
    for name in names.split()
}
"""Legal values of every number, by its field (names are unique over all sections, since each is also a flag)."""


def resolve(config: Config, *, world_size: int) -> Config:
    """`config` with everything filled in that follows, for a job of `world_size` processes; idempotent.

    Raises ConfigError with one paragraph on the first thing that cannot work.
    """
    for section in dataclasses.fields(config):
        _check_ranges(getattr(config, section.name))
    parallel = resolve_mesh(config.parallel, world_size)
    model = resolve_model(config.model)
    parallel = resolve_split(parallel, model)
    if model.position_embedding != "rope":
        _check_no_rotary(model)
    _check_data(config.data, config.run)
    _check_intervals(config.checkpoint, config.run)
    _check_log(config.log)
    return replace(
        config,
        model=model,
        parallel=parallel,
        batch=resolve_batch(config.batch, parallel),
        optim=_resolve_optim(config.optim, config.run),
    )


def check_can_train(config: Config) -> None:
    """Refuse a resolved `config` that names no data, or files that are not there: what a model file may leave open."""
    data = config.data
    if not data.data_path and not data.mock_data:
        raise ConfigError(
            "No training data: give --data-path PREFIX (tools/preprocess_data.py writes it), or --mock-data to train "
            "on generated sequences."
        )
    prefix = data.data_path.removesuffix(".bin").removesuffix(".idx")
    missing = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if not os.path.isfile(name)]
    if data.data_path and missing:
        raise ConfigError(
            f"--data-path {data.data_path} stands for the files {prefix}.bin and {prefix}.idx, but there is no "
            f"{listed(missing, 'and no')}. Give the prefix that tools/preprocess_data.py wrote."
        )
    if data.data_path != prefix:
        raise ConfigError(f"--data-path takes what its two files have in common: {prefix} and not {data.data_path}.")
    if data.tokenizer not in ("", "byte") and not os.path.isfile(data.tokenizer):
        raise ConfigError(
            f"--tokenizer {data.tokenizer}: there is no such file. Give a SentencePiece model (made by "
            "tools/train_tokenizer.py), a tokenizer.json of Hugging Face's, or the word byte."
        )


def _check_ranges(section: object) -> None:
    """Each number and each text of `section` by itself."""
    for name, value in vars(section).items():
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{flag(name)} {value!r} has a null character, which no name and no path can have.")
        if name in RANGES and value not in RANGES[name]:
            raise ConfigError(f"{flag(name)} is {value}, but it must be {RANGES[name]}.")


def _check_no_rotary(model: ModelConfig) -> None:
    """Rotary settings are given only where they act."""
    for name in ("rope_theta", "rope_scaling"):
        if getattr(model, name) != getattr(ModelConfig(), name):
            raise ConfigError(
                f"{name} has no effect with --position-embedding {model.position_embedding}. Leave it out, or choose "
                "rope."
            )


def _resolve_optim(optim: OptimConfig, run: RunConfig) -> OptimConfig:
    """decay_steps; the schedule fits into the run, and what is set acts."""
    shape, steps, warmup = optim.lr_schedule, run.train_steps, optim.warmup_steps
    if optim.optimizer == "sgd":
        _check_no_moments(optim)
    if optim.min_lr > optim.lr:
        raise ConfigError(
            f"--min-lr {optim.min_lr} is above the peak, --lr {optim.lr}. Choose a --min-lr from 0 to {optim.lr}."
        )
    if optim.min_lr and shape == "constant":
        raise ConfigError(
            f"--min-lr {optim.min_lr} has no effect with --lr-schedule constant, which never falls. Leave it out, or "
            "choose linear, cosine or wsd."
        )
    if warmup > steps:
        raise ConfigError(
            f"--warmup-steps {warmup} is more than --train-steps {steps}: the peak would never be reached. Choose at "
            f"most {steps}."
        )
    if optim.decay_steps and shape != "wsd":
        raise ConfigError(
            f"--decay-steps {optim.decay_steps} has no effect with --lr-schedule {shape}. Leave it out, or choose wsd."
        )
    decay = optim.decay_steps or (max(1, steps // 10) if shape == "wsd" else 0)
    if warmup + decay > steps:
        raise ConfigError(
            f"--lr-schedule wsd rises over --warmup-steps {warmup} and falls over --decay-steps {decay}, in all more "
            f"than --train-steps {steps}. Choose a sum of at most {steps}, with at least one step of decay."
        )
    return replace(optim, decay_steps=decay)


def _check_no_moments(optim: OptimConfig) -> None:
    """AdamW's settings are given only where they act."""
    for name in ("beta1", "beta2", "eps"):
        if (value := getattr(optim, name)) != getattr(OptimConfig(), name):
            raise ConfigError(
                f"{flag(name)} {value} has no effect with --optimizer sgd. Leave it out, or choose adamw."
            )


def _check_data(data: DataConfig, run: RunConfig) -> None:
    """At most one source, with settings that act on it."""
    validation = split_shares(data.split)[1]
    if data.mock_data:
        given = {"--data-path": data.data_path, "--tokenizer": data.tokenizer}
        if data.split != DataConfig().split:
            given["--split"] = data.split
        for name, value in given.items():
            if value:
                raise ConfigError(
                    f"{name} {value} has no effect with --mock-data, which generates its sequences. Leave one of "
                    "them out."
                )
        if run.eval_interval and not run.eval_steps:
            raise ConfigError(
                "--eval-steps 0 means the whole validation set, but --mock-data has no end. Choose at least 1."
            )
    if data.data_path and run.eval_interval and not validation:
        raise ConfigError(
            f"--eval-interval {run.eval_interval} asks for evaluations, but --split {data.split} leaves no documents "
            "to evaluate on. Give the second share a positive value, e.g. 969,30,1."
        )


def split_shares(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """The shares of training, validation and test in `--split`; "9,1" leaves out the last, which is then 0."""
    try:
        if "e" in split.lower():
            raise ValueError("an exponent may ask for more digits than memory holds")
        shares = [Fraction(share.strip()) for share in split.split(",")]
    except (ValueError, ZeroDivisionError):
        shares = []
    if not 1 <= len(shares) <= 3:
        raise ConfigError(
            f"--split {split!r} must be one to three numbers with commas between them: the shares of training, "
            "validation and test, e.g. 969,30,1."
        )
    if shares[0] <= 0 or min(shares) < 0:
        raise ConfigError(
            f"--split {split} must give training a positive share, and validation and test none below 0, e.g. 969,30,1."
        )
    train, validation, test = [*shares, Fraction(0), Fraction(0)][:3]
    return train, validation, test


def _check_intervals(checkpoint: CheckpointConfig, run: RunConfig) -> None:
    """What happens every so often has something to act on."""
    if checkpoint.save_interval and not checkpoint.save:
        raise ConfigError(
            f"--save-interval {checkpoint.save_interval} has no effect without --save. Name a folder with --save, or "
            "leave the interval out."
        )
    _check_checkpoint(checkpoint)
    for name in ("spike_window", "stop_on_spike"):
        if getattr(run, name) != getattr(RunConfig(), name) and not run.spike_sigmas:
            raise ConfigError(f"{flag(name)} has no effect without --spike-sigmas. Give the height of a spike, e.g. 6.")
    if run.eval_steps != RunConfig().eval_steps and not run.eval_interval:
        raise ConfigError(
            f"--eval-steps {run.eval_steps} has no effect without --eval-interval. Give the number of steps between "
            "evaluations, or leave it out."
        )


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Where a run begins is said once, and what is said of saving and loading has something to act on."""
    load, save = checkpoint.load, checkpoint.save
    begins_elsewhere = load and not checkpoint.load_weights_only
    if checkpoint.auto_resume and (not save or begins_elsewhere):
        raise ConfigError(
            f"--auto-resume goes on from the newest checkpoint in --save: it needs that folder (now {save or 'none'}) "
            f"and no --load (now {load or 'none'}), unless --load-weights-only says what the run begins with."
        )
    if checkpoint.load_weights_only and not load:
        raise ConfigError("--load-weights-only has no effect without --load. Name the folder that has the weights.")
    if checkpoint.override_schedule and (not (load or checkpoint.auto_resume) or checkpoint.load_weights_only):
        raise ConfigError(
            "--override-schedule has no effect on a run that begins anew. It belongs to --load or --auto-resume, "
            "without --load-weights-only."
        )
    for name in ("keep_last", "async_save"):
        if getattr(checkpoint, name) and not save:
            raise ConfigError(f"{flag(name)} has no effect without --save. Name a folder for checkpoints.")


def _check_log(log: LogConfig) -> None:
    """How a W&B run is called and kept is said of one that there is."""
    for name in ("wandb_name", "wandb_mode"):
        if (value := getattr(log, name)) != getattr(LogConfig(), name) and not log.wandb_project:
            raise ConfigError(
                f"{flag(name)} {value} has no effect without --wandb-project. Name the project to record the run in, "
                "or leave it out."
            )
