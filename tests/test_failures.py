"""How runs end early: failures are told and leave nobody behind, requests to stop save one and the same step."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron3d.signals import STOPPED, StopRequest

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--config", "tiny", "--mock-data", "--global-batch-size", "4", "--micro-batch-size", "2", "--num-layers", "2"]
RUN = [*TINY, "--tp", "2", "--pp", "2", "--train-steps", "6", "--lr-schedule", "constant"]


def launch(*words: str, restarts: int = 0) -> list[str]:
    options = ["--nproc-per-node", "4", "--max-restarts", str(restarts), "--monitor-interval", "0.2"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *words]


def run(*words: str, restarts: int = 0, timeout: float = 150) -> tuple[int, str, float]:
    """Exit code of torchrun, everything it printed, seconds; no rank may be left behind."""
    begin = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = launch(*words, restarts=restarts)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


def inject(
    kind: str, place: str, rank: int, step: int, *flags: str, once: str = "-", restarts: int = 0
) -> tuple[int, str]:
    mishap = ("tests/injected.py", kind, place, str(rank), str(step), once)
    code, text, seconds = run(*mishap, *RUN, *flags, restarts=restarts)
    assert seconds < 120, text
    return code, text


QUICK = [("forward", 3), ("data", 0)]
ALL = [(place, rank) for place in ("forward", "backward", "data", "collective", "save") for rank in (0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.soak) for case in ALL]
)
def test_an_exception_on_one_rank_ends_all(place: str, rank: int, tmp_path: Path) -> None:
    """FAIL-01: non-zero, the first traceback with its rank, stage and step; every rank leaves by itself."""
    flags = ["--save", str(tmp_path / "save"), "--save-interval", "2", "--log-dir", str(tmp_path)]
    step = 2 if place == "save" else 3
    code, text = inject("raise", place, rank, step, *flags)
    assert code == 1
    if place == "save":
        assert f"error: rank {rank}: saving failed: ArithmeticError: injected in save" in text
        assert not (tmp_path / "save" / "latest").exists()
        return
    assert text.count("ArithmeticError: injected in") >= 1 and "Traceback" in text
    assert re.search(rf"^rank {rank} \(stage {rank // 2}, .*\) failed at step 3: ArithmeticError", text, re.M), text
    assert "no answer from rank" in text and "no word from" not in text
    assert json.loads((tmp_path / f"flight-rank-{rank}.json").read_text()), "the flight record"
    assert "(SIGKILL)" not in text and "(SIGABRT)" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank"), [pytest.param("exit", 2), pytest.param("SIGSTOP", 1, marks=pytest.mark.soak)]
)
def test_a_rank_that_is_gone_is_named(kind: str, rank: int, tmp_path: Path) -> None:
    """Leaving with code 0, or standing still beyond --timeout-seconds: who was absent, at which step, in what."""
    code, text = inject(kind, "step", rank, 3, "--timeout-seconds", "10", "--log-dir", str(tmp_path))
    assert code == 1
    assert f"no word from rank {rank}: absent at step 3" in text
    assert re.search(rf"failed at step 3: no answer from rank {rank}; step 3, \w+ over \w+ with ranks", text), text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGUSR1", pytest.param("SIGTERM", marks=pytest.mark.soak)])
def test_a_signal_to_one_rank_stops_all_at_one_step(name: str, tmp_path: Path) -> None:
    """All save the same step and leave with the documented code; the run goes on at the next step (CKPT-07)."""
    folders = ["--save", str(tmp_path / "save"), "--log-dir", str(tmp_path)]
    code, text = inject(name, "step", 1, 3, *folders)
    assert code == 1 and "stopped after step 3, as asked" in text
    assert set(re.findall(r"exitcode\s*: (-?\d+)", text)) == {str(STOPPED)}, text
    assert (tmp_path / "save" / "latest").read_text().strip() == "step-00000003"
    code, text, _ = run("pretrain_gpt.py", *RUN, *folders, "--load", str(tmp_path / "save"))
    assert code == 0, text
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


SEEDS = [pytest.param(seed, marks=() if seed < 1 else pytest.mark.soak) for seed in range(100)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, text, _ = run("pretrain_gpt.py", *RUN, "--log-dir", str(folder), "--save", str(folder / "save"))
    assert code == 0, text
    return [*losses(folder), *checksums(folder)]


def checksums(folder: Path) -> list[float]:
    """Of every box of the last checkpoint: equal exactly where all weights and moments are."""
    index = json.loads((folder / "save" / "step-00000006" / "index.json").read_text())
    return [
        box["crc32"]
        for kind in sorted(index["tensors"])
        for name in sorted(index["tensors"][kind])
        for box in sorted(index["tensors"][kind][name]["boxes"], key=lambda box: box["box"])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_ranks_change_nothing(seed: int, undisturbed: list[float], tmp_path: Path) -> None:
    """SIGKILL of a random rank at a random moment under --max-restarts: the final state is that of a run in peace."""
    generator = random.Random(seed)
    place, rank, step = (
        generator.choice(["step", "forward", "backward"]),
        generator.randrange(4),
        generator.randint(1, 6),
    )
    flags = ["--save", str(tmp_path / "save"), "--save-interval", "2", "--log-dir", str(tmp_path), "--auto-resume"]
    code, text = inject("SIGKILL", place, rank, step, *flags, once=str(tmp_path / "killed"), restarts=2)
    assert code == 0, text
    assert (tmp_path / "killed").exists()
    assert [*losses(tmp_path), *checksums(tmp_path)] == undisturbed


@pytest.mark.slow
@pytest.mark.soak
def test_a_crash_that_repeats_is_given_up(tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path), "--auto-resume"]
    code, text = inject("raise", "forward", 0, 3, *flags, restarts=5)
    assert code == 1 and "has failed 2 times in a row at step 3" in text
    assert text.count("ArithmeticError: injected in forward\nrank 0") == 2


def test_signals_are_noted_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    with stop.listening():
        assert not stop
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        assert stop and stop.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_time_runs_out() -> None:
    assert not StopRequest(3600.0)
    stop = StopRequest(1e-6)
    time.sleep(0.01)
    assert stop and stop.reason == "--exit-after-seconds"
