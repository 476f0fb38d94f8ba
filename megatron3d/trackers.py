"""Weights & Biases and TensorBoard, where they can be had: the numbers of a run, drawn by others.

The one idea: a tracker is a guest. It is imported here alone, opened by the one rank that speaks and at most once a
run; and whatever it fails at, from a missing package to a full disk, costs one warning and the tracker, never the run.
What a row holds and how often one is shown is in metrics.py, the id of a W&B run in the checkpoint's meta (trainer.py).
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from megatron3d.config import Config, LogConfig
from megatron3d.config_io import to_dict

T = TypeVar("T", bound="Tracker")
Numbers = Mapping[str, float]

WANDB, TENSORBOARD = "--wandb-project", "--tensorboard-dir"
PACKAGES = {WANDB: "wandb", TENSORBOARD: "tensorboard"}

# What W&B may wait for (a key to be typed, the network, the last numbers to arrive) and for how many seconds at most:
# the other ranks wait with it, and must not take its rank for lost.
WANDB_WAITS = ("login_timeout", "init_timeout", "finish_timeout")
LONGEST_WAIT, SHARE_OF_TIMEOUT = 60.0, 0.25
KEPT_ID = "wandb-id"
LAST_SECONDS = 3.0  # that a run which has failed leaves W&B


class Tracker(Protocol):
    """Where numbers go; any of these may raise anything."""

    def write(self, step: int, numbers: Numbers) -> None:
        """Records the numbers of a step."""

    def close(self, *, failed: bool) -> None:
        """Ends the record, as that of a run that has failed or not."""


class WandbTracker:
    """One W&B run, gone on with if `run_id` names one.

    Its charts have the training step as their axis. W&B's own counter only grows and stays unused: after a resume from
    an older checkpoint the steps repeat, and points that lay behind that counter would be dropped. A job that restarts
    by itself may do so before it has a checkpoint to keep the id in: then it is in a file beside where those will be.
    """

    def __init__(self, config: Config, run_id: str) -> None:
        log, wandb = config.log, importlib.import_module("wandb")
        known, longest = wandb.Settings(), min(LONGEST_WAIT, SHARE_OF_TIMEOUT * config.parallel.timeout_seconds)
        kept = Path(config.checkpoint.save) / KEPT_ID if config.checkpoint.auto_resume else None
        if kept and not run_id and kept.is_file():
            run_id = kept.read_text().strip()
        self._run = wandb.init(
            project=log.wandb_project,
            name=log.wandb_name or None,
            mode=None if log.wandb_mode == "auto" else log.wandb_mode,
            id=run_id or None,
            resume="allow",
            config=to_dict(config),
            settings={name: longest for name in WANDB_WAITS if hasattr(known, name)},
        )
        self.id = str(self._run.id)
        if kept and self.id != run_id:
            kept.write_text(self.id + "\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Numbers) -> None:
        """Queues a point; W&B's own process sends it."""
        self._run.log({"step": step, **numbers})

    def close(self, *, failed: bool) -> None:
        """Waits for what is queued; after a failure, of which the others have yet to hear, not for long."""
        if not failed:
            self._run.finish(exit_code=0)
            return
        finish = threading.Thread(target=self._fail, daemon=True)
        finish.start()
        finish.join(LAST_SECONDS)

    def _fail(self) -> None:
        with contextlib.suppress(Exception):  # the failure that is about to be told matters more
            self._run.finish(exit_code=1)


class TensorBoardTracker:
    """Event files in `log.tensorboard_dir`; points after `first_step`, of an interrupted run, are not drawn."""

    def __init__(self, log: LogConfig, first_step: int) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(log.tensorboard_dir, purge_step=first_step + 1 if first_step else None)

    def write(self, step: int, numbers: Numbers) -> None:
        """Queues a point per number; a thread writes it within two minutes."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Writes what is queued; an event file knows no failure."""
        self._writer.close()


class Trackers:
    """The trackers that `config` asks for and that work; `warn` is told, once each, why one does not.

    `wandb_id` is the W&B run to go on with, empty for a new one; `first_step` the step the run was loaded at.
    """

    def __init__(self, config: Config, first_step: int, wandb_id: str, warn: Callable[[str], None]) -> None:
        log = config.log
        self.wandb_id = wandb_id
        """Of the run that is written to; else what was given, for another attempt after a resume."""
        self._warn = warn
        self._live: dict[str, Tracker] = {}
        if log.wandb_project and (wandb := self._open(WANDB, lambda: WandbTracker(config, wandb_id))) is not None:
            self.wandb_id = wandb.id
        if log.tensorboard_dir:
            self._open(TENSORBOARD, lambda: TensorBoardTracker(log, first_step))

    def _open(self, option: str, make: Callable[[], T]) -> T | None:
        try:
            tracker = make()
        except Exception as error:
            self._warn(_excuse(option, error))
            return None
        self._live[option] = tracker
        return tracker

    def write(self, step: int, numbers: Numbers) -> None:
        """Records the numbers of a step everywhere; a tracker that fails is left out from then on."""
        for option, tracker in list(self._live.items()):
            try:
                tracker.write(step, numbers)
            except Exception as error:
                del self._live[option]
                self._warn(_excuse(option, error))

    def close(self, *, failed: bool) -> None:
        """Ends every tracker, once."""
        while self._live:
            option, tracker = self._live.popitem()
            try:
                tracker.close(failed=failed)
            except Exception as error:
                self._warn(_excuse(option, error))


def _excuse(option: str, error: Exception) -> str:
    """Why training goes on without what `option` asks for, in one line."""
    cure = f" (pip install {PACKAGES[option]})" if isinstance(error, ImportError) else ""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{option}: nothing is recorded from here on: {words}{cure}. Training goes on; the console has the numbers."
