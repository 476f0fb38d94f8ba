"""What a run says about itself: rates, one JSON object a step, a console line, a progress bar.

The one idea: a step's row is made once and shown in several places; only the main rank shows it. Rates use the FLOPs of
cost.py: model FLOPs, causal attention counted once.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron3d.config import Config
from megatron3d.config_io import to_dict
from megatron3d.cost import flops_per_token

Row = dict[str, Any]

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


class MetricsLog:
    """Shows the rows of a run on the console and appends them to `<log-dir>/metrics.jsonl`.

    `first_step` is the step a resumed run was loaded at: rows after it, left by the interrupted run, are cut.
    """

    def __init__(self, config: Config, first_step: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self.total = config.run.train_steps
        self.console = Console(stderr=False, highlight=False, soft_wrap=True)
        self.file: Path | None = None
        self.progress: Progress | None = None
        if not enabled:
            return
        if config.log.log_dir:
            folder = Path(config.log.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")
            self.file = folder / "metrics.jsonl"
            _write_whole(self.file, "".join(_rows_up_to(self.file, first_step)))
        if config.log.progress and self.console.is_terminal:
            columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.progress = Progress(*columns, console=self.console, transient=True)
            self.bar = self.progress.add_task("training", total=self.total, completed=first_step)
            self.progress.start()

    def say(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if self.enabled:
            self.console.print(text, markup=False)

    def write(self, row: Row) -> None:
        """Records one step."""
        if not self.enabled:
            return
        self.say(_console_line(row, self.total))
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
        if self.progress is not None:
            self.progress.update(self.bar, completed=row["step"])

    def close(self) -> None:
        """Takes the progress bar away."""
        if self.progress is not None:
            self.progress.stop()


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows_up_to(file: Path, step: int) -> list[str]:
    """Lines of an earlier run to keep; a line cut off by a crash is dropped."""
    kept = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")  # the last one may be whole but for its end
        except (ValueError, KeyError, TypeError):
            continue
    return kept


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
        parts.append(f"eval loss {row['eval_loss']:.4f}")
    if row["skipped_steps"]:
        parts.append(f"{row['skipped_steps']} skipped")
    return " | ".join(parts)
