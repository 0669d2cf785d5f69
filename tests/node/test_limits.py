"""Quiet hours, hours a day and disk: decided by hand-made clocks, zones and measures."""

from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from node.config import LimitsConfig
from node.limits import (
    Disk,
    clock_time,
    day_ends,
    day_of,
    limit_hold,
    local_zone,
    no_room,
    quiet_spans,
    quiet_until,
)

BERLIN, NEW_YORK = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")
ROOM = Disk(used=100 << 20, free=100 << 30, checkpoint=1 << 30)


def at(text: str, zone: tzinfo = BERLIN, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def until(text: str, now: float, zone: tzinfo = BERLIN) -> str | None:
    end = quiet_until(quiet_spans(text), now, zone)
    return None if end is None else datetime.fromtimestamp(end, zone).strftime("%a %d %H:%M")


@pytest.mark.parametrize(
    ("hours", "now", "end"),
    [
        # 2026-11-30 is a Monday
        ("22:00-08:00", "2026-11-30T21:59:59", None),
        ("22:00-08:00", "2026-11-30T22:00:00", "Tue 01 08:00"),
        ("22:00-08:00", "2026-12-01T07:59:59", "Tue 01 08:00"),
        ("22:00-08:00", "2026-12-01T08:00:00", None),
        ("9:00-17:30", "2026-11-30T12:00:00", "Mon 30 17:30"),
        ("mon-fri 09:00-17:00", "2026-12-04T10:00:00", "Fri 04 17:00"),
        ("mon-fri 09:00-17:00", "2026-12-05T10:00:00", None),
        ("Sat-Sun 00:00-24:00", "2026-12-05T10:00:00", "Mon 07 00:00"),
        ("sun 22:00-06:00", "2026-11-30T05:00:00", "Mon 30 06:00"),
        ("fri-mon 23:00-24:00", "2026-11-30T23:30:00", "Tue 01 00:00"),
        ("fri-mon 23:00-24:00", "2026-12-01T23:30:00", None),
        ("20:00-24:00, 00:00-07:00, 06:00-09:00", "2026-11-30T21:00:00", "Tue 01 09:00"),
        ("", "2026-11-30T21:00:00", None),
    ],
)
def test_quiet_hours(hours: str, now: str, end: str | None) -> None:
    assert until(hours, at(now)) == end


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        ("22:00", "'22:00' is not like 22:00-08:00"),
        ("22-8", "is not like"),
        ("25:00-26:00", "no clock shows"),
        ("22:60-23:00", "no clock shows"),
        ("24:00-08:00", "no clock shows"),
        ("08:00-08:00", "00:00-24:00"),
        ("holiday 08:00-09:00", "is not like"),
        ("٠8:00-09:00", "is not like"),
        ("00:00-24:00", "never train"),
        ("00:00-12:00,mon-sun 12:00-24:00", "never train"),
    ],
)
def test_quiet_hours_that_make_no_sense(hours: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LimitsConfig(quiet_hours=hours)


def test_quiet_hours_where_clocks_change() -> None:
    # forward: 02:00 becomes 03:00, so that an hour of the night is missing
    assert until("22:00-06:00", at("2026-03-28T23:00:00")) == "Sun 29 06:00"
    end = quiet_until(quiet_spans("22:00-06:00"), at("2026-03-28T23:00:00"), BERLIN)
    assert end == at("2026-03-28T23:00:00") + 6 * 3600
    # an end that no clock shows that night
    assert until("01:00-02:30", at("2026-03-29T01:59:00")) == "Sun 29 03:30"
    # back: 02:00 to 03:00 comes twice
    end = quiet_until(quiet_spans("22:00-06:00"), at("2026-10-24T23:00:00"), BERLIN)
    assert end == at("2026-10-24T23:00:00") + 8 * 3600
    second = at("2026-10-25T02:10:00", fold=1)
    assert quiet_until(quiet_spans("01:00-02:30"), second, BERLIN) == second + 20 * 60
    # every minute of both nights: whoever is held is held until some later moment, and free at that one
    for night in ("2026-03-29T00:00:00", "2026-10-25T00:00:00"):
        for minute in range(0, 5 * 60, 7):
            now = at(night) + 60 * minute
            end = quiet_until(quiet_spans("01:15-02:45"), now, BERLIN)
            assert end is None or (now < end <= now + 3 * 3600)


def test_a_day_is_a_calendar_day() -> None:
    now = at("2026-10-25T00:30:00")
    assert (day_of(now, BERLIN), day_of(now, NEW_YORK)) == ("2026-10-25", "2026-10-24")
    assert day_ends(now, BERLIN) - at("2026-10-25T00:00:00") == 25 * 3600


def test_the_zone_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert day_ends(0.0, local_zone()) == 15 * 3600
    monkeypatch.setenv("TZ", "Nowhere/At_All")
    assert local_zone() is UTC
    monkeypatch.delenv("TZ")
    monkeypatch.setattr("node.limits.LOCALTIME", tmp_path / "missing")
    assert local_zone() is UTC


def hold(limits: LimitsConfig, now: float = at("2026-11-30T23:00:00"), trained: float = 0.0, **others: Any) -> Any:
    given = {"disk": ROOM, "passed_over": {}, **others}
    return limit_hold(limits, now=now, zone=BERLIN, trained=trained, **given)


def test_quiet_hours_hold_until_they_end_or_are_passed_over() -> None:
    limits = LimitsConfig(quiet_hours="22:00-08:00")
    held = hold(limits)
    assert (held.by, held.reason, held.next) == (
        "quiet_hours",
        "quiet hours until 08:00 CET",
        "shoal resume trains now",
    )
    assert held.resumes_at == at("2026-12-01T08:00:00")
    assert hold(limits, passed_over={"quiet_hours": held.resumes_at}) is None
    assert hold(limits, now=at("2026-12-01T22:00:00"), passed_over={"quiet_hours": held.resumes_at}).by == "quiet_hours"
    assert hold(limits, now=at("2026-12-01T12:00:00")) is None


def test_hours_a_day_hold_until_midnight() -> None:
    limits = LimitsConfig(hours_per_day=2.5)
    assert hold(limits, trained=2.5 * 3600 - 1) is None
    held = hold(limits, trained=2.5 * 3600)
    assert held.reason == "2.5 h trained today (limits.hours_per_day), until 00:00 CET"
    assert held.resumes_at == at("2026-12-01T00:00:00")
    assert hold(limits, trained=9e9, passed_over={"hours_per_day": held.resumes_at}) is None
    assert hold(LimitsConfig(), trained=9e9) is None


@pytest.mark.parametrize(
    ("limit", "disk", "reason"),
    [
        (0, Disk(1 << 50, 100 << 30, 1 << 30), None),
        (2000, Disk(2000 << 20, 100 << 30, 1 << 30), None),
        (2000, Disk(2001 << 20, 100 << 30, 1 << 30), "the home takes 2001 MB of disk, the limit is 2000"),
        (0, Disk(0, 1536 << 20, 1 << 30), None),
        (0, Disk(0, 1535 << 20, 1 << 30), "1535 MB of disk are free, and the next checkpoint wants 1536"),
        (0, Disk(0, 63 << 20, 0), "63 MB of disk are free"),
        (0, None, None),
    ],
)
def test_disk(limit: int, disk: Disk | None, reason: str | None) -> None:
    held = hold(LimitsConfig(disk_mb=limit), disk=disk)
    assert held is None if reason is None else held.by == "disk" and held.reason.startswith(reason) and held.next


@pytest.mark.parametrize(
    ("limit", "disk", "why"),
    [
        (2000, Disk(1900 << 20, 100 << 30, 0), ""),
        (2000, Disk((1900 << 20) + 1, 100 << 30, 0), "it takes 100 MB of disk, and limits.disk_mb leaves 99; raise it"),
        (2000, Disk(2100 << 20, 100 << 30, 0), "it takes 100 MB of disk, and limits.disk_mb leaves 0; raise it"),
        (0, Disk(9000 << 20, 164 << 20, 0), ""),
        (0, Disk(9000 << 20, 163 << 20, 0), "it takes 100 MB of disk, and 99 MB can be had; free some disk"),
    ],
)
def test_what_is_about_to_be_written_must_have_room(limit: int, disk: Disk, why: str) -> None:
    assert no_room(limit, disk, 100 << 20).startswith(why)
    assert bool(no_room(limit, disk, 100 << 20)) == bool(why)


def test_a_disk_that_is_full_counts_before_the_time_of_day() -> None:
    limits = LimitsConfig(quiet_hours="22:00-08:00", disk_mb=16)
    assert hold(limits).by == "disk"
    assert hold(limits, disk=Disk(1, 100 << 30, 1)).by == "quiet_hours"


def test_a_moment_more_than_a_day_away_has_its_day() -> None:
    now = at("2026-11-30T23:00:00")
    assert clock_time(now + 3600, now, BERLIN) == "00:00 CET"
    assert clock_time(now + 86_400, now, BERLIN) == "Tue 23:00 CET"


@pytest.mark.parametrize("key", ["upload_kbps", "download_kbps"])
def test_a_rate_under_which_nothing_would_arrive_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="at least 64, or 0"):
        LimitsConfig.model_validate({key: 63})
    assert getattr(LimitsConfig.model_validate({key: 64}), key) == 64
