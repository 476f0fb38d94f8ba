"""Compare two runs' metrics.jsonl step by step: the first differing step, the largest gap, an exit code. See --help."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError
from megatron3d.launch import user_errors

KEYS = ("loss", "eval_loss", "grad_norm", "lr", "skipped_steps", "consumed_samples", "consumed_tokens")
"""What a layout must not change; rates and memory may."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    a: Annotated[str, tyro.conf.Positional]
    """Log folder or metrics.jsonl of the first run."""
    b: Annotated[str, tyro.conf.Positional]
    """Log folder or metrics.jsonl of the second run."""
    tolerance: float = 0.0
    """Relative difference up to which two numbers count as equal; 0: bit by bit."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Gap:
    """A difference at one step."""

    step: int
    key: str
    a: float | None
    b: float | None

    @property
    def relative(self) -> float:
        """|a - b| / |b|; infinite where only one of them is a number."""
        if self.a is None or self.b is None:
            return 0.0 if self.a is self.b else math.inf
        return 0.0 if self.a == self.b else abs(self.a - self.b) / max(abs(self.b), sys.float_info.min)


def main(argv: Sequence[str]) -> int:
    """0: equal on all common steps; 1: different. A missing or empty file is a user's error (2)."""
    flags = parse_tool(Flags, argv, description="Compare two runs step by step; exit 0 if equal, 1 if not.")
    a, b = read_rows(flags.a), read_rows(flags.b)
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise ConfigError(f"the runs have no step in common: {flags.a} has {span(a)}, {flags.b} has {span(b)}")
    gaps = [
        Gap(step, key, a[step].get(key), b[step].get(key))
        for step in steps
        for key in KEYS
        if key in a[step] and key in b[step]
    ]
    different = [gap for gap in gaps if gap.relative > flags.tolerance]
    largest = max(gaps, key=lambda gap: gap.relative)
    unmatched = {name: sorted(rows.keys() - set(steps)) for name, rows in (("a", a), ("b", b))}
    if flags.json:
        print(as_json(steps, different, largest, unmatched))
    else:
        print("\n".join([as_text(steps, different, largest, flags.tolerance), *missing(unmatched)]))
    return 1 if different else 0


def read_rows(path: str) -> dict[int, dict[str, Any]]:
    """Rows of a run by step."""
    file = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return {row["step"]: row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as metrics: {error}. Give a run's --log-dir") from error


def span(rows: dict[int, dict[str, Any]]) -> str:
    """Which steps there are, in words."""
    return f"steps {min(rows)} to {max(rows)}" if rows else "no steps"


def as_text(steps: list[int], different: list[Gap], largest: Gap, tolerance: float) -> str:
    """The result for a reader."""
    compared = f"{len(steps)} common steps, {steps[0]} to {steps[-1]}"
    if not different:
        within = f"equal within {tolerance:g} (largest gap {largest.relative:.3g})" if tolerance else "equal bit by bit"
        return f"{compared}: {within}"
    first = different[0]
    return (
        f"{compared}: {len(different)} numbers differ\n"
        f"first:   step {first.step}, {first.key}: {first.a!r} and {first.b!r}\n"
        f"largest: step {largest.step}, {largest.key}: {largest.a!r} and {largest.b!r}, "
        f"relative gap {largest.relative:.3g}"
    )


def missing(unmatched: dict[str, list[int]]) -> list[str]:
    """For a reader: which steps only one of the runs has, a line for each run that has any."""
    return [
        f"only in {name}: {len(steps)} steps, {steps[0]} to {steps[-1]}" for name, steps in unmatched.items() if steps
    ]


def as_json(steps: list[int], different: list[Gap], largest: Gap, unmatched: dict[str, list[int]]) -> str:
    """The result for a machine."""
    first = different[0] if different else None
    gap = largest.relative if math.isfinite(largest.relative) else None
    return json.dumps(
        {
            "steps": len(steps),
            "equal": not different,
            "first_differing_step": first and first.step,
            "first_differing_key": first and first.key,
            "largest_relative_gap": gap,
            "largest_gap_step": largest.step,
            "largest_gap_key": largest.key,
            "steps_only_in_a": unmatched["a"],
            "steps_only_in_b": unmatched["b"],
        }
    )


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
