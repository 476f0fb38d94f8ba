"""This project beside its peers: one problem, the layouts of rows.py, one table. See --help.

The one idea: a machine's speed drifts, so contenders take turns step by step (turns.py): plain PyTorch and all of a row
run together, but only one of them works at a time. Ratios are taken within such a round; in the next one another
contender is first. Each is a job of its own, started as a user would start it, with one thread a rank. Whatever fails
is reported with its last words.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks import problem, table
from benchmarks.rows import MODULES, PLAIN, ROWS, Contender, Library, Row
from benchmarks.turns import Program
from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError
from megatron3d.launch import user_errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGES: dict[Library, str] = {"torch": "torch", "deepspeed": "deepspeed", "megatron-core": "megatron-core"}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the comparison."""

    rows: tuple[str, ...] = tuple(row.key for row in ROWS)
    """Layouts to compare."""
    rounds: int = 3
    """How often each contender is started."""
    steps: int = problem.STEPS
    """Steps of a run; the first 3 are not timed."""
    deepspeed: str = ""
    """Python interpreter of an environment with DeepSpeed; empty: leave it out."""
    megatron_core: str = ""
    """Python interpreter of an environment with megatron-core; empty: leave it out."""
    timeout: int = 300
    """Seconds after which a start or a step has failed."""
    json: str = ""
    """File for all that was measured."""
    source: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Such a file: render its table again instead of measuring."""
    write: str = ""
    """Markdown document whose table is replaced."""


def main(argv: Sequence[str]) -> int:
    """Measures or reads, prints the table; 1 if some contender failed or computed something else."""
    flags = parse_tool(Flags, argv, description="Speed, losses and memory of this project and its peers, on CPUs.")
    if min(flags.rounds, flags.steps) < 1:
        raise ConfigError(f"--rounds {flags.rounds} --steps {flags.steps}: both must be at least 1.")
    document = place_for_table(flags.write)
    results = measured_before(flags.source) if flags.source else measure(flags)
    rendered = table.render(results)
    print(rendered)
    if document:
        Path(flags.write).write_text(table.insert(document, rendered))
    return 1 if table.problems(results) else 0


def measured_before(path: str) -> table.Results:
    """What an earlier comparison kept. Raises ConfigError where that cannot be read."""
    try:
        results: table.Results = json.loads(Path(path).read_text())
        table.render(results)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"--from {path} is not what --json writes: {type(error).__name__}: {error}.") from error
    return results


def place_for_table(path: str, marks: table.Marks = table.MARKS) -> str:
    """The document, found before the work is done to be one that can take the table; empty if there is none."""
    if not path:
        return ""
    try:
        document = Path(path).read_text()
        table.insert(document, "", marks)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--write {path}: {error}. Give a Markdown file such as docs/performance.md.") from None
    return document


def measure(flags: Flags) -> table.Results:
    """All rounds."""
    pythons, rows = interpreters(flags), chosen(flags.rows)
    results: table.Results = {
        "machine": machine(),
        "versions": {PACKAGES[library]: version(python, PACKAGES[library]) for library, python in pythons.items()},
        "rounds": flags.rounds,
        "steps": flags.steps,
        "left_out": [library for library in PACKAGES if library not in pythons],
        "speeds": speeds(flags.timeout),
        "runs": [],
    }
    begin, total = time.monotonic(), flags.rounds * len(rows)
    for done, (number, row) in enumerate(itertools.product(range(flags.rounds), rows), 1):
        results["runs"] += round_of(row, number, flags, pythons)
        if flags.json:  # after each round: who stops early keeps what there is
            Path(flags.json).write_text(json.dumps(results, indent=1) + "\n")
        left = (time.monotonic() - begin) / done * (total - done) / 60
        print(f"{done}/{total} {row.key}; {left:.0f} min left", flush=True)
    return results


def round_of(row: Row, number: int, flags: Flags, pythons: dict[Library, str]) -> list[dict[str, Any]]:
    """What plain PyTorch and a row's contenders reported, all having taken their steps in turns."""
    programs: dict[str, Program] = {}
    with contextlib.ExitStack() as stack:
        for contender in in_order(row, number, pythons):
            ranks = 1 if contender is PLAIN else row.layout.ranks
            words = command(contender, ranks, flags.steps, pythons)
            program = Program(words, ROOT, ranks=ranks, timeout=flags.timeout)
            programs[contender.name] = stack.enter_context(program)
        for _ in range(flags.steps + 1):  # in the last turn they report and leave
            for program in programs.values():
                program.turn()
        found = {name: outcome(program) for name, program in programs.items()}
    for name, one in found.items():
        told = f"{one['step_ms']:,.0f} ms a step" if "losses" in one else f"failed: {one['failure']}"
        print(f"{row.key}, {name}: {told}", flush=True)
    return [{"round": number, "row": row.key, "name": name, **one} for name, one in found.items()]


def interpreters(flags: Flags) -> dict[Library, str]:
    """Of the libraries that take part."""
    given: dict[Library, str] = {"deepspeed": flags.deepspeed, "megatron-core": flags.megatron_core}
    return {"torch": sys.executable, **{library: python for library, python in given.items() if python}}


def chosen(keys: Sequence[str]) -> list[Row]:
    """The rows of these names."""
    known = {row.key: row for row in ROWS}
    if not keys:
        raise ConfigError(f"--rows names no row. The rows are {', '.join(known)}.")
    if unknown := [key for key in keys if key not in known]:
        raise ConfigError(f"--rows {' '.join(unknown)}: there is no such row. The rows are {', '.join(known)}.")
    return [known[key] for key in keys]


def version(python: str, package: str) -> str:
    """Of a package in another environment."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            f"{python} is no Python interpreter that has {package}. Give the one of an environment with torch and "
            f"{package}, e.g. {package}/bin/python."
        ) from None


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cores": len(os.sched_getaffinity(0)), "cpu": cpu}


def in_order(row: Row, number: int, pythons: dict[Library, str]) -> list[Contender]:
    """Plain PyTorch and who can take part in a row; in each round another one is first."""
    able = [one for one in (PLAIN, *row.contenders) if one.library in ("plain", "ours") or one.library in pythons]
    first = number % len(able)
    return able[first:] + able[:first]


def command(contender: Contender, ranks: int, steps: int, pythons: dict[Library, str]) -> list[str]:
    """Starts a contender."""
    program = ["-m", MODULES[contender.library], *contender.flags.split()]
    if contender is PLAIN:
        return [sys.executable, *program, "--steps", str(steps)]
    steps_flag = "--train-steps" if contender.library == "ours" else "--steps"
    return [*torchrun(pythons.get(contender.library, sys.executable), ranks), *program, steps_flag, str(steps)]


def torchrun(python: str, ranks: int) -> list[str]:
    """Starts ranks that meet at a port of their own."""
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def speeds(timeout: int) -> dict[str, Any]:
    """Of bare products and messages."""
    outcome = run([*torchrun(sys.executable, 2), "-m", "benchmarks.speeds"], timeout)
    if "failure" in outcome:
        raise ConfigError(f"The speed of this machine could not be measured: {outcome['failure']}")
    return dict(outcome["speeds"])


def run(words: Sequence[str], timeout: float) -> dict[str, Any]:
    """What a program that runs alone reported."""
    with Program(words, ROOT, timeout=timeout) as program:
        return outcome(program)


def outcome(program: Program) -> dict[str, Any]:
    """What a program reported as a line of JSON, or its "failure"."""
    try:
        code, output = program.result()
    except TimeoutError as error:
        return {"failure": str(error)}
    reports = [line for line in output.splitlines() if line.startswith('{"')]
    if code == 0 and reports:
        return dict(json.loads(reports[-1]))
    said = words_of_ranks(output)
    errors = [line for line in said if "Error" in line]
    return {"failure": (errors or said or [f"exit code {code}"])[-1], "said": said[-30:]}


def words_of_ranks(output: str) -> list[str]:
    """Lines before torchrun's own report on a failure."""
    lines = itertools.takewhile(lambda line: "torch/distributed/elastic/" not in line, output.splitlines())
    return [line.strip() for line in lines if line.strip()]


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
