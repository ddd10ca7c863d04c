"""What the earlier launches of a run have used and met, as sums: the numbers of a run are those of all its launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Earlier:
    """The launches of a run before the present one; without an argument: there were none."""

    launches: int = 0
    generations: int = 0
    drivers: int = 0
    num_incidents: int = 0
    wall_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By category of the goodput ledger. They sum to `wall_s`, which leaves out the time between launches."""
    started_at_s: float | None = None
    """When the first launch began, in Unix time."""

    @classmethod
    def before(cls, state: Mapping[str, Any], num_incidents: int) -> Earlier:
        """Returns the sums with the launch that has stored `state` (the document `launch.json`) and met `num_incidents`."""
        known, ledger = cls.of(state), state["goodput"]
        seconds = {name: known.seconds.get(name, 0.0) + value for name, value in ledger["seconds"].items()}
        return cls(
            known.launches + 1,
            known.generations + state["generations"],
            known.drivers + state["drivers"],
            known.num_incidents + num_incidents,
            known.wall_s + sum(ledger["seconds"].values()),
            {**known.seconds, **seconds},
            ledger["started_at_s"] if known.started_at_s is None else known.started_at_s,
        )

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Earlier:
        """Returns the sums that are stored in `launch.json`. A document from before there were any has none."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in state.get("earlier", {}).items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
