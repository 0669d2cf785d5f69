"""What a check is given and what it says."""

from dataclasses import dataclass, field
from typing import Any, Literal

from node.config import Config
from node.home import Home

Verdict = Literal["ok", "warn", "fail"]
PROBE_SECONDS = 3.0
"""Deadline of one connection attempt or local request."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is what a person should do; empty where there is nothing to do."""

    check: str
    verdict: Verdict
    said: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined."""

    home: Home
    config: Config
    """The settings, or the defaults where `settings_error` says why they cannot be read."""
    settings_error: str = ""
    status: dict[str, Any] | None = None
    """What the running daemon says of itself; None: none answers."""
    silence: str = ""
    """Why there is no status, with what to do."""
    known: dict[str, Any] = field(default_factory=dict)
    """The daemon's DaemonInfo fields, where one runs."""

    @property
    def pid(self) -> int | None:
        """Of the daemon that answers."""
        return self.known.get("pid") if self.status is not None else None

    @property
    def initialised(self) -> bool:
        return self.home.identity_path.exists()


def ok(check: str, said: str) -> Finding:
    return Finding(check, "ok", said)


def warn(check: str, said: str, fix: str) -> Finding:
    return Finding(check, "warn", said, fix)


def fail(check: str, said: str, fix: str) -> Finding:
    return Finding(check, "fail", said, fix)


def failed(check: str, error: BaseException) -> Finding:
    """Of an error that already says '<what> ; <fix>' or '<what>; <fix>', as those of this project do."""
    what, _, told = str(error).partition(" ; " if " ; " in str(error) else "; ")
    return fail(check, what or type(error).__name__, told or "see `shoal logs`")
