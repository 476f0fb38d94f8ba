"""Is this machine computing right? One table and an exit code. See --help; the checks are in megatron3d/selftest.py."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron3d.cli import parse_tool
from megatron3d.config import Device, JobError
from megatron3d.launch import launch_from_environment, use_repeatable_cublas, user_errors

if TYPE_CHECKING:
    from megatron3d.selftest import Row

WIDTH = 160  # of the table, whatever the terminal's: a log must not lose its verdicts
DESCRIPTION = (
    "Train tiny models on every layout that the processes of this job can form, and compare with one process: to the "
    "last bit, or up to rounding. Start it as training is started, e.g. torchrun --nproc-per-node 4 tools/selftest.py. "
    "Exit code 0: all is well; 1: a comparison failed."
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    full: bool = False
    """More models, dtypes, knobs and steps: minutes instead of seconds."""
    device: Device = "auto"
    """auto: one GPU per process where there are any, else the CPU."""
    json: bool = False
    """Print one JSON object."""


def main(argv: Sequence[str]) -> None:
    """Runs and prints; JobError, so that all ranks leave in good order with exit code 1, if a comparison failed."""
    launch = launch_from_environment()
    flags = parse_tool(Flags, argv, description=DESCRIPTION)
    use_repeatable_cublas()

    import torch
    from rich.console import Console
    from rich.progress import track

    from megatron3d.mesh import pick_device
    from megatron3d.selftest import selftest, stages

    torch.use_deterministic_algorithms(True)
    device = pick_device(flags.device, launch)
    aside = Console(stderr=True)
    silent = launch.rank != 0 or not aside.is_terminal
    tested = track(
        selftest(launch, device, full=flags.full),
        "testing layouts",
        total=stages(launch.world_size),
        console=aside,
        transient=True,
        disable=silent,
    )
    rows = [row for of_stage in tested for row in of_stage]
    if launch.rank == 0:
        where = f"{launch.world_size} x {device.type}"
        print(as_json(rows, where) if flags.json else as_text(rows, where), flush=True)
    if failed := sum(not row.passed for row in rows):
        raise JobError(
            f"{failed} of {len(rows)} comparisons failed: a device, a link or an installed library computes wrong. "
            "Do not trust what is trained on these processes until it is found."
        )


def as_text(rows: Sequence[Row], where: str) -> str:
    """The table for a reader, and a last line that counts."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE)
    for name in ("model", "tp x pp x dp", "turned", "compared with"):
        table.add_column(name)
    for name in ("loss gap", "norm gap", "weight gap", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        gaps = [f"{gap:.1e}" if gap else "0" for gap in (*row.gaps, row.limit)]
        verdict = "ok" if row.passed else f"FAILED {row.note}".rstrip()
        table.add_row(f"{row.model} {row.dtype}", row.layout, row.knobs, row.against, *gaps, verdict)
    console = Console(width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table, markup=False)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    passed = sum(row.passed for row in rows)
    return "\n".join([*(line for line in lines if line), f"{where}: {passed} of {len(rows)} comparisons passed"])


def as_json(rows: Sequence[Row], where: str) -> str:
    """The same for a machine; gaps that are no numbers are null."""
    return json.dumps(
        {
            "devices": where,
            "passed": all(row.passed for row in rows),
            "rows": [_as_dict(row) for row in rows],
        }
    )


def _as_dict(row: Row) -> dict[str, Any]:
    gaps = {f"{name}_gap": gap if math.isfinite(gap) else None for name, gap in row.gaps._asdict().items()}
    return {**{name: value for name, value in vars(row).items() if name != "gaps"}, **gaps, "passed": row.passed}


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
