"""A slow network on one machine: islands in network namespaces on a bridge, both directions of every link shaped.

    island 0 [namespace mdlmnet0: link0] --veth-- mdlmnet-h0 \\
    island 1 [namespace mdlmnet1: link0] --veth-- mdlmnet-h1 -- bridge mdlmnet-br    (attached to nothing else)

`tc tbf` (a token bucket) on link0 limits what an island sends, on its host end what it receives. Only the rate is
shaped: delay and loss would need the kernel's netem, which small virtual machines often lack. The bucket holds 128 kB
or more: packets leave the sender up to 64 kB at a time, and a smaller bucket would let the rate collapse. A shaped rate
counts Ethernet headers, so a transfer reaches about 95 % of it; `Network.measure` says how much, and must be believed
over the rate that was asked for. Counters are those of the interfaces (Ethernet bytes, of segments before splitting).
TCP is Reno, which every kernel has and which fills such a link evenly: BBR's probing made 5 MB take up to half longer.

Needs root. `clean` removes what a killed process left behind. Read next: `slow_network.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

PREFIX = "mdlmnet"
BRIDGE = f"{PREFIX}-br"
LINK = "link0"
"""Name of an island's only interface (besides loopback), the same in every namespace."""
LOCK = Path("/run/lock/mdlm-slow-network.lock")
TOLERANCE = (0.85, 1.02)
"""Measured over shaped rate must lie between these."""

_TRANSFER = """
import socket, sys, threading, time
peer, total, skip = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
server = socket.create_server(("0.0.0.0", 7707))
def send():
    for attempt in range(100):
        try:
            out = socket.create_connection((peer, 7707), timeout=60)
            break
        except OSError:
            time.sleep(0.05)
    block = bytes(65536)
    for _ in range(total // 65536):
        out.sendall(block)
    out.close()
thread = threading.Thread(target=send)
thread.start()
came, _ = server.accept()
got = 0
started = None
while True:
    part = came.recv(1 << 20)
    if not part:
        break
    got += len(part)
    if started is None and got >= skip:
        started, first = time.perf_counter(), got
print((got - first) * 8 / (time.perf_counter() - started))
thread.join()
"""


def namespace(island: int) -> str:
    """Name of an island's network namespace."""
    return f"{PREFIX}{island}"


def host_end(island: int) -> str:
    """Name of the interface on the bridge that leads to the island."""
    return f"{PREFIX}-h{island}"


def address(island: int) -> str:
    """The island's IPv4 address."""
    return f"10.77.0.{island + 1}"


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def unavailable() -> str | None:
    """Why no such network can be made here; None if one can. Tries with a namespace of its own, and removes it."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (apt-get install iproute2)"
    trial = f"{PREFIX}-t{os.getpid()}"
    try:
        _do("ip", "netns", "add", trial)
        _do("tc", "-n", trial, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "128kb",
            "latency", "200ms")  # fmt: skip
    except RuntimeError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
    return None


@contextmanager
def only_one() -> Iterator[None]:
    """Within the block no other process makes or cleans such a network. Raises RuntimeError naming one that does."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise RuntimeError(
                f"process {file.read().strip() or '?'} uses the emulated network; stop it first"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP end the program as Ctrl-C does: by an exception, so that it cleans up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def clean() -> list[str]:
    """Kills what still runs in the islands' namespaces and removes namespaces, interfaces and bridge, if any are left.

    Returns the names of what was removed.
    """
    found = [line.split()[0] for line in _do("ip", "netns", "list").splitlines() if line.startswith(PREFIX)]
    for name in found:
        for process in _do("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while _do("ip", "netns", "pids", name).split() and time.monotonic() < deadline:
            time.sleep(0.02)
        _do("ip", "netns", "del", name)
    for interface in sorted(path.name for path in Path("/sys/class/net").glob(f"{PREFIX}-*")):
        gone = subprocess.run(["ip", "link", "del", interface], capture_output=True, check=False).returncode
        found += [] if gone else [interface]  # a veth goes with its namespace, in its own time
    return found


class Network:
    """Islands that reach each other over links of a given rate. Use as a context manager."""

    def __init__(self, islands: int, mbit: float | None) -> None:
        """`mbit`: Mbit/s per island and direction; None: not shaped."""
        if not 2 <= islands <= 64:
            raise ValueError(f"{islands} islands; the emulated network takes 2 to 64")
        if mbit is not None and not mbit > 0:
            raise ValueError(f"the rate is {mbit} Mbit/s; it must be positive, or None for a link that is not shaped")
        self.islands, self.mbit = islands, mbit
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        clean()
        try:
            _do("ip", "link", "add", BRIDGE, "type", "bridge")
            _do("ip", "link", "set", BRIDGE, "up")
            for i in range(self.islands):
                self._connect(i)
        except BaseException:
            clean()
            raise
        return self

    def _connect(self, i: int) -> None:
        name, end = namespace(i), host_end(i)
        _do("ip", "netns", "add", name)
        _do("ip", "link", "add", end, "type", "veth", "peer", "name", LINK, "netns", name)
        _do("ip", "link", "set", end, "master", BRIDGE)
        _do("ip", "link", "set", end, "up")
        _do("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", LINK)
        for interface in (LINK, "lo"):
            _do("ip", "-n", name, "link", "set", interface, "up")
        _do("ip", "netns", "exec", name, "sysctl", "-w", "net.ipv4.tcp_congestion_control=reno")
        if self.mbit is not None:
            burst = max(131072, int(self.mbit * 1e6 / 8 / 100))
            shape = ["root", "tbf", "rate", f"{round(self.mbit * 1e6)}bit", "burst", f"{burst}b", "latency", "200ms"]
            _do("tc", "-n", name, "qdisc", "add", "dev", LINK, *shape)
            _do("tc", "qdisc", "add", "dev", end, *shape)

    def __exit__(self, *_: object) -> None:
        self.stop()
        clean()

    def start(
        self,
        island: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a process on an island, in a session of its own; output goes to `log`, or can be read from it."""
        output = subprocess.PIPE if log is None else log
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace(island), *command],
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT if log is not None else subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """Kills the processes that `start` started and that still run, with their children."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._processes.clear()

    def sent_bytes(self, island: int) -> int:
        """Bytes that the island's interface has sent since it was made."""
        return int(Path(f"/sys/class/net/{host_end(island)}/statistics/rx_bytes").read_text())

    def measure(self, seconds: float = 2.0) -> list[float]:
        """Mbit/s that island i receives from island i - 1, all at once: every up-link and every down-link is used once.

        `seconds`: length of the transfer on a shaped link, about.
        """
        size = 64_000_000 if self.mbit is None else max(2_000_000, int(self.mbit * 1e6 / 8 * seconds))
        skipped = min(size // 4, max(524_288, 2 * int((self.mbit or 0) * 1e6 / 8 / 100)))  # what the buckets held
        command = [sys.executable, "-S", "-c", _TRANSFER]
        peers = [address((i + 1) % self.islands) for i in range(self.islands)]
        running = [self.start(i, [*command, peer, str(size), str(skipped)]) for i, peer in enumerate(peers)]
        rates = []
        for process in running:
            out, err = process.communicate(timeout=60 + 10 * seconds)
            if process.returncode:
                raise RuntimeError(f"the trial transfer failed: {err.strip()}")
            rates.append(float(out) / 1e6)
            self._processes.remove(process)
        return rates

    def verified(self, seconds: float = 2.0, attempts: int = 3) -> list[float]:
        """`measure`, again if other work on the machine got in its way.

        Raises RuntimeError if a link is not as fast as it should be, or faster.
        """
        low, high = TOLERANCE
        for _ in range(attempts):
            rates = self.measure(seconds)
            if self.mbit is None or all(low * self.mbit <= rate <= high * self.mbit for rate in rates):
                return rates
        measured = ", ".join(f"{rate:.1f}" for rate in rates)
        raise RuntimeError(
            f"links shaped to {self.mbit} Mbit/s carry {measured} Mbit/s; expected {low} to {high} of it: "
            "is the machine busy, or does something else shape these interfaces?"
        )
