"""A compose project of a test: how it is started, asked, watched and taken away."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECTS = {
    "shoal-test-peer": ("172.31.76", 18421),
    "shoal-test": ("172.31.77", 18420),
    "shoal-test-vllm": ("172.31.78", 18422),
}
"""The projects of these tests: the /24 of each one's networks (no two may overlap on one engine), and its page's port.

Who uses another one's network comes first: it has to go before it.
"""
BUILD_SECONDS = 3600.0
CALL_SECONDS = 300.0
LOG_CHARACTERS = 6000


class Project:
    """`docker compose -p NAME -f FILE ...` from the root of the repository, without a terminal."""

    def __init__(self, name: str, *files: str, join: str = "", profile: str = "") -> None:
        """`join`: the invite that the node gets as SHOAL_JOIN; `profile`: one that is on."""
        net, self.port = PROJECTS[name]
        self._command = ["docker", "compose", "-p", name, *(word for file in files for word in ("-f", file))]
        self._environment = {
            **os.environ,
            "TEST_NET": net,
            "TEST_PORT": str(self.port),
            "SHOAL_JOIN": join,
            "COMPOSE_PROFILES": profile,
        }

    def compose(self, *arguments: str, timeout: float = CALL_SECONDS) -> str:
        """What it prints. Raises AssertionError, with what every service logged, when it fails."""
        done = self._run(*arguments, timeout=timeout)
        if done.returncode != 0:
            said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            raise AssertionError(f"{arguments}: {said}\nlogs:\n{self.logs()}")
        return done.stdout

    def logs(self) -> str:
        """The last lines of every service."""
        return self._run("logs", "--no-color", "--tail=60", timeout=CALL_SECONDS).stdout[-LOG_CHARACTERS:]

    def shoal(self, *arguments: str, service: str = "node") -> Any:
        """What `shoal ... --json` answers inside the service's container. Raises AssertionError."""
        return json.loads(self.compose("exec", "-T", service, "shoal", *arguments, "--json"))

    def python(self, code: str, service: str = "node") -> str:
        """What a line of Python prints inside the service. Raises AssertionError."""
        return self.compose("exec", "-T", service, "python3", "-c", code)

    def until(self, wanted: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """The node's status once it is as wanted. Raises AssertionError when the node fails or takes longer."""
        deadline = time.monotonic() + seconds
        status: dict[str, Any] = {}
        while not status or not wanted(status):
            assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {status}\n{self.logs()}"
            time.sleep(2)
            done = self._run("exec", "-T", "node", "shoal", "status", "--json", timeout=CALL_SECONDS)
            if done.returncode == 0:  # else the daemon is not up yet
                status = json.loads(done.stdout)
                assert status["state"] != "FAILED", status
        return status

    def until_step(self, step: int, seconds: float) -> dict[str, Any]:
        """The status once the node has done `step` steps."""
        return self.until(lambda status: status["step"] >= step, seconds)

    def until_health(self, word: str, seconds: float) -> None:
        """Wait until the engine says "healthy" or "unhealthy" of the node. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        while (health := self.inspect()["State"]["Health"])["Status"] != word:
            assert time.monotonic() < deadline, f"not {word} in {seconds:.0f} s: {health}\n{self.logs()}"
            time.sleep(2)

    def inspect(self, service: str = "node") -> dict[str, Any]:
        """What the engine knows of the service's container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        details: list[dict[str, Any]] = json.loads(
            subprocess.check_output(["docker", "inspect", container], timeout=CALL_SECONDS)
        )
        return details[0]

    def down(self) -> None:
        """Take away containers, networks and volumes, those of an earlier run that was killed too."""
        self.compose("down", "--volumes", "--remove-orphans")

    def _run(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
