"""The comparison with peers: what it computes, and what it makes of results that are known. Nothing here is timed."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType

from benchmarks import accounts, one_card, one_card_turns, peers, problem, table
from benchmarks.bounds import HIDDEN, Passes, Speeds, Stage, step_seconds
from benchmarks.ours import FLAGS, our_weights
from benchmarks.problem import SHAPE
from benchmarks.rows import OURS, PLAIN, ROWS, Contender, Layout, Row
from benchmarks.turns import Program
from megatron3d.cli import parse
from megatron3d.config import ConfigError
from megatron3d.launch import Launch, user_errors
from megatron3d.params import num_parameters, param_table
from megatron3d.trainer import Trainer

MICROBATCHES = SHAPE.global_batch // SHAPE.micro_batch
FREE = Speeds({1: Passes(1, 2), 2: Passes(0.5, 1)}, {1: Passes(2, 4), 2: Passes(1, 2)}, 0.0, 0.0)
"""A layer's passes take 3 s and the head's 6, so the model's 18; messages take no time."""
LINK = FREE._replace(byte=1 / HIDDEN)  # one second for the hidden states of a microbatch
MANY = 64  # cores: more than ranks


# What is computed


@pytest.mark.slow
def test_losses_of_plain_and_ours_agree() -> None:
    contenders = (PLAIN, Contender(OURS, "ours"))
    plain, ours = (peers.run(peers.command(one, 1, 2, {}), timeout=900) for one in contenders)
    assert len(plain["losses"]) == len(ours["losses"]) == 2
    assert plain["losses"] == pytest.approx(ours["losses"], abs=table.LOSS_GAP, rel=0)
    assert plain["losses"][0] != plain["losses"][1]
    assert min(*plain["peak_mib"], *ours["peak_mib"]) > 4 * 7.35  # at least weights, gradients and two moments


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_rows_are_layouts_of_the_trainer(row: Row) -> None:
    words = [*FLAGS.split(), *row.contenders[0].flags.split()]
    parallel = parse(words, Launch(world_size=row.layout.ranks, from_torchrun=True)).parallel
    assert (parallel.dp, parallel.tp, parallel.pp) == row.layout[:3]
    assert bool(parallel.sp) == row.layout.sp
    assert parallel.zero == 1


def test_ours_has_the_problem_s_model() -> None:
    model = parse(FLAGS.split(), Launch()).model
    assert num_parameters(param_table(model)) == sum(weight.numel() for weight in our_weights().values())


def test_ranks_share_a_global_batch() -> None:
    whole = [tokens.tolist() for tokens, _ in problem.microbatches(3)]
    parts = [tokens.tolist() for rank in range(2) for tokens, _ in problem.microbatches(3, rank, 2)]
    assert parts == whole and len(whole) == MICROBATCHES


# Starting contenders


@pytest.mark.slow
def test_a_contender_that_fails_is_heard() -> None:
    outcome = peers.run([*peers.torchrun(sys.executable, 2), "-m", "benchmarks.torch_peer", "--tp", "3"], timeout=400)
    assert "Error" in outcome["failure"] and "rank" in outcome["failure"]


def test_last_words_leave_out_the_launcher_s() -> None:
    code = """
print('{"contender": "a line before the end"}')
print("ValueError: 3 heads over 2 ranks")
print("a warning")
print("E1130 12:00 venv/torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1)")
print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
raise SystemExit(1)
"""
    outcome = peers.run([sys.executable, "-c", code], timeout=400)
    assert outcome["failure"] == "ValueError: 3 heads over 2 ranks"
    assert outcome["said"][-1] == "a warning"


def test_a_run_that_says_nothing_or_never_ends_has_failed() -> None:
    assert peers.run([sys.executable, "-c", "pass"], timeout=400)["failure"] == "exit code 0"
    assert "1 s" in peers.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=1)["failure"]


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}"])
def test_results_that_are_none_are_refused(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--from {file} is not what --json writes"):
        peers.main(["--from", str(file)])


def test_in_each_round_another_is_first() -> None:
    def names(number: int, **pythons: str) -> list[str]:
        return [one.name for one in peers.in_order(row, number, {"torch": "python", **pythons})]  # type: ignore[dict-item]

    row = next(row for row in ROWS if row.key == "tp2")
    both = {"megatron-core": "other"}
    assert names(0, **both) == ["plain PyTorch", "megatron3d", "megatron-core", "torch DTensor"]
    assert names(1, **both) == ["megatron3d", "megatron-core", "torch DTensor", "plain PyTorch"]
    assert names(4, **both) == names(0, **both)
    assert names(0) == ["plain PyTorch", "megatron3d", "torch DTensor"]


STEPPER = """
import sys
from pathlib import Path
from benchmarks import problem
name, ranks = sys.argv[1], int(sys.argv[2])
journal = Path(sys.argv[3])

def step(number):
    with journal.open("a") as file:
        file.write(f"{name} {number}\\n")
    if "dies" in name and number == 1:
        raise ValueError("no second step")
    return 0.5

measured = problem.measure(step, 0.0, 3)
problem.report(name, [measured] * ranks)
"""


def stepper(name: str, journal: Path, ranks: int = 1, timeout: float = 400) -> Program:
    """A program of three steps that writes down each of them; with more ranks than one it waits for the others."""
    return Program(
        [sys.executable, "-c", STEPPER, name, str(ranks), str(journal)], peers.ROOT, ranks=ranks, timeout=timeout
    )


def test_one_program_works_at_a_time(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(stepper(name, journal)) for name in ("a", "dies", "c")]
        assert not journal.exists()  # all of them wait
        for number in range(4):
            for program in programs:
                program.turn()
            if number == 0:
                assert journal.read_text().split("\n")[:-1] == ["a 0", "dies 0", "c 0"]
        assert journal.read_text().split("\n")[:-1] == ["a 0", "dies 0", "c 0", "a 1", "dies 1", "c 1", "a 2", "c 2"]
        a, dies, c = map(peers.outcome, programs)
    assert a["contender"] == "a" and len(a["steps_ms"]) == 3 and c["losses"] == [0.5] * 3
    assert dies["failure"] == "ValueError: no second step"


def test_a_turn_ends_when_all_ranks_wait(tmp_path: Path) -> None:
    """The second rank is this process, which has not said that it waits."""
    journal = tmp_path / "journal"
    with stepper("lonely", journal, ranks=2, timeout=3) as program:
        assert peers.outcome(program)["failure"] == "no result within 3 s"
    assert not journal.exists()


def test_ranks_wait_at_their_own_pipes(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from benchmarks.turns import wait_for_turn
if "RANK" not in os.environ:
    words = [sys.executable, "-c", sys.argv[1], *sys.argv[1:]]
    ranks = [subprocess.Popen(words, env={**os.environ, "RANK": str(rank)}) for rank in range(3)]
    sys.exit(max(rank.wait() for rank in ranks))
for step in range(5):
    wait_for_turn()
    with open(sys.argv[2], "a") as file:
        file.write(f"{step}")
wait_for_turn()
"""
    journal = tmp_path / "journal"
    with Program([sys.executable, "-c", code, code, str(journal)], peers.ROOT, ranks=3, timeout=400) as program:
        for _ in range(6):
            program.turn()
        assert program.result()[0] == 0
    assert journal.read_text() == "000111222333444"


def test_wrong_flags_are_told() -> None:
    with pytest.raises(ConfigError, match=r"dp3.*dp2, tp2"):
        peers.chosen(["dp2", "dp3"])
    with pytest.raises(ConfigError, match=r"names no row.*dp2, tp2"):
        peers.chosen([])
    with pytest.raises(ConfigError, match="no Python interpreter that has surely-not-there"):
        peers.version(sys.executable, "surely-not-there")
    with pytest.raises(ConfigError, match="at least 1"):
        peers.main(["--rounds", "0"])
    with pytest.raises(ConfigError, match=r"README.md: .*lacks the lines"):
        peers.main(["--write", str(peers.ROOT / "README.md")])


# Bounds


@pytest.mark.parametrize(
    ("layout", "cores", "seconds"),
    [
        (Layout(), MANY, 18 * MICROBATCHES),
        (Layout(dp=2), MANY, 18 * MICROBATCHES / 2),
        (Layout(dp=2), 1, 18 * MICROBATCHES),
        (Layout(tp=2), 2, 18 * MICROBATCHES / 2),
        (Layout(pp=2, stage_layers=(3, 1)), MANY, 9 * (MICROBATCHES + 1)),  # balanced: 3 layers, or 1 and the head
        (Layout(pp=2), MANY, 12 * MICROBATCHES + 6),  # the second stage has 12 of 18, and waits for one forward pass
        (
            Layout(pp=4),
            2,
            9 * MICROBATCHES + 9,
        ),  # the last stage has half, and idles while one microbatch comes and goes
        (Layout(pp=4), 1, 18 * MICROBATCHES),
        (Layout(dp=2, tp=2, pp=2), 2, 18 * MICROBATCHES / 2),
    ],
)
def test_bound_without_messages(layout: Layout, cores: int, seconds: float) -> None:
    assert step_seconds(layout, FREE, cores) == pytest.approx(seconds)


def test_tensor_parallel_messages_are_on_the_way() -> None:
    """4 layers x 2 directions x 2 sums, one of the embedding, one of the head; each is twice half the hidden states."""
    seconds = step_seconds(Layout(tp=2), LINK, MANY)
    assert seconds - step_seconds(Layout(tp=2), FREE, MANY) == pytest.approx((4 * 2 * 2 + 2) * MICROBATCHES)


def test_sequence_parallelism_gathers_again() -> None:
    """Two gathers more per layer and one for the head, in the backward pass; each is half the hidden states."""
    extra = step_seconds(Layout(tp=2, sp=True), LINK, MANY) - step_seconds(Layout(tp=2), LINK, MANY)
    assert extra == pytest.approx((4 * 2 + 1) / 2 * MICROBATCHES)


def test_pipeline_messages_delay() -> None:
    """The first one to the second stage, and the last one back: whatever is between them waits for nobody."""
    extra = step_seconds(Layout(pp=2), LINK, MANY) - step_seconds(Layout(pp=2), FREE, MANY)
    assert extra == pytest.approx(2)
    assert Stage(Layout(pp=2), 0).pp_messages == 1 and Stage(Layout(pp=3), 1).pp_messages == 2


def test_data_parallel_messages_are_work() -> None:
    """Half of the gradients and half of the weights leave each rank."""
    matrices = sum(weight.numel() for weight in problem.initial_weights().values() if weight.dim() == 2)
    layout = Layout(dp=2)
    assert Stage(layout, 0).dp_bytes() == 2 * 4 * matrices / 2
    busy = FREE._replace(byte_work=1e-6)
    assert step_seconds(layout, busy, MANY) == step_seconds(layout, FREE, MANY)
    assert step_seconds(layout, busy, 2) == pytest.approx(step_seconds(layout, FREE, 2) + 4e-6 * matrices)


# The table


def results(**changes: Any) -> table.Results:
    """Two rounds of one row, in which plain PyTorch needs 1000 ms a step and then 1100; the first step is slower."""

    def run(number: int, row: str, name: str, milliseconds: float, losses: list[float]) -> dict[str, Any]:
        steps = [9e3, milliseconds]
        measured = {"step_ms": milliseconds, "steps_ms": steps, "losses": losses, "peak_mib": [100.0 + number, 90.0]}
        return {"round": number, "row": row, "name": name, **measured}

    return {
        "machine": {"cores": 2, "cpu": "abacus"},
        "versions": {"torch": "2.13"},
        "rounds": 2,
        "steps": 2,
        "left_out": ["deepspeed"],
        "speeds": {
            "layer": {"1": [0.004, 0.008], "2": [0.002, 0.004]},
            "head": {"1": [0.006, 0.008], "2": [0.003, 0.004]},
            "byte": 0.0,
            "byte_work": 0.0,
        },
        "runs": [
            run(0, "tp2", PLAIN.name, 1000, [9.0, 8.0]),
            run(0, "tp2", OURS, 500, [9.0, 8.0]),
            run(0, "tp2", "torch DTensor", 2000, [9.0, 8.0]),
            run(1, "tp2", PLAIN.name, 1100, [9.0, 8.0]),
            run(1, "tp2", OURS, 1000, [9.0, 8.000001]),
            {"round": 1, "row": "tp2", "name": "torch DTensor", "failure": "out of patience"},
        ],
    } | changes


def test_the_table() -> None:
    """62 ms of products a microbatch, 8 of them on 2 cores: 248 ms, of 1050 that plain PyTorch needs in the median."""
    lines = table.render(results()).splitlines()
    assert "| tp 2 (2) | megatron3d | 1.55 (1.10 - 2.00) | 1.50 | 4.23 | 37% | 1.0e-06 | 101 |" in lines
    assert "|  | torch DTensor | 0.50 |  |  |  | 0.0e+00 | 100 |" in lines
    assert "- tp2, torch DTensor: 1 runs failed, the last one with `out of patience`." in lines
    assert any("deepspeed was left out" in line for line in lines)
    assert len([line for line in lines if line.startswith("|")]) == 4  # two of the header


def test_other_losses_are_a_problem() -> None:
    changed = results()
    changed["runs"][1]["losses"] = [9.0, 8.00001]
    assert "**differs**" in table.render(changed)
    assert any("losses differ" in told for told in table.problems(changed))
    changed["runs"][1]["losses"] = [9.0, math.nan]
    assert any("losses differ" in told for told in table.problems(changed))
    assert not any("losses differ" in told for told in table.problems(results()))


def test_a_contender_that_always_failed_is_in_the_table() -> None:
    only = [run for run in results()["runs"] if run["round"] == 0 and run["name"] != "torch DTensor"]
    failed = {"round": 0, "row": "tp2", "name": "torch DTensor", "failure": "no"}
    assert "|  | torch DTensor | failed |  |  |  |  |  |" in table.render(results(runs=[*only, failed])).splitlines()


def test_without_plain_pytorch_there_is_no_table() -> None:
    failed = {"round": 0, "row": "tp2", "name": PLAIN.name, "failure": "no"}
    ours = next(run for run in results()["runs"] if run["name"] == OURS)
    told = table.render(results(runs=[failed, ours])).splitlines()
    assert "Plain PyTorch never came to its end." in told
    assert "- tp2, plain PyTorch: 1 runs failed, the last one with `no`." in told


def test_the_prose_around_a_table_stays() -> None:
    document = f"before\n{table.MARKS[0]}\nold\n{table.MARKS[1]}\nafter\n"
    assert table.insert(document, "new") == f"before\n{table.MARKS[0]}\n\nnew\n\n{table.MARKS[1]}\nafter\n"
    assert table.insert(table.insert(document, "a"), "new") == table.insert(document, "new")
    with pytest.raises(ValueError, match="lacks"):
        table.insert("no marks", "new")


def test_the_document_has_a_place_for_the_table() -> None:
    table.insert((peers.ROOT / "docs" / "performance.md").read_text(), "")


def test_a_table_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, document = tmp_path / "kept.json", tmp_path / "document.md"
    kept.write_text(json.dumps(results()))
    document.write_text(f"{table.MARKS[0]}{table.MARKS[1]}")
    assert peers.main(["--from", str(kept), "--write", str(document)]) == 1  # one run had failed
    assert capsys.readouterr().out.strip() in document.read_text()
    kept.write_text(json.dumps(results(runs=results()["runs"][:-1])))
    assert peers.main(["--from", str(kept)]) == 0


def test_all_of_the_cores_time_is_accounted_for() -> None:
    """Two ranks on one core each have half of the wall's time; a wait is nobody's."""
    times = {"matrix products": 60.0, "attention": 20.0, "other computation": 0.0, "views and allocations": 4.0}
    lane = {"host": {"ms": {**times, "rest": 16.0, "tp wait": 100.0}, "operations": 1}}
    ranks = [{"lanes": lane, "processor_ms": 50.0}] * 2
    shares = accounts.account(ranks, cores=1)
    assert shares["products"] == pytest.approx(60 / 200) and shares["Python"] == pytest.approx(20 / 200)
    assert shares["nobody's"] == pytest.approx(0.5) and sum(shares.values()) == pytest.approx(1)
    rows = list(accounts.lines([(ROWS[0], {"ranks": ranks, "bare_step_ms": 7.0}), (ROWS[1], {"failure": "x"})], 1))
    assert rows[2].startswith("| dp 2, ZeRO-1 (2) | 7 | 30% | 10% |") and "failed: x" in rows[3]
    assert len({row.count("|") for row in rows}) == 1


# One card

TINY = ["--tiny", "--no-compile", "--device", "cpu"]
SHORT = [*TINY, "--rounds", "1", "--steps", "1"]


@pytest.fixture(scope="module")
def one_card_run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A comparison on this machine: exit code, figures, the document, and (mask, causal) of each attention."""
    folder = tmp_path_factory.mktemp("one_card")
    document, kept, masks, attention = folder / "document.md", folder / "kept.json", [], F.scaled_dot_product_attention
    document.write_text(f"before\n{one_card.MARKS[0]}\nold\n{one_card.MARKS[1]}\nafter\n")

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        masks.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return attention(*args, **kwargs)

    with mock.patch("torch.nn.functional.scaled_dot_product_attention", noted):
        code = one_card.main([*TINY, "--json", str(kept), "--write", str(document)])
    figures = json.loads(kept.read_text())
    return SimpleNamespace(code=code, figures=figures, document=document.read_text(), masks=masks)


def test_one_card_trains_both_alike(one_card_run: SimpleNamespace) -> None:
    runs = one_card_run.figures["runs"]
    assert one_card_run.code == 0
    assert [run["name"] for run in runs] == [OURS, "transformers", "transformers", OURS]
    ours, theirs, *second = (run["losses"] for run in runs)
    assert ours == pytest.approx(theirs, abs=2e-5, rel=0)
    assert second == [pytest.approx(theirs), pytest.approx(ours)]  # each turn begins anew
    assert len(set(ours)) == len(ours) == 3


def test_one_card_clips_both_alike() -> None:
    """So far that the gradients are as small as what AdamW adds to their size: it hides other factors."""
    usual = one_card.settings(one_card.TINY, "none")
    clipped = replace(usual, optim=replace(usual.optim, clip_grad=1e-6))
    device, weights = torch.device("cpu"), one_card_turns.initial_weights(usual)
    losses = [
        one_card_turns.turn("", start, config, device, weights, profiled=False).losses
        for config in (usual, clipped)
        for start in (one_card_turns.ours, partial(one_card_turns.theirs, compiled=False))
    ]
    assert losses[2] == pytest.approx(losses[3], abs=2e-5, rel=0)
    assert abs(losses[2][-1] - losses[0][-1]) > 2e-4


def test_the_card_is_waited_for_around_each_step() -> None:
    events: list[Any] = []
    with (
        mock.patch.object(torch.cuda, "synchronize", side_effect=lambda _: events.append("wait")),
        mock.patch.object(one_card_turns, "peak_memory_bytes", return_value=2**30),
    ):
        found = one_card_turns.taken(lambda n: events.append(n) or 0.5, 2, torch.device("cuda"), profiled=False)
    assert events == ["wait", 0, "wait", 1, "wait"]
    assert found[1:] == ([0.5, 0.5], 1.0, [])


@pytest.mark.parametrize(("seconds", "median"), [([9.0, 9, 9, 1, 2, 4], 2), ([9.0, 8, 7], 7), ([9.0], 9)])
def test_the_first_steps_on_a_card_are_not_timed(seconds: list[float], median: float) -> None:
    measured = problem.Measured(seconds, [0.5] * len(seconds), 0.0)
    with mock.patch.object(problem, "measure", return_value=measured):
        found = one_card_turns.taken(lambda _: 0.5, len(seconds), torch.device("cpu"), profiled=False)
    assert found.step_seconds == median


def test_one_card_writes_its_table(one_card_run: SimpleNamespace) -> None:
    document, rendered = one_card_run.document, one_card.render(one_card_run.figures)
    assert document == f"before\n{one_card.MARKS[0]}\n\n{rendered}\n\n{one_card.MARKS[1]}\nafter\n"
    assert "216,512 parameters" in rendered and "without torch.compile" in rendered


def test_one_card_knows_no_peak_of_a_cpu(one_card_run: SimpleNamespace) -> None:
    assert {run["mfu"] for run in one_card_run.figures["runs"]} == {None}
    row = next(line for line in one_card_run.document.splitlines() if line.startswith(f"| {OURS} |"))
    assert [cell.strip() for cell in row.split("|")][3] == "-"


def test_one_card_s_peer_attends_without_a_mask(one_card_run: SimpleNamespace) -> None:
    """With one there is no flash attention."""
    layers, microbatches, steps = 3, 2, 3
    assert one_card_run.masks == [(None, True)] * (layers * microbatches * (4 * steps + 1))  # and a profiled step


def test_one_card_s_mfu(tmp_path: Path) -> None:
    """3 x forward of 3 layers of hidden 64, SwiGLU 176, vocabulary 512, sequence 128, by hand; of 2 TFLOP/s."""
    flops = 3 * (3 * (8 * 64 * 64 + 4 * 64 * 64 + 6 * 64 * 176) + 2 * 64 * 512)
    one_card.main([*SHORT, "--peak-tflops", "2", "--json", str(tmp_path / "kept.json")])
    for run in json.loads((tmp_path / "kept.json").read_text())["runs"]:
        assert run["tokens_per_second"] == pytest.approx(2 * 128 / run["step_seconds"])
        assert run["mfu"] == pytest.approx(flops * run["tokens_per_second"] / 2e12)


def test_one_card_s_other_losses_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(one_card.LOSS_GAP, "fp32", 0.0)
    assert one_card.main(SHORT) == 1
    assert "**differs**" in capsys.readouterr().out


@pytest.mark.parametrize("contender", [OURS, "transformers"])
def test_a_model_too_large_for_the_card_is_told(contender: str, capsys: pytest.CaptureFixture[str]) -> None:
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    place = (Trainer, "step") if contender == OURS else (torch.optim.AdamW, "step")
    with mock.patch.object(*place, full), pytest.raises(SystemExit) as leaving, user_errors():
        one_card.main(SHORT)
    told = capsys.readouterr().err.strip()
    assert leaving.value.code == 1 and full.called
    assert told.startswith(f"error: {contender} does not fit") and "--micro-batch-size" in told
    assert "\n" not in told


def test_one_card_without_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(sys.modules, {"transformers": None}), pytest.raises(SystemExit) as leaving, user_errors():
        one_card.main(TINY)
    told = capsys.readouterr().err.strip()
    assert leaving.value.code == 2
    assert "extra hf" in told and "\n" not in told


def test_one_card_s_wrong_flags_are_told() -> None:
    with pytest.raises(ConfigError, match=r"1,345,423,360 parameters.*--tiny"):
        one_card.main(["--device", "cpu"])
    with pytest.raises(ConfigError, match=r"--rounds -1 --steps 2: .*at least 1"):
        one_card.main([*TINY, "--rounds", "-1", "--steps", "2"])
    with pytest.raises(ConfigError, match="--global-batch-size 3"):
        one_card.main([*TINY, "--micro-batch-size", "2", "--global-batch-size", "3"])
    with pytest.raises(ConfigError, match=r"README.md: .*lacks the lines"):
        one_card.main([*TINY, "--write", str(peers.ROOT / "README.md")])


def test_the_document_says_which_model_is_for_one_card() -> None:
    document = (peers.ROOT / "docs" / "performance.md").read_text()
    table.insert(document, "", one_card.MARKS)
    assert f"{num_parameters(param_table(one_card.settings(one_card.CARD, 'none').model)):,} parameters" in document


def test_kernels_are_counted_once() -> None:
    """The profiler lists a kernel's time with the operation that started it too, and spans that users have named."""

    def event(key: str, kind: DeviceType, microseconds: float, **other: Any) -> SimpleNamespace:
        times = {"self_device_time_total": microseconds, "self_cpu_time_total": 1.0}
        return SimpleNamespace(key=key, device_type=kind, count=2, **times, **{"is_user_annotation": False, **other})

    events = [
        event("aten::mm", DeviceType.CPU, 3000.0),
        event("copy", DeviceType.CUDA, 1000.0),
        event("gemm", DeviceType.CUDA, 3000.0),
        event("step", DeviceType.CUDA, 4000.0, is_user_annotation=True),
    ]
    profiler = SimpleNamespace(key_averages=lambda: events)
    with mock.patch.object(one_card_turns, "profile", return_value=contextlib.nullcontext(profiler)):
        found = one_card_turns.longest_kernels(lambda: None, torch.device("cuda"))
    assert found == [("gemm", 3.0, 2), ("copy", 1.0, 2)]


def one_card_results(**changes: Any) -> table.Results:
    """Two rounds on a card of 100 TFLOP/s; ours is twice as fast in the first one."""

    def run(number: int, name: str, seconds: float, losses: list[float]) -> dict[str, Any]:
        speed = {"step_seconds": seconds, "tokens_per_second": 1000 / seconds, "mfu": 0.25 / seconds}
        return {"round": number, "name": name, "losses": losses, "peak_gib": 30.0 + number, **speed}

    return {
        **one_card.facts(
            one_card.Flags(), one_card.CARD, one_card.settings(one_card.CARD, "none"), torch.device("cpu")
        ),
        "device": "an abacus",
        "device_type": "cuda",
        "peak_tflops": 100.0,
        "runs": [
            run(0, OURS, 0.5, [10.0, 9.0]),
            run(0, "transformers", 1.0, [10.0, 9.001]),
            run(1, "transformers", 1.0, [10.0, 9.0]),
            run(1, OURS, 1.0, [10.0, 9.0]),
        ],
        "kernels": [{"name": f"{'x' * 200}{i}", "ms": 12.0 - i, "calls": 1200} for i in range(12)],
    } | changes


def test_the_table_of_one_card() -> None:
    """Ratios are taken within a round."""
    rendered = one_card.render(one_card_results()).splitlines()
    ours = "1,500 (1,000 - 2,000) | 37.5% (25.0% - 50.0%) | 1.50 (1.00 - 2.00) | 30.5 (30.0 - 31.0)"
    assert f"| megatron3d | {ours} | 10.0000, 9.0000 | 1.0e-03 |" in rendered
    assert (
        "| transformers | 1,000 (1,000 - 1,000) | 25.0% (25.0% - 25.0%) |  | 30.5 (30.0 - 31.0) | 10.0000, 9.0010 |  |"
        in rendered
    )
    assert "- an abacus; torch" in "\n".join(rendered)
    kernels = [line for line in rendered if line.startswith("| `")]
    assert len(kernels) == 10
    assert kernels[0] == f"| `{'x' * one_card.LONGEST}...` | 12.00 | 15.4% | 1,200 |"  # of 78 ms


def test_losses_that_are_no_numbers_differ() -> None:
    broken = one_card_results()
    broken["runs"][0]["losses"] = [10.0, math.nan]
    assert one_card.largest_gap(broken) == math.inf and "**differs**" in one_card.render(broken)
    assert "saw no kernel" in one_card.render(one_card_results(kernels=[]))
