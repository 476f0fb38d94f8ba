"""The account of a step as text and as a Chrome trace: tables, a drawing of one row per rank, a JSON file.

The one idea: a chart is a pure function of the profiles of all ranks. What is in a profile, and how its time is
divided, is in spans.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.spans import HOST, MESSAGE, PHASE, REST, VIEWS, WORK, Profile, Span, kernel_kind, kind

LETTERS = {
    f"{PHASE}forward": "F",
    f"{PHASE}backward": "B",
    f"{PHASE}optimizer": "o",
    f"{PHASE}reduce": "d",
    f"{PHASE}gather": "d",
    f"{PHASE}data": ".",
    f"{PHASE}pipeline wait": "w",
    f"{MESSAGE}pp": "w",
    f"{MESSAGE}pp_back": "w",
    f"{MESSAGE}tp": "t",
    f"{MESSAGE}dp": "d",
    f"{MESSAGE}world": "a",
}
NOTHING = "."
LEGEND = "F forward, B backward, w pipeline wait, t tp, d dp, a all ranks, c a device's collective, o optimizer, . else"
COLUMNS, FINENESS = 100, 100  # of a drawing, and looks per column

# Tables ---------------------------------------------------------------------------------------------------------------


def tables(summaries: Sequence[Mapping[str, Any]]) -> str:
    """A table of milliseconds per lane, ranks to the right and their mean last, and one of counts."""
    lanes = list(dict.fromkeys(lane for rank in summaries for lane in rank["lanes"]))
    parts = [_table(f"ms per step, {lane}", _times([_ms(rank, lane) for rank in summaries])) for lane in lanes]
    return "\n\n".join([*parts, _table("counts per step", _counts(summaries, lanes))])


Rows = list[tuple[str, list[float]]]
FIGURES = {
    "main thread on a processor, ms": "processor_ms",
    "allocations": "allocations",
    "allocations, MiB": "allocated_mib",
}
"""Title -> key in a summary."""


def _ms(rank: Mapping[str, Any], lane: str) -> Mapping[str, float]:
    return dict(rank["lanes"].get(lane, {"ms": {}})["ms"])


def _times(ranks: Sequence[Mapping[str, float]]) -> Rows:
    found = {name for rank in ranks for name in rank}
    waits = sorted(found - {*WORK, VIEWS, REST})
    order = [name for name in (*WORK, VIEWS, *waits, REST) if name in found]
    rows = [(name, [rank.get(name, 0.0) for rank in ranks]) for name in order]
    return [*rows, ("total", [sum(rank.values()) for rank in ranks])]


def _counts(ranks: Sequence[Mapping[str, Any]], lanes: Iterable[str]) -> Rows:
    rows: Rows = [
        (f"operations, {lane}", [rank["lanes"].get(lane, {"operations": 0})["operations"] for rank in ranks])
        for lane in lanes
    ]
    rows += [(name, [rank[key] for rank in ranks]) for name, key in FIGURES.items()]
    reads = sorted({name for rank in ranks for name in rank["host_reads"]})
    rows += [(f"host reads, {name}", [rank["host_reads"].get(name, 0.0) for rank in ranks]) for name in reads]
    nothing = {"count": 0.0, "mib": 0.0}
    for message in sorted({name for rank in ranks for name in rank["messages"]}):
        told = [rank["messages"].get(message, nothing) for rank in ranks]
        rows += [(message, [one["count"] for one in told]), (f"{message}, MiB", [one["mib"] for one in told])]
    return rows


def _table(title: str, rows: Rows) -> str:
    width = max(len(title), *(len(name) for name, _ in rows))
    heads = [*(f"rank {rank}" for rank in range(len(rows[0][1]))), "mean"]
    lines = [title.ljust(width) + "".join(head.rjust(10) for head in heads)]
    for name, values in rows:
        cells = [*values, sum(values) / len(values)]
        lines.append(name.ljust(width) + "".join(f"{value:10.1f}" for value in cells))
    return "\n".join(lines)


# The drawing ----------------------------------------------------------------------------------------------------------


def drawing(profiles: Sequence[Profile], columns: int = COLUMNS) -> str:
    """The last step of all ranks on one clock: in each column the letter of what took most of it."""
    steps = [profile.steps[-1] for profile in profiles]
    begin, end = min(step.start for step in steps), max(step.end for step in steps)
    rows = [f"last step, {(end - begin) / columns / 1e6:.2f} ms a column: {LEGEND}"]
    for rank, profile in enumerate(profiles):
        host = _paint((span for span in profile.spans if span.lane == HOST), begin, end, columns * FINENESS)
        rows.append(f"rank {rank:<4} {_thin(host, columns)}")
        if device := [span for span in profile.spans if span.lane != HOST]:
            rows.append(f"   device {_thin(_paint_device(device, host, begin, end), columns)}")
    return "\n".join(rows)


def _paint(spans: Iterable[Span], begin: int, end: int, looks: int) -> list[str]:
    """What goes on at each of so many moments: inner spans are painted over outer ones."""
    row = [NOTHING] * looks
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if letter := LETTERS.get(span.name):
            first, last = (_look(time, begin, end, looks) for time in (span.start, span.end))
            row[first:last] = letter * (last - first)
    return row


def _paint_device(kernels: Iterable[Span], host: Sequence[str], begin: int, end: int) -> list[str]:
    """A kernel has the letter of what the host did when it launched it; collectives lie under what hides them."""
    row = [NOTHING] * len(host)
    for kernel in sorted(kernels, key=lambda kernel: kernel_kind(kernel.name) != "collectives"):
        first, last, cause = (_look(t, begin, end, len(host)) for t in (kernel.start, kernel.end, kernel.cause))
        letter = "c" if kernel_kind(kernel.name) == "collectives" else host[min(cause, len(host) - 1)]
        row[first:last] = letter * (last - first)
    return row


def _look(time: int, begin: int, end: int, looks: int) -> int:
    return min(max(round((time - begin) / (end - begin) * looks), 0), looks)


def _thin(row: Sequence[str], columns: int) -> str:
    each = len(row) // columns
    return "".join(Counter(row[i * each : (i + 1) * each]).most_common(1)[0][0] for i in range(columns))


# The trace ------------------------------------------------------------------------------------------------------------


def chrome_trace(profiles: Sequence[Profile]) -> dict[str, Any]:
    """For chrome://tracing or Perfetto: a process per rank, a thread per lane, messages from start to end above."""
    events: list[dict[str, Any]] = []
    first = min(step.start for profile in profiles for step in profile.steps)
    for rank, profile in enumerate(profiles):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        last = 1e-9 * profile.steps[-1].end
        for name, start, end, lane, _ in profile.spans:
            category = (kind(name) if lane == HOST else kernel_kind(name)) or REST
            times = {"ts": (start - first) / 1e3, "dur": (end - start) / 1e3}
            events.append({"ph": "X", "name": name, "cat": category, "pid": rank, "tid": lane, **times})
        for message in profile.messages:
            name = f"{message.axis} {message.operation}"
            same = {"name": name, "cat": f"messages, {message.axis}", "pid": rank, "tid": HOST, "id": message.number}
            began, ended = (1e6 * (time - 1e-9 * first) for time in (message.began, message.ended or last))
            events.append({"ph": "b", "ts": began, "args": {"bytes": message.size}, **same})
            events.append({"ph": "e", "ts": ended, **same})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
