"""tools/report_env.py: what it says, what it keeps to itself, and the figures of each axis."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron3d import report
from megatron3d.config import ParallelConfig
from megatron3d.mesh import Axis, Mesh
from tests.ranks import on_mesh
from tools import report_env

ROOT = Path(__file__).resolve().parent.parent


def start(*words: str, processes: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, str(ROOT / "tools" / "report_env.py"), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)


def test_names_nobody() -> None:
    """It is meant for bug reports: no host, user or folder, in either form."""
    for form in ([], ["--json"]):
        done = start(*form, USER="kurt", HOME="/home/kurt")
        assert done.returncode == 0, done.stderr
        for secret in {socket.gethostname(), "kurt", str(ROOT), sys.prefix, *({getpass.getuser()} - {"root"})}:
            assert not re.search(rf"\b{re.escape(secret)}\b", done.stdout), secret
        assert not re.search(r"(?<![\w.])/\w+/", done.stdout)
    told = json.loads(done.stdout)
    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["system"]["cores"] == len(os.sched_getaffinity(0)) and told["system"]["memory_gib"] > 0.1
    assert told["backends"]["gloo"] == "available" and told["axes"] == []
    assert len(told["devices"]) == torch.cuda.device_count()
    assert set(told["optional"]) == {"triton", "wandb", "tensorboard", "transformers"}


@pytest.mark.slow
def test_a_line_per_axis_under_torchrun() -> None:
    done = start("--tp", "2", processes=4)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("axis ")]
    assert [line.split()[1] for line in lines] == ["tp", "dp"], "one rank speaks, and axes of one rank are left out"
    assert all(re.search(r"latency [\d,]+ us, \d+\.\d\d GB/s at \d+ MiB", line) for line in lines)


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    done = start("--tp", "2")
    assert done.returncode == 2 and "--tp 2 x --pp 1 does not divide the 1 processes" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def measured(mesh: Mesh, delay: float) -> list[report.AxisSpeed]:
    """measure_axes, with every operation of the last rank late by `delay` seconds of a clock that else stands still."""
    run, now = report._run, [0.0]

    def late(operation: str, x: torch.Tensor, axis: Axis) -> None:
        now[0] += delay * (mesh.rank == mesh.grid.size - 1)
        run(operation, x, axis)

    report._run, report.time = late, SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[assignment]
    return report.measure_axes(mesh)


def test_the_slowest_rank_counts() -> None:
    """A delay of 20 ms in one rank is what every rank reports, on each of its axes."""
    speeds = on_mesh(ParallelConfig(tp=2, pp=3, dp=1), measured, 0.02)
    assert all(each == speeds[0] for each in speeds)
    assert [(each.axis, each.size, each.operation) for each in speeds[0]] == [
        ("tp", 2, "all-reduce"),
        ("pp", 3, "exchange"),
    ]
    for each in speeds[0]:
        assert each.latency_seconds == pytest.approx(0.02) == each.seconds


def test_bandwidth_counts_what_a_rank_sends() -> None:
    speed = report.AxisSpeed(
        axis="dp", size=4, operation="all-reduce", latency_seconds=1e-5, message_bytes=1 << 20, seconds=0.5
    )
    assert speed.bytes_per_second == 1.5 * (1 << 20) / 0.5
    assert replace(speed, operation="exchange").bytes_per_second == (1 << 20) / 0.5


def test_why_an_optional_package_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "wandb.py"
    broken.write_text("raise ImportError('cannot load /home/kurt/lib/libx.so: no such file\\nmore')")
    (tmp_path / "triton.py").touch()
    (tmp_path / "transformers.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in report_env.OPTIONAL:
        monkeypatch.delitem(sys.modules, name, raising=False)
    told = report_env.optional("wandb", [])
    assert told.endswith("no, its import fails: ImportError: cannot load .../libx.so: no such file")
    assert "there is no GPU" in report_env.optional("triton", [])
    assert report_env.optional("triton", ["a GPU"]).endswith(": yes")
    assert report_env.optional("transformers", []).endswith(": yes")
    monkeypatch.setitem(report_env.OPTIONAL, "no_such_package", ("something", "pip install it"))
    assert report_env.optional("no_such_package", []) == "something: no, not installed (pip install it)"


def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('/opt/x/libtorch.so: cannot open')")
    done = start("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["torch"] == "torch cannot be imported: OSError: .../libtorch.so: cannot open"
