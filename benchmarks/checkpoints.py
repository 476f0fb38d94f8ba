"""What conversions and saves cost beside a plain copy: `python -m benchmarks.checkpoints`. See --help.

The one idea: a disk's speed drifts, so each conversion and the copy take turns in one process, in a folder of the same
disk, and their ratio is what is told. Memory is the peak of a process of the tool's, above one that only imports, at
its own number of jobs and at more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
CONVERT = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]
IMPORTS = "import megatron3d.sources, megatron3d.convert, megatron3d.megatron_files, rich.progress"
JOBS = 4
"""Also measured, wherever fewer are the default."""
SHAPE = {
    "num_layers": 24,
    "hidden_size": 1024,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 16,
    "vocab_size": 24_000,
}
SMALL = {"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1408, "num_attention_heads": 8, "vocab_size": 8192}


def main(argv: Sequence[str]) -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to work; 6 GB are needed; default: the system's")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        found = conversions(Path(folder), flags.rounds)
    found["async save"] = held_up(flags.rounds)
    print(json.dumps(found) if flags.json else table(found))


def conversions(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds, ratio to the copy and peak memory of each conversion."""
    from tools import convert_checkpoint

    run([sys.executable, "-m", "benchmarks.checkpoints", "--make", str(folder / "native")])
    base = run([sys.executable, "-c", IMPORTS])
    ways = {"hf": ["--to", "hf"], "megatron": ["--to", "megatron", "--tp", "2", "--pp", "2"]}
    for name, words in ways.items():
        run([*CONVERT, "--load", folder / "native", "--save", folder / name, *words])
    jobs = {
        "native, tp 1 pp 1 -> tp 2 pp 2": ("native", ["--tp", "2", "--pp", "2"]),
        "native -> Hugging Face": ("native", ways["hf"]),
        "native -> Megatron-LM, tp 2 pp 2": ("native", ways["megatron"]),
        "Hugging Face -> native": ("hf", []),
        "Hugging Face -> Megatron-LM, tp 2 pp 2": ("hf", ways["megatron"]),
        "Megatron-LM, tp 2 pp 2 -> native": ("megatron", []),
        "Megatron-LM, tp 2 pp 2 -> Hugging Face": ("megatron", ways["hf"]),
    }
    found: dict[str, Any] = {name: {"seconds": [], "ratio": []} for name in jobs}
    size = sum(path.stat().st_size for path in (folder / "native").rglob("*") if path.is_file())
    lines = {
        name: ["--load", str(folder / source), "--save", str(folder / "out"), *words]
        for name, (source, words) in jobs.items()
    }
    for name, line in lines.items():
        for key, more in (("peak_mb", []), ("peak_mb_jobs", ["--jobs", str(JOBS)])):
            found[name][key] = run([*CONVERT, *line, *more]) - base
            shutil.rmtree(folder / "out")
    for _ in range(rounds):
        for name, line in lines.items():
            copied = timed(lambda: copy_synced(folder / "native", folder / "copy"))
            shutil.rmtree(folder / "copy")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                seconds = timed(lambda line=line: convert_checkpoint.main(line))  # type: ignore[misc]
            shutil.rmtree(folder / "out")
            found[name]["seconds"].append(seconds)
            found[name]["ratio"].append(seconds / copied)
    return {"bytes": size, "imports_mb": base, "conversions": found}


def copy_synced(source: Path, target: Path) -> None:
    """Every file, a MiB at a time, forced to the disk."""
    for path in source.rglob("*"):
        if path.is_file():
            to = target / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as reader, to.open("wb") as writer:
                shutil.copyfileobj(reader, writer, 1 << 20)
                writer.flush()
                os.fsync(writer.fileno())


def timed(action: Callable[[], object]) -> float:
    """Seconds, what was deleted before not counted."""
    os.sync()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def run(words: Sequence[object]) -> float:
    """The peak resident MB of a process, which must end well."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([str(word) for word in words], cwd=ROOT, stdout=quiet, stderr=quiet)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{words} ended with {process.returncode}")
    return usage.ru_maxrss * 1024 / 1e6


def make(folder: Path) -> None:
    """A model of 1.2 GB, weights in fp32."""
    from megatron3d.config import Config, ModelConfig
    from megatron3d.convert import write_native
    from megatron3d.params import ParamSpec, param_table
    from megatron3d.validate import resolve

    config = resolve(Config(model=ModelConfig(**SHAPE)), world_size=1)  # type: ignore[arg-type]
    specs: Mapping[str, ParamSpec] = {spec.name: spec for spec in param_table(config.model)}

    class Random:
        """A source of random weights."""

        kinds = ("weight",)
        meta: Mapping[str, Any] = {}

        def __init__(self) -> None:
            self.config = config

        def dtype(self, kind: str, name: str) -> torch.dtype:
            return torch.float32

        def read(self, kind: str, name: str) -> torch.Tensor:
            return torch.rand(specs[name].shape)

    write_native(Random(), folder)


def held_up(rounds: int) -> dict[str, Any]:
    """How long a step that saves is held up by --async-save, beside copies of the same state in memory."""
    from megatron3d.config import BatchConfig, Config, ModelConfig, OptimConfig
    from megatron3d.data import open_datasets
    from megatron3d.heap import keep_freed_memory
    from megatron3d.mesh import Mesh
    from megatron3d.trainer import Trainer
    from megatron3d.validate import resolve

    torch.set_num_threads(1)
    keep_freed_memory()
    config = resolve(
        Config(model=ModelConfig(**SMALL), optim=OptimConfig(), batch=BatchConfig(micro_batch_size=1)),  # type: ignore[arg-type]
        world_size=1,
    )
    config = replace(config, data=replace(config.data, mock_data=True))
    trainer = Trainer(config, Mesh.single(), open_datasets(config.data, config.model, 1))
    trainer.step()
    copies, begins = [], []
    state = [t for s in trainer.optimizer.spans for t in (s.master, s.exp_avg, s.exp_avg_sq) if t is not None]
    for _ in range(rounds):
        copies.append(timed(lambda: [tensor.clone() for tensor in state]))
        with tempfile.TemporaryDirectory() as folder:
            begins.append(timed(lambda: trainer.saver.begin(folder, trainer._counts(), behind=True)))
            trainer.saver.finish()
    size = sum(tensor.numel() * tensor.element_size() for tensor in state)
    ratios = [begin / copy for begin, copy in zip(begins, copies, strict=True)]
    return {"bytes": size, "copy_ms": [1e3 * c for c in copies], "begin_ms": [1e3 * b for b in begins], "ratio": ratios}


def table(found: Mapping[str, Any]) -> str:
    """For docs/checkpoints.md."""
    lines = [
        f"{found['bytes'] / 1e9:.2f} GB of weights; imports take {found['imports_mb']:.0f} MB.",
        "",
        "| conversion | seconds | x the copy with fsync (least - most) | peak above the imports, MB | "
        f"with --jobs {JOBS} |",
        "|---|---|---|---|---|",
    ]
    for name, one in found["conversions"].items():
        ratio = f"{statistics.median(one['ratio']):.2f} ({min(one['ratio']):.2f} - {max(one['ratio']):.2f})"
        peaks = f"{one['peak_mb']:.0f} | {one['peak_mb_jobs']:.0f}"
        lines.append(f"| {name} | {statistics.median(one['seconds']):.1f} | {ratio} | {peaks} |")
    held = found["async save"]
    ratio = f"{statistics.median(held['ratio']):.2f} ({min(held['ratio']):.2f} - {max(held['ratio']):.2f})"
    lines += [
        "",
        f"--async-save of {held['bytes'] / 1e6:.0f} MB holds a step up for "
        f"{statistics.median(held['begin_ms']):.0f} ms, {ratio} x a copy of the state in memory.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
