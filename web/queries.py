"""Reads what a client asked for. Whatever is not understood is refused with the limit it broke, never guessed."""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from web.answers import Refused

MAX_BODY = 16 * 1024
"""Bytes of a request body; the longest one holds the reason for a pause."""
BODY_SECONDS = 5.0
MAX_ROW = 2**63 - 1
"""Row ids are SQLite integers."""
GROUP_ID = re.compile(r"[0-9a-f]{4,64}")


def numbers(request: web.Request, **limits: tuple[int | None, int, int]) -> dict[str, Any]:
    """The query's integers: name -> (default, smallest, largest).

    Raises Refused (400) for a name that is not asked for, a repeated one, and a value that is no integer in its limits.
    """
    query = request.query
    if unknown := sorted(set(query) - set(limits)):
        known = f"it takes {', '.join(limits)}" if limits else "it takes none"
        raise Refused(400, f"unknown query parameter {unknown[0][:40]!r} for {request.path}", known)
    found: dict[str, Any] = {}
    for name, (default, low, high) in limits.items():
        given = query.getall(name, [])
        if not given:
            found[name] = default
            continue
        if len(given) > 1:
            raise Refused(400, f"query parameter {name} is given {len(given)} times", "give it once")
        found[name] = integer(name, given[0], low, high)
    return found


def integer(name: str, text: str, low: int, high: int) -> int:
    """Raises Refused (400)."""
    # at most 19 digits before int(): its time grows with the square of their number
    if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) or not low <= int(text) <= high:
        raise Refused(
            400, f"{name}: {text[:40]!r} is not an integer from {low} to {high}", f"give {name} in that range"
        )
    return int(text)


def group_id(request: web.Request) -> str:
    """The id in the path: hex digits, or the first few of them. Raises Refused (400)."""
    given = request.match_info["id"].lower()
    if not GROUP_ID.fullmatch(given):
        raise Refused(
            400,
            f"group id {given[:80]!r} is not 4 to 64 hex digits",
            "copy an id, or its first 4 or more digits, from `shoal groups`",
        )
    return given


async def body(request: web.Request) -> Mapping[str, Any]:
    """The JSON object sent, or an empty one where nothing was. Raises Refused (400, 408, 413, 415)."""
    if (request.content_length or 0) > MAX_BODY:
        raise Refused(413, f"body of {request.content_length} bytes", f"send at most {MAX_BODY} bytes")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, f"body of more than {MAX_BODY} bytes", f"send at most {MAX_BODY} bytes") from None
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS:.0f} s", "send it at once") from None
    if not raw:
        return {}
    # a form on another site can send text/plain without asking first, but not this type
    if request.content_type != "application/json":
        raise Refused(415, f"body of type {request.content_type[:80]}", "send application/json")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON", "send one JSON object") from None
    if not isinstance(value, dict):
        raise Refused(400, f"the body is a JSON {type(value).__name__}", "send one JSON object")
    return value
