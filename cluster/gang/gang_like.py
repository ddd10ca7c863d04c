"""What a driver needs of a gang, of its slots and of how gangs are made. mypy checks that `Gang` and `acquire` fit, and that the
stand-ins of the tests do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from cluster.gang.calls import MailboxLike
from cluster.hosts.config import HostsConfig
from gangway.waits import CheckStop
from gangway.wire.answers import Description, TakenOver
from gangway.wire.orders import MachineOrders


class SlotLike(Protocol):
    """Room for one host (`cluster.gang.slots.Slot`)."""

    number: int
    description: Description | None
    """The agent's last answer to `describe`; None until it has answered."""
    lost: bool
    """Whether the driver has given its agent up."""

    @property
    def available(self) -> bool: ...

    @property
    def node_id(self) -> str | None: ...


S = TypeVar("S", bound=SlotLike)


class Asked(Protocol):
    """The part of a gang through which its hosts are asked."""

    def call(self, host: int, method: str, *args: Any, **kwargs: Any) -> Any: ...

    def tell(self, host: int, method: str, *args: Any) -> None: ...

    def mailbox(self) -> MailboxLike: ...


class GangLike(Asked, Protocol[S]):
    """The slots of a run and their agents. See `cluster.gang.gang.Gang` for what each of these does."""

    version: int

    @property
    def slots(self) -> Sequence[S]: ...

    @property
    def members(self) -> Sequence[S]: ...

    @property
    def leads(self) -> Sequence[TakenOver]: ...

    def ask(self, slot: S, method: str, *args: Any, **kwargs: Any) -> Any: ...

    def orders(self, host: int) -> MachineOrders: ...

    def prepare(self, preparation: Any) -> None: ...

    def record(self) -> dict[str, Any]: ...

    def cluster_address(self) -> str: ...

    def draining_nodes(self) -> dict[str, float | None]: ...

    def set_members(self, slots: Iterable[S]) -> None: ...

    def refresh(self, *, members: bool = False) -> list[S]: ...

    def wait_available(self, count: int, timeout_s: float, check_stop: CheckStop = ...) -> list[S]: ...

    def lose(self, *slots: S, avoid_nodes: Sequence[str] = (), fill: bool = True) -> None: ...

    def fill_unassigned(self) -> None: ...

    def missing(self) -> str: ...

    def clear_avoided_nodes(self) -> bool: ...

    def release(self) -> None: ...


AnyGang = GangLike[Any]
"""For a driver, whose slots are those of one gang, whatever their class."""


class GangsLike(Protocol):
    """How a driver gets its gang. See `cluster.gang.acquire`."""

    def clear(self, run_name: str, *, check_stop: CheckStop) -> Any: ...

    def reserve(
        self,
        config: HostsConfig,
        run_name: str,
        /,
        *,
        log_dir: str,
        driver_term: int,
        lease_s: float,
        check_stop: CheckStop,
    ) -> AnyGang: ...

    def adopt(
        self,
        config: HostsConfig,
        run_name: str,
        record: Mapping[str, Any],
        /,
        *,
        log_dir: str,
        driver_term: int,
        lease_s: float,
        check_stop: CheckStop,
    ) -> AnyGang: ...
