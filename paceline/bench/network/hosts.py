"""Several "hosts" on this machine: network namespaces, joined by links of a set rate.

Nothing of it has a name outside, and the kernel takes it away: everything lives in namespaces of its own for
networks, mounts and processes, which end with their first process, and that one ends when its standard input does.
So a kill that leaves no time to clean up leaves nothing to clean up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}
"""Programs that must be installed, and the package that has each."""

INTERFACE = "eth0"
"""Name of the network interface of every host."""

MTU = 9000
"""Bytes of a packet: jumbo frames, as between the machines of a cluster, so that headers take 0.7 % of the rate."""

FOLDER = "/dev/shm"
"""Where the namespaces see a folder of their own: files for temporary use go there, and end with them."""

MOST_HOSTS = 250
"""As many as there are addresses."""


class NetworkUnavailable(Exception):
    """This machine cannot make such hosts; the message says what is missing."""


def missing() -> str:
    """What this machine lacks to make hosts, in words; empty if nothing is known to be missing."""
    lacking = []
    if not sys.platform.startswith("linux"):
        lacking.append("Linux")
    elif os.geteuid() != 0:
        lacking.append("root")
    absent = [name for name in PACKAGES if shutil.which(name) is None]
    for package in dict.fromkeys(PACKAGES[name] for name in absent):
        names = [name for name in absent if PACKAGES[name] == package]
        lacking.append(f"the program{'s' * (len(names) > 1)} {', '.join(names)} of the package {package} on the PATH")
    return "; ".join(lacking)


def address(host: int) -> str:
    """The address of a host."""
    return f"10.77.0.{host + 1}"


def limit(gbit: float) -> str:
    """Arguments of `tc qdisc add` that limit what an interface sends to `gbit` Gbit/s.

    A credit of a millisecond makes up for the moments in which a busy core is late to send, so that the rate is
    kept over tens of milliseconds. The peak rate lets that credit out at 1.02 of the rate, not at once.
    """
    bits = round(gbit * 1e9)
    credit, at_once = max(bits // 8000, 4 * MTU), max(bits // 16000, 2 * MTU)
    return f"tbf rate {bits}bit burst {credit} latency 20ms peakrate {round(bits * 1.02)}bit mtu {at_once}"


def commands(hosts: int, gbit: float) -> list[str]:
    """Shell commands that make the hosts, for root in namespaces of its own.

    Two hosts have one link. More have one each to a switch, where what is sent to them is limited too.
    """
    lines = [f"mount -t tmpfs paceline {FOLDER}", f"cd {FOLDER}"]
    for name in (*range(hosts), *(["switch"] if hosts > 2 else [])):
        lines += [f"touch {name}", f"unshare --net=./{name} true"]
    if hosts == 2:
        lines.append(f"nsenter --net=0 ip link add {INTERFACE} type veth peer name {INTERFACE} netns ./1")
    else:
        lines += [f"nsenter --net=switch ip link {words}" for words in ("add switch type bridge", "set switch up")]
    for host in range(hosts):
        if hosts > 2:
            port, at_switch = f"port{host}", "nsenter --net=switch"
            lines += [
                f"{at_switch} ip link add {port} mtu {MTU} type veth peer name {INTERFACE} netns ./{host}",
                f"{at_switch} ip link set {port} master switch up",
                f"{at_switch} tc qdisc add dev {port} root {limit(gbit)}",
            ]
        at_host = f"nsenter --net={host}"
        lines += [
            f"{at_host} ip link set lo up",
            f"{at_host} ip link set {INTERFACE} mtu {MTU} up",
            f"{at_host} tc qdisc add dev {INTERFACE} root {limit(gbit)}",
            f"{at_host} ip address add {address(host)}/24 dev {INTERFACE}",
            # Linux's own default, from which this machine's may differ.
            f"{at_host} ip route change 10.77.0.0/24 dev {INTERFACE} src {address(host)} congctl cubic",
            f"echo {uuid.uuid4()} > boot-id-{host}",
        ]
    return lines


class Hosts:
    """The hosts and all processes that were started on them; gone when closed, or when this process ends in any way."""

    def __init__(self, count: int, gbit: float) -> None:
        """Makes `count` hosts, at least 2, whose links carry `gbit` Gbit/s each way.

        Raises:
            NetworkUnavailable: This machine cannot.
        """
        if lacking := missing():
            raise NetworkUnavailable(f"needs {lacking}")
        self.count = count
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc"]
        # The kernel closes our end of the pipe however we end; `cat` is the process that all others end with.
        self._guard = subprocess.Popen(
            [*unshare, "sh", "-c", "echo made && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        try:
            assert self._guard.stdout is not None
            if not self._guard.stdout.readline():
                raise NetworkUnavailable(
                    f"needs the right to make namespaces (CAP_SYS_ADMIN; docker run --privileged): {self._complaint()}"
                )
            script = "\n".join(commands(count, gbit))
            made = subprocess.run([*self._enter(), "sh", "-eux", "-c", script], capture_output=True, text=True)
            if made.returncode:
                raise NetworkUnavailable(
                    "needs CAP_NET_ADMIN and a kernel with veth, bridge and tbf; this failed: "
                    + " ".join(made.stderr.splitlines()[-2:])
                )
        except BaseException:
            self.close()
            raise

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a program on a host, in this process's working directory, with `environment` added to its own.

        The kernel's boot id, by which programs tell hosts apart, is the host's own.
        """
        prepare = f'mount --bind "{FOLDER}/boot-id-$0" /proc/sys/kernel/random/boot_id && cd "$1" && shift && exec "$@"'
        return subprocess.Popen(
            [*self._enter(host), "unshare", "--mount", "sh", "-c", prepare, str(host), str(Path.cwd()), *command],
            env={**os.environ, "TMPDIR": FOLDER, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # Ctrl-C is for the program that made the hosts; when that ends, this does.
            process_group=0,
        )

    def close(self) -> None:
        """Ends every process on the hosts, and with them the hosts."""
        pipes = (self._guard.stdin, self._guard.stdout, self._guard.stderr)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        self._guard.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, host: int | None = None) -> list[str]:
        process = f"/proc/{self._guard.pid}"
        network = f"{process}/ns/net" if host is None else f"{process}/root{FOLDER}/{host}"
        spaces = (f"--net={network}", f"--mount={process}/ns/mnt", f"--pid={process}/ns/pid_for_children")
        return ["nsenter", *spaces, "--"]

    def _complaint(self) -> str:
        assert self._guard.stderr is not None
        return self._guard.stderr.read().decode(errors="replace").strip()
