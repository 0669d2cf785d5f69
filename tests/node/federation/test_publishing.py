"""The leader's store: what is written of each version, what is kept, and older versions made again exactly."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.federation.publishing import Publisher, UnknownVersion
from protocol.policy import check_head, check_record
from tests.node.federation.conftest import LEADER, SWARM, Lead

MakeLead = Callable[..., Lead]


def items(lead: Lead) -> list[tuple[int, int | None]]:
    """Of the signed head."""
    known = check_head(lead.store.head(), leader=LEADER.peer_id, swarm=SWARM, now=time.time())
    assert known.head.model == "mark"
    return [(item.version, item.base) for item in known.head.items]


def loaded(lead: Lead, version: int) -> dict[str, torch.Tensor]:
    into = {name: torch.zeros(p.shape) for name, p in lead.bundle.model.named_parameters()}
    lead.publisher.load(version, into)
    return into


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_every_version_that_is_kept_can_be_made_again(make_lead: MakeLead, dtype: Any) -> None:
    lead = make_lead(dtype, whole_every=3)
    snapshots = {}
    for version in range(8):
        if version:
            lead.update(version)
        await lead.publish()
        snapshots[version] = dict(lead.trainer.snapshot(dtype))
    assert lead.told == []
    assert lead.publisher.version == 7
    versions = lead.publisher.versions
    assert set(versions.values()) >= {5, 6, 7}
    for version in versions.values():
        made = loaded(lead, version)
        assert all(made[name].equal(weight.float()) for name, weight in snapshots[version].items())
    with pytest.raises(UnknownVersion, match="99 is no longer kept"):
        loaded(lead, 99)


async def test_changes_are_small_and_wholes_come_now_and_then(make_lead: MakeLead) -> None:
    lead = make_lead(whole_every=3)
    first = await lead.publish()
    assert (first.version, first.change_bytes) == (0, None)
    lead.update(1)
    second = await lead.publish()
    assert (second.version, second.whole_bytes) == (1, None)
    assert 0 < second.change_bytes < 0.3 * first.whole_bytes
    for version in (2, 3):
        lead.update(version)
        last = await lead.publish()
    assert last.whole_bytes == first.whole_bytes
    assert items(lead) == [(1, 0), (2, 1), (3, 2), (3, None)]
    held = {path.name for path in (lead.store.directory / "pieces").iterdir()}
    known = check_head(lead.store.head(), leader=LEADER.peer_id, swarm=SWARM, now=time.time())
    named = set()
    for item in known.head.items:
        named |= {item.record.hex(), *(p.hex() for p in check_record(lead.store.read(item.record), item).pieces)}
    assert held == named
    assert [path.name for path in lead.store.directory.glob("*.safetensors")] == ["weights-3.safetensors"]


async def test_a_restart_goes_on_with_the_chain(make_lead: MakeLead) -> None:
    lead = make_lead()
    await lead.publish()
    lead.update(1)
    await lead.publish()
    lead.again()
    await lead.publish()  # the same version again: nothing is new, and the head is signed anew
    assert items(lead) == [(0, None), (1, 0)]
    assert lead.publisher.last == lead.publisher.last.__class__(1, None, None, 0.0, lead.publisher.last.encode_seconds)
    lead.update(3)  # version 2 was never published
    await lead.publish()
    assert items(lead) == [(0, None), (1, 0), (3, 1)]
    assert sorted(lead.publisher.versions.values()) == [0, 1, 3]


@pytest.mark.parametrize("damage", ["weights", "piece", "index", "version"])
async def test_what_leads_nowhere_is_published_anew(make_lead: MakeLead, damage: str) -> None:
    lead = make_lead()
    for version in range(3):
        if version:
            lead.update(version)
        await lead.publish()
    if damage == "weights":
        path = lead.store.directory / "weights-2.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    elif damage == "piece":
        max((lead.store.directory / "pieces").iterdir(), key=lambda path: path.stat().st_size).unlink()
    elif damage == "index":
        (lead.store.directory / "index.bin").write_bytes(b"garbage")
    lead.again()
    lead.update(1 if damage == "version" else 5)
    await lead.publish()
    assert items(lead) == [(1 if damage == "version" else 5, None)]
    assert lead.told == []


async def test_a_full_disk_costs_the_version_only(make_lead: MakeLead, monkeypatch: pytest.MonkeyPatch) -> None:
    lead = make_lead()
    await lead.publish()

    put, pieces = lead.store.put, lead.store.directory / "pieces"
    before, during = set(pieces.iterdir()), set[Path]()

    def full(piece: bytes) -> bytes:
        during.update(pieces.iterdir())
        if during > before:  # one of its pieces is there
            raise OSError(28, "No space left on device")
        return put(piece)

    with monkeypatch.context() as patched:
        patched.setattr(lead.store, "put", full)
        lead.update(1)
        await lead.publish()
    assert len(lead.told) == 1
    assert "version 1 of the policy is not published" in lead.told[0]
    left = {path.name for path in lead.store.directory.iterdir()}
    assert left == {"head.bin", "index.bin", "pieces", "weights-0.safetensors"}
    assert during > before
    assert set(pieces.iterdir()) == before
    lead.update(2)
    await lead.publish()
    assert items(lead) == [(0, None), (2, 0)]


async def test_a_head_is_signed_anew_at_a_start_and_a_full_disk_ends_nothing(
    make_lead: MakeLead, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = make_lead()
    await lead.publish()
    (lead.store.directory / "head.bin").unlink()
    running = asyncio.create_task(lead.again().run())
    deadline = time.monotonic() + 20
    while not lead.store.head():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert items(lead) == [(0, None)]
    running.cancel()

    def full(sealed: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lead.store, "keep_head", full)
    monkeypatch.setattr("node.federation.publishing.SIGN_SECONDS", 0.05)
    running = asyncio.create_task(lead.again().run())
    while len(lead.told) < 3:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert not running.done()
    assert "not signed anew: [Errno 28]" in lead.told[-1]
    running.cancel()


async def test_a_whole_that_nobody_can_pull_in_time_is_told_once(
    make_lead: MakeLead, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = make_lead(whole_every=1)
    await lead.publish()
    lead.update(1)
    await lead.publish()
    assert not lead.told
    monkeypatch.setattr("node.federation.publishing.PIECES_RATE", 1.0)
    for version in (2, 3, 4):
        lead.update(version)
        await lead.publish()
    assert len(lead.told) == 1
    assert "nobody can begin to follow" in lead.told[0]


async def test_a_version_that_comes_too_soon_is_left_out(make_lead: MakeLead) -> None:
    lead = make_lead()
    running = asyncio.create_task(lead.publisher.run())
    await lead.publisher.offer(lead.trainer, lead.device)
    lead.update(1)
    await lead.publisher.offer(lead.trainer, lead.device)  # the first one is not written yet
    assert lead.publisher.skipped == 1
    deadline = time.monotonic() + 20
    while lead.publisher.version != 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    while lead.publisher.version != 1:
        assert time.monotonic() < deadline
        await lead.publisher.offer(lead.trainer, lead.device)
        await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


async def test_only_the_turns_that_are_asked_for(make_lead: MakeLead) -> None:
    lead = make_lead()
    lead.options["every"] = 3
    publisher: Publisher = lead.again()
    for version in range(7):
        lead.trainer.step = version
        await publisher.offer(lead.trainer, lead.device)
        if not publisher._waiting.empty():
            assert publisher._waiting.get_nowait()[0] == version
            assert version % 3 == 0
        else:
            assert version % 3
    assert publisher.skipped == 0
