"""Where the launchers of a job's hosts meet: in torchrun's store, or in one at the address that Slurm's variables give.

There the leading launcher, of host 0, says where the others reach it and by what secret they know each other. Ranks
meet in the same store, each job of theirs by a name of its own, so that none of an earlier job can enter a later one.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.comm.authentication import new_secret
from paceline.comm.cpu.reception import BACKLOG, Reception, introduce
from paceline.comm.cpu.tcp_connect import addresses, reach
from paceline.comm.environment import read_environment
from paceline.comm.world import STORE
from paceline.core.errors import UserError
from paceline.launch.host_line import CUT_OFF_SECONDS, FENCED_SECONDS, HostLine
from paceline.launch.stop import ended_at_once

JOINING_SECONDS = 600.0
"""For which hosts are waited for when a job begins."""
PATIENT_SECONDS = 5.0
"""After which one who waits says for whom."""
_ANSWER_SECONDS = 5.0
_KEY = "paceline: the leading launcher"


class HostMeeting:
    """This host's place among those of the job, by the variables of who started one launcher on each.

    Attributes:
        host: This one's number.
        hosts: How many.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Reads the variables.

        Raises:
            UserError: They are of several processes on a host, or contradict each other.
        """
        self.host, self.hosts, _, here, method = read_environment(environment)
        if here != 1:
            raise UserError(
                f"min_workers and spares: {here} processes of the job were started on this host; start one on each "
                "(torchrun --nproc-per-node 1, srun --ntasks-per-node 1), which starts its own --workers"
            )
        if method == "env://":
            method = f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        self.address, _, port = method.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store: Any = None

    def open_store(self) -> None:
        """On host 0: joins the store, or makes it where nobody else has one.

        Raises:
            UserError: It cannot be reached, or the port is another's.
        """
        try:
            self._store = self._join(not self._has_store, JOINING_SECONDS)
        except RuntimeError as error:
            advice = (
                "Another program has that port, or another launcher is host 0 too: end it, or set another MASTER_PORT "
                "on every host"
                if "EADDRINUSE" in str(error)
                else "See that hosts reach that address"
            )
            raise UserError(
                f"host {self.host} of {self.hosts} could not meet the others at {self.place}: "
                f"{str(error).splitlines()[0]}. {advice}"
            ) from error

    def say(self, told: dict[str, Any]) -> None:
        """On host 0: tells the others how to reach it."""
        self._store.set(_KEY, json.dumps(told))

    def hear(self) -> dict[str, Any] | None:
        """On another host: what host 0 has said last; None where it has said nothing, or there is no store."""
        try:
            # Torch writes pages about a port at which nobody listens.
            socket.create_connection((self.address, self._port), _ANSWER_SECONDS).close()
            # Who has the port may be another program, for whose words torch waits without end.
            with ended_at_once():
                # Joined anew, as host 0 may have been started again.
                store = self._join(False, _ANSWER_SECONDS)
                told: dict[str, Any] | None = json.loads(store.get(_KEY)) if store.check([_KEY]) else None
        except (OSError, RuntimeError):
            return None
        return told

    @property
    def place(self) -> str:
        """Where hosts meet."""
        return f"{self.address}:{self._port}"

    def store_for(self, job: str) -> str:
        """What tells ranks of a job to meet here."""
        return f"{STORE}{self.place}/{job}"

    def _join(self, makes: bool, seconds: float) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.address, self._port, is_master=makes, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )


class LeadingEnd:
    """Host 0's lines to the others, which come, are lost, and come again.

    Attributes:
        lines: By host: of those that are there.
    """

    def __init__(self, meeting: HostMeeting) -> None:
        """Lets others in from now on."""
        self.lines: dict[int, HostLine] = {}
        self._meeting = meeting
        self._arrived: dict[int, socket.socket] = {}
        self._attempt = secrets.token_hex(8)
        secret = new_secret()
        self._secret = bytes.fromhex(secret)
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)
        self._reception = self._receive()
        port = self._listener.getsockname()[1]
        meeting.say({"addresses": [meeting.address, *addresses()], "port": port, "secret": secret})

    @property
    def missing(self) -> list[int]:
        """Hosts that are not there."""
        return [host for host in range(1, self._meeting.hosts) if host not in {*self.lines, *self._arrived}]

    def come(self) -> list[int]:
        """Hosts that have come since this was last asked."""
        self._gather()
        found, self._arrived = self._arrived, {}
        for host, connection in found.items():
            self.lines[host] = HostLine(connection, self._secret, 0, host, CUT_OFF_SECONDS)
        return sorted(found)

    def drop(self, host: int) -> None:
        """Forgets a host that is lost, which may then come again."""
        self.lines.pop(host).close()
        self._reception.close()
        self._gather()
        self._reception = self._receive()

    def store_for(self, epoch: int) -> str:
        """Where the ranks of a job meet, which those of earlier ones and of earlier attempts at it do not find."""
        return self._meeting.store_for(f"{self._attempt}-{epoch}")

    def close(self) -> None:
        """Ends all lines."""
        self._reception.close()
        self._listener.close()
        for line in self.lines.values():
            line.close()

    def _gather(self) -> None:
        for host in list(self._reception.accepted):
            self._arrived[host] = self._reception.accepted.pop(host)

    def _receive(self) -> Reception:
        return Reception(self._listener.dup(), self.missing, _ANSWER_SECONDS, self._secret)


def reach_leader(meeting: HostMeeting) -> HostLine | None:
    """On another host: a line to the leading launcher; None where it does not answer now."""
    told = meeting.hear()
    if told is None:
        return None
    connection, secret = reach(told["addresses"], told["port"], _ANSWER_SECONDS), bytes.fromhex(told["secret"])
    if connection is None:
        return None
    try:
        introduce(connection, meeting.host, secret, _ANSWER_SECONDS)
    except OSError:
        connection.close()
        return None
    return HostLine(connection, secret, meeting.host, 0, FENCED_SECONDS)
