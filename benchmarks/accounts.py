"""Where each row's time goes: the timeline of every layout of rows.py, as one table. See --help.

The one idea: a step on so many cores is a stock of processor time, cores x step, and all of it is accounted for. What
the ranks do is known by kind (spans.py), on the clock of the wall; where ranks share a core that clock also runs while
another one works, so a rank's kinds are scaled to the processor time that its main thread has had. What is left of the
stock nobody used: bubbles of the pipeline, waits for messages, and what the system does for them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers, table
from benchmarks.rows import ROWS, Row
from benchmarks.spans import ATTENTION, COPIES, HOST, MATRIX, OTHER, REST, VIEWS
from megatron3d.cli import parse_tool
from megatron3d.launch import user_errors

MARKS = ("<!-- written by benchmarks/accounts.py: begin -->", "<!-- written by benchmarks/accounts.py: end -->")
WORKING = {
    "products": (MATRIX,),
    "attention": (ATTENTION,),
    "norms, activations, loss, optimizer": (OTHER,),
    "copies": (COPIES,),
    "Python": (VIEWS, REST),
}
"""Column -> kinds of spans.py."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the account."""

    rows: tuple[str, ...] = tuple(row.key for row in ROWS)
    """Layouts."""
    steps: int = 3
    """Profiled steps of each."""
    timeout: int = 300
    """Seconds after which a run has failed."""
    write: str = ""
    """Markdown document whose table is replaced."""


def main(argv: Sequence[str]) -> int:
    """Profiles, prints and writes; 1 if a run failed."""
    flags = parse_tool(Flags, argv, description="Where the time of a step of this project goes, layout by layout.")
    document = peers.place_for_table(flags.write, MARKS)
    cores, done = peers.machine()["cores"], []
    for row in peers.chosen(flags.rows):
        done.append((row, outcome(row, flags)))
        print(f"{len(done)}/{len(flags.rows)} {row.key}", flush=True)
    rendered = "\n".join(lines(done, cores))
    print(rendered)
    if document:
        Path(flags.write).write_text(table.insert(document, rendered, MARKS))
    return int(any("failure" in found for _, found in done))


def outcome(row: Row, flags: Flags) -> dict[str, Any]:
    """What the timeline reports of a layout."""
    program = ["-m", "benchmarks.timeline", *row.contenders[0].flags.split(), "--steps", str(flags.steps), "--json"]
    return peers.run([*peers.torchrun(sys.executable, row.layout.ranks), *program], flags.timeout)


def lines(done: Sequence[tuple[Row, Mapping[str, Any]]], cores: int) -> Iterator[str]:
    """The table."""
    yield "| layout (ranks) | ms a step | " + " | ".join(WORKING) + " | nobody's |"
    yield "|---" * (3 + len(WORKING)) + "|"
    for row, found in done:
        if "failure" in found:
            yield f"| {row.title} ({row.layout.ranks}) | failed: {found['failure']} |" + " |" * (1 + len(WORKING))
        else:
            shares = account(found["ranks"], cores)
            cells = [f"{found['bare_step_ms']:,.0f}", *(f"{share:.0%}" for share in shares.values())]
            yield f"| {row.title} ({row.layout.ranks}) | " + " | ".join(cells) + " |"


def account(ranks: Sequence[Mapping[str, Any]], cores: int) -> dict[str, float]:
    """Column -> share of the cores' time in the profiled steps; what nobody used comes last. They add up to 1."""
    stock = cores * max(sum(rank["lanes"][HOST]["ms"].values()) for rank in ranks)
    used = dict.fromkeys(WORKING, 0.0)
    for rank in ranks:
        times = rank["lanes"][HOST]["ms"]
        working = {column: sum(times.get(kind, 0.0) for kind in kinds) for column, kinds in WORKING.items()}
        had = min(1.0, rank["processor_ms"] / sum(working.values()))
        for column, milliseconds in working.items():
            used[column] += had * milliseconds
    shares = {column: milliseconds / stock for column, milliseconds in used.items()}
    return {**shares, "nobody's": 1 - sum(shares.values())}


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
