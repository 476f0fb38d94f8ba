"""Who had each nanosecond of a training step: from the events of a profiler to milliseconds by kind of work.

The one idea: a span counts for the time that no span inside it has, so the kinds add up to the step, and what is in no
kind is the rest: Python, and a processor that others had. Pure: what records the events is in timeline.py, how the
account is shown, in charts.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron3d.flight import Message

MIB = 1 << 20
HOST = "host"

# Names under which timeline.py records what torch knows nothing of.
STEP, PHASE, MESSAGE = "step", "phase: ", "message: "

MATRIX, ATTENTION, OTHER, COPIES = "matrix products", "attention", "other computation", "copies and fills"
WORK = (MATRIX, ATTENTION, OTHER, COPIES)
VIEWS = "views and allocations"
AXES = {"pp": "pipeline", "pp_back": "pipeline"}  # axes that are told under another name
REST = "rest"


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


MATRIX_OPS = _ops("mm addmm addmm_ bmm baddbmm baddbmm_ matmul linear mv addmv addmv_ einsum")
COPY_OPS = _ops("copy_ cat stack fill_ zero_ constant_pad_nd repeat _foreach_copy_ _foreach_zero_")
# They only name or reserve memory, or hand over to another op, which is then inside and counts.
VIEW_OPS = _ops(
    "alias as_strided chunk clone contiguous detach detach_ empty empty_like empty_strided expand expand_as flatten "
    "full full_like item lift_fresh narrow new_empty new_empty_strided new_full new_ones new_zeros ones ones_like pad "
    "permute promote_types reshape resize_ resolve_conj resolve_neg result_type scalar_tensor select set_ slice split "
    "split_with_sizes squeeze t to _to_copy transpose unbind unflatten _unsafe_view unsqueeze view view_as zeros "
    "zeros_like"
)


class Span(NamedTuple):
    """Something that took time; nanoseconds since the epoch, which is what ranks have in common."""

    name: str
    start: int
    end: int
    lane: str = HOST
    """`host`, or a stream of the device."""
    cause: int = 0
    """When the host launched it, if it is the device's."""


@dataclass(frozen=True)
class Profile:
    """What one rank did in its profiled steps."""

    spans: Sequence[Span]
    allocations: Sequence[int]
    """Bytes of each."""
    messages: Sequence[Message]
    host_reads: Sequence[str]
    """What asked a tensor for its values: `item`, `tolist`, ..."""
    processor_seconds: float
    """For how long a processor ran the main thread; of the rest it waited, or others had the processor."""

    @property
    def steps(self) -> list[Span]:
        """One span per step."""
        return [span for span in self.spans if span.lane == HOST and span.name == STEP]


class Account(NamedTuple):
    """Of one lane."""

    nanoseconds: Mapping[str, int]
    """By kind; the rest is in it, so they add up to the wall time."""
    operations: int
    """Ops, or kernels, that work."""


# From torch's trace ---------------------------------------------------------------------------------------------------


def read(trace: Mapping[str, Any], device_type: int) -> tuple[list[Span], list[int]]:
    """Spans of the steps in one of torch.profiler's traces, and the bytes of each allocation on `device_type` (as c10
    numbers them: 0 is the CPU).

    All threads of the host are one lane: autograd's thread, if it has one, works while the main thread waits for it.
    Annotations of others are left out: those of gloo last until the message has arrived, whatever else goes on.
    """
    events, base = trace["traceEvents"], int(trace["baseTimeNanoseconds"])

    def at(event: Mapping[str, Any]) -> int:
        return base + round(1e3 * float(event["ts"]))

    spans, allocations = [], []
    launches = {
        event["args"]["correlation"]: at(event)
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    for event in events:
        name, category, start = event["name"], event.get("cat"), at(event) if "ts" in event else 0
        end = start + round(1e3 * float(event.get("dur", 0)))
        if category == "cpu_op" or (category == "user_annotation" and _is_ours(name)):
            spans.append(Span(name, start, end))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            arguments = event["args"]
            cause = launches.get(arguments.get("correlation"), start)
            spans.append(Span(name, start, end, f"stream {arguments['stream']}", cause))
        elif name == "[memory]" and event["args"]["Device Type"] == device_type:
            allocations.append((start, event["args"]["Bytes"]))
    steps = [span for span in spans if span.name == STEP]
    within = [clipped for span in spans for clipped in _within(span, steps)]
    return within, [size for time, size in allocations if size > 0 and any(s.start <= time < s.end for s in steps)]


def _is_ours(name: str) -> bool:
    return name == STEP or name.startswith((PHASE, MESSAGE))


def _within(span: Span, steps: Iterable[Span]) -> list[Span]:
    """The span, cut at the end of the step that it begins in; nothing if it begins in none."""
    return [span._replace(end=min(span.end, step.end)) for step in steps if step.start <= span.start < step.end]


# Kinds of work --------------------------------------------------------------------------------------------------------


def kind(name: str, around: str = "") -> str | None:
    """What a span of the host does, given the name of the span around it; None for what is no kind of its own."""
    if name.startswith(MESSAGE):
        return f"{_axis(name)} wait"
    if name.startswith("c10d::"):
        return f"{_axis(around)} start" if around.startswith(MESSAGE) else "other start"
    space, _, op = name.rpartition("::")
    if space != "aten":
        return None
    if op in VIEW_OPS:
        return VIEWS
    if "scaled_dot_product" in op or "attention" in op:
        return ATTENTION
    return MATRIX if op in MATRIX_OPS else COPIES if op in COPY_OPS else OTHER


def kernel_kind(name: str, around: str = "") -> str:
    """What a kernel of a CUDA device does, from the names that cuBLAS, CUTLASS, cuDNN and NCCL give theirs."""
    words = name.lower()
    for found, parts in (
        ("collectives", ("nccl",)),
        (ATTENTION, ("flash", "fmha", "attention")),
        (MATRIX, ("gemm", "gemv", "nvjet", "xmma", "cutlass", "cublas", "splitk")),
        (COPIES, ("memcpy", "memset", "copy", "fillfunctor", "catarray")),
    ):
        if any(part in words for part in parts):
            return found
    return OTHER


def _axis(name: str) -> str:
    axis = name.removeprefix(MESSAGE)
    return AXES.get(axis, axis)


# The account ----------------------------------------------------------------------------------------------------------


class _Node(NamedTuple):
    """A span in its place."""

    span: Span
    around: list[int]
    """Indices of those that it is in, outermost first."""


def _nested(spans: Iterable[Span]) -> list[_Node]:
    """By time, outer before inner. One that lasts beyond the span that it begins in is cut there."""
    nodes: list[_Node] = []
    around: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while around and nodes[around[-1]].span.end <= span.start:
            around.pop()
        if around:
            span = span._replace(end=min(span.end, nodes[around[-1]].span.end))
        nodes.append(_Node(span, list(around)))
        around.append(len(nodes) - 1)
    return nodes


def account(spans: Iterable[Span], wall: int, kind: Callable[[str, str], str | None] = kind) -> Account:
    """Time by kind of one lane, and how many ops work: those of a working kind with none of the same kind inside."""
    nodes = _nested(spans)
    kinds = [kind(span.name, nodes[around[-1]].span.name if around else "") for span, around in nodes]
    own = [span.end - span.start for span, _ in nodes]
    outer: set[int] = set()
    for i, (span, around) in enumerate(nodes):
        if around:
            own[around[-1]] -= span.end - span.start
        outer |= {j for j in around if kinds[j] == kinds[i]}
    time: Counter[str] = Counter()
    for what, nanoseconds in zip(kinds, own, strict=True):
        if what is not None:
            time[what] += nanoseconds
    time[REST] = wall - sum(time.values())
    working = sum(what in (*WORK, "collectives") and i not in outer for i, what in enumerate(kinds))
    return Account(time, working)


def accounts(profile: Profile) -> dict[str, Account]:
    """By lane, the host first."""
    wall = sum(step.end - step.start for step in profile.steps)
    streams = sorted({span.lane for span in profile.spans} - {HOST})
    lanes = {lane: [span for span in profile.spans if span.lane == lane] for lane in (HOST, *streams)}
    return {lane: account(spans, wall, kind if lane == HOST else kernel_kind) for lane, spans in lanes.items()}


def summary(profile: Profile) -> dict[str, Any]:
    """What a machine may want of a rank; all figures per step."""
    steps = len(profile.steps)
    messages: dict[str, list[int]] = {}
    for message in profile.messages:
        messages.setdefault(f"{message.axis} {message.operation}", []).append(message.size)
    return {
        "lanes": {
            lane: {"ms": {name: t / steps / 1e6 for name, t in time.items()}, "operations": operations / steps}
            for lane, (time, operations) in accounts(profile).items()
        },
        "allocations": len(profile.allocations) / steps,
        "allocated_mib": sum(profile.allocations) / steps / MIB,
        "host_reads": {name: count / steps for name, count in sorted(Counter(profile.host_reads).items())},
        "processor_ms": 1e3 * profile.processor_seconds / steps,
        "messages": {
            name: {"count": len(sizes) / steps, "mib": sum(sizes) / steps / MIB}
            for name, sizes in sorted(messages.items())
        },
    }
