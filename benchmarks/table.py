"""The results as a Markdown table, and its place in a document.

The one idea: a pure function of what peers.py measured (its --json), so that the table can be written again without
running anything. A contender's speed is its ratio to plain PyTorch, step by step, as the two took them in turns; of a
round's steps the median counts, of several rounds the median again, with the least and the most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.bounds import HIDDEN, Speeds, step_seconds
from benchmarks.problem import SHAPE, WARMUP, timed
from benchmarks.rows import OURS, PLAIN, ROWS, Layout, Row

Marks = tuple[str, str]
MARKS: Marks = ("<!-- written by benchmarks/peers.py: begin -->", "<!-- written by benchmarks/peers.py: end -->")
LOSS_GAP = 2e-6  # two units in the last place of a loss of 9 in fp32
HEADER = (
    "| layout (ranks) | contender | x plain (least - most) | goal | bound | of bound | loss gap | MiB a rank |",
    "|---|---|---|---|---|---|---|---|",
)
Results = dict[str, Any]


class Figures(NamedTuple):
    """Of one contender in one layout, over all rounds."""

    ratios: list[float]
    """Speed relative to plain PyTorch in each round; empty where every run failed."""
    loss_gap: float
    """Largest difference of a step's loss from plain PyTorch's."""
    mib: float
    """Peak memory above imports of the rank that had most."""
    failures: list[str]
    """Last words of the runs that failed."""


def figures(results: Results, row: str, name: str) -> Figures | None:
    """Of what ran; None where it did not."""
    runs = [run for run in results["runs"] if (run["row"], run["name"]) == (row, name)]
    plain = {run["round"]: run for run in plain_runs(results) if run["row"] == row}
    done = [(run, plain[run["round"]]) for run in runs if "losses" in run and run["round"] in plain]
    gaps = [_apart(*pair) for run, other in done for pair in zip(run["losses"], other["losses"], strict=True)]
    if not runs:
        return None
    return Figures(
        ratios=[_ratio(run, other) for run, other in done],
        loss_gap=max(gaps, default=0.0),
        mib=max((max(run["peak_mib"]) for run, _ in done), default=0.0),
        failures=[run["failure"] for run in runs if "failure" in run],
    )


def _ratio(run: dict[str, Any], plain: dict[str, Any]) -> float:
    """How often a run took a step while plain PyTorch took one; of the timed steps the median."""
    return statistics.median(b / a for a, b in zip(timed(run["steps_ms"]), timed(plain["steps_ms"]), strict=True))


def _apart(a: float, b: float) -> float:
    """How far two losses are apart; one that is not a number is as far as can be."""
    return math.inf if math.isnan(a - b) else abs(a - b)


def plain_runs(results: Results) -> list[dict[str, Any]]:
    """Runs of plain PyTorch, one in each round of each row."""
    return [run for run in results["runs"] if run["name"] == PLAIN.name and "losses" in run]


def bound(results: Results, layout: Layout) -> float:
    """Of the ratio to plain PyTorch."""
    seconds = statistics.median(run["step_ms"] for run in plain_runs(results)) / 1e3
    return seconds / step_seconds(layout, Speeds.from_json(results["speeds"]), results["machine"]["cores"])


def render(results: Results) -> str:
    """The table, and what has to be known to read it."""
    if not plain_runs(results):
        return "\n".join(["Plain PyTorch never came to its end.", "", *(f"- {told}" for told in problems(results))])
    lines = [*HEADER]
    for row in ROWS:
        for contender in row.contenders:
            if found := figures(results, row.key, contender.name):
                ours = contender.name == OURS
                title = f"{row.title} ({row.layout.ranks})" if ours else ""
                lines.append(_line(title, contender.name, found, _aims(results, row, found) if ours else ["", "", ""]))
    return "\n".join([*lines, "", *(f"- {note}" for note in _notes(results))])


def _line(title: str, name: str, found: Figures, aims: list[str]) -> str:
    speed, gap, mib = "failed", "", ""
    if found.ratios:
        speed, gap, mib = _spread(found.ratios), _gap(found.loss_gap), f"{found.mib:.0f}"
    return "| " + " | ".join([title, name, speed, *aims, gap, mib]) + " |"


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}" + f" ({min(ratios):.2f} - {max(ratios):.2f})" * (len(ratios) > 1)


def _gap(gap: float) -> str:
    return f"{gap:.1e}" + " **differs**" * (gap > LOSS_GAP)


def _aims(results: Results, row: Row, found: Figures) -> list[str]:
    """Goal, bound, and how near the bound is."""
    most = bound(results, row.layout)
    share = f"{statistics.median(found.ratios) / most:.0%}" if found.ratios else ""
    return [f"{row.goal:.2f}", f"{most:.2f}", share]


def _notes(results: Results) -> Iterator[str]:
    """Below the table."""
    machine, speeds, plain = results["machine"], Speeds.from_json(results["speeds"]), plain_runs(results)
    versions = ", ".join(f"{library} {version}" for library, version in results["versions"].items())
    yield f"{machine['cores']} cores ({machine['cpu']}), {versions}."
    yield f"{results['rounds']} rounds of {results['steps']} steps, the first {WARMUP} not timed."
    milliseconds, mib = [run["step_ms"] for run in plain], max(max(run["peak_mib"]) for run in plain)
    tokens = SHAPE.global_batch * SHAPE.seq / statistics.median(milliseconds) * 1e3
    least, most = min(milliseconds), max(milliseconds)
    yield f"Plain PyTorch: {tokens:,.0f} tokens/s, {least:,.0f} - {most:,.0f} ms a step, {mib:.0f} MiB."
    layer, head = (1e3 * sum(part[1]) for part in (speeds.layer, speeds.head))
    yield (
        f"Bare products of a microbatch: {layer:.1f} ms a layer, {head:.1f} ms the head, forward and backward. "
        f"Two ranks swap {HIDDEN // 1024} KiB in {1e3 * HIDDEN * speeds.byte:.2f} ms."
    )
    yield from problems(results)
    for library in results["left_out"]:
        yield f"{library} was left out: no interpreter was given."


def problems(results: Results) -> list[str]:
    """Contenders that failed, or whose losses are not plain PyTorch's."""
    found = []
    for key, name in [(row.key, one.name) for row in ROWS for one in (PLAIN, *row.contenders)]:
        one = figures(results, key, name)
        if one and one.failures:
            found.append(f"{key}, {name}: {len(one.failures)} runs failed, the last one with `{one.failures[-1]}`.")
        if one and one.loss_gap > LOSS_GAP:
            found.append(f"{key}, {name}: losses differ from plain PyTorch's by up to {one.loss_gap:.1e}.")
    return found


def insert(document: str, table: str, marks: Marks = MARKS) -> str:
    """The document with what lies between its two marks replaced."""
    begin, end = marks
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document lacks the lines {begin} and {end}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"
