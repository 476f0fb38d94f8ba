"""The hostfile launcher and the check of the meeting point, with a local shell in the place of ssh."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron3d.config import ConfigError
from megatron3d.rendezvous import check_rendezvous
from tests.test_nodes import free_port
from tools import launch_hosts

ROOT = Path(__file__).resolve().parent.parent

SSH = """#!/bin/sh
# Runs the line here, as sshd would: by a shell, joined with blanks.
host=$1; shift
began=$(dirname "$0")/python.began
if [ "$host" = gone ]; then
    until [ -f "$began" ]; do sleep 0.05; done
    echo "ssh: connect to host gone: No route to host" >&2; exit 255
fi
exec sh -c "$*"
"""

# Stands for Python: the check passes, and "torchrun" does what the program's words say.
PYTHON = """#!/bin/sh
case "$2" in megatron3d.rendezvous) exit 0 ;; esac
rank=; while [ $# -gt 0 ]; do [ "$1" != --node-rank ] || rank=$2; last=$1; shift; done
trap 'echo told to stop; exit 75' TERM
[ $rank != 0 ] || touch "$0.began"
until [ -f "$0.began" ]; do sleep 0.05; done  # nobody fails before the other can hear of it
echo "node $rank of $VALUE: $last"
case "$last" in
    fail) [ $rank != 1 ] || exit 7; while :; do sleep 0.1; done ;;
    stubborn) [ $rank != 1 ] || exit 7; trap '' TERM; sleep 100 ;;
    wait) while :; do sleep 0.1; done ;;
esac
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A hostfile of two hosts; beside it the stubs `ssh` and `python`."""
    (tmp_path / "hosts").write_text("# two of them\nlocalhost slots=2  # first\n\nother slots=2\n")
    for name, text in {"ssh": SSH, "python": PYTHON}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path / "hosts"


def words(hosts: Path, *more: str, real: bool = False) -> list[str]:
    stub = [] if real else ["--python", str(hosts.parent / "python"), "--env", "VALUE=a b"]
    flags = ["--hostfile", str(hosts), "--ssh", str(hosts.parent / "ssh"), *stub]
    return [sys.executable, str(ROOT / "tools" / "launch_hosts.py"), *flags, *more]


def start(hosts: Path, *more: str, real: bool = False, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words(hosts, *more, real=real), cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )


def test_hostfile(hosts: Path) -> None:
    assert launch_hosts.read_hostfile(hosts) == [launch_hosts.Host("localhost", 2), launch_hosts.Host("other", 2)]
    hosts.write_text("user@a\n10.0.0.2\tslots=16\n")
    assert launch_hosts.read_hostfile(hosts) == [launch_hosts.Host("user@a", 1), launch_hosts.Host("10.0.0.2", 16)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lists no host"),
        ("a slots=0", "line 1: 'a slots=0'"),
        ("a\nb slot=2", "line 2: 'b slot=2'"),
        ("a\nb\na slots=2", "line 3: a is listed twice"),
        ("-oProxyCommand=x", "line 1"),
    ],
)
def test_wrong_hostfiles_are_refused_in_one_paragraph(hosts: Path, text: str, told: str) -> None:
    hosts.write_text(text)
    done = start(hosts, "--", "fine")
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


def test_missing_words_are_refused(hosts: Path) -> None:
    for more, told in ([], "After --"), (["--", "x"], "cannot be read"), (["--env", "X", "--", "x"], "NAME=VALUE"):
        if "cannot" in told:
            hosts = hosts.parent / "nowhere"
        done = start(hosts if "cannot" in told else hosts.parent / "hosts", *more)
        assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


def test_dry_run_shows_one_torchrun_per_host(hosts: Path) -> None:
    done = start(hosts, "--dry-run", "--json", "--", "pretrain_gpt.py", "--data-path", "a b", real=True)
    plan = json.loads(done.stdout)["hosts"]
    assert list(plan) == ["localhost", "other"]
    ports = set()
    for rank, (host, command) in enumerate(plan.items()):
        assert command[:2] == [str(hosts.parent / "ssh"), host]
        assert f"--nnodes 2 --node-rank {rank} --nproc-per-node 2 --master-addr localhost" in command[2]
        assert command[2].count("pretrain_gpt.py --data-path 'a b'") == 1
        ports.add(command[2].partition("--master-port ")[2].split()[0])
    assert len(ports) == 1, "all hosts meet at one port"
    hosts.write_text("me@a\nb\n")
    assert "--master-addr a " in start(hosts, "--dry-run", "--", "x").stdout, "the user's name is for ssh only"
    fixed = start(hosts, "--dry-run", "--master-port", "1234", "--master-addr", "10.0.0.1", "--", "x")
    assert fixed.stdout.count("--master-addr 10.0.0.1 --master-port 1234") == 2 == len(fixed.stdout.splitlines())


def test_lines_carry_their_host(hosts: Path) -> None:
    done = start(hosts, "--", "fine")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[localhost] node 0 of a b: fine", "[other] node 1 of a b: fine"]


def test_first_failure_ends_the_others(hosts: Path) -> None:
    """FAIL-03: the job ends with the exit code of the host that failed, and the other is asked to stop."""
    begun = time.monotonic()
    done = start(hosts, "--", "fail")
    assert done.returncode == 7 and "[localhost] told to stop" in done.stdout, done.stdout + done.stderr
    assert "error: other was the first host to fail: exit code 7." in done.stderr
    assert time.monotonic() - begun < 55, "the grace is 60 s"
    (hosts.parent / "python.began").unlink()
    told = start(hosts, "--json", "--", "fail")
    assert json.loads(told.stdout) == {"exit_code": 7, "hosts": {"localhost": 75, "other": 7}}


def test_who_does_not_stop_is_left_after_the_grace(hosts: Path) -> None:
    begun = time.monotonic()
    done = start(hosts, "--grace", "1", "--", "stubborn")
    assert done.returncode == 7 and time.monotonic() - begun < 90, "it would go on for 100 s"


def test_unreachable_host(hosts: Path) -> None:
    hosts.write_text("localhost slots=2\ngone slots=2\n")
    done = start(hosts, "--", "wait")
    assert done.returncode == 255 and "[localhost] told to stop" in done.stdout
    assert "gone was the first host to fail: ssh could not run" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_hosts_stop_with_the_launcher(hosts: Path, number: signal.Signals) -> None:
    """Even if it is killed: the hosts notice that nobody holds their standard input."""
    process = subprocess.Popen(words(hosts, "--", "wait"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert sorted(lines) == ["[localhost] node 0 of a b: wait\n", "[other] node 1 of a b: wait\n"]
    process.send_signal(number)
    rest = process.communicate(timeout=200)[0]
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number and rest.count("told to stop") == 2
    deadline = time.monotonic() + 100
    while stubs(hosts):
        assert time.monotonic() < deadline, stubs(hosts)
        time.sleep(0.1)


def stubs(hosts: Path) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if f"{hosts.parent}/python" in line]


def test_taken_port_is_explained(hosts: Path) -> None:
    """FAIL-05: the message has the port and the option, within a minute, and both hosts end."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        done = start(hosts, "--master-port", port, "--", "pretrain_gpt.py", "--mock-data", real=True)
    assert done.returncode == 2 and done.stdout.startswith(f"[localhost] error: Port {port} of this machine")
    assert "--master-port" in done.stdout and "Traceback" not in done.stdout


def test_unknown_address_is_explained(hosts: Path) -> None:
    """FAIL-06: every host says which name it cannot resolve, within a minute."""
    done = start(hosts, "--master-addr", "no-such-host.invalid", "--", "pretrain_gpt.py", real=True)
    assert done.returncode == 2 and "'no-such-host.invalid'" in done.stdout and "--master-addr" in done.stdout


def test_meeting_point() -> None:
    """FAIL-05, FAIL-06: what each side of a meeting point finds out by itself."""
    port = free_port()  # one that nobody takes by chance when it is let go
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ConfigError, match=f"Port {port}.*--master-port"):
            check_rendezvous("localhost", port, hosts=True)
        check_rendezvous("localhost", port, hosts=False)
    check_rendezvous(socket.gethostname(), port, hosts=True)  # a name of this host's own
    with pytest.raises(ConfigError, match=rf"Nobody answers at localhost:{port}.*after 0.5 s.*--master-addr"):
        check_rendezvous("localhost", port, hosts=False, patience=0.5)
    with pytest.raises(ConfigError, match=r"'no-such-host.invalid'.*--master-addr"):
        check_rendezvous("no-such-host.invalid", port, hosts=True)
    with pytest.raises(ConfigError, match="is 70000"):
        check_rendezvous("localhost", 70000, hosts=True)


def test_a_silent_name_service_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAIL-06: a look-up that hangs ends the wait, not the patience."""
    monkeypatch.setattr("megatron3d.rendezvous.RESOLVE_SECONDS", 0.2)
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(200))
    with pytest.raises(ConfigError, match="the name service did not answer"):
        check_rendezvous("slow.invalid", 1234, hosts=False)
    assert not answer.is_set()
    answer.set()


@pytest.mark.slow
def test_trains_on_two_hosts(hosts: Path) -> None:
    train = ["pretrain_gpt.py", "--config", "tiny", "--tp", "2", "--pp", "2", "--mock-data", "--train-steps", "2"]
    done = start(hosts, "--", *train, real=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[localhost] mesh: tp 2 x pp 2 x dp 1 on 4 x cpu" in done.stdout and done.stdout.count("step 2/2") == 1
