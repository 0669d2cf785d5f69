"""Reads what a client asked for. Whatever is not understood is refused with the limit it broke, never guessed."""

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from web.answers import Refused

MAX_BODY = 16 * 1024
"""Bytes of a request body; the longest one holds the reason for a pause."""
BODY_SECONDS = 5.0
MAX_ROW = 2**63 - 1
"""Row ids are SQLite integers."""
GROUP_ID = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True, slots=True)
class Number:
    """A query parameter that is an integer from `low` to `high`; without it `default`."""

    default: int | None
    low: int
    high: int
    says: str

    def read(self, name: str, text: str) -> int:
        """Raises Refused (400)."""
        # at most 19 digits before int(): its time grows with the square of their number
        if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) or not self.low <= int(text) <= self.high:
            limits = f"from {self.low} to {self.high}"
            raise Refused(400, f"{name}: {text[:40]!r} is not an integer {limits}", f"give {name} in that range")
        return int(text)


@dataclass(frozen=True, slots=True)
class Choice:
    """A query parameter that is one of a few words; without it `default`."""

    default: str | None
    among: Sequence[str]
    says: str

    def read(self, name: str, text: str) -> str:
        """Raises Refused (400)."""
        if text not in self.among:
            raise Refused(400, f"{name}: {text[:40]!r} is unknown", f"give one of {', '.join(self.among)}")
        return text


@dataclass(frozen=True, slots=True)
class Text:
    """A query parameter of 1 to `longest` characters, all of the class `of` of regular expressions; else None."""

    longest: int
    of: str
    says: str
    default: None = None

    @property
    def pattern(self) -> str:
        return f"^{self.of}{{1,{self.longest}}}$"

    def read(self, name: str, text: str) -> str:
        """Raises Refused (400)."""
        if not re.fullmatch(self.pattern.removesuffix("$"), text, re.ASCII):
            raise Refused(
                400, f"{name}: {text[:40]!r} is not 1 to {self.longest} characters of {self.of}", f"mend {name}"
            )
        return text


Parameter = Number | Choice | Text


def asked(request: web.Request, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """The values of the query's parameters, defaults where they are not given.

    Raises Refused (400) for a name that is not asked for, a repeated one, and a value beyond its limits.
    """
    query = request.query
    if unknown := sorted(set(query) - set(parameters)):
        known = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
        raise Refused(400, f"unknown query parameter {unknown[0][:40]!r} for {request.path}", known)
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        given = query.getall(name, [])
        if len(given) > 1:
            raise Refused(400, f"query parameter {name} is given {len(given)} times", "give it once")
        found[name] = parameter.read(name, given[0]) if given else parameter.default
    return found


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


async def body(request: web.Request, known: Collection[str] | None) -> Mapping[str, Any]:
    """The JSON object sent, or an empty one where nothing was. Raises Refused (400, 408, 413, 415).

    `known`: the fields that it may have; None: its reader knows them.
    """
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
    if known is not None and (unknown := sorted(set(value) - set(known))):
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise Refused(400, f"unknown field {unknown[0][:40]!r} for {request.path}", takes)
    return value
