"""The rows of a run: which keys, which numbers, and what a resumed run leaves in the file."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron3d.config import Config, LogConfig
from megatron3d.config_io import from_dict
from megatron3d.cost import flops_per_token
from megatron3d.data import Datasets
from megatron3d.mesh import Mesh
from megatron3d.metrics import MetricsLog, duration, peak_memory_bytes, peak_tflops, perplexity, rates, short_count
from megatron3d.trainer import Trainer
from tests import toy
from tests.ranks import on_mesh

KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "skipped_steps",
    "consumed_samples",
    "consumed_tokens",
    "step_seconds",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "peak_memory_bytes",
}


def logging(config: Config, folder: Path, **settings: Any) -> Config:
    """`config` with a log in `folder`."""
    return replace(config, log=LogConfig(log_dir=str(folder), progress=False, **settings))


def rows(folder: Path) -> list[dict[str, Any]]:
    """Every line of the log, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def run(mesh: Mesh, config: Config) -> None:
    Trainer(config, mesh, toy.datasets(config.model)).run()


def test_one_object_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly the documented keys; eval_loss where the step evaluates; the console says the same."""
    config = toy.config(global_batch_size=2, train_steps=5, eval_interval=2, eval_steps=1, lr_schedule="cosine")
    run(Mesh.single(), logging(config, tmp_path, peak_tflops=0.5))
    log = rows(tmp_path)
    assert [row["step"] for row in log] == [1, 2, 3, 4, 5]
    for row in log:
        evaluates = row["step"] in (2, 4, 5)
        assert set(row) == KEYS | ({"eval_loss"} if evaluates else set())
        assert row["consumed_samples"] == 2 * row["step"] and row["consumed_tokens"] == 64 * row["step"]
        assert row["loss_scale"] == 1.0 and row["skipped_steps"] == 0 and row["peak_memory_bytes"] > 2**20
        assert row["mfu"] == pytest.approx(row["tflops_per_device"] / 0.5)
    assert [row["lr"] for row in log] == pytest.approx(
        [0.3 * (1 + math.cos(math.pi * step / 5)) / 2 for step in range(5)]
    )
    assert from_dict(json.loads((tmp_path / "config.json").read_text())) == logging(config, tmp_path, peak_tflops=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "metrics.jsonl"]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ") and "/5 |" in line]
    assert len(shown) == 5
    for line, row in zip(shown, log, strict=True):
        assert f"step {row['step']}/5 | loss {row['loss']:.4f} | grad norm {row['grad_norm']:.3f}" in line
        assert ("eval loss" in line) == ("eval_loss" in row) and "MFU" in line


class NothingValid(toy.RandomData):
    def sample(self, index: int) -> Any:
        tokens, labels = super().sample(index)
        return tokens, labels * 0 - 100


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    config = logging(toy.config(global_batch_size=2, train_steps=2), tmp_path)
    Trainer(config, Mesh.single(), Datasets(NothingValid(131, 32), None, "")).run()
    log = rows(tmp_path)
    assert [(row["loss"], row["grad_norm"], row["skipped_steps"]) for row in log] == [(None, None, 1), (None, None, 2)]
    assert all(row["mfu"] is None for row in log)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"dp": 2}], ids=str)
def test_tokens_count_once(layout: dict[str, Any], tmp_path: Path) -> None:
    """METR-03: tokens per step are gbs x seq at tp 1, 2, 4, pp 2, dp 2; per device: / world size."""
    config = logging(toy.config(global_batch_size=2, train_steps=2, **layout), tmp_path)
    on_mesh(config.parallel, run, config)
    world = math.prod(layout.values())
    log = rows(tmp_path)
    assert [row["consumed_tokens"] for row in log] == [64, 128]
    for row in log:
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(64)
        flops = row["tflops_per_device"] * 1e12 * row["step_seconds"] * world
        assert flops == pytest.approx(64 * flops_per_token(config.model))


def test_rates_of_one_step() -> None:
    """By hand: 12 samples x 32 tokens in half a second on 3 devices."""
    config = toy.config(global_batch_size=12)
    row = rates(config, 0.5, 3, None)
    assert row["tokens_per_second"] == 768 and row["step_seconds"] == 0.5 and row["mfu"] is None
    assert row["tflops_per_device"] == pytest.approx(flops_per_token(config.model) * 768 / 3 / 1e12)
    peak = row["tflops_per_device"] * 4
    assert rates(config, 0.5, 3, peak)["mfu"] == pytest.approx(0.25)


def test_peaks_and_memory() -> None:
    cpu = torch.device("cpu")
    assert peak_tflops(cpu, 0.0) is None and peak_tflops(cpu, 12.5) == 12.5
    before = peak_memory_bytes(cpu)
    block = torch.ones(2**24)  # 64 MiB
    assert before < 2**36 and peak_memory_bytes(cpu) >= before and block[0] == 1


def row_of(step: int) -> dict[str, Any]:
    """A row as the trainer makes it."""
    numbers = dict.fromkeys(KEYS, 1.0)
    return {**numbers, "step": step, "mfu": None, "skipped_steps": 0}


def resumed(folder: Path, left_by_the_interrupted_run: str, first_step: int) -> list[int]:
    """Steps in the log after one more row was written by a run that was loaded at `first_step`."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(left_by_the_interrupted_run)
    log = MetricsLog(logging(toy.config(), folder), first_step, enabled=True)
    log.write(row_of(first_step + 1))
    log.close()
    return [row["step"] for row in rows(folder)]


def test_a_resumed_run_cuts_what_came_after(tmp_path: Path) -> None:
    """Rows after the loaded step go, and broken lines; a last line that is whole but for its end stays. What goes is
    kept beside: it may be another run's."""
    lines = [json.dumps(row_of(step)) + "\n" for step in range(1, 6)]
    assert resumed(tmp_path / "a", "".join(lines), 3) == [1, 2, 3, 4]
    assert (tmp_path / "a" / "metrics-cut.jsonl").read_text() == "".join(lines[3:])
    assert resumed(tmp_path / "b", "".join(lines[:3]) + lines[3][:40], 3) == [1, 2, 3, 4]
    assert resumed(tmp_path / "c", "".join(lines[:2]) + lines[2][:-1], 3) == [1, 2, 3, 4]
    assert resumed(tmp_path / "d", "".join(lines[:2]) + "7\n{}\n" + lines[2], 3) == [1, 2, 3, 4]
    assert (tmp_path / "d" / "metrics-cut.jsonl").read_text() == "7\n{}\n"
    assert resumed(tmp_path / "e", "".join(lines), 0) == [1]
    assert resumed(tmp_path / "f", "".join(lines[:3]), 3) == [1, 2, 3, 4]
    assert not (tmp_path / "f" / "metrics-cut.jsonl").exists()


def test_only_one_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(logging(toy.config(), tmp_path / "none"), 0, enabled=False)
    log.write(row_of(1))
    log.say("nothing")
    log.close()
    assert not (tmp_path / "none").exists() and capsys.readouterr().out == ""


def test_every_step_in_the_file_every_few_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Interval 3 of 8 steps with evaluations at 4 and 8: lines at 3, 4, 6 and 8; a row each step in the file."""
    config = toy.config(global_batch_size=1, train_steps=8, eval_interval=4, eval_steps=1)
    run(Mesh.single(), logging(config, tmp_path, log_interval=3, log_level=1))
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in lines if line.startswith("step ") and "/8 |" in line] == [
        "step 3", "step 4", "step 6", "step 8"
    ]  # fmt: skip
    phases = [line for line in lines if line.startswith("ms per step, least-most over ranks: forward ")]
    assert len(phases) == 4 and ["evaluate" in line for line in phases] == [False, True, False, True]
    assert all("optimizer" in line and "backward" in line for line in phases)


def test_the_line_says_what_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 12 x 32 tokens a step; after step 2 of 20, 10 s after step 1, 18 steps of 10 s. The first line goes by
    the step's own seconds, the last one has nothing left."""
    clock = iter([100.0, 110.0, 400.0])
    monkeypatch.setattr("megatron3d.metrics.time.perf_counter", lambda: next(clock))
    log = MetricsLog(replace(toy.config(), log=LogConfig(progress=False)), 0, enabled=True)
    for step in (1, 2, 20):
        log.write({**row_of(step), "step_seconds": 200.0})
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith(" | 7.30k tokens left | ETA 1:03:20")  # 19 x 384, 19 x 200 s
    assert second.endswith(" | 6.91k tokens left | ETA 0:03:00")
    assert "left" not in last and "ETA" not in last


def test_the_pace_is_that_of_the_last_hundred_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 steps of 1 s, then 100 of 3 s: the time left counts 3 s a step."""
    seconds = 0.0
    monkeypatch.setattr("megatron3d.metrics.time.perf_counter", lambda: seconds)
    log = MetricsLog(replace(toy.config(train_steps=1000), log=LogConfig(progress=False)), 0, enabled=True)
    for step in range(1, 251):
        seconds += 1.0 if step <= 150 else 3.0
        log.write(row_of(step))
    assert capsys.readouterr().out.rstrip().endswith(" | ETA 0:37:30")  # 750 x 3 s


def test_durations_and_counts() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 5025, 86399.9, 12 * 86400 + 4 * 3600)] == [
        "0:00:00", "0:01:00", "1:23:45", "1d 0:00:00", "12d 4:00:00"
    ]  # fmt: skip
    assert [short_count(number) for number in (999, 1000, 1_234_567, 15 * 10**9, 2 * 10**12)] == [
        "999", "1.00k", "1.23M", "15.00B", "2.00T"
    ]  # fmt: skip


def test_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    """exp of the mean loss, beside it on the console; beyond a float infinite, of nothing nothing."""
    assert perplexity(0.0) == 1 and perplexity(math.log(131)) == pytest.approx(131)
    assert perplexity(1e3) == math.inf and perplexity(math.inf) == math.inf and math.isnan(perplexity(math.nan))
    log = MetricsLog(replace(toy.config(), log=LogConfig(progress=False)), 0, enabled=True)
    log.write({**row_of(1), "eval_loss": math.log(131)})
    log.write({**row_of(2), "eval_loss": 800.0})
    first, second = capsys.readouterr().out.splitlines()
    assert "eval loss 4.8752, perplexity 131.00" in first and "eval loss 800.0000, perplexity inf" in second
