"""Crashes that repeat: a restarted run that fails again at the same step is not worth a third try.

The one idea: the file `<save>/crash.json` counts failures at one step in a row. Getting past that step forgives them.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from megatron3d.config import ConfigError

MOST = 2
"""Failures at one step after which a run is not started again."""


def note(folder: Path, step: int, before: tuple[int, int]) -> None:
    """Enters a failure at `step` of a run that has read `before` when it began. However many of its ranks enter it,
    since they may be unable to agree on one: it is the same failure."""
    times = before[1] + 1 if before[0] == step else 1
    aside = folder / "crash.json.tmp"
    with contextlib.suppress(OSError):  # the failure may be the folder's
        aside.write_text(json.dumps({"step": step, "times": times}) + "\n")
        aside.replace(folder / "crash.json")


def read(folder: Path) -> tuple[int, int]:
    """(step of the last failure, failures there in a row); (-1, 0) if there is none."""
    try:
        entry = json.loads((folder / "crash.json").read_text())
        return int(entry["step"]), int(entry["times"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0


def check(folder: Path) -> None:
    """Refuses (ConfigError) to start once more what has failed MOST times at the same step."""
    step, times = read(folder)
    if times >= MOST:
        raise ConfigError(
            f"The run in {folder} has failed {times} times in a row at step {step}; a restart would fail there again. "
            f"Look at what it said, and remove {folder / 'crash.json'} to try once more."
        )


def forgive(folder: Path, step: int) -> None:
    """Forgets failures at steps up to `step`, which has been completed."""
    failed, times = read(folder)
    if times and failed <= step:
        (folder / "crash.json").unlink(missing_ok=True)
