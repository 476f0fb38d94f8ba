"""Start a job on the hosts of a hostfile over ssh: one torchrun per host. See --help.

The one idea: every host gets one line of shell, made by a pure function, and the pipe to its standard input is its
life line: the line ends torchrun as soon as the pipe closes, whether this program wishes it so or is gone.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError
from megatron3d.launch import user_errors

PORTS = range(10000, 30000)  # below the range from which systems take ports of outgoing connections
SSH_FAILED = 255


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    hostfile: str
    """A file of lines `host slots=8`, slots being the number of processes; # begins a comment."""
    master_addr: str = ""
    """Where the processes meet, as all hosts can reach it; default: the first host's name in the file."""
    master_port: int = 0
    """Port there; 0: a random one from 10000 to 29999, checked to be free on the first host."""
    workdir: str = ""
    """Folder of the repository on every host; default: this one."""
    python: str = sys.executable
    """Python on every host."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=10"
    """Command that runs a line of shell on a host; it gets the host's name and the line."""
    env: tuple[str, ...] = ()
    """Variables for every host, such as NCCL_SOCKET_IFNAME=eth0; ssh passes none on."""
    grace: float = 60.0
    """Seconds that the other hosts get to stop by themselves after the first failure or a signal."""
    dry_run: bool = False
    """Print the commands and start nothing."""
    json: bool = False
    """Print one JSON object with commands and exit codes; the hosts' output goes to stderr."""


@dataclass(frozen=True)
class Host:
    """A line of the hostfile."""

    name: str
    slots: int


def main(argv: Sequence[str]) -> int:
    """The exit code of the first host that failed, 128 + the number of a signal that ended the job, or 0."""
    ours, program = split_words(argv)
    flags = parse_tool(
        Flags, ours, description="Start one torchrun per host over ssh: launch_hosts.py ... -- pretrain_gpt.py ..."
    )
    if not program:
        raise ConfigError(
            "After -- comes what torchrun is to start: launch_hosts.py --hostfile hosts -- pretrain_gpt.py ..."
        )
    hosts = read_hostfile(Path(flags.hostfile))
    port = flags.master_port or random.choice(PORTS)
    commands = [
        [*shlex.split(flags.ssh), host.name, shell_line(flags, hosts, rank, port, program)]
        for rank, host in enumerate(hosts)
    ]
    if flags.dry_run:
        plan = {host.name: command for host, command in zip(hosts, commands, strict=True)}
        print(json.dumps({"hosts": plan}) if flags.json else "\n".join(shlex.join(command) for command in commands))
        return 0
    job = Job([host.name for host in hosts], commands, sys.stderr if flags.json else sys.stdout, flags.grace)
    code = job.run()
    if flags.json:
        print(json.dumps({"exit_code": code, "hosts": dict(zip(job.names, job.codes, strict=True))}))
    return code


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first --."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def read_hostfile(file: Path) -> list[Host]:
    """The hosts of a file, in its order, which is the order of ranks. Raises ConfigError."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {file} cannot be read: {error}.") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        match = re.fullmatch(r"([^\s=-][^\s=]*)(?:\s+slots=([1-9]\d*))?", text)
        if match is None:
            raise ConfigError(f"{file}, line {number}: {text!r} is not of the form `host slots=8`.")
        hosts.append(Host(match[1], int(match[2] or 1)))
        if [host.name for host in hosts].count(match[1]) > 1:
            raise ConfigError(f"{file}, line {number}: {match[1]} is listed twice; give it all its slots in one line.")
    if not hosts:
        raise ConfigError(f"--hostfile {file} lists no host. Write one a line, as `host slots=8`.")
    return hosts


def shell_line(flags: Flags, hosts: Sequence[Host], rank: int, port: int, program: Sequence[str]) -> str:
    """What host number `rank` runs: checks the meeting point, starts torchrun, ends it when standard input closes."""
    address = flags.master_addr or hosts[0].name.rpartition("@")[2]
    meeting = [address, str(port)]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank", str(rank)]
    torchrun += ["--nproc-per-node", str(hosts[rank].slots), "--master-addr", address, "--master-port", str(port)]
    for variable in flags.env:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", variable, re.DOTALL):
            raise ConfigError(f"--env {variable}: it must have the form NAME=VALUE.")
    env = ["env", "PYTHONUNBUFFERED=1", f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={flags.grace:.0f}", *flags.env, flags.python]
    return (
        f"exec 3<&0; cd {shlex.quote(flags.workdir or str(Path.cwd()))} || exit; "
        f"{shlex.join([*env, '-m', 'megatron3d.rendezvous', *meeting, str(rank)])} </dev/null 3<&- || exit; "
        f"{shlex.join([*env, *torchrun, *program])} </dev/null 3<&- & run=$!; "
        "{ cat <&3; kill $run; } >/dev/null 2>&1 & wait $run; code=$?; kill $! 2>/dev/null; exit $code"
    )


class Job:
    """The running commands, one per host; the first failure or signal ends all."""

    def __init__(self, names: Sequence[str], commands: Sequence[Sequence[str]], out: TextIO, grace: float) -> None:
        self.names, self.commands, self.out, self.grace = names, commands, out, grace
        self.codes: list[int | None] = [None] * len(names)
        self.signal = 0

    def run(self) -> int:
        """Starts all, forwards their lines, waits for all; the exit code of the job."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._remember)
        processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C in the terminal is for this program, which then asks the hosts
            )
            for command in self.commands
        ]
        printers = [
            threading.Thread(target=self._forward, args=pair, daemon=True)
            for pair in zip(self.names, processes, strict=True)
        ]
        for printer in printers:
            printer.start()
        failed = self._watch(processes)
        for printer in printers:
            printer.join(2)
        if self.signal:
            return 128 + self.signal
        if failed is None:
            return 0
        code = self.codes[failed]
        assert code is not None
        why = (
            f"ssh could not run the command there (exit code {SSH_FAILED})"
            if code == SSH_FAILED
            else f"exit code {code}"
        )
        print(f"error: {self.names[failed]} was the first host to fail: {why}.", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def _watch(self, processes: Sequence[subprocess.Popen[str]]) -> int | None:
        """Waits for the end of all; which host failed first, if any did."""
        failed, deadline = None, float("inf")
        while None in self.codes:
            for rank, process in enumerate(processes):
                if self.codes[rank] is None and (code := process.poll()) is not None:
                    self.codes[rank] = code
                    failed = rank if failed is None and code else failed
            if deadline == float("inf") and (failed is not None or self.signal):
                deadline = time.monotonic() + self.grace + 5  # by then torchrun has killed its ranks
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.close()
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
        return failed

    def _forward(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.out.write(f"[{name}] {line.rstrip()}\n")  # one piece: print would let another thread in between
            self.out.flush()


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
