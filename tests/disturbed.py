"""Jobs that are disturbed, and the same ones left in peace: their settings, what they leave, how it is compared.

Used by test_failures.py and test_save_kills.py; conftest.py makes the fixtures known.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron3d import crashes, mesh
from tests.agent import Job

TINY = ["--config", "tiny", "--mock-data", "--global-batch-size", "4", "--micro-batch-size", "2", "--num-layers", "2"]
STEPS = 6
RUN = [*TINY, "--train-steps", str(STEPS), "--lr-schedule", "constant"]
MESH = ["--tp", "2", "--pp", "2"]

SETTINGS = {
    "tp 2, pp 2": MESH,
    "dp 2, tp 2, bf16, dropout": ["--tp", "2", "--dtype", "bf16", "--dropout", "0.1"],
    "dp 2, pp 2, fp16": ["--pp", "2", "--dtype", "fp16"],
}
MEASURED = {"step_seconds", "tokens_per_second", "tflops_per_device", "mfu", "peak_memory_bytes"}


@dataclass(frozen=True)
class Peace:
    """A run that nobody disturbed."""

    folder: Path
    seconds: float
    """That its ranks lived."""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Of the metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def words(folder: Path, settings: list[str]) -> list[str]:
    """The flags of a run that leaves all it does in `folder`."""
    intervals = ["--save-interval", "2", "--eval-interval", "3", "--eval-steps", "1"]
    places = ["--save", str(folder / "save"), "--log-dir", str(folder), "--auto-resume"]
    return [*RUN, *settings, *intervals, *places]


@pytest.fixture(scope="session")
def in_peace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Peace]:
    """The run with some SETTINGS that nobody disturbs; made once."""

    @cache
    def run(name: str) -> Peace:
        folder = tmp_path_factory.mktemp("peace")
        job = Job(folder / "out", "pretrain_gpt.py", *words(folder, SETTINGS[name]))
        job.ranks()
        begin = time.monotonic()
        code, text = job.end()
        assert code == 0, text
        return Peace(folder, time.monotonic() - begin)

    return run


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves but times: its rows, and every bit of its last weights and moments."""
    last = folder / "save" / f"step-{STEPS:08d}"
    index = json.loads((last / "index.json").read_text())["content"]
    return {
        "rows": [{key: value for key, value in row.items() if key not in MEASURED} for row in rows(folder)],
        "counts": {key: value for key, value in index["meta"].items() if key != "config"},
        "tensors": index["tensors"],
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in last.glob("rank-*")},
        "latest": (folder / "save" / "latest").read_text().strip(),
        "crash": crashes.read(folder / "save"),
    }


def assert_undisturbed(code: int, text: str, folder: Path, peace: Peace) -> None:
    """The job ended well, all but the victim left by themselves and without astonishment, and nothing was lost."""
    assert code == 0 and "Unable to shutdown" not in text and "Traceback" not in text, text
    assert outcome(folder) == outcome(peace.folder)


@pytest.fixture
def quick_roll_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is absent is no question where a test has killed it: the roll ends once all but one have answered. (It is not
    the time that is shortened: the store, too, has no longer than that to answer, and living ranks may be slow.)"""

    def absent(roll: mesh.RollCall) -> list[int]:
        silent = [rank for rank in range(roll.mesh.grid.size) if rank != roll.mesh.rank] if roll.store else []
        deadline = time.monotonic() + mesh.ROLL_CALL.total_seconds()
        while len(silent) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
            silent = [rank for rank in silent if not roll._has_answered(rank)]
        return silent

    monkeypatch.setattr(mesh.RollCall, "absent", absent)
