"""Talks to the daemon of a home over its local HTTP API (web/server.py), for the command line.

http.client and not urllib, because a proxy configured for the web must never see this traffic or its token.
"""

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from node.home import Home

START_SECONDS = 180.0
"""A node whose imports and port take longer hangs; on an idle machine they take some seconds."""
TIMEOUT = 10.0
MAX_ANSWER = 64 * 1024 * 1024


class DaemonUnreachable(Exception):
    """No daemon runs on this home, or it does not answer; the message says which and what to do."""


class RequestRefused(Exception):
    """The daemon answered with an error; `status` is the HTTP one."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Client:
    """One request, one connection: a command makes one to three of them."""

    def __init__(self, url: str, token: str, timeout: float = TIMEOUT) -> None:
        self.url, self.token, self.timeout = url, token, timeout

    def get(self, *path: str, **query: str | int) -> Any:
        """GET /api/v1/<path>. Raises DaemonUnreachable, RequestRefused."""
        target = target_of(path)
        return accepted(target, *self._ask("GET", f"{target}?{urlencode(query)}" if query else target, None))

    def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST /api/v1/<path> with a JSON body. Raises DaemonUnreachable, RequestRefused."""
        target = target_of(path)
        return accepted(target, *self._ask("POST", target, body or {}))

    def ready(self) -> tuple[bool, list[str]]:
        """Whether the daemon works as it should (/readyz), and why not. Raises DaemonUnreachable."""
        status, answer = self._ask("GET", "/readyz", None)
        return status == 200, list(answer.get("reasons", [])) if isinstance(answer, dict) else []

    def _ask(self, method: str, target: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        """(HTTP status, JSON of the answer)."""
        parts = urlsplit(self.url)
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        content = None
        if body is not None:
            content = json.dumps(body)
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            connection.request(method, target, content, headers)
            response = connection.getresponse()
            raw = response.read(MAX_ANSWER)
        except TimeoutError as error:
            raise DaemonUnreachable(
                f"the daemon at {self.url} did not answer within {self.timeout:.0f} s ; see `shoal logs`"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise DaemonUnreachable(f"no daemon answers at {self.url} ({error}) ; start it with `shoal up`") from error
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw) if raw else None
        except ValueError as error:
            raise RequestRefused(
                response.status, f"{self.url} answered {response.status} and no JSON: is it Shoal? ; see `shoal paths`"
            ) from error


def target_of(path: Sequence[str]) -> str:
    return "/api/v1/" + "/".join(quote(part, safe="") for part in path)


def accepted(target: str, status: int, answer: Any) -> Any:
    """The answer, unless it is an error. Raises RequestRefused."""
    if status < 400:
        return answer
    told = answer if isinstance(answer, dict) else {}
    error, fix = told.get("error") or f"the daemon answered {status} to {target}", told.get("fix") or "see `shoal logs`"
    raise RequestRefused(status, f"{error} ; {fix}")


def connect(home: Home, timeout: float = TIMEOUT) -> Client:
    """A client of the daemon on this home. Raises NotInitialised, DaemonUnreachable."""
    token = home.token()
    info = home.daemon()
    if info is None and (pid := home.holder()) is not None:
        held = max(0.0, time.time() - home.lock_path.stat().st_mtime)
        doing = "is still starting" if held < START_SECONDS else "does not answer (offline training never does)"
        raise DaemonUnreachable(
            f"process {pid}, which has {home.path} for {held:.0f} s, {doing} ; "
            f"try again, or see `{home.command('logs')}`"
        )
    if info is None:
        raise DaemonUnreachable(f"no daemon runs on {home.path} ; start it with `{home.starting()}`")
    return Client(info.url, token, timeout)
