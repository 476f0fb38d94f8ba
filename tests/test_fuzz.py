"""150 wrong command lines, on 2 or 4 ranks without a launcher: each is refused by one rank, in one paragraph.

The lines are drawn in wrong_lines.py. Run as a program, this file is the driver: it imports what pretrain_gpt.py needs
before torch, reads lines as JSON, and forks each of them, rank by rank, with the variables that torchrun would set. So
a rank costs a small part of a second; and the driver has no torch to give: a rank that asks for it ends there, for it
has accepted its line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron3d.cli import parse
from megatron3d.config import ConfigError
from megatron3d.launch import Launch, user_errors
from megatron3d.resume import check_folders, check_loadable
from tests.wrong_lines import HERE, MISTAKES, Line, WrongLine, with_checkpoint, wrong_lines

ROOT = Path(__file__).resolve().parent.parent
COUNT, SAMPLE, SEED = 150, 30, 2
ACCEPTED = 99  # exit code of a rank that asked for torch
AT_ONCE = 120  # ranks that are alive together: most of their time they wait
PATIENCE = 60.0  # seconds until a rank is ended: it takes 6 of them, if the machine is not busy
LONGEST = 1000  # characters of a paragraph


# The driver -----------------------------------------------------------------------------------------------------------


class NoTorch(importlib.abc.MetaPathFinder):
    """Ends the process that asks for torch."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torch":
            os._exit(ACCEPTED)


def drive() -> None:
    """Lines from standard input, one JSON object each; to standard output, the ranks' exit codes by line and rank."""
    assert "torch" not in sys.modules
    sys.meta_path.insert(0, NoTorch())
    for module in ("pretrain_gpt", "megatron3d.data", "sentencepiece"):
        importlib.import_module(module)
    with contextlib.suppress(ConfigError):
        parse([], Launch())  # loads what is loaded late
    gc.freeze()
    waiting = [json.loads(text) for text in sys.stdin]
    running: dict[int, tuple[int, int, float]] = {}  # process -> line, rank, deadline
    codes: dict[int, dict[int, int]] = {line["number"]: {} for line in waiting}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            line = waiting.pop(0)
            for rank in range(line["processes"]):
                running[fork(line, rank)] = (line["number"], rank, time.monotonic() + PATIENCE)
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            number, rank, _ = running.pop(process)
            codes[number][rank] = os.waitstatus_to_exitcode(status)
            continue
        for process, (number, _, deadline) in running.items():
            if time.monotonic() > deadline or ACCEPTED in codes[number].values():
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    print(json.dumps(codes))


def fork(line: dict[str, Any], rank: int) -> int:
    """Starts a rank with streams, folder and variables of its own; its process."""
    if process := os.fork():
        return process
    os.chdir(line["folder"])
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{line['results']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    place = {"RANK": rank, "WORLD_SIZE": line["processes"], "LOCAL_RANK": rank}
    place |= {"LOCAL_WORLD_SIZE": line["processes"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": line["port"]}
    os.environ |= {**{name: str(value) for name, value in place.items()}, **line["env"]}
    code = run(line["words"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(words: Sequence[str]) -> int:
    """The exit code that `python pretrain_gpt.py words` would have."""
    try:
        with user_errors():
            importlib.import_module("pretrain_gpt").main(list(words))
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# The test -------------------------------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """What a rank left behind."""

    code: int
    out: str
    err: str


def lay_out(line: WrongLine | Line, folder: Path) -> list[str]:
    """Makes the files of a line; its words, with the folder in them."""
    folder.mkdir(parents=True)
    for name, content in line.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (folder / name).mkdir(exist_ok=True)
        else:
            (folder / name).write_bytes(content)
    words = line.words if isinstance(line, WrongLine) else line.words()
    return [word.replace(HERE, str(folder)) for word in words]


def start_all(lines: Sequence[WrongLine], folder: Path) -> list[list[Rank]]:
    """What the ranks of each line left behind, by line and rank."""
    orders = []
    for number, line in enumerate(lines):
        here, results = folder / str(number), folder / f"{number}.results"
        results.mkdir(parents=True)
        order = {"number": number, "words": lay_out(line, here), "folder": str(here), "results": str(results)}
        orders.append(order | {"processes": line.processes, "env": line.env, "port": 20000 + number})
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_fuzz"],
        input="\n".join(map(json.dumps, orders)),
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    codes = {int(number): ranks for number, ranks in json.loads(done.stdout).items()}
    return [
        [
            Rank(codes[number][str(rank)], *(told(order, rank, stream) for stream in ("out", "err")))
            for rank in range(line.processes)
        ]
        for number, (line, order) in enumerate(zip(lines, orders, strict=True))
    ]


def told(order: dict[str, Any], rank: int, stream: str) -> str:
    return Path(f"{order['results']}/{rank}.{stream}").read_text()


def complaints(line: WrongLine, ranks: Sequence[Rank], made: set[str]) -> list[str]:
    """What is wrong with the way a line was refused."""
    codes = [rank.code for rank in ranks]
    if ACCEPTED in codes:
        return ["accepted"]
    found = []
    if codes != [2] * len(codes):
        found.append(f"exit codes {codes}")
    speaking = [rank for rank in ranks if rank.out or rank.err]
    if len(speaking) != 1:
        found.append(f"{len(speaking)} ranks speak: {[(rank.out + rank.err)[:300] for rank in speaking]}")
    for rank in speaking[:1]:
        paragraph = rank.err.removesuffix("\n")
        if rank.out or not paragraph.startswith("error: ") or not paragraph.isprintable():
            found.append("not one printable paragraph on standard error")
        if len(paragraph) > LONGEST:
            found.append(f"{len(paragraph)} characters")
        if missing := [word for word in line.named if word not in paragraph]:
            found.append(f"does not name {missing}")
        if found:
            found.append((rank.out + rank.err)[:3000])
    if made:
        found.append(f"left {made}")
    return found


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def sample(count: int) -> list[WrongLine]:
    """So many of the lines, drawn at random, but one of each mistake before any other."""
    drawn = random.Random(SEED).sample(list(wrong_lines(COUNT, SEED)), COUNT)
    firsts = {line.mistake: line for line in reversed(drawn)}
    return [*firsts.values(), *(line for line in drawn if line is not firsts[line.mistake])][:count]


@pytest.mark.slow
@pytest.mark.parametrize("count", [SAMPLE, pytest.param(COUNT, marks=pytest.mark.soak)])
def test_a_wrong_line_is_refused_by_one_rank_in_one_paragraph(count: int, tmp_path: Path) -> None:
    """Exit code 2 on all ranks, before torch is imported, and no file is made."""
    lines = sample(count)
    for number, line in enumerate(lines):
        lay_out(line, tmp_path / "before" / str(number))
    results = start_all(lines, tmp_path / "after")
    failed = {}
    for number, (line, ranks) in enumerate(zip(lines, results, strict=True)):
        made = contents(tmp_path / "after" / str(number)) - contents(tmp_path / "before" / str(number))
        if found := complaints(line, ranks, made):
            words = [word[:60] for word in line.words]
            failed[number] = [line.mistake, words, line.env, line.named, found]
    assert failed == {}


def test_lines_are_right_but_for_their_mistake(tmp_path: Path) -> None:
    """Else a refusal would prove nothing about the mistake."""
    from megatron3d.data import open_datasets

    for number, wrong in enumerate(wrong_lines(COUNT, SEED)):
        line = wrong.before
        if number % 5 == 0:
            with_checkpoint(line)
        config = parse(lay_out(line, tmp_path / str(number)), Launch(world_size=line.processes, from_torchrun=True))
        if config.checkpoint.load:
            check_loadable(config)
        check_folders(config)
        open_datasets(config.data, config.model, config.run.seed)


def test_every_mistake_and_many_options_occur() -> None:
    lines = sample(COUNT)
    assert {line.mistake for line in sample(SAMPLE)} == {mistake.__name__ for mistake in MISTAKES}
    assert len({tuple(line.words) for line in lines}) == COUNT


if __name__ == "__main__":
    drive()
