"""Where the ranks of a generation meet; where they cannot, which process holds the port."""

import os
import socket
from dataclasses import dataclass
from typing import Self

from paceline.agent.gate import LOOPBACK, StoreGate, far_store, own_store, port_taken
from paceline.contract.node_plan import NodePlan


@dataclass(frozen=True)
class Store:
    """Where the ranks of a generation meet.

    On one host in `memory`: a file without a name that they inherit, and that no other user can reach. On several at a
    port, which rank 0 inherits bound and listening: one that is found and closed again can be lost; the way to it is a
    `gate`. A script opens its store itself, at a port that is open to all. On one host the port is for the workers' own
    code (any script that torchrun could start opens one): it is only bound, which keeps it from everybody who asks for
    any free port, but not from whoever asks for this one with SO_REUSEADDR.
    """

    port: socket.socket | None
    memory: int = -1
    gate: StoreGate | None = None

    @classmethod
    def make(cls, plan: NodePlan) -> Self:
        """Of the node that `plan` is for.

        Raises:
            UsageError: when the port is taken.
        """
        if plan.nodes > 1 and not plan.plain_store:
            if plan.node:
                door, secret = plan.head_ports[0], bytes.fromhex(plan.secret)
                return cls(None, gate=far_store(plan.master_addr, door, secret))
            store, gate = own_store(plan.port)
            return cls(store, gate=gate)
        return cls(_bound(plan), os.memfd_create("paceline-store") if plan.nodes == 1 else -1)

    def inherited(self, rank: int, *, plain: bool) -> int:
        """The descriptor by which this rank comes to the store; -1 where it is to connect."""
        if self.memory >= 0:
            return self.memory
        return self.port.fileno() if rank == 0 and self.port is not None and not plain else -1

    def port_number(self, plan: NodePlan) -> int:
        """What the ranks get as MASTER_PORT."""
        if self.gate is not None:
            return self.gate.port
        return self.port.getsockname()[1] if self.port is not None else plan.port

    def address(self, plan: NodePlan) -> str:
        """What the ranks get as MASTER_ADDR."""
        return plan.master_addr if self.gate is None else LOOPBACK

    def close(self) -> None:
        """Leave it to the ranks: with our socket open, connecting to a dead rank 0 would not be refused."""
        if self.port is not None:
            self.port.close()
        if self.memory >= 0:
            os.close(self.memory)


def _bound(plan: NodePlan) -> socket.socket | None:
    if plan.node != 0:
        return None
    store = socket.socket(socket.AF_INET6 if ":" in plan.master_addr else socket.AF_INET)
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's closing connections do no harm
    try:
        store.bind(("" if plan.plain_store else plan.master_addr, plan.port))
    except OSError as error:
        store.close()
        raise port_taken(f"port {plan.port} on {plan.master_addr}", plan.port, error) from error
    return store
