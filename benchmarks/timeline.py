"""Where the time of our training step goes: `torchrun --nproc-per-node 4 -m benchmarks.timeline --tp 2 --pp 2`.

The one idea: torch's profiler knows the ops; the trainer's phases and the waits for messages are recorded beside them,
so that every nanosecond has an owner (spans.py). Flags that are not this file's are the trainer's. A profile costs time
itself, which is told beside the step's time without it.

    --steps N     profiled steps, whose mean is shown (3)
    --trace FILE  a Chrome trace of all ranks, for chrome://tracing or Perfetto
    --json        the figures as one line of JSON instead of tables and drawing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import charts, problem
from benchmarks.ours import FLAGS, ProblemData, our_weights
from benchmarks.spans import MESSAGE, PHASE, STEP, Profile, read, summary
from megatron3d.cli import parse
from megatron3d.comm import gather_to_first
from megatron3d.config import ConfigError
from megatron3d.data import Datasets
from megatron3d.flight import Message, answering
from megatron3d.heap import keep_freed_memory
from megatron3d.launch import launch_from_environment, leave, user_errors
from megatron3d.mesh import Mesh, pick_device
from megatron3d.timers import Phase, Timers
from megatron3d.trainer import Trainer

HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
BARE_STEPS = 3  # timed without the profiler
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as c10 numbers them


@contextlib.contextmanager
def watched(mesh: Mesh) -> Iterator[tuple[list[Message], list[str]]]:
    """While inside: messages as they begin, and the names of reads of tensors by the host."""
    messages: list[Message] = []
    reads: list[str] = []
    begin = mesh.recorder.begin

    def kept(operation: str, axis: str, peers: tuple[int, ...], size: int) -> Message:
        message = begin(operation, axis, peers, size)
        messages.append(message)
        return message

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.append(name)
            return original(self, *args, **kwargs)

        return noted

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(mesh.recorder, "begin", kept))
        for name in HOST_READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, counted(name)))
        yield messages, reads


@contextlib.contextmanager
def annotated() -> Iterator[None]:
    """While inside: every phase, and every call that starts a message or waits for one, is a span of the profiler."""

    @contextlib.contextmanager
    def spanned(message: Message | None, peers: Sequence[int]) -> Iterator[None]:
        assert message is not None, "every message is entered"
        with record_function(f"{MESSAGE}{message.axis}"), answering(message, peers):
            yield

    def phase(_: Timers, name: Phase) -> AbstractContextManager[None]:
        return record_function(f"{PHASE}{name}")

    with mock.patch("megatron3d.comm.answering", spanned), mock.patch.object(Timers, "__call__", phase):
        yield


def profiled(trainer: Trainer, steps: int) -> Profile:
    """The next `steps` steps of this rank, after one that only starts the profiler; the trainer's log level is 1."""
    assert trainer.timers is not None, "phases are told to a trainer that keeps times"
    mesh, device = trainer.mesh, trainer.mesh.device.type
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with annotated(), profile(activities=activities, profile_memory=True) as profiler:
        trainer.step()
        with watched(mesh) as (messages, reads):
            begin = time.thread_time()
            for _ in range(steps):
                with record_function(STEP):
                    trainer.step()
            processor_seconds = time.thread_time() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    spans, allocations = read(trace, DEVICE_TYPES[device])
    return Profile(spans, allocations, messages, reads, processor_seconds)


def bare_ms(trainer: Trainer) -> list[float]:
    """Milliseconds of steps without a profiler, after the first ones, which are slower."""
    times = []
    for _ in range(problem.WARMUP + BARE_STEPS):
        begin = time.perf_counter()
        trainer.step()
        times.append(1e3 * (time.perf_counter() - begin))
    return times[problem.WARMUP :]


def build(argv: Sequence[str]) -> Trainer:
    """Our trainer on the problem, as ours.py runs it."""
    torch.set_num_threads(1)
    launch = launch_from_environment()
    config = parse([*FLAGS.split(), "--log-level", "1", *argv], launch)
    device = pick_device(config.run.device, launch)
    if device.type == "cpu":
        keep_freed_memory()
    mesh = Mesh.create(config.parallel, launch, device, deterministic=config.run.deterministic)
    trainer = Trainer(config, mesh, Datasets(ProblemData(), None, ""))
    trainer.weights.load(our_weights())
    trainer.optimizer.reset_masters()
    return trainer


def main(argv: list[str]) -> None:
    """Profiles and reports."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trace", default="")
    parser.add_argument("--json", action="store_true")
    wanted, others = parser.parse_known_args(argv)
    if wanted.steps < 1:
        raise ConfigError(f"--steps {wanted.steps}: a profile needs at least one step, e.g. --steps 3")
    trainer = build(others)
    mesh = trainer.mesh
    bare = gather_to_first(bare_ms(trainer), mesh.control)
    profiles = gather_to_first(profiled(trainer, wanted.steps), mesh.control)
    if mesh.is_main:
        step = statistics.median(max(times) for times in zip(*bare, strict=True))
        print(report(profiles, step, as_json=wanted.json), flush=True)
        if wanted.trace:
            Path(wanted.trace).write_text(json.dumps(charts.chrome_trace(profiles)))
    mesh.close()
    leave(0)


def report(profiles: Sequence[Profile], bare_step_ms: float, *, as_json: bool) -> str:
    """What is printed."""
    ranks = [summary(profile) for profile in profiles]
    steps = len(profiles[0].steps)
    if as_json:
        return json.dumps({"steps": steps, "bare_step_ms": bare_step_ms, "ranks": ranks})
    first = f"mean of {steps} profiled steps; a step without the profiler takes {bare_step_ms:.1f} ms"
    return "\n\n".join([first, charts.tables(ranks), charts.drawing(profiles)])


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
