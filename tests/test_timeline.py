"""The account of a training step: by hand from canned events, and once from two real ranks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import charts, spans, timeline
from benchmarks.spans import Profile, Span, account, kernel_kind, kind, read, summary
from megatron3d import comm
from megatron3d.config import Config, LogConfig
from megatron3d.flight import Message
from megatron3d.mesh import Mesh
from megatron3d.timers import Timers
from megatron3d.trainer import Trainer
from tests import toy
from tests.ranks import on_mesh
from tests.test_steady import closed_form

# Kinds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "around", "expected"),
    [
        ("aten::mm", "aten::matmul", "matrix products"),
        ("aten::addmm_", "_ColumnLinearBackward", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "", "attention"),
        ("aten::copy_", "aten::_to_copy", "copies and fills"),
        ("aten::_to_copy", "aten::to", "views and allocations"),
        ("aten::empty_strided", "", "views and allocations"),
        ("aten::silu", "_SwiGLU", "other computation"),
        ("message: tp", "_ColumnLinear", "tp wait"),
        ("message: pp_back", "phase: pipeline wait", "pipeline wait"),
        ("c10d::recv_", "message: tp", "tp start"),
        ("c10d::send", "message: pp", "pipeline start"),
        ("c10d::allgather_", "_ColumnLinear", "other start"),
        ("_ColumnLinear", "phase: forward", None),
        ("autograd::engine::evaluate_function: MmBackward0", "", None),
        ("phase: forward", "step", None),
        ("step", "", None),
    ],
)
def test_the_kind_of_a_span(name: str, around: str, expected: str | None) -> None:
    assert kind(name, around) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64>", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copies and fills"),
        ("_rms_norm_forward", "other computation"),
    ],
)
def test_the_kind_of_a_kernel(name: str, expected: str) -> None:
    assert kernel_kind(name) == expected


def test_an_op_has_one_kind() -> None:
    assert not spans.MATRIX_OPS & spans.COPY_OPS and not spans.VIEW_OPS & (spans.MATRIX_OPS | spans.COPY_OPS)


# The account ----------------------------------------------------------------------------------------------------------

STEP = [
    Span("step", 0, 1000),
    Span("phase: forward", 10, 600),
    Span("_ColumnLinear", 20, 500),
    Span("message: tp", 30, 230),
    Span("c10d::recv_", 40, 90),
    Span("aten::linear", 300, 480),
    Span("aten::matmul", 310, 470),
    Span("aten::mm", 320, 460),
    Span("aten::copy_", 330, 340),
    Span("aten::add", 520, 560),
    Span("aten::to", 525, 545),
    Span("aten::_to_copy", 530, 540),
    Span("aten::copy_", 532, 536),
    Span("aten::to", 570, 571),
    Span("phase: pipeline wait", 700, 800),
    Span("message: pp", 710, 790),
]
"""By hand, in nanoseconds; the order is not the profiler's."""

TIME = {
    "matrix products": 170,  # linear and matmul call it: 180 - 10 for the copy inside
    "other computation": 20,
    "copies and fills": 10 + 4,
    "views and allocations": 20 - 4 + 1,
    "tp wait": 150,
    "tp start": 50,
    "pipeline wait": 80,
    "rest": 1000 - 170 - 20 - 14 - 17 - 200 - 80,
}


@pytest.mark.parametrize("shuffled", [STEP, STEP[::-1]], ids=["in order", "reversed"])
def test_no_nanosecond_counts_twice(shuffled: list[Span]) -> None:
    time, operations = account(shuffled, wall=1000)
    assert time == TIME
    assert sum(time.values()) == 1000
    assert operations == 4, "mm, its copy, add, and the copy that it needs; what only calls them does not count"


def test_a_span_that_lasts_beyond_its_parent_is_cut() -> None:
    """Or its time would be taken from the parent's, and a kind could have less than nothing."""
    time, _ = account([Span("aten::mm", 0, 10), Span("aten::copy_", 6, 90), Span("aten::mm", 20, 30)], wall=100)
    assert time == {"matrix products": 6 + 10, "copies and fills": 4, "rest": 80}


def event(name: str, category: str, ts: float, dur: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "args": arguments}


def memory(ts: float, size: int, device: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "name": "[memory]",
        "cat": "cpu_instant_event",
        "ts": ts,
        "args": {"Bytes": size, "Device Type": device},
    }


TRACE = {
    "baseTimeNanoseconds": 1_000_000,
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        event("aten::mm", "cpu_op", 1, 2),  # before the step
        event("step", "user_annotation", 10, 80.5),
        event("phase: forward", "user_annotation", 11, 70),
        event("gloo:recv", "user_annotation", 12, 200),
        event("aten::mm", "cpu_op", 20.125, 5),
        event("cudaLaunchKernel", "cuda_runtime", 22, 1, correlation=7),
        event("sm90_gemm", "kernel", 60, 50, correlation=7, stream=3),
        event("Memset", "gpu_memset", 85, 1, stream=4),
        memory(5, 64, 0),
        memory(30, 128, 0),
        memory(40, -128, 0),
        memory(50, 256, 1),
    ],
}


def test_reading_a_trace() -> None:
    """Only what begins in a step, cut at its end; times from microseconds after a base to nanoseconds."""
    found, allocations = read(TRACE, 0)
    assert found == [
        Span("step", 1_010_000, 1_090_500),
        Span("phase: forward", 1_011_000, 1_081_000),
        Span("aten::mm", 1_020_125, 1_025_125),
        Span("sm90_gemm", 1_060_000, 1_090_500, "stream 3", cause=1_022_000),
        Span("Memset", 1_085_000, 1_086_000, "stream 4", cause=1_085_000),
    ]
    assert allocations == [128]
    assert read(TRACE, 1)[1] == [256]


def message(axis: str, size: int, began: float, ended: float | None) -> Message:
    return Message(len(axis), "all_gather", axis, (1,), size, 3, began, ended)


def canned(later: int = 0) -> Profile:
    """Two steps, the second alike, and a device that works in the first."""
    at = [
        span._replace(start=span.start + shift + later, end=span.end + shift + later)
        for shift in (0, 1000)
        for span in STEP
    ]
    kernels = [
        Span("gemm", 100 + later, 400 + later, "stream 7", 50 + later),
        Span("ncclDevKernel", 300, 600, "stream 9"),
    ]
    messages = [message("tp", spans.MIB, 1e-7, 2e-7), message("tp", 3 * spans.MIB, 3e-7, None)]
    return Profile(
        [*at, *kernels],
        [spans.MIB] * 6,
        messages,
        host_reads=["tolist", "item", "item", "item"],
        processor_seconds=5e-6,
    )


def test_figures_are_per_step() -> None:
    told = summary(canned())
    assert list(told["lanes"]) == ["host", "stream 7", "stream 9"]
    assert told["lanes"]["host"]["ms"] == pytest.approx({name: t / 1e6 for name, t in TIME.items()})
    assert told["lanes"]["host"]["operations"] == 4
    assert told["lanes"]["stream 7"] == {"ms": {"matrix products": 150e-6, "rest": 850e-6}, "operations": 0.5}
    assert told["lanes"]["stream 9"]["ms"]["collectives"] == 150e-6
    assert told["messages"] == {"tp all_gather": {"count": 1, "mib": 2}}
    rest = {name: told[name] for name in ("allocations", "allocated_mib", "host_reads", "processor_ms")}
    assert rest == {
        "allocations": 3,
        "allocated_mib": 3,
        "host_reads": {"item": 1.5, "tolist": 0.5},
        "processor_ms": 2.5e-3,
    }


# Charts ---------------------------------------------------------------------------------------------------------------


def rank(**ms: float) -> dict[str, Any]:
    """Of one lane."""
    lanes = {"host": {"ms": {name.replace("_", " "): value for name, value in ms.items()}, "operations": 10.0}}
    messages = {"tp all_gather": {"count": 4.0, "mib": 1.5}} if "tp_wait" in ms else {}
    return {
        "lanes": lanes,
        "allocations": 7.0,
        "allocated_mib": 2.0,
        "host_reads": {"tolist": 1.0},
        "processor_ms": 9.0,
        "messages": messages,
    }


def test_the_tables() -> None:
    """What a rank lacks is 0 there; columns add up; the mean is last."""
    text = charts.tables([rank(matrix_products=10, tp_wait=2.5, rest=1), rank(matrix_products=20, rest=3)])
    rows = {line[:-30].strip(): [float(x) for x in line[-30:].split()] for line in text.splitlines() if "." in line}
    assert list(rows)[:4] == ["matrix products", "tp wait", "rest", "total"]
    assert rows["matrix products"] == [10, 20, 15]
    assert rows["tp wait"] == [2.5, 0, 1.2]
    assert rows["total"] == [13.5, 23, 18.2]
    assert rows["operations, host"] == [10, 10, 10]
    assert rows["host reads, tolist"] == [1, 1, 1]
    assert rows["tp all_gather"] == [4, 0, 2]
    assert rows["tp all_gather, MiB"] == [1.5, 0, 0.8]


def host_only(profile: Profile) -> Profile:
    return replace(profile, spans=[span for span in profile.spans if span.lane == "host"])


def test_the_drawing_shows_the_last_step_on_one_clock() -> None:
    """A column is 50 ns of 1500; by hand: F from 10 to 600 with t from 30 to 230 inside, w from 700 to 800. The second
    rank is 500 ns behind: its row begins with the second half of the step before."""
    step = "F" + "tttt" + "F" * 7 + ".." + "ww" + "...."
    first, second = charts.drawing([host_only(canned()), host_only(canned(later=500))], columns=30).splitlines()[1:]
    assert first == "rank 0    " + step + ".........."
    assert second == "rank 1    FF..ww...." + step


def test_a_kernel_has_the_letter_of_what_launched_it() -> None:
    """Launched in forward, run from 400 to 900, in part beside a collective that takes from 600 to 1000."""
    host = [Span("step", 0, 1000), Span("phase: forward", 0, 200), Span("phase: optimizer", 200, 300)]
    device = [Span("gemm", 400, 900, "stream 7", 100), Span("ncclDevKernel", 600, 1000, "stream 9", 250)]
    profile = Profile([*host, *device], [], [], [], 0.0)
    assert charts.drawing([profile], columns=10).splitlines()[1:] == ["rank 0    FFo.......", "   device ....FFFFFc"]


def test_the_trace_has_all_ranks_on_one_clock() -> None:
    events = json.loads(json.dumps(charts.chrome_trace([canned(), canned(later=500)])))["traceEvents"]
    steps = [(e["pid"], e["ts"], e["dur"]) for e in events if e["name"] == "step"]
    assert steps == [(0, 0, 1), (0, 1, 1), (1, 0.5, 1), (1, 1.5, 1)]
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X" and e["name"] == "gemm"} == {
        (0, "stream 7"),
        (1, "stream 7"),
    }
    ends = [e["ts"] for e in events if e["ph"] == "e" and e["pid"] == 1]
    assert ends == pytest.approx([0.2, 2.5]), "a message that is open at the end is cut there"


# Two ranks ------------------------------------------------------------------------------------------------------------

STEPS = 2


def profile_two_steps(mesh: Mesh, config: Config) -> tuple[Profile, Counter[Any], bool]:
    before = (comm.answering, Timers.__call__, torch.Tensor.tolist, mesh.recorder.begin)
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    profile = timeline.profiled(trainer, STEPS)
    expected = closed_form(config, mesh, trainer.stage, trainer.weights.layout)
    return profile, expected, before == (comm.answering, Timers.__call__, torch.Tensor.tolist, mesh.recorder.begin)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "name"), [("tp", "tp"), ("pp", "pipeline"), ("dp", "dp")])
def test_two_ranks(axis: str, name: str) -> None:
    """The account is whole and the counts are those of tests/test_steady.py; nothing stays patched."""
    config = toy.config(global_batch_size=8, micro_batch_size=2, optimizer="adamw", **{axis: 2})
    config = replace(config, log=LogConfig(log_level=1))
    for profile, expected, restored in on_mesh(config.parallel, profile_two_steps, config):
        assert restored
        assert len(profile.steps) == STEPS
        assert profile.host_reads == ["tolist"] * STEPS
        found = Counter((m.operation, m.axis, m.size) for m in profile.messages)
        assert found == Counter({message: STEPS * count for message, count in expected.items()})
        time, operations = spans.accounts(profile)["host"]
        assert sum(time.values()) == sum(step.end - step.start for step in profile.steps)
        assert all(value >= 0 for value in time.values()), "rest is what the others leave"
        assert {"matrix products", "attention", "copies and fills", f"{name} wait"} <= time.keys()
        assert (f"{name} start" in time) == (axis not in ("tp", "dp")), "shared memory starts as a copy"
        assert "other start" not in time
        assert operations > 0 and len(profile.allocations) > 0
        assert {"phase: forward", "phase: backward", "phase: optimizer"} <= {span.name for span in profile.spans}
