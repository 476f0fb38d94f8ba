"""Whether the processes of a job can meet at all, found out before torch waits for minutes in silence.

The one idea: three plain socket calls answer most questions about a meeting point: does its name resolve, is its port
free where it will be served, does it answer everywhere else. As a program it is the first thing each node runs
(tools/slurm.sbatch, tools/launch_hosts.py): `python -m megatron3d.rendezvous ADDRESS PORT NODE_RANK`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

from megatron3d.config import ConfigError
from megatron3d.launch import shared_mistakes

RESOLVE_SECONDS = 10.0
ANSWER_SECONDS = 45.0


def check_rendezvous(address: str, port: int, *, hosts: bool, patience: float = ANSWER_SECONDS) -> None:
    """Refuses a meeting point `address`:`port` at which the processes would wait in vain.

    `hosts` says that this process (or its node) will serve it: the port must then be free. Everyone else waits up to
    `patience` seconds until somebody answers there; 0 leaves that question open. Raises ConfigError.
    """
    with shared_mistakes():
        if not 0 < port < 1 << 16:
            raise ConfigError(
                f"The port of the meeting point is {port}; --master-port (or MASTER_PORT) must be from 1 to 65535."
            )
    _resolve(address, port)
    if hosts:
        _must_be_free(port)
    elif patience:
        _must_answer(address, port, patience)


def _resolve(address: str, port: int) -> None:
    """Looks the name up, in a thread because a name server that is away may hold the call for minutes."""
    outcome: list[str] = [f"the name service did not answer in {RESOLVE_SECONDS:g} s"]

    def look_up() -> None:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            outcome[0] = ""
        except OSError as error:
            outcome[0] = str(error.strerror or error)
        except UnicodeError as error:  # an empty or endless part between dots
            outcome[0] = str(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    is_answer = not thread.is_alive()  # then the others have the same one; who has to wait, may be alone in that
    if outcome[0]:
        with shared_mistakes() if is_answer else contextlib.nullcontext():
            raise ConfigError(
                f"The host name {address!r}, where the processes are to meet, cannot be resolved on this machine: "
                f"{outcome[0]}. Give --master-addr (or MASTER_ADDR) a name or address of the first node that every "
                f"node can resolve."
            )


def _must_be_free(port: int) -> None:
    """Binds the port as the store will, and lets it go."""
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        raise ConfigError(
            f"Port {port} of this machine, where the processes are to meet, cannot be opened: {error.strerror}. Most "
            f"often another job holds it. Give another one with --master-port (or MASTER_PORT); on a single node, "
            f"torchrun --standalone takes a free one by itself."
        ) from None


def _must_answer(address: str, port: int, patience: float) -> None:
    """Connects, again and again, because the first node may start later."""
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Nobody answers at {address}:{port}, where the processes are to meet, after {patience:g} s: "
                    f"{error.strerror or error}. Either the first node has not started, or it has failed, or a "
                    f"firewall is between; --master-addr (or MASTER_ADDR) must be an address of the first node that "
                    f"this machine can reach, --master-port (or MASTER_PORT) an open port of it."
                ) from None
        time.sleep(0.25)


def main(argv: list[str]) -> None:
    """Checks for one node: the one with rank 0 serves the meeting point."""
    if len(argv) != 3 or not all(word.isdecimal() for word in argv[1:]):
        raise ConfigError("usage: python -m megatron3d.rendezvous ADDRESS PORT NODE_RANK")
    address, port, node_rank = argv
    check_rendezvous(address, int(port), hosts=node_rank == "0")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as refusal:  # every node speaks for itself: what one can reach, another cannot
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
