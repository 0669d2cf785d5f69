import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.envelope import Domain, digest_of, seal
from protocol.identity import Identity
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn
from swarm.experience import (
    MAX_REJECTED_BODY,
    ROW_BYTES,
    ExperienceStore,
    GroupRecord,
    PeerRecord,
    StoreError,
    StoreFull,
    UnknownGroup,
)

NOW = 1_800_000_000.0
IDENTITY = Identity.from_seed(b"e" * 32)


def record(n: int, **changes) -> GroupRecord:
    base = GroupRecord(
        digest=hashlib.sha256(str(n).encode()).digest(),
        origin="foreign",
        producer="alice",
        epoch=3,
        task=TaskRef("chain_sum", "1", 7, n),
        model="tiny",
        claimed=(0.0, 1.0),
        local=(0.0, 1.0),
        verdict="admitted",
        detail="",
        received_at=NOW,
        expires_at=NOW + 100,
    )
    return replace(base, **changes)


def test_a_group_comes_back_as_it_was_stored(store: ExperienceStore) -> None:
    stored = record(1, claimed=(0.25, 1.0), local=(0.5, 1.0), verdict="reward_mismatch", detail="completion 0")
    assert store.add(stored, b"body")
    (found,) = store.summaries(None, 10)
    assert found == replace(stored, row=1, size=4)
    assert not store.add(stored, b"other"), "the same digest again"
    assert store.size == 4 + ROW_BYTES


def test_what_was_judged_is_recognised(store: ExperienceStore) -> None:
    store.add(record(1, verdict="stale"), b"body")
    assert store.has_group(record(1).digest)
    assert not store.has_group(record(2).digest)
    store.add(record(3, task=record(1).task, verdict="equivocation"), b"body")
    assert store.group_of("alice", 3, TaskRef("chain_sum", "1", 7, 1)) == record(1).digest, "the first one"
    assert store.group_of("alice", 4, TaskRef("chain_sum", "1", 7, 1)) is None
    assert store.group_of("bob", 3, TaskRef("chain_sum", "1", 7, 1)) is None
    assert store.group_of("alice", 3, TaskRef("chain_sum", "1", 7, 2)) is None


def test_the_pool_holds_admitted_live_foreign_groups(store: ExperienceStore) -> None:
    store.add(record(1), b"body")
    store.add(record(2, producer="bob"), b"body")
    store.add(record(3, verdict="uninformative"), b"body")
    store.add(record(4, origin="own"), b"body")
    store.add(record(5, expires_at=NOW - 1), b"body")
    assert [(entry.digest, entry.producer, entry.rewards) for entry in store.pool(NOW)] == [
        (record(1).digest, "alice", (0.0, 1.0)),
        (record(2).digest, "bob", (0.0, 1.0)),
    ]
    assert store.unused(NOW) == {"alice": 1, "bob": 1}
    store.mark_used([record(1).digest])
    assert store.unused(NOW) == {"bob": 1}
    assert len(store.pool(NOW)) == 2
    assert store.find(record(1).digest.hex()).uses == 1


def test_bodies_of_own_and_admitted_live_groups_are_served(store: ExperienceStore, clock: Any) -> None:
    store.add(record(1), b"one")
    store.add(record(2, origin="own"), b"two")
    store.add(record(3, verdict="uninformative"), b"three")
    assert store.body(record(1).digest) == b"one"
    assert store.body(record(2).digest) == b"two"
    assert store.body(record(3).digest) is None
    assert store.body(record(4).digest) is None
    clock.now = NOW + 100
    assert store.body(record(1).digest) is None


def test_a_stored_group_can_be_decoded_after_it_expired(store: ExperienceStore, clock: Any) -> None:
    completion = Completion((Turn("assistant", "42"),), "stop", 2, 1.0)
    group = RolloutGroup(
        3,
        record(1).task,
        "tiny",
        b"",
        0,
        (completion, msgspec.structs.replace(completion, reward=0.0)),
    )
    body = seal(IDENTITY, Domain.group, msgspec.msgpack.encode(group), issued=NOW, expires=NOW + 100)
    store.add(record(1, digest=digest_of(body)), body)
    clock.now = NOW + 1000
    assert store.group_body(digest_of(body)) == group


def test_a_rejected_body_that_is_no_group_is_a_clear_error(store: ExperienceStore) -> None:
    store.add(record(1, verdict="malformed"), b"garbage")
    with pytest.raises(UnknownGroup, match="was rejected and cannot be shown"):
        store.group_body(record(1).digest)
    with pytest.raises(UnknownGroup, match="not held"):
        store.group_body(record(2).digest)


def test_find_takes_any_unique_prefix(store: ExperienceStore) -> None:
    for n, digest in enumerate((b"\xab\xc0" + bytes(30), b"\xab\xd0" + bytes(30))):
        store.add(record(n, digest=digest), b"body")
    assert store.find("abc").digest[:2] == b"\xab\xc0"
    assert store.find("abd0").digest[:2] == b"\xab\xd0"
    with pytest.raises(UnknownGroup, match="more than one"):
        store.find("ab")
    with pytest.raises(UnknownGroup, match="no group"):
        store.find("ff")
    for bad in ("xyz", "0" * 65, "é"):
        with pytest.raises(UnknownGroup, match="64 hex digits"):
            store.find(bad)


def test_summaries_are_paged_newest_first(store: ExperienceStore) -> None:
    for n in range(7):
        store.add(record(n), b"body")
    first = store.summaries(None, 3)
    second = store.summaries(first[-1].row, 3)
    assert [r.task.index for r in first + second] == [6, 5, 4, 3, 2, 1]
    assert [r.task.index for r in store.summaries(second[-1].row, 3)] == [0]


def test_a_long_rejected_body_is_not_kept(store: ExperienceStore) -> None:
    store.add(record(1, verdict="malformed"), bytes(MAX_REJECTED_BODY + 1))
    store.add(record(2), bytes(MAX_REJECTED_BODY + 1))
    assert store.find(record(1).digest.hex()).size == MAX_REJECTED_BODY + 1
    assert store.size == MAX_REJECTED_BODY + 1 + 2 * ROW_BYTES


def test_retention_by_bytes_forgets_expired_then_rejected_then_oldest(tmp_path: Path, clock: Any) -> None:
    store = ExperienceStore(tmp_path / "node.db", 10_500, clock)
    store.add(record(1), bytes(2000))
    store.add(record(2, verdict="uninformative"), bytes(2000))
    store.add(record(3, expires_at=NOW - 1), bytes(2000))
    assert store.size == 3 * 2640
    store.add(record(4), bytes(2000))
    assert store.size == 3 * 2640, "the expired one went whole"
    assert not store.has_group(record(3).digest)
    store.add(record(5), bytes(2000))
    assert store.has_group(record(2).digest), "the row of a rejected live one stays: it recognises a replay"
    assert store.size == 3 * 2640 + 640
    store.add(record(6), bytes(2000))
    assert store.body(record(1).digest) is None
    assert store.has_group(record(1).digest)
    assert [entry.digest for entry in store.pool(NOW)] == [record(n).digest for n in (4, 5, 6)]
    assert store.evicted == 3
    for n in range(7, 60):
        store.add(record(n), b"")
    assert store.size <= 10_500, "rows alone are bounded too"
    store.close()
    reopened = ExperienceStore(tmp_path / "node.db", 10_500, clock)
    assert reopened.size == store.size
    reopened.close()


@pytest.mark.parametrize("of_01", [False, True])
def test_room_is_given_back_a_little_at_a_time(tmp_path: Path, clock: Any, of_01: bool) -> None:
    path = tmp_path / "node.db"
    if of_01:  # Shoal 0.1 made its database without
        old = sqlite3.connect(path)
        old.execute("CREATE TABLE other (x)")
        old.close()
    store = ExperienceStore(path, 64 << 20, clock)
    for n in range(100):
        store.add(record(n), bytes(200_000))
    store.resize(2 << 20)
    assert store.freed > 15 << 20
    calls = 1
    while store.compact():
        calls += 1
    assert (calls == 1) if of_01 else (calls > 3)
    assert path.stat().st_size < 3 << 20
    store.add(record(100), bytes(200_000))
    assert store.body(record(100).digest) == bytes(200_000)
    store.close()


def test_retention_by_age_and_number(tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.announcements.MAX_ANNOUNCEMENTS", 3)
    monkeypatch.setattr("swarm.peer_records.MAX_PEERS", 2)
    store = ExperienceStore(tmp_path / "node.db", 1 << 20, clock, keep_seconds=50)
    store.add(record(1, expires_at=NOW), b"body")
    store.add(record(2), b"body")
    for n in range(5):
        task = TaskRef("chain_sum", "1", 7, n)
        store.announcements.add(bytes([n]) * 32, "alice", 3, task, b"sealed", heard_at=NOW, expires_at=NOW + 1000)
        store.peers.save(PeerRecord(f"peer{n}", 0, 0, NOW, False, "", NOW, NOW + n), "stale")
    clock.now = NOW + 51
    store.tidy()
    assert not store.has_group(record(1).digest)
    assert store.has_group(record(2).digest)
    assert store.size == 4 + ROW_BYTES
    assert [digest[0] for digest in store.announcements.digests(clock.now, 10)] == [4, 3, 2]
    assert [peer.peer for peer in store.peers.all()] == ["peer3", "peer4"]
    everybody = [f"peer{n}" for n in range(5)]
    assert store.peers.verdicts(everybody) == {"peer3": {"stale": 1}, "peer4": {"stale": 1}}
    store.close()


def test_a_transaction_happens_whole_or_not_at_all(store: ExperienceStore) -> None:
    def fail_half_way() -> None:
        with store.transaction():
            store.add(record(1), b"body")
            store.announcements.add(bytes(32), "alice", 3, record(1).task, b"sealed", heard_at=NOW, expires_at=NOW + 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert not store.has_group(record(1).digest)
    assert not store.announcements.digests(NOW, 10)
    assert store.size == 0


def test_a_full_disk_is_a_typed_error_and_costs_nothing_else(store: ExperienceStore) -> None:
    store.add(record(1), b"body")
    (pages,) = store._db.one("PRAGMA page_count")
    store._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreFull, match="free some disk"):
        store.add(record(2), bytes(200_000))
    assert store.size == 4 + ROW_BYTES
    assert store.body(record(1).digest) == b"body"
    store._db.execute("PRAGMA max_page_count=1000000")
    assert store.add(record(2), bytes(200_000))


def test_a_file_that_is_no_database_and_one_of_a_newer_shoal_are_named(tmp_path: Path, clock: Any) -> None:
    (tmp_path / "bad.db").write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(StoreError, match=r"bad\.db is damaged .* ; move it away"):
        ExperienceStore(tmp_path / "bad.db", 1 << 20, clock)
    ExperienceStore(tmp_path / "new.db", 1 << 20, clock).close()
    with sqlite3.connect(tmp_path / "new.db") as connection:
        connection.execute("UPDATE experience_schema SET version = 99")
    connection.close()
    with pytest.raises(StoreError, match="version 99"):
        ExperienceStore(tmp_path / "new.db", 1 << 20, clock)


VERSION_1 = """
DROP TABLE announcements;
DROP INDEX groups_shown;
DROP INDEX groups_same_task;
ALTER TABLE groups DROP COLUMN parts;
UPDATE groups SET uses = 3, producer = 'alice';
CREATE TABLE announcements (
    row INTEGER PRIMARY KEY, digest BLOB NOT NULL, producer TEXT NOT NULL, sealed BLOB NOT NULL,
    expires_at REAL NOT NULL, UNIQUE (digest, producer));
CREATE INDEX announcements_expiry ON announcements (expires_at);
CREATE INDEX announcements_producer ON announcements (producer, expires_at);
UPDATE experience_schema SET version = 1;
"""


def test_a_file_of_an_older_shoal_is_brought_up_to_date(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "node.db"
    store = ExperienceStore(path, 1 << 20, clock)
    store.add(record(1), b"body")
    store.close()
    with sqlite3.connect(path) as connection:
        connection.executescript(VERSION_1)
    connection.close()
    for _ in range(2):  # the second time it is new
        store = ExperienceStore(path, 1 << 20, clock)
        assert store.body(record(1).digest) == b"body"
        assert [(found.uses, found.parts) for found in store.summaries(None, 10)] == [(3, ())]
        assert store.peers.verdicts(["alice"]) == {"alice": {"trained": 3}}
        added = store.announcements.add(
            bytes(32), "alice", 3, record(1).task, b"sealed", heard_at=NOW, expires_at=NOW + 1
        )
        store.close()
    assert not added, "it was there from the first time"


def test_another_connection_can_write_to_the_same_file(store: ExperienceStore, tmp_path: Path) -> None:
    """node.history does, from the same thread: an open transaction here would block it for ever."""
    store.add(record(1), b"body")
    other = sqlite3.connect(tmp_path / "node.db", timeout=0)
    other.execute("CREATE TABLE events (at REAL)")
    other.execute("INSERT INTO events VALUES (1)")
    other.commit()
    other.close()
    assert store.add(record(2), b"body")


def test_three_hundred_inserts_a_second(store: ExperienceStore) -> None:
    body = os.urandom(2000)
    begin = time.process_time()
    for n in range(300):
        store.add(record(n), body)
    assert time.process_time() - begin < 1.0


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_experience import ExperienceStore, record
store = ExperienceStore(Path({path!r}), 1 << 20, time.time)
for n in range(50):
    store.add(record(n), b"body")
print("written", flush=True)
time.sleep(60)
"""


def test_a_killed_process_loses_nothing_that_was_stored(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "node.db"
    script = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    store = ExperienceStore(path, 1 << 20, clock)
    assert len(store.summaries(None, 100)) == 50
    store.close()


def test_groups_are_chosen_by_what_they_are(store: ExperienceStore) -> None:
    for n in range(12):
        store.add(
            record(n, origin=("own", "foreign")[n % 2], verdict=("admitted", "stale", "replayed")[n % 3]), b"body"
        )

    def rows(before: int | None = None, **where: str) -> list[int]:
        return [found.row for found in store.summaries(before, 3, where)]

    assert rows() == [12, 11, 10]
    assert rows(origin="own") == [11, 9, 7]
    assert rows(7, origin="own") == [5, 3, 1]
    assert rows(origin="foreign", verdict="stale") == [8, 2]
    assert rows(producer="nobody") == rows(environment="chain") == []
    assert rows(producer=record(0).producer, environment=record(0).task.environment) == [12, 11, 10]


def test_a_hundred_thousand_groups_are_read_by_an_index(store: ExperienceStore) -> None:
    """Choosing reads the index alone: behind the bodies it would be every page of the file."""
    store._db.execute(
        "INSERT INTO groups WITH RECURSIVE counter (n) AS"
        " (SELECT 1 UNION ALL SELECT n + 1 FROM counter WHERE n < 100000)"
        " SELECT n, CAST(n AS BLOB), x'00', 1, 'foreign', 'peer' || (n % 500), 1, 'chain_sum', '1', n / 4, 0, 'm', x'',"
        " x'', 'admitted', '', 0, 0, 0, '' FROM counter"
    )
    began = time.process_time()
    found = store.summaries(None, 50, {"producer": "peer7", "origin": "foreign"})
    none = store.summaries(None, 50, {"verdict": "stale"})
    print(f"two choices of 100,000 groups in {1000 * (time.process_time() - began):.0f} ms")  # noqa: T201
    assert (len(found), found[0].row, found[1].row, none) == (50, 99_507, 99_007, [])
    plan = store._db.all(
        "EXPLAIN QUERY PLAN SELECT row FROM groups INDEXED BY groups_shown WHERE row < 9 AND origin = 'own'"
        " ORDER BY row DESC LIMIT 9"
    )
    assert "COVERING INDEX groups_shown" in plan[0][3]
    assert [one.row for one in store.same_task(found[0], 32)] == [99_506, 99_505, 99_504]


def test_parts_of_rewards_and_uses_are_kept(store: ExperienceStore) -> None:
    parts = ({"parsed": 1.0, "raw": 0.25}, {"parsed": 0.0})
    store.add(record(1, parts=parts), b"body")
    store.add(record(2), b"body")
    assert [store.find(record(n).digest.hex()).parts for n in (1, 2)] == [parts, ()]
    store.mark_used([record(1).digest, record(2).digest])
    store.mark_used([record(1).digest])
    assert store.peers.verdicts([record(1).producer]) == {record(1).producer: {"trained": 3}}
    assert store.find(record(1).digest.hex()).uses == 2


def test_what_followers_are_credited_with_is_no_refusal(store: ExperienceStore) -> None:
    store.peers.save(PeerRecord("alice", 1.0, 0.0, NOW, False, "", NOW, NOW), "admitted")
    for n in (1, 2):
        store.add(record(n, model=f"tiny {n}"), b"body")
    assert [entry.model for entry in store.pool(NOW)] == ["tiny 1", "tiny 2"]
    store.mark_used([record(1).digest, record(2).digest], [record(2).digest])
    store.mark_used([record(2).digest], [record(2).digest])
    assert store.peers.verdicts(["alice"]) == {"alice": {"admitted": 1, "trained": 3, "followed": 2}}
    assert store.peers.credited() == 2
    store.peers.save(PeerRecord("bob", 1.0, 0.0, NOW, False, "", NOW, NOW), "stale")
    order = {"search": "", "sort": "rejected", "descending": True, "offset": 0, "limit": 9}
    total, found = store.peers.page((), NOW, weigh=lambda *_: 0.0, **order)
    assert (total, [one.peer for one in found]) == (2, ["bob", "alice"]), "one refusal is more than none"


def test_a_group_that_is_overruled_is_neither_trained_on_nor_served(store: ExperienceStore) -> None:
    for n in (1, 2):
        store.add(record(n), b"body")
    store.overrule(record(1).digest, "logprob_mismatch", "0.9 nats apart")
    assert [entry.digest for entry in store.pool(NOW)] == [record(2).digest]
    assert store.unused(NOW) == {"alice": 1}
    assert store.body(record(1).digest) is None
    found = store.find(record(1).digest.hex())
    assert (found.verdict, found.detail) == ("logprob_mismatch", "0.9 nats apart")
    assert store.has_group(record(1).digest)


def test_other_groups_on_the_same_task(store: ExperienceStore) -> None:
    task = TaskRef("chain_sum", "1", 77, 3)
    for n in range(5):
        store.add(record(n, task=task), b"body")
    for n, other in enumerate(
        (TaskRef("chain_sum", "1", 77, 4), TaskRef("chain_sum", "2", 77, 3), TaskRef("words", "1", 77, 3)), start=5
    ):
        store.add(record(n, task=other), b"body")
    found = store.find(record(2).digest.hex())
    assert [one.digest for one in store.same_task(found, 3)] == [record(n).digest for n in (4, 3, 1)]
