"""A compose project of a test: how it is started, asked, watched and taken away."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NETS = {"shoal-test": "172.31.77", "shoal-vllm-test": "172.31.78"}
"""The projects of these tests, and the /24 that each one's networks are in: no two may overlap on one engine."""
BUILD_SECONDS = 3600.0
CALL_SECONDS = 300.0
LOG_CHARACTERS = 6000


class Project:
    """`docker compose -p NAME -f FILE ...` from the root of the repository, without a terminal."""

    def __init__(self, name: str, *files: str) -> None:
        self.name = name
        self._command = ["docker", "compose", "-p", name, *(word for file in files for word in ("-f", file))]
        self._environment = {**os.environ, "TEST_NET": NETS[name]}

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
        """What `shoal ... --json` answers inside the service. Raises AssertionError."""
        return json.loads(self.compose("exec", "-T", service, "shoal", *arguments, "--json"))

    def until_step(self, step: int, seconds: float, service: str = "node") -> dict[str, Any]:
        """The status once the node has done `step` steps. Raises AssertionError when it fails or takes longer."""
        deadline = time.monotonic() + seconds
        status: dict[str, Any] = {"step": -1}
        while status["step"] < step:
            assert time.monotonic() < deadline, f"step {step} not reached in {seconds:.0f} s: {status}\n{self.logs()}"
            time.sleep(2)
            done = self._run("exec", "-T", service, "shoal", "status", "--json", timeout=CALL_SECONDS)
            if done.returncode != 0:  # the daemon is not up yet
                continue
            status = json.loads(done.stdout)
            assert status["state"] != "FAILED", status
        return status

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
