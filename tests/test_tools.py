"""The programs as users start them: torchrun, generate, compare_runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron3d.config import Config, ConfigError, DataConfig
from tools import compare_runs, generate

ROOT = Path(__file__).resolve().parent.parent


def start(*words: str, processes: int = 0, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Runs a program of the repository, on `processes` ranks of torchrun if given."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes else []
    return subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_train_resume_elsewhere_compare_and_generate(tmp_path: Path) -> None:
    """What `make demo` does, in small: the run resumed on another layout follows the one that went through."""
    common = ["pretrain_gpt.py", "--config", "tiny", "--vocab-size", "257", "--data-path", str(corpus(tmp_path))]
    common += ["--tokenizer", "byte", "--global-batch-size", "8", "--lr-schedule", "constant", "--eval-interval", "4"]
    common += ["--eval-steps", "2", "--split", "8,2,0"]
    through = start(*common, "--train-steps", "8", "--log-dir", str(tmp_path / "through"))
    assert through.returncode == 0, through.stderr

    cut = [*common, "--log-dir", str(tmp_path / "cut"), "--save", str(tmp_path / "checkpoints")]
    first = start(*cut, "--train-steps", "4", "--tp", "2", "--pp", "2", "--micro-batch-size", "4", processes=4)
    assert first.returncode == 0, first.stderr
    again = ["--pp", "2", "--micro-batch-size", "2", "--train-steps", "8", "--load", str(tmp_path / "checkpoints")]
    second = start(*cut, *again, processes=4)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("step 5/8") == 1, "one rank speaks"

    assert [row["step"] for row in rows(tmp_path / "cut")] == list(range(1, 9))
    assert compare_runs.main([str(tmp_path / "through"), str(tmp_path / "cut"), "--tolerance", "1e-5"]) == 0
    assert compare_runs.main([str(tmp_path / "through"), str(tmp_path / "cut")]) == 1, "tp rounds differently"

    sampled = start("tools/generate.py", "--load", str(tmp_path / "checkpoints"), "--max-new-tokens", "40", "--json")
    assert sampled.returncode == 0, sampled.stderr
    result = json.loads(sampled.stdout)
    assert result["step"] == 8 and len(result["ids"]) == 40 and max(result["ids"]) < 257


def corpus(folder: Path) -> Path:
    """A small corpus of bytes; its prefix."""
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "the quick brown fox jumps over it. " * 40)
    made = start(
        "tools/preprocess_data.py", "--input", str(folder), "--tokenizer", "byte", "--output", f"{folder}/data"
    )
    assert made.returncode == 0, made.stderr
    return folder / "data"


@pytest.mark.parametrize("tool", sorted((ROOT / "tools").glob("*.py")), ids=lambda tool: tool.stem)
def test_help_needs_no_torch(tool: Path) -> None:
    code = f"import runpy, sys; sys.argv = [{str(tool)!r}, '--help']\n"
    code += f"try: runpy.run_path({str(tool)!r}, run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules\n"
    told = start("-c", code)
    assert told.returncode == 0 and "usage:" in told.stdout, told.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--load", "/nowhere"], "no checkpoint"),
        (["--load", "/nowhere", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--load", "/nowhere", "--temperature", "nan"], "--temperature nan"),
        (["--load", "/nowhere", "--temperature", "inf"], "--temperature inf"),
        ([], "--load"),
    ],
)
def test_generate_refuses_in_one_paragraph(flags: list[str], words: str) -> None:
    told = start("tools/generate.py", *flags)
    assert told.returncode == 2 and words in told.stderr
    assert "Traceback" not in told.stderr and len(told.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("tokenizer", ["", "/nowhere/some.model"])
def test_the_tokenizer_of_a_run_may_be_gone(tokenizer: str) -> None:
    """The message says where the name comes from, and how to give another."""
    with pytest.raises(ConfigError, match="The run that saved folder .*" + tokenizer + ".*--tokenizer overrides"):
        generate.tokenizer_of_run(Config(data=DataConfig(tokenizer=tokenizer)), "folder", Path("nowhere"))


def write_run(folder: Path, losses: list[float | None]) -> str:
    folder.mkdir()
    lines = [json.dumps({"step": i + 1, "loss": loss, "lr": 0.1, "step_seconds": i}) for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_compare_runs_finds_first_and_largest_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0])
    b = write_run(tmp_path / "b", [4.0, 3.000003, 2.0, 2.0, 9.0])
    assert compare_runs.main([a, b, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "steps": 4,
        "equal": False,
        "first_differing_step": 2,
        "first_differing_key": "loss",
        "largest_relative_gap": 0.5,
        "largest_gap_step": 4,
        "largest_gap_key": "loss",
        "steps_only_in_a": [],
        "steps_only_in_b": [5],
    }
    assert compare_runs.main([a, b]) == 1
    assert "step 2" in capsys.readouterr().out


def test_compare_runs_tells_of_steps_that_one_run_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The common ones are compared all the same, and decide the exit code."""
    a, b = write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0]), write_run(tmp_path / "b", [4.0, 3.0])
    assert compare_runs.main([a, b]) == compare_runs.main([b, a]) == 0
    assert re.findall("only in .*", capsys.readouterr().out) == [
        "only in a: 2 steps, 3 to 4",
        "only in b: 2 steps, 3 to 4",
    ]
    assert compare_runs.main([a, a]) == 0
    assert "only in" not in capsys.readouterr().out


def test_compare_runs_tells_null_from_number(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [4.0, None]), write_run(tmp_path / "b", [4.0, 3.0])
    assert compare_runs.main([a, b, "--tolerance", "0.5"]) == 1
    assert compare_runs.main([a, a]) == 0


def test_compare_runs_refuses_what_it_cannot_compare(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [4.0])
    (tmp_path / "b").mkdir()
    told = start("tools/compare_runs.py", a, str(tmp_path / "b"))
    assert told.returncode == 2 and "cannot be read" in told.stderr
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    told = start("tools/compare_runs.py", a, str(tmp_path / "b"))
    assert told.returncode == 2 and "steps 1 to 1" in told.stderr and "steps 7 to 7" in told.stderr
