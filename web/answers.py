"""What every answer looks like: JSON values out, errors as `{error, fix}`."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web


class Refused(Exception):
    """A request that gets an error for an answer: HTTP status, what is wrong, and what to do about it."""

    def __init__(self, status: int, error: str, fix: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{error} ; {fix}")
        self.status, self.error, self.fix, self.headers = status, error, fix, headers


def encode(value: Any) -> str:
    """JSON of a value, ASCII only: lone surrogates and U+2028 stay escaped, so any client can read it.

    JSON has no NaN (a skipped step has a loss of NaN): it becomes null.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(without_nan(value), allow_nan=False, separators=(",", ":"))


def without_nan(value: Any) -> Any:
    """The same JSON value with null for every float that JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nan(inner) for inner in value]
    return value


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(text=encode(value), status=status, headers=headers, content_type="application/json")


def error_answer(status: int, error: str, fix: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return answer({"error": error, "fix": fix}, status, headers)
