"""Which events of a run somebody is notified of, outside of the terminal. Pure: it reads no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gangway.config.masking import MASK, masked
from gangway.config.section import Section, did_you_mean, require

STARTED, INCIDENT, GAVE_UP, FINISHED, GOODPUT = EVENTS = ("started", "incident", "gave_up", "finished", "goodput")
INCIDENTS_EVERY_S = 60.0
"""Of incidents that follow each other sooner, the first is sent, and with the next one how many there were."""
GOODPUT_AFTER_S = 600.0
"""A run that has just started has no goodput yet."""
GOODPUT_MARGIN = 0.05
"""Goodput that was sent is sent again only after it was better than the limit by so much."""


@dataclass(frozen=True, kw_only=True)
class NotifyConfig(Section):
    """Who is notified of what. By default, nobody."""

    command: tuple[str, ...] = ()
    """A program and its arguments. It gets the notice as JSON on its standard input, and in GANGWAY_EVENT, GANGWAY_RUN and
    GANGWAY_TEXT. So a notice becomes an e-mail: `[sh, -c, 'echo "$GANGWAY_TEXT" | mail -s "$GANGWAY_RUN" me@example.org']`."""
    webhook: str | None = field(default=None, repr=False)
    """A URL to which the notice is sent as JSON; to one of Slack, in Slack's form. It is a secret, and never shown or stored."""
    events: tuple[str, ...] = EVENTS
    """Which events are told: `started`, `incident`, `gave_up`, `finished`, `goodput`."""
    goodput_below: float | None = None
    """Told when the goodput of the run falls below this share of the wall clock, after its first ten minutes."""

    def __post_init__(self):
        unknown = [name for name in self.events if name not in EVENTS]
        require(
            not unknown,
            f"events = {list(self.events)}: expected some of {', '.join(EVENTS)}"
            f"{did_you_mean(unknown[0], EVENTS) if unknown else ''}",
        )
        below = self.goodput_below
        require(below is None or 0 < below < 1, f"goodput_below = {below}: expected a share between 0 and 1, such as 0.8")
        parts = urlsplit(self.webhook or "https://host")
        require(
            parts.scheme in ("http", "https") and bool(parts.hostname),
            f"webhook = {self.shown()!r}: expected a URL such as https://hooks.slack.com/services/...",
        )
        require(
            below is None or bool(self.command or self.webhook),
            f"goodput_below = {below}: nobody is notified of it; give notify.command or notify.webhook",
        )

    @property
    def tells(self) -> bool:
        return bool(self.command or self.webhook)

    def shown(self) -> str | None:
        """Returns the webhook for showing: its path is the secret."""
        if self.webhook is None:
            return None
        parts = urlsplit(self.webhook)
        return f"{parts.scheme}://{masked(parts.hostname or '')}/{MASK}" if parts.hostname else MASK


@dataclass(frozen=True)
class Notice:
    event: str
    text: str
    """A sentence for people."""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Notices:
    """What to tell of the events that a console gets, in their order."""

    config: NotifyConfig
    run: str
    _has_started: bool = False
    _last_incident_s: float = float("-inf")
    _incidents_since: int = 0
    _goodput_noted: bool = False

    def of(self, event: Mapping[str, Any], now_s: float, since_start_s: float) -> Notice | None:
        """Returns the notice about an event; None if there is none. `now_s` is any steady clock."""
        found = self._of(event, now_s, since_start_s)
        return found if found is not None and found.event in self.config.events else None

    def _of(self, event: Mapping[str, Any], now_s: float, since_start_s: float) -> Notice | None:
        match event["ev"]:
            case "generation":
                return self._started(event)
            case "incident":
                return self._incident(event["incident"], now_s)
            case "metrics":
                return self._goodput(event, since_start_s)
            case "summary":
                return self._ended(event["summary"])
        return None

    def _started(self, event: Mapping[str, Any]) -> Notice | None:
        if self._has_started or event["generation"] > 0:
            return None
        self._has_started = True
        hosts = event["hosts"]
        return Notice(STARTED, f"{self.run} started on {hosts} host{'' if hosts == 1 else 's'}", {"hosts": hosts})

    def _incident(self, incident: Mapping[str, Any], now_s: float) -> Notice | None:
        if incident["action"] == "give up":
            return None  # the end tells it
        self._incidents_since += 1
        if now_s - self._last_incident_s < INCIDENTS_EVERY_S:
            return None
        self._last_incident_s, count = now_s, self._incidents_since
        self._incidents_since = 0
        what = incident.get("evidence", {}).get("summary") or str(incident["kind"]).replace("_", " ")
        others = f" (and {count - 1} more in the last minutes)" if count > 1 else ""
        return Notice(INCIDENT, f"{self.run}: {what}{others}", {"incident": incident})

    def _goodput(self, event: Mapping[str, Any], since_start_s: float) -> Notice | None:
        goodput, limit = event.get("goodput"), self.config.goodput_below
        if goodput is None or limit is None or since_start_s < GOODPUT_AFTER_S:
            return None
        if goodput >= limit:
            self._goodput_noted = self._goodput_noted and goodput < limit + GOODPUT_MARGIN
            return None
        if self._goodput_noted:
            return None
        self._goodput_noted = True
        step = event["step"]
        text = f"{self.run}: goodput is {goodput:.0%} at step {step:,}, below {limit:.0%}"
        return Notice(GOODPUT, text, {"goodput": goodput, "step": step})

    def _ended(self, summary: Mapping[str, Any]) -> Notice:
        status, steps = str(summary["status"]), summary.get("steps") or 0
        about = {name: summary.get(name) for name in ("status", "stop_reason", "steps", "error", "train_loss", "eval_loss")}
        if status == "failed":
            return Notice(GAVE_UP, f"{self.run} failed at step {steps:,}: {summary.get('error')}", about)
        loss = "" if summary.get("train_loss") is None else f", loss {summary['train_loss']:.4g}"
        return Notice(FINISHED, f"{self.run} {status} at step {steps:,}{loss}", about)
