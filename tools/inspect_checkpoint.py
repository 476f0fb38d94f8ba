"""Look into a checkpoint of any known kind, verify it, or compare two. See --help; the work is in
megatron3d/contents.py."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError
from megatron3d.launch import user_errors


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    load: str = ""
    """Folder of the checkpoint; of a --save folder the newest whole one is taken."""
    verify: bool = False
    """Read every byte and hold it against its checksum."""
    diff: tuple[str, str] | None = None
    """Two folders: largest difference per tensor. The exit code is 1 if there is any."""
    weights_only: bool = False
    """With --diff: the weights alone, where one of the two has moments and the other has not."""
    vocab_size: int = 0
    """The true vocabulary, for a Megatron-LM checkpoint that does not say it."""
    every_layer: bool = False
    """A line for every tensor, instead of one for the same tensor of all layers."""
    json: bool = False
    """Print one JSON object."""


def main(argv: Sequence[str]) -> int:
    """Looks, prints; the exit code."""
    flags = parse_tool(Flags, argv, description="What is in a checkpoint; is it whole; how do two differ.")
    idle = flags.verify or flags.every_layer if flags.diff else flags.weights_only
    if bool(flags.load) == bool(flags.diff) or idle:
        raise ConfigError(
            "Give --load FOLDER, with --verify or --every-layer if wanted, or --diff FOLDER FOLDER, with "
            "--weights-only if wanted: one of the two."
        )
    return compare(*flags.diff, flags) if flags.diff else show(flags)


def show(flags: Flags) -> int:
    """The summary and the tree, after the check if there is to be one."""
    from megatron3d import contents
    from megatron3d.sources import open_source

    opened = open_source(Path(flags.load), vocab_size=flags.vocab_size)
    found: dict[str, Any] = contents.summary(opened)
    if flags.verify:
        found["verified_tensors"] = contents.verify(opened.source)
    lines = contents.tree(opened.source, every_layer=flags.every_layer)
    if flags.json:
        print(json.dumps({**found, "tree": [line._asdict() for line in lines]}))
        return 0
    kinds = ", ".join(
        f"{kind} {'/'.join(told['types'])} ({told['bytes'] / 1e6:,.1f} MB)" for kind, told in found["tensors"].items()
    )
    print(f"{found['path']}: {found['kind']}, {found['parameters']:,} parameters")
    print(f"tensors: {kinds}")
    if "saved_from" in found:
        layout = ", ".join(f"{name} {value}" for name, value in found["saved_from"].items())
        print(f"saved from: {layout}")
    for name, value in found["meta"].items():
        print(f"{name}: {json.dumps(value)}")
    table = Table("tensor", "shape", "types", "values", box=None)
    for line in lines:
        table.add_row(line.name, " x ".join(map(str, line.shape)), line.types, f"{line.values:,}")
    wide(table)
    for note in found["notes"]:
        print(f"note: {note}")
    if flags.verify:
        print(f"verified: {found['verified_tensors']} tensors are whole and finite")
    return 0


def compare(first: str, second: str, flags: Flags) -> int:
    """Differences of all tensors; 1 if there are any."""
    from megatron3d import contents
    from megatron3d.sources import kind_of, open_source

    a, b = (
        open_source(Path(path), vocab_size=flags.vocab_size if kind_of(Path(path)) == "megatron" else 0).source
        for path in (first, second)
    )
    console = Console(stderr=True)
    pairs = contents.differences(a, b, weights_only=flags.weights_only)
    quiet = not console.is_terminal
    found = list(track(pairs, "Comparing", console=console, transient=True, disable=quiet))
    differ = [one for one in found if one.largest != 0]
    if flags.json:
        print(json.dumps({"tensors": len(found), "differ": [dataclasses.asdict(one) for one in differ]}))
    else:
        table = Table("kind", "tensor", "largest difference", "relative", box=None)
        for one in differ:
            table.add_row(
                one.kind, one.name, one.what or f"{one.largest:.3e}", "" if one.what else f"{one.relative:.1e}"
            )
        if differ:
            wide(table)
        print(f"{len(differ)} of {len(found)} tensors differ")
    return int(bool(differ))


def wide(table: Table) -> None:
    """Prints a table whose names are not cut, however narrow the console."""
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has seen enough: no reason for a traceback
    with user_errors():
        sys.exit(main(sys.argv[1:]))
