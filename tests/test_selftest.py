"""tools/selftest.py: which layouts it tries, that a sound machine passes, and that unsound ones are found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from megatron3d import comm, selftest
from megatron3d.config import JobError, ParallelConfig
from megatron3d.launch import Launch
from megatron3d.mesh import Axis, Mesh
from megatron3d.selftest import Gaps, Layout, Row
from tests.ranks import run_ranks
from tests.test_tools import start
from tools import selftest as tool


def row(*gaps: float, limit: float = 0.0, note: str = "") -> Row:
    return Row(
        gaps=Gaps(*gaps), limit=limit, model="llama", dtype="fp32", layout="1 x 1 x 1", knobs="", against="", note=note
    )


# Pure -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 7, 8, 12, 16, 64])
def test_every_layout_can_start(processes: int) -> None:
    """Each one uses all processes and none occurs twice; every run of the full form resolves."""
    found = selftest.layouts(processes)
    assert len(found) == len(set(found)) >= 1 and all(math.prod(layout) == processes for layout in found)
    for layout in found:
        for family, dtype in selftest.kinds(full=True):
            for knobs in ({}, *selftest.variants(layout, singly=True)):
                config = selftest.config_of(family, dtype, layout, processes, **knobs)
                assert config.batch.global_batch_size == 4 * processes


def test_layouts_of_four() -> None:
    expected = [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    assert selftest.layouts(4) == [Layout(*sizes) for sizes in expected]
    assert selftest.stages(4) == 7


def test_knobs_are_turned_where_they_act() -> None:
    assert selftest.variants(Layout(2, 1, 1), singly=False) == [{"bucket_size": 1, "recompute": "full"}]
    assert len(selftest.variants(Layout(1, 2, 2), singly=True)) == 1 + 5
    assert selftest.kinds(full=False) == [("llama", "fp32"), ("gpt2", "fp32")]


def test_verdicts() -> None:
    assert row(0, 0, 0).passed and row(1e-6, 0, 1e-5, limit=1e-5).passed
    assert not row(0, 0, 1e-30).passed and not row(0, 2e-5, 0, limit=1e-5).passed
    assert not row(math.nan, 0, 0, limit=1).passed and not row(math.inf, 0, 0, limit=1).passed
    assert not row(0, 0, 0, note="copies differ").passed


# Machines, sound and not ----------------------------------------------------------------------------------------------


def _sound(rank: int) -> None:
    pass


def _other_arithmetic_on_the_last(rank: int) -> None:
    """One weight of it is off by a part in a million."""
    weights = selftest.random_weights

    def off(*words: object) -> dict[str, torch.Tensor]:
        found = weights(*words)  # type: ignore[arg-type]
        found["layers.2.mlp.up.weight"][5] *= 1 + 1e-6
        return found

    if rank == 1:
        selftest.random_weights = off  # type: ignore[assignment]


def _lossy_link(rank: int) -> None:
    """Of each sum of gradients over several ranks, one element gets lost."""
    scatter = comm.start_reduce_scatter

    def lossy(x: torch.Tensor, axis: Axis, out: torch.Tensor | None = None) -> comm.Pending:
        if axis.size > 1:
            x[x.numel() // 2 - 64] = 0
        return scatter(x, axis, out)

    from megatron3d import grads

    grads.start_reduce_scatter = lossy  # type: ignore[attr-defined]


def _inexact_knobs(rank: int) -> None:
    """With exact knobs something else turns, too: a little of the weight decay."""
    config_of = selftest.config_of

    def nudged(family: str, dtype: str, layout: Layout, processes: int, **knobs: object) -> object:
        config = config_of(family, dtype, layout, processes, **knobs)
        if knobs:
            object.__setattr__(config.optim, "weight_decay", 0.010001)
        return config

    selftest.config_of = nudged  # type: ignore[assignment]


def _rows(launch: Launch, init_method: str, break_it: Callable[[int], None]) -> list[Row]:
    """What two ranks find, after `break_it` on each."""
    break_it(launch.rank)
    world = Mesh.create(ParallelConfig(dp=2), launch, torch.device("cpu"), init_method=init_method)
    rows = [row for of_stage in selftest.selftest(launch, torch.device("cpu"), full=False) for row in of_stage]
    world.close()
    return rows


def failures(break_it: Callable[[int], None]) -> list[Row]:
    """The rows that fail on two such ranks; all ranks must tell the same."""
    first, second = run_ranks(2, _rows, break_it)
    assert first == second and len(first) == 2 + 3 * 2 * 2
    return [row for row in first if not row.passed]


def test_a_sound_machine_passes() -> None:
    assert failures(_sound) == []


@pytest.mark.slow
def test_a_rank_with_other_arithmetic_is_found_and_named() -> None:
    failed = failures(_other_arithmetic_on_the_last)
    assert [row.note for row in failed if row.layout == "each alone"] == ["on process 1", "on process 1"]


@pytest.mark.slow
def test_a_lossy_link_is_found() -> None:
    """dp 2 is far from one process; the layouts without dp are not touched."""
    failed = failures(_lossy_link)
    assert {(row.layout, row.against) for row in failed} >= {("1 x 1 x 2", "one process")}
    assert {row.layout for row in failed} == {"1 x 1 x 2"}


@pytest.mark.slow
def test_a_knob_that_changes_bits_is_found() -> None:
    failed = failures(_inexact_knobs)
    assert len(failed) == 6 and {row.against for row in failed} == {"this layout"}
    assert all(0 < row.gaps.weight < 1e-5 for row in failed), "far below what rounding may do"


# The program ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_under_torchrun() -> None:
    done = start("tools/selftest.py", "--json", processes=2)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["devices"] == f"2 x {'cuda' if torch.cuda.device_count() > 1 else 'cpu'}" and told["passed"]
    assert {each["layout"] for each in told["rows"]} == {"each alone", "1 x 1 x 2", "1 x 2 x 1", "2 x 1 x 1"}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_verdict_and_words(
    form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(0, 0, 0), row(1e-3, math.inf, 0, limit=1e-5, note="on process 3")]
    monkeypatch.setattr(selftest, "selftest", lambda *_, **__: iter([rows[:1], rows[1:]]))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    with pytest.raises(JobError, match="1 of 2 comparisons failed"):
        tool.main([*form, "--device", "cpu"])
    text = capsys.readouterr().out
    if form:
        told = json.loads(text)
        assert not told["passed"] and [each["passed"] for each in told["rows"]] == [True, False]
        assert told["rows"][1]["norm_gap"] is None and told["rows"][1]["loss_gap"] == 1e-3
    else:
        lines = text.splitlines()
        assert lines[2].endswith("ok") and lines[3].endswith("FAILED on process 3")
        assert lines[-1] == "1 x cpu: 1 of 2 comparisons passed"
    rows.pop()
    tool.main([*form, "--device", "cpu"])
