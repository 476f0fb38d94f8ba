"""tools/slurm.sbatch: with stubs in place of Slurm's programs, and (marker `slurm`) on a real Slurm of two nodes."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "slurm.sbatch"
PROGRAM = (ROOT / "pretrain_gpt.py").read_text() + (ROOT / "megatron3d" / "trainer.py").read_text()
DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")

STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo n3; echo n4; else echo "scontrol $*" >> "$CALLS"; fi',
    "scancel": 'echo "scancel $*" >> "$CALLS"; touch "$CALLS.stop"',
    "srun": """
        printf '%s\\n' "$@" > "$CALLS.srun"; env > "$CALLS.env"; echo a line of the ranks
        if [ -n "$LINGER" ]; then touch "$CALLS.began"; until [ -f "$CALLS.stop" ]; do sleep 0.05; done; fi
        exit $SRUN_CODE""",
}


@dataclass
class Stubbed:
    """The script with stubs first in its path; what they were called with lands in `folder`."""

    folder: Path

    def start(self, *words: str, code: int = 0, **env: str) -> subprocess.Popen[str]:
        for name, body in STUBS.items():
            program = self.folder / name
            program.write_text(f"#!/bin/sh\n{body}\n")
            program.chmod(0o755)
        job = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_NUM_NODES": "2"}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MASTER_", "TRITON_", "NCCL_"))}
        clean |= {"PATH": f"{self.folder}:{os.environ['PATH']}", "CALLS": str(self.folder / "calls")}
        return subprocess.Popen(
            ["bash", SCRIPT, *words],
            cwd=self.folder,
            env=clean | job | {"SRUN_CODE": str(code), "LINGER": ""} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, code: int = 0, **env: str) -> int:
        process = self.start(*words, code=code, **env)
        process.communicate(timeout=200)
        return process.returncode

    def srun(self) -> list[str]:
        return (self.folder / "calls.srun").read_text().splitlines()

    def env(self) -> dict[str, str]:
        lines = (self.folder / "calls.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def stubbed(tmp_path: Path) -> Stubbed:
    return Stubbed(tmp_path)


def test_the_script_parses() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)


@pytest.mark.parametrize("code", [0, 7])
def test_exit_code_passes_the_pipe(stubbed: Stubbed, code: int) -> None:
    """FAIL-03: the script returns what srun returned, although the output goes through tee."""
    assert stubbed.run("--config", "tiny", code=code) == code
    assert "--kill-on-bad-exit=1" in stubbed.srun()
    assert (stubbed.folder / "megatron3d-41234.log").read_text() == "a line of the ranks\n"
    assert stubbed.calls() == [], "an ordinary end, good or bad, is not queued again"


def test_arguments_arrive_word_for_word(stubbed: Stubbed) -> None:
    stubbed.run("--data-path", "a b/c", "--split", "8,2,0", SLURM_GPUS_ON_NODE="8")
    words = stubbed.srun()
    assert words[words.index("pretrain_gpt.py") + 1 :] == ["--data-path", "a b/c", "--split", "8,2,0"]
    for flag, value in {"--nnodes": "2", "--nproc-per-node": "8", "--master-addr": "n3"}.items():
        assert words[words.index(flag) + 1] == value


def test_meeting_point_is_the_first_host_and_a_port_of_the_job(stubbed: Stubbed) -> None:
    """FAIL-05: two jobs on one host do not meet at one port."""
    ports = set()
    for job in range(41234, 41244):
        stubbed.run(SLURM_JOB_ID=str(job))
        assert stubbed.env()["MASTER_ADDR"] == "n3"
        ports.add(int(stubbed.env()["MASTER_PORT"]))
    assert len(ports) == 10 and all(1024 < port < 32768 for port in ports)
    stubbed.run(MASTER_ADDR="10.0.0.1", MASTER_PORT="777")
    assert (stubbed.env()["MASTER_ADDR"], stubbed.env()["MASTER_PORT"]) == ("10.0.0.1", "777")


def test_triton_cache_is_on_the_node_and_of_the_job(stubbed: Stubbed) -> None:
    """CACHE-07: node-local and per job by default; the user's own choice stays."""
    stubbed.run()
    assert stubbed.env()["TRITON_CACHE_DIR"] == "/tmp/megatron3d-triton-41234"
    stubbed.run(TRITON_CACHE_DIR="/mine")
    assert stubbed.env()["TRITON_CACHE_DIR"] == "/mine"


@pytest.mark.parametrize("spelling", [["--save", "here/kept"], ["--save=here/kept"]])
def test_resumes_only_where_there_is_a_checkpoint(stubbed: Stubbed, spelling: list[str]) -> None:
    stubbed.run("--load", "other", *spelling, "--tp", "2")
    assert "here/kept" not in stubbed.srun()[stubbed.srun().index("--load") :][:2]
    (stubbed.folder / "here" / "kept").mkdir(parents=True)
    (stubbed.folder / "here" / "kept" / "latest").write_text("step-1\n")
    stubbed.run("--load", "other", *spelling, "--tp", "2")
    assert stubbed.srun()[-4:] == ["--tp", "2", "--load", "here/kept"]


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--save", "here"], ["--auto-resume"]),
        (["--save=here", "--load", "base", "--load-weights-only"], ["--auto-resume"]),
        (["--config", "run.toml"], ["--auto-resume"]),
        (["--config=other.toml"], []),
        (["--save", "here", "--auto-resume"], []),
        (["--tp", "2"], []),
    ],
)
def test_any_run_that_saves_goes_on_by_itself(stubbed: Stubbed, words: list[str], added: list[str]) -> None:
    """At the first turn and at later ones, by the same words, which the program accepts."""
    (stubbed.folder / "run.toml").write_text('[checkpoint]\nsave = "here"\n')
    (stubbed.folder / "other.toml").write_text("[checkpoint]\nsave_interval = 5\n")
    stubbed.run(*words)
    given = stubbed.srun()
    assert given[given.index("pretrain_gpt.py") + 1 :] == [*words, *added]


@pytest.mark.parametrize(("code", "requeued"), [(1, True), (0, False)])
def test_usr1_reaches_the_step_and_queues_the_job_again(stubbed: Stubbed, code: int, requeued: bool) -> None:
    """A run that was asked to stop is queued again; one that was just done is not."""
    process = stubbed.start(code=code, LINGER="yes")
    wait_for(lambda: (stubbed.folder / "calls.began").exists(), 200)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=200)
    assert process.returncode == code
    assert stubbed.calls() == ["scancel --signal=USR1 41234", *["scontrol requeue 41234"] * requeued]


def wait_for(condition: object, seconds: float, pause: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, f"nothing came of it in {seconds} s"
        time.sleep(pause)


# A real Slurm ---------------------------------------------------------------------------------------------------------

needs_slurm = pytest.mark.skipif(
    not all(shutil.which(name) for name in DAEMONS) or os.getuid() != 0, reason="needs slurm-wlm, munge, and root"
)

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2
ReturnToService=2
KillWait=5
SlurmctldParameters=node_reg_mem_percent=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """A cluster of two nodes on this machine."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Of a user of the cluster: no GPUs, two processes a node, and n1 by an address: no name service knows it."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return os.environ | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": path,
            "NPROC_PER_NODE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str, **env: str) -> str:
        """The id of a job of two nodes that trains the tiny model."""
        tiny = ["--config", "tiny", "--tp", "2", "--pp", "2", "--mock-data", "--global-batch-size", "4"]
        self.folder.joinpath("log").touch()
        given = ",".join(["ALL", f"RUN_LOG={self.folder}/log", *(f"{name}={value}" for name, value in env.items())])
        flags = ["--parsable", "--nodes=2", f"--output={self.folder}/out", f"--export={given}"]
        return self.command("sbatch", *flags, str(SCRIPT), *tiny, *words)

    def field(self, job: str, name: str) -> str:
        words = self.command("scontrol", "show", "job", job).split()
        return next(word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}="))

    def end(self, job: str, seconds: float = 400) -> tuple[str, str]:
        """State and exit code of a job, once it is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        wait_for(lambda: self.field(job, "JobState") in over, seconds, 0.5)
        return self.field(job, "JobState"), self.field(job, "ExitCode")

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Starts munged, slurmctld and two slurmd in a folder of their own, and ends them."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    for parent in [folder, *folder.parents[:-2]]:
        parent.chmod(0o755)  # munged wants a socket that everyone can reach
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, ports=free_ports(3)))
    cluster = Slurm(folder)
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
    munge += [f"--{what}={folder}/munge.{what.removesuffix('-file')}" for what in ("socket", "pid-file", "seed-file")]
    munge += [f"--log-file={folder}/munge.log"]
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(daemon(cluster, "munged", *munge))
        wait_for((folder / "munge.socket").exists, 100)
        daemons.enter_context(daemon(cluster, "slurmctld", "slurmctld", "-D", "-i"))
        for name in ("n1", "n2"):
            daemons.enter_context(daemon(cluster, name, "slurmd", "-D", "-N", name))
        wait_for(lambda: idle(cluster), 400, 0.5)
        yield cluster
        subprocess.run(["scancel", "--user", getpass.getuser()], env=cluster.env, check=False)
        time.sleep(1)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in opened]


@contextlib.contextmanager
def daemon(cluster: Slurm, label: str, *words: str) -> Iterator[None]:
    with (cluster.folder / f"{label}.out").open("w") as out:
        process = subprocess.Popen(words, env=cluster.env, stdout=out, stderr=out, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def idle(cluster: Slurm) -> bool:
    told = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=cluster.env, capture_output=True, text=True, timeout=200)
    return told.stdout.strip() == "idle 2"


@needs_slurm
@pytest.mark.slurm
@pytest.mark.slow
def test_a_good_run_and_a_resumed_one(slurm: Slurm, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "kept"), "--log-dir", str(tmp_path / "log")]
    assert slurm.end(slurm.submit("--train-steps", "3", *save)) == ("COMPLETED", "0:0"), slurm.log()
    assert "on 4 x cpu" in slurm.log() and "from step 0 to 3" in slurm.log()
    assert slurm.end(slurm.submit("--train-steps", "5", "--override-schedule", *save)) == ("COMPLETED", "0:0"), (
        slurm.log()
    )
    assert "from step 3 to 5" in slurm.log(), "the second job resumes without being told to"


@needs_slurm
@pytest.mark.slurm
@pytest.mark.slow
def test_a_failing_rank_fails_the_job(slurm: Slurm, tmp_path: Path) -> None:
    """FAIL-03: non-zero through the pipe, and no node goes on alone."""
    (tmp_path / "latest").write_text("step-nowhere\n")
    state, code = slurm.end(slurm.submit("--train-steps", "100000", "--load", str(tmp_path)))
    assert state == "FAILED" and code == "1:0", slurm.log()


@needs_slurm
@pytest.mark.slurm
@pytest.mark.slow
def test_a_killed_rank_ends_both_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """FAIL-03: a rank of one node dies in mid-run; the job fails within seconds and leaves no process behind."""
    word = str(tmp_path / "log")
    job = slurm.submit("--train-steps", "100000", "--log-dir", word)
    wait_for((tmp_path / "log" / "metrics.jsonl").exists, 400)
    ranks = processes_with(word, "pretrain_gpt.py", without="torchrun")
    assert len(ranks) == 4
    os.kill(max(ranks), signal.SIGKILL)
    state, code = slurm.end(job)
    assert state == "FAILED" and code != "0:0", slurm.log()
    wait_for(lambda: not processes_with(word), 200)


def processes_with(*words: str, without: str = "\0") -> list[int]:
    """Processes whose command line has all `words` and not `without`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_text(errors="replace").replace("\0", " ")
            if all(word in line for word in words) and without not in line:
                found.append(int(file.parent.name))
    return found


@needs_slurm
@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.skipif("megatron3d.signals" not in PROGRAM, reason="the program handles no signals")
def test_usr1_saves_requeues_and_resumes(slurm: Slurm, tmp_path: Path) -> None:
    """What happens two minutes before the time limit, brought about by hand."""
    save = ["--save", str(tmp_path / "kept"), "--log-dir", str(tmp_path / "log")]
    job = slurm.submit("--train-steps", "100000", *save)
    rows = tmp_path / "log" / "metrics.jsonl"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") >= 3, 400)
    slurm.command("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: slurm.field(job, "Restarts") == "1", 400, 0.5)
    saved = int((tmp_path / "kept" / "latest").read_text().strip().removeprefix("step-"))
    assert saved >= 3
    wait_for(lambda: slurm.field(job, "JobState") == "PENDING", 100, 0.5)
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")  # it would wait two minutes
    wait_for(lambda: f"from step {saved} to" in slurm.log(), 400, 0.5)
    wait_for(lambda: json.loads(rows.read_text().splitlines()[-1])["step"] > saved, 400)
    slurm.command("scancel", job)
    steps = [json.loads(line)["step"] for line in rows.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost or taken twice"
