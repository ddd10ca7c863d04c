"""Tells somebody of a run: by a command, or by a webhook. It runs beside the driver, and whatever it meets, training goes on."""

from __future__ import annotations

import dataclasses
import html
import os
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from gangway.storage import json_text
from gangway.text import cut
from orchestrator.policies.notices import Notice, Notices, NotifyConfig
from trainers.console.text import printable

DELAYS_S = (1.0, 5.0, 30.0)
"""Before each further try."""
WEBHOOK_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 60.0
MAX_WAITING = 100
"""Notices that wait for a server that does not answer. Further ones are dropped, and counted."""
SLACK = ".slack.com"


class Notifier:
    """Sends the notices of a launch from a thread of its own. `note` tells on the console what could not be sent."""

    def __init__(
        self,
        config: NotifyConfig,
        run: str,
        run_dir: str,
        began_at_s: float,
        note: Callable[[str], None],
        *,
        delays_s: Sequence[float] = DELAYS_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        self._config, self._run_dir, self._note, self._delays_s = config, run_dir, note, delays_s
        self._began_at_s, self._clock, self._wall = began_at_s, clock, wall
        self._notices = Notices(config, run)
        self._waiting: queue.Queue[Notice | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def see(self, event: Mapping[str, Any]) -> None:
        """Takes an event of the console. Never waits, and never raises."""
        if not self._config.tells:
            return
        try:
            notice = self._notices.of(event, self._clock(), self._wall() - self._began_at_s)
        except Exception as error:  # an odd event: the run goes on
            self._note(f"notify: no notice was made of an event ({error!r})")
            return
        if notice is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
            self._thread.start()
        # Any text can be sent: an operating system takes no variable of 128 kB, and none with a NUL.
        notice = dataclasses.replace(notice, text=cut(printable(notice.text)))
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float) -> None:
        """Waits at most so long until all is sent."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)
        self._ended.set()
        if self._thread.is_alive():
            self._note(f"notify: not all notices were sent within {timeout_s:.3g} s")
        if self._dropped:
            self._note(f"notify: {self._dropped} notices were dropped")

    def _run(self) -> None:
        while (notice := self._waiting.get()) is not None:
            for way, send in (("command", self._by_command), ("webhook", self._by_webhook)):
                if problem := self._tried(send, notice):
                    self._note(f"notify.{way} did not take the notice {notice.event!r}: {problem}")

    def _tried(self, send: Callable[[Notice], None], notice: Notice) -> str:
        """Returns why a notice could not be sent, after several tries; empty if it was."""
        problem = ""
        for delay_s in (*self._delays_s, None):
            try:
                send(notice)
                return ""
            except Exception as error:  # whatever a server or a command does: the run goes on
                problem = _reason(error)
            if delay_s is None or self._ended.wait(delay_s):
                break
        return problem

    def _body(self, notice: Notice) -> dict[str, Any]:
        return {"event": notice.event, "run": self._notices.run, "text": notice.text, "run_dir": self._run_dir, **notice.about}

    def _by_command(self, notice: Notice) -> None:
        if not self._config.command:
            return
        about = {"GANGWAY_EVENT": notice.event, "GANGWAY_RUN": self._notices.run, "GANGWAY_TEXT": notice.text}
        body = json_text.dumps(self._body(notice)) + "\n"  # so that `cat >> FILE` makes lines of JSON
        subprocess.run(
            self._config.command,
            input=body,
            text=True,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
            env={**os.environ, **about},
            start_new_session=True,  # Ctrl-C at the command of the run is not for it
        )

    def _by_webhook(self, notice: Notice) -> None:
        if self._config.webhook is None:
            return
        host = urlsplit(self._config.webhook).hostname or ""
        # Of Slack, & < and > are its own: they would tell everybody in a channel, or show another address than that of a link.
        body = {"text": html.escape(notice.text, quote=False)} if f".{host}".endswith(SLACK) else self._body(notice)
        data = json_text.dumps(body).encode()
        request = urllib.request.Request(self._config.webhook, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=WEBHOOK_TIMEOUT_S) as answer:
            answer.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirect: the notice would not go with it, and another page's answer would count as its arrival."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _reason(error: Exception) -> str:
    """Returns what went wrong, without the URL, which is a secret."""
    match error:
        case urllib.error.HTTPError():
            return f"HTTP {error.code}"
        case urllib.error.URLError():
            return str(error.reason)
        case subprocess.CalledProcessError():
            last = (error.stderr or "").strip().splitlines()[-1:] or [""]
            return f"exit status {error.returncode}{': ' if last[0] else ''}{last[0]}"
        case subprocess.TimeoutExpired():
            return f"it did not end within {COMMAND_TIMEOUT_S:.0f} s"
        case FileNotFoundError():
            return f"there is no program {error.filename}"
    return str(error)
