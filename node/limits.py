"""Which limit holds training up now, why and until when. Decides only: clock, zone and measures are handed in.

Quiet hours are those of the wall clock: a change to summer time makes them an hour shorter or longer, and a clock that
was set is believed, because everything is worked out anew each time.
"""

import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    from node.config import LimitsConfig

log = logging.getLogger(__name__)

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY, WEEK = 24 * 60, 7 * 24 * 60
"""In minutes."""
FREE_CHECKPOINTS = 1.5
"""Checkpoints that there must be room for; one is written aside before an older one goes."""
LEAST_FREE = 64 << 20
LOCALTIME = Path("/etc/localtime")
RESUME = "shoal resume trains now"

_RANGE = re.compile(
    rf"(?:({'|'.join(DAYS)})(?:-({'|'.join(DAYS)}))? +)?(\d{{1,2}}):(\d\d)-(\d{{1,2}}):(\d\d)", re.ASCII | re.IGNORECASE
)

Holder = Literal["person", "quiet_hours", "hours_per_day", "disk"]


@dataclass(frozen=True, slots=True)
class Hold:
    """Why no step begins."""

    by: Holder
    reason: str
    next: str
    """What a person can do."""
    resumes_at: float | None = None
    """Unix seconds, where it ends by itself."""


@dataclass(frozen=True, slots=True)
class Disk:
    """In bytes."""

    used: int
    """By the whole home."""
    free: int
    checkpoint: int
    """What the next one takes; 0: not known yet."""


@dataclass(frozen=True, slots=True)
class Span:
    """Minutes of the week, from Monday 00:00."""

    begin: int
    length: int

    def left(self, minute: int) -> int:
        """Minutes from `minute` to the end of the span; 0 outside."""
        return max(0, self.length - (minute - self.begin) % WEEK)


def quiet_spans(text: str) -> tuple[Span, ...]:
    """Parse "22:00-08:00" or "mon-fri 09:00-17:00, sat 20:00-24:00". Raises ValueError with what is wrong."""
    spans = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not like 22:00-08:00 or mon-fri 09:00-17:00")
        first, last, *times = match.groups()
        from_hour, from_minute, to_hour, to_minute = map(int, times)
        begin, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
        if max(from_minute, to_minute) > 59 or begin >= DAY or end > DAY:
            raise ValueError(f"{part!r} has a time that no clock shows: 00:00 to 23:59, or 24:00 at the end")
        if begin == end:
            raise ValueError(f"{part!r} begins when it ends: for a whole day write 00:00-24:00")
        days: Sequence[int] = range(7)
        if first:
            from_day = DAYS.index(first.lower())
            days = [(from_day + i) % 7 for i in range((DAYS.index((last or first).lower()) - from_day) % 7 + 1)]
        spans += [Span(day * DAY + begin, (end - begin) % DAY or DAY) for day in days]
    if spans and _minutes_left(spans, spans[0].begin) >= WEEK:
        raise ValueError("they cover the whole week, and the node would never train: leave some time, or shoal pause")
    return tuple(spans)


def _minutes_left(spans: Sequence[Span], minute: int) -> int:
    """Minutes from `minute` of the week until no span covers it; a week or more: there is no such time."""
    total = 0
    while total < WEEK and (left := max((span.left(minute + total) for span in spans), default=0)):
        total += left
    return total


def quiet_until(spans: Sequence[Span], now: float, zone: tzinfo) -> float | None:
    """Unix seconds at which the quiet time around `now` ends; None outside of any."""
    local = datetime.fromtimestamp(now, zone).replace(tzinfo=None)
    minutes = _minutes_left(spans, local.weekday() * DAY + local.hour * 60 + local.minute)
    if not minutes:
        return None
    end = (local.replace(second=0, microsecond=0) + timedelta(minutes=minutes)).replace(tzinfo=zone)
    # when clocks go back an hour comes twice, and of its first time this may be the second
    return next(at for at in (end.timestamp(), end.replace(fold=1).timestamp(), now + 60) if at > now)


def day_of(now: float, zone: tzinfo) -> str:
    """The calendar day, as 2026-11-30."""
    return datetime.fromtimestamp(now, zone).date().isoformat()


def day_ends(now: float, zone: tzinfo) -> float:
    """Unix seconds of the next midnight."""
    tomorrow = datetime.fromtimestamp(now, zone).date() + timedelta(days=1)
    return datetime(tomorrow.year, tomorrow.month, tomorrow.day, tzinfo=zone).timestamp()


def local_zone() -> tzinfo:
    """The machine's time zone: TZ, else /etc/localtime, else UTC."""
    name = os.environ.get("TZ", "").removeprefix(":")
    try:
        if name and not name.startswith("/"):
            return ZoneInfo(name)
        with Path(name or LOCALTIME).open("rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError, LookupError) as error:
        where = f"TZ = {name!r}" if name else str(LOCALTIME)
        log.warning("%s gives no time zone (%s): quiet hours and days are those of UTC", where, error)
        return UTC


def limit_hold(
    limits: "LimitsConfig",
    *,
    now: float,
    zone: tzinfo,
    trained: float,
    disk: Disk | None,
    passed_over: Mapping[Holder, float],
) -> Hold | None:
    """The limit that holds training up, if any. `trained`: seconds today; `passed_over`: holder -> until when."""
    return (
        disk_hold(limits.disk_mb, disk)
        or _quiet_hold(limits.quiet_hours, now, zone, passed_over.get("quiet_hours", 0.0))
        or _hours_hold(limits.hours_per_day, now, zone, trained, passed_over.get("hours_per_day", 0.0))
    )


def over_disk(limit_mb: int, disk: Disk) -> int:
    """Bytes above limits.disk_mb."""
    return max(0, disk.used - (limit_mb << 20)) if limit_mb else 0


NoRoom = Callable[[int], Awaitable[str]]
"""Why there is no room for so many bytes more, and what to do; empty: there is."""


def no_room(limit_mb: int, disk: Disk, size: int) -> str:
    """Why the disk has no room for `size` bytes more, and what to do; empty: it has."""
    wants = f"it takes {max(1, size >> 20)} MB of disk, and"
    if limit_mb and disk.used + size > limit_mb << 20:
        left = max(0, (limit_mb << 20) - disk.used) >> 20
        return f"{wants} limits.disk_mb leaves {left}; raise it, or lower limits.store_mb"
    if disk.free - size < LEAST_FREE:
        return f"{wants} {max(0, disk.free - LEAST_FREE) >> 20} MB can be had; free some disk"
    return ""


def disk_hold(limit_mb: int, disk: Disk | None) -> Hold | None:
    """What the disk has to do with it; None for `disk`: not measured yet."""
    if disk is None:
        return None
    if over_disk(limit_mb, disk):
        said = f"the home takes {disk.used >> 20} MB of disk, the limit is {limit_mb} (limits.disk_mb)"
        return Hold("disk", said, "raise it, or lower limits.store_mb or checkpoint.keep")
    need = max(LEAST_FREE, int(FREE_CHECKPOINTS * disk.checkpoint))
    if disk.free < need:
        said = f"{disk.free >> 20} MB of disk are free, and the next checkpoint wants {need >> 20}"
        return Hold("disk", said, "free some disk")
    return None


def _quiet_hold(text: str, now: float, zone: tzinfo, passed_over: float) -> Hold | None:
    until = quiet_until(quiet_spans(text), now, zone)
    if until is None or now < passed_over:
        return None
    return Hold("quiet_hours", f"quiet hours until {clock_time(until, now, zone)}", RESUME, until)


def _hours_hold(hours: float, now: float, zone: tzinfo, trained: float, passed_over: float) -> Hold | None:
    if not hours or trained < hours * 3600 or now < passed_over:
        return None
    until = day_ends(now, zone)
    said = f"{hours:g} h trained today (limits.hours_per_day), until {clock_time(until, now, zone)}"
    return Hold("hours_per_day", said, RESUME, until)


def clock_time(at: float, now: float, zone: tzinfo) -> str:
    """ "08:00 CET", and with its day where that is more than a day away. A container's zone may not be its owner's."""
    return datetime.fromtimestamp(at, zone).strftime("%H:%M %Z" if at - now < 86_400 else "%a %H:%M %Z")
