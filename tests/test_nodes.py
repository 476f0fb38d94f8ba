"""Several nodes: two torchrun agents train as one job, on one address and in two network namespaces of their own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.agent import Job
from tests.disturbed import RUN, STEPS
from tools import compare_runs
from tools.launch_hosts import PORTS

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ["pretrain_gpt.py", "--config", "tiny", "--mock-data", "--global-batch-size", "8", "--micro-batch-size", "2"]
MESH = ["--tp", "2", "--pp", "2"]
TIMEOUT = 15  # --timeout-seconds of the runs that lose a node
SLACK = 120  # for the processes to come down on a busy machine
LONG = 400  # seconds after which a run that should end has hung


class Node:
    """A torchrun agent with two ranks; what they print is in `out`."""

    def __init__(self, rank: int, address: str, port: int, out: Path, words: Sequence[str], inside: str = "") -> None:
        prefix = ["ip", "netns", "exec", inside] if inside else []
        agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2"]
        agent += ["--master-addr", address, "--master-port", str(port)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": inside} if inside else {})
        self.out = out
        with out.open("w") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *agent, *words], cwd=ROOT, env=env, stdout=file, stderr=file
            )

    def end(self, seconds: float) -> int:
        """The exit code, within so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.out.read_text()[-2000:]}") from None

    def ranks(self) -> list[int]:
        """The agent's children."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def lose(self) -> None:
        """What a power cut does."""
        for pid in [self.process.pid, *(self.ranks() if self.process.poll() is None else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def two_nodes(
    folder: Path, words: Sequence[str], address: str = "127.0.0.1", inside: Sequence[str] = ("", "")
) -> Iterator[list[Node]]:
    port = free_port() if not inside[0] else random.choice(PORTS)
    nodes = [Node(rank, address, port, folder / f"node{rank}.out", words, inside[rank]) for rank in (0, 1)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.lose()


def free_port() -> int:
    """One that stays free: none of those which the system gives to whoever asks for any, as other tests do."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log folder of a run of one process."""
    log = tmp_path_factory.mktemp("alone")
    words = [sys.executable, *TRAIN, "--train-steps", "5", "--log-dir", str(log)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    return log


def wait_for_steps(log: Path, nodes: Sequence[Node], count: int = 3) -> None:
    rows, deadline = log / "metrics.jsonl", time.monotonic() + LONG
    while not rows.exists() or rows.read_text().count("\n") < count:
        assert time.monotonic() < deadline and all(node.process.poll() is None for node in nodes), [
            node.out.read_text()[-2000:] for node in nodes
        ]
        time.sleep(0.1)


def wait_until_gone(processes: Sequence[int]) -> None:
    """They end at their own pace; a zombie that nobody has asked about has ended."""
    deadline = time.monotonic() + SLACK
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.2)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does(tmp_path: Path, alone: Path) -> None:
    words = [*TRAIN, *MESH, "--train-steps", "5", "--log-dir", str(tmp_path)]
    with two_nodes(tmp_path, words) as nodes:
        assert [node.end(LONG) for node in nodes] == [0, 0]
    assert compare_runs.main([str(alone), str(tmp_path), "--tolerance", "1e-5"]) == 0
    assert "on 4 x cpu" in nodes[0].out.read_text() and "step 5/5" not in nodes[1].out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_lost_node_ends_the_other(tmp_path: Path, lost: int) -> None:
    words = [*TRAIN, *MESH, "--train-steps", "1000000", "--timeout-seconds", str(TIMEOUT), "--log-dir", str(tmp_path)]
    with two_nodes(tmp_path, words) as nodes:
        wait_for_steps(tmp_path, nodes)
        other = nodes[1 - lost]
        ranks = other.ranks()  # before they hear of it
        nodes[lost].lose()
        assert other.end(TIMEOUT + SLACK) != 0
        assert len(ranks) == 2
        wait_until_gone(ranks)


PROGRAM = (ROOT / "pretrain_gpt.py").read_text()


@pytest.mark.slow
@pytest.mark.skipif("end_with_launcher" not in PROGRAM, reason="ranks are not tied to their launcher")
def test_a_killed_agent_ends_both_nodes(tmp_path: Path) -> None:
    """The agent alone, by SIGKILL: its ranks are well, and would train on with nobody to end them."""
    words = [*TRAIN, *MESH, "--train-steps", "1000000", "--timeout-seconds", str(TIMEOUT), "--log-dir", str(tmp_path)]
    with two_nodes(tmp_path, words) as nodes:
        wait_for_steps(tmp_path, nodes)
        ranks = nodes[1].ranks()
        nodes[1].process.kill()
        assert nodes[0].end(TIMEOUT + SLACK) != 0
        assert len(ranks) == 2
        wait_until_gone(ranks)


def test_a_tethered_process_ends_with_its_parent() -> None:
    """Parent prints its child's pid and is killed; the child's handler for SIGTERM runs."""
    child = (
        "import signal, sys, time; from megatron3d.tether import end_with_launcher; end_with_launcher()\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit()))\n"
        "print('ready', flush=True); time.sleep(30)"
    )
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(30)"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    assert process.communicate(timeout=100)[0] == "told\n"


@pytest.mark.slow
def test_two_jobs_on_one_machine_find_their_own_ports(tmp_path: Path) -> None:
    """FAIL-05: both run."""
    jobs = [Job(tmp_path / name, "pretrain_gpt.py", *RUN, "--pp", "2") for name in ("one", "other")]
    for code, text in [job.end() for job in jobs]:
        assert code == 0 and f"step {STEPS}/{STEPS}" in text, text


@pytest.mark.skipif("check_rendezvous" not in PROGRAM, reason="the program does not check its meeting point")
def test_the_program_explains_its_meeting_point() -> None:
    """FAIL-05, FAIL-06: started by hand, a name that leads nowhere and a port that is taken, within a minute."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        for address, told in {"no-such-host.invalid": "'no-such-host.invalid'", "localhost": f"Port {port}"}.items():
            env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
            env |= {"MASTER_ADDR": address, "MASTER_PORT": port}
            words = [sys.executable, *TRAIN, "--tp", "2"]
            done = subprocess.run(words, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=LONG)
            assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces joined by a cable; each names its end like itself, so that it can be pulled."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    names = [f"m3d{os.getpid() % 100000}{end}" for end in "ab"]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("network namespaces cannot be made here")
        cable = ["ip", "link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1]]
        if subprocess.run([*cable, "netns", names[1]], capture_output=True).returncode:
            pytest.skip("veth devices cannot be made here")
        for number, name in enumerate(names, 1):
            for command in (f"addr add 10.83.7.{number}/24 dev {name}", f"link set {name} up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *command.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_two_network_namespaces(tmp_path: Path, alone: Path, namespaces: list[str]) -> None:
    """Each node has an address of its own, and a name that leads to itself: GLOO_SOCKET_IFNAME says which to use."""
    words = [*TRAIN, *MESH, "--train-steps", "5", "--log-dir", str(tmp_path)]
    with two_nodes(tmp_path, words, "10.83.7.1", namespaces) as nodes:
        assert [node.end(LONG) for node in nodes] == [0, 0], [node.out.read_text()[-2000:] for node in nodes]
    assert compare_runs.main([str(alone), str(tmp_path), "--tolerance", "1e-5"]) == 0


@pytest.mark.slow
@pytest.mark.soak
def test_a_pulled_cable_ends_both_nodes(tmp_path: Path, namespaces: list[str]) -> None:
    """No connection is closed, nothing more arrives: only the time-out can tell."""
    words = [*TRAIN, *MESH, "--train-steps", "1000000", "--timeout-seconds", str(TIMEOUT), "--log-dir", str(tmp_path)]
    with two_nodes(tmp_path, words, "10.83.7.1", namespaces) as nodes:
        wait_for_steps(tmp_path, nodes)
        subprocess.run(["ip", "-n", namespaces[1], "link", "set", namespaces[1], "down"], check=True)
        assert all(node.end(TIMEOUT + SLACK + 30) for node in nodes)
