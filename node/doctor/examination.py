"""Runs the checks, each with a deadline of its own: one that hangs or breaks is a finding like any other."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

from node.client import DaemonUnreachable, RequestRefused, connect
from node.config import Config
from node.doctor import machine, network, stored, swarm
from node.doctor.finding import PROBE_SECONDS, Finding, Subject, fail, failed, ok, warn
from node.home import Home, HomeError
from node.oddities import oddities
from node.settings import ConfigError, load
from web.probes import readiness

Check = Callable[[Subject], Sequence[Finding]]
CHECK_SECONDS = 20.0
"""Deadline of one check."""
IMPORT_SECONDS = 120.0
"""Deadline of the one that imports torch and transformers: from a cold disk or on a busy machine that takes a while."""


def subject(home: Home, overrides: Mapping[str, str]) -> Subject:
    """The node of a home as it is now, whether or not it was initialised or runs."""
    config, error = Config(), ""
    try:
        config = load(home, overrides).config
    except ConfigError as wrong:
        error = str(wrong)
    try:
        info = home.daemon()
        client = connect(home, PROBE_SECONDS)
        return Subject(home, config, error, client.get("status"), "", asdict(info) if info else {})
    except (HomeError, DaemonUnreachable, RequestRefused, OSError) as silence:
        return Subject(home, config, error, None, str(silence))


def settings(subject: Subject) -> list[Finding]:
    if subject.settings_error:
        what, _, fix = subject.settings_error.partition(" ; ")
        return [fail("settings", f"{what} (what follows is of the default settings)", fix)]
    odd = oddities(subject.config)
    return [warn("settings", said, "change it, or leave it if it is meant") for said in odd] or [
        ok("settings", f"{subject.home.config_path} and the environment are valid")
    ]


def daemon(subject: Subject) -> list[Finding]:
    """Whether it runs, and how old its last step is."""
    now = subject.status
    if now is None:
        if not subject.initialised:
            return [ok("daemon", "there is none yet")]
        what, _, fix = subject.silence.partition(" ; ")
        if subject.home.daemon() is not None:
            return [fail("daemon", what, fix or "shoal logs says what it does; end the process and run shoal up")]
        return [warn("daemon", what, fix or "start it with `shoal up`")]
    words = f"{now['state']}, step {now['step']}"
    if age := now["last_step_age"]:
        words += f", the last one {age:.0f} s ago"
    faults = readiness(now)
    if faults:
        return [fail("daemon", f"{words}: {'; '.join(faults)}", now["next"] or "see `shoal logs`")]
    if now["state"] == "WAITING":
        return [warn("daemon", f"{words}: {now['reason']}", now["next"] or "see `shoal logs`")]
    return [ok("daemon", words)]


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "settings": settings,
        "home": stored.home,
        "daemon": daemon,
        "clock": network.clock,
        "ports": network.ports,
        "reachability": network.reachability,
        "bootstrap": network.bootstrap,
        "coordinator": swarm.coordinator,
        "federation": swarm.federation,
        "averaging": swarm.averaging,
        "python": machine.python,
        "torch": machine.torch_build,
        "device": machine.device,
        "model": machine.model,
        "memory": machine.memory,
        "disk": stored.disk,
        "vllm": machine.vllm,
    }
)
"""In the order they are told: what is quick comes before what imports torch."""


def examine(
    subject: Subject,
    checks: Mapping[str, Check] = CHECKS,
    *,
    begins: Callable[[str], None] = lambda name: None,
    seconds: float = CHECK_SECONDS,
) -> Iterator[Finding]:
    """Findings of all checks, as they come; `begins` is told which one is next. Never raises."""
    for name, check in checks.items():
        begins(name)
        yield from within(
            name, check, subject, max(seconds, IMPORT_SECONDS) if check is machine.torch_build else seconds
        )


def within(name: str, check: Check, subject: Subject, seconds: float) -> Sequence[Finding]:
    """What a check finds within its deadline."""
    found: list[Sequence[Finding]] = []

    def run() -> None:
        try:
            found.append(check(subject))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the machine, the other checks go on
            found.append([failed(name, RuntimeError(f"the check broke with {type(error).__name__}: {error}"))])

    thread = threading.Thread(target=run, name=f"check-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        return [fail(name, f"the check gave no answer within {seconds:.0f} s", "try again when the machine is idle")]
    return found[0]
