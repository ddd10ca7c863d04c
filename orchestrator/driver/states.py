"""The states of a driver: what each knows, and which may follow which.

    Beginning -> Reserving -> Importing -> Training -> Saving -> Ended
    Training -> (Halting) -> Recovering -> (BackingOff, Reserving) -> Recovering -> Training

`Driver` and what it is made of enter a state by `EventHandler.enter`; a transition that is not in FOLLOWERS is a mistake in the
driver, and raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class State:
    label: ClassVar[str] = ""
    """What a person sees; empty: nothing new."""
    category: ClassVar[str | None] = None
    """Its category of the ledger of time. None: the category goes on as it is, or the events of the hosts say it
    (`Generation.category`)."""


@dataclass(frozen=True)
class Beginning(State):
    """No gang is reserved or adopted yet."""


@dataclass(frozen=True)
class Reserving(State):
    """It waits for machines, before the first generation or for the next one."""

    label: ClassVar[str] = "reserving"
    category: ClassVar[str | None] = "schedule"


@dataclass(frozen=True)
class Importing(State):
    """The processes of the first generation are being prepared."""

    label: ClassVar[str] = "importing"
    category: ClassVar[str | None] = "import"


@dataclass(frozen=True)
class Training(State):
    label: ClassVar[str] = "training"
    new_checkpoint: bool = False
    """Whether a checkpoint was committed since the driver last considered to grow."""


@dataclass(frozen=True)
class Saving(State):
    """The hosts of a generation were asked to save and to stop."""

    label: ClassVar[str] = "saving"
    generation: int
    stop_ordered_at_s: float | None = None
    """When a person's request was sent to the hosts; None: there is none. By the monotonic clock."""
    pauses: bool = False
    """Whether they were asked so that another gang goes on."""


@dataclass(frozen=True)
class Halting(State):
    """It waits until killed processes have ended. What failed, and when, is not known yet."""

    label: ClassVar[str] = "recovering"


@dataclass(frozen=True)
class Recovering(State):
    """The next generation is being formed and started, until its first step."""

    label: ClassVar[str] = "recovering"
    category: ClassVar[str | None] = "recovery"


@dataclass(frozen=True)
class BackingOff(State):
    """It waits before the next try."""

    label: ClassVar[str] = "recovering"
    category: ClassVar[str | None] = "idle"


@dataclass(frozen=True)
class Ended(State):
    """The launch has its result, or its error."""


FOLLOWERS: Mapping[type[State], tuple[type[State], ...]] = {
    # Training at once: with the gang of the previous driver.
    Beginning: (Reserving, Training, Ended),
    # Recovering: the machines of the next generation are there.
    Reserving: (Reserving, Importing, Recovering, Ended),
    # Saving: the time limit passes before the first step.
    Importing: (Training, Saving, Halting, Recovering, Ended),
    # Training: the gang of the previous driver completes the first step that this driver sees.
    Training: (Training, Saving, Halting, Recovering, Ended),
    # Saving: a person asks while it pauses, or while the time limit has passed.
    Saving: (Saving, Halting, Recovering, Ended),
    Halting: (Halting, Recovering, Ended),
    # Saving, Halting: before the first step of the new generation.
    Recovering: (Recovering, BackingOff, Reserving, Training, Saving, Halting, Ended),
    BackingOff: (Recovering, Ended),
    Ended: (),
}


class IllegalTransition(RuntimeError):
    """The driver was about to enter a state that cannot follow its present one."""


def follow(story: Sequence[State], state: State) -> State:
    """Returns the state, which is to follow the last one of `story`. Raises IllegalTransition, with the story."""
    allowed = FOLLOWERS[type(story[-1])]
    if type(state) not in allowed:
        expected = ", ".join(kind.__name__ for kind in allowed) or "nothing"
        came = " -> ".join(type(each).__name__ for each in story)
        raise IllegalTransition(f"the driver is {came}: {type(state).__name__} cannot follow; expected {expected}")
    return state


def saving(state: State, generation: int, **changes: Any) -> Saving:
    """Returns the state in which this generation saves; what the present one knows of that is kept."""
    before = state if isinstance(state, Saving) and state.generation == generation else Saving(generation)
    return replace(before, **changes)
