"""Talks to the daemon of a home over its local HTTP API (web/server.py), for the command line.

http.client and not urllib, because a proxy configured for the web must never see this traffic or its token.
"""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from node.home import Home

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
        return self._ask("GET", path, query, None)

    def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST /api/v1/<path> with a JSON body. Raises DaemonUnreachable, RequestRefused."""
        return self._ask("POST", path, {}, body or {})

    def _ask(self, method: str, path: tuple[str, ...], query: Mapping[str, Any], body: Mapping[str, Any] | None) -> Any:
        parts = urlsplit(self.url)
        target = "/api/v1/" + "/".join(quote(part, safe="") for part in path)
        if query:
            target += "?" + urlencode(query)
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
            answer = json.loads(raw) if raw else None
        except ValueError as error:
            raise RequestRefused(
                response.status, f"{self.url} answered {response.status} and no JSON: is it Shoal? ; see `shoal paths`"
            ) from error
        if response.status >= 400:
            detail = answer.get("error") if isinstance(answer, dict) else None
            raise RequestRefused(response.status, str(detail or f"the daemon answered {response.status} to {target}"))
        return answer


def connect(home: Home, timeout: float = TIMEOUT) -> Client:
    """A client of the daemon on this home. Raises NotInitialised, DaemonUnreachable."""
    token = home.token()
    info = home.daemon()
    if info is None:
        raise DaemonUnreachable(f"no daemon runs on {home.path} ; start it with `shoal up`")
    return Client(info.url, token, timeout)
