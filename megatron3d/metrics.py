"""What a run says about itself: rates, one JSON object a step, a console line, a progress bar.

The one idea: a step's row is made once and shown in several places; only the main rank shows it. Rates use the FLOPs of
cost.py: model FLOPs, causal attention counted once. W&B and TensorBoard are in trackers.py, clocks in timers.py.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from megatron3d.config import Config
from megatron3d.config_io import to_dict
from megatron3d.cost import flops_per_token
from megatron3d.timers import Phase, table_line
from megatron3d.trackers import Trackers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Row = dict[str, Any]

PACE_STEPS = 100  # the time left follows from the pace of so many steps, evaluations and saves in between included

# Dense bf16 peaks in TFLOP/s from the vendors' data sheets, by a part of the device's name; the first match counts.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.4,
    "H100": 989.4,
    "A100": 312.0,
    "V100": 125.0,
    "MI300X": 1307.4,
}


def peak_tflops(device: torch.device, stated: float) -> float | None:
    """The peak that MFU refers to: the stated one, else the data sheet's of a known GPU, else None."""
    if stated:
        return stated
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: allocated on its GPU, else resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rates(config: Config, step_seconds: float, devices: int, peak: float | None) -> Row:
    """Throughput of one step of `step_seconds` on `devices`: all tokens count once, however many ranks share them."""
    tokens = config.batch.global_batch_size * config.model.seq_length
    tflops = flops_per_token(config.model) * tokens / step_seconds / devices / 1e12
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "tflops_per_device": tflops,
        "mfu": tflops / peak if peak else None,
    }


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class MetricsLog:
    """Shows the rows of a run on the console and appends them to `<log-dir>/metrics.jsonl`.

    The file has every step; the console and the trackers have those that `shows` names. `first_step` is the step a
    resumed run was loaded at: rows after it, left by the interrupted run, move to metrics-cut.jsonl. `wandb_id` is the
    W&B run to go on with. As a context it closes itself, and tells the trackers whether the run has failed.
    """

    def __init__(self, config: Config, first_step: int, *, enabled: bool, wandb_id: str = "") -> None:
        self.enabled = enabled
        self.total, self.interval = config.run.train_steps, config.log.log_interval
        self.tokens_per_step = config.batch.global_batch_size * config.model.seq_length
        self.console: Console | None = None
        self.file: Path | None = None
        self.progress: Progress | None = None
        self.trackers: Trackers | None = None
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)
        self._phases_since = first_step
        if not enabled:
            return
        from rich.console import Console  # by the one rank that speaks

        self.console = Console(stderr=False, highlight=False, soft_wrap=True)
        if config.log.log_dir:
            folder = Path(config.log.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")
            self.file = folder / "metrics.jsonl"
            kept, cut = _cut_after(self.file, first_step)
            if cut:
                with (folder / "metrics-cut.jsonl").open("a") as file:
                    file.writelines(cut)
            _write_whole(self.file, "".join(kept))
        self.trackers = Trackers(config, first_step, wandb_id, lambda text: self.say(f"warning: {text}"))
        if config.log.progress and self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.progress = Progress(*columns, console=self.console, transient=True)
            self.bar = self.progress.add_task("training", total=self.total, completed=first_step)
            self.progress.start()

    @property
    def wandb_id(self) -> str:
        """Of the W&B run, for the checkpoint; empty where there is none."""
        return self.trackers.wandb_id if self.trackers is not None else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def say(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if self.console is not None:
            self.console.print(text, markup=False)

    def shows(self, row: Row) -> bool:
        """Whether a row is for the console and the trackers: every `log_interval` steps, the last one, and those that
        evaluate. The same on all ranks."""
        step = row["step"]
        return step % self.interval == 0 or step == self.total or "eval_loss" in row

    def write(self, row: Row) -> None:
        """Records one step."""
        if not self.enabled:
            return
        self._pace.append((row["step"], time.perf_counter()))
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
        if self.shows(row):
            self.say(f"{_console_line(row, self.total)}{self._what_is_left(row)}")
            if self.trackers is not None:
                self.trackers.write(row["step"], _numbers(row))
        if self.progress is not None:
            self.progress.update(self.bar, completed=row["step"])

    def write_phases(self, step: int, ranks: Sequence[Mapping[Phase, float]]) -> None:
        """Shows the seconds that each rank spent in each phase since the last call."""
        if self.enabled:
            self.say(table_line(ranks, step - self._phases_since))
            self._phases_since = step

    def _what_is_left(self, row: Row) -> str:
        """The end of the console line: tokens, and the time they will take."""
        steps = self.total - row["step"]
        if steps <= 0:
            return ""
        seconds = steps * (mean_pace(self._pace) or row["step_seconds"])
        return f" | {short_count(steps * self.tokens_per_step)} tokens left | ETA {duration(seconds)}"

    def close(self, *, failed: bool = False) -> None:
        """Takes the progress bar away and ends what the trackers recorded."""
        if self.progress is not None:
            self.progress.stop()
        if self.trackers is not None:
            self.trackers.close(failed=failed)


def mean_pace(marks: Sequence[tuple[int, float]]) -> float:
    """Seconds per step between the first and the last of `marks`, (step, time) each; 0 if there is only one."""
    (first, begun), (last, now) = marks[0], marks[-1]
    return (now - begun) / (last - first) if last > first else 0.0


def duration(seconds: float) -> str:
    """5025 -> "1:23:45"; days stand before it: "12d 4:00:00"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d " * bool(days) + f"{hour}:{minute:02d}:{second:02d}"


def short_count(number: int) -> str:
    """1234567 -> "1.23M"."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def _numbers(row: Row) -> dict[str, float]:
    """What trackers draw of a row: all that is known, over the step, and the perplexity beside the evaluation loss."""
    numbers = {key: value for key, value in row.items() if key != "step" and value is not None}
    if "eval_loss" in row:
        numbers["eval_perplexity"] = perplexity(row["eval_loss"])
    return numbers


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_after(file: Path, step: int) -> tuple[list[str], list[str]]:
    """Lines of an earlier run up to `step`, and later ones; what is no row, such as a line that a crash has cut off,
    is among the later ones."""
    kept, cut = list[str](), list[str]()
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            side = kept if json.loads(line)["step"] <= step else cut
        except (ValueError, KeyError, TypeError):
            side = cut
        side.append(line + "\n")  # the last one may be whole but for its end
    return kept, cut


def _write_whole(file: Path, text: str) -> None:
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(text)
    aside.replace(file)


def _console_line(row: Mapping[str, Any], total: int) -> str:
    parts = [
        f"step {row['step']:>{len(str(total))}}/{total}",
        f"loss {row['loss']:.4f}",
        f"grad norm {row['grad_norm']:.3f}",
        f"lr {row['lr']:.2e}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"{row['tflops_per_device']:.3g} TFLOP/s per device",
    ]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if "eval_loss" in row:
        parts.append(f"eval loss {row['eval_loss']:.4f}, perplexity {perplexity(row['eval_loss']):.2f}")
    if row["skipped_steps"]:
        parts.append(f"{row['skipped_steps']} skipped")
    return " | ".join(parts)
