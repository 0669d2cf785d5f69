"""What an older Shoal left in a home is taken over with nothing lost; what a newer one left is refused with words.

The databases are SQL text as those versions wrote it, and not what today's code would make of it.
"""

import base64
import hashlib
import json
import re
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from node import history, journal
from node.checkpoint import CheckpointError, CheckpointStore
from node.history import History
from node.home import Home, HomeError
from node.settings import ConfigError, load
from protocol.invite import Invite, InviteError
from swarm import experience
from swarm.database import StoreError
from swarm.experience import ADMITTED, ExperienceStore
from tests.conftest import Clock

EVENTS = """
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, at REAL NOT NULL, mean REAL NOT NULL, scores TEXT NOT NULL);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    level TEXT NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL
);
INSERT INTO evaluations VALUES (0, 4.0, 0.125, '{"sums": 0.125}'), (2, 7.0, 0.5, '{"sums": 0.5}');
INSERT INTO events (at, level, kind, message) VALUES (5.0, 'warning', 'share', 'one'), (6.0, 'info', 'stop', 'two');
"""
HISTORIES = {
    1: """
CREATE TABLE history_version (version INTEGER NOT NULL);
INSERT INTO history_version VALUES (1);
CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL, foreign_groups INTEGER NOT NULL);
CREATE INDEX steps_foreign ON steps (foreign_groups);
INSERT INTO steps VALUES (1, 5.0, '{"reward": 0.5, "foreign_groups": 4}', 4);
INSERT INTO steps VALUES (2, 6.0, '{"reward": 0.25, "foreign_groups": 3}', 3);
""",
    2: """
CREATE TABLE history_version (version INTEGER NOT NULL);
INSERT INTO history_version VALUES (2);
CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL, trained_foreign INTEGER NOT NULL);
INSERT INTO steps VALUES (1, 5.0, '{"reward": 0.5, "foreign_groups": 4}', 4);
INSERT INTO steps VALUES (2, 6.0, '{"reward": 0.25, "foreign_groups": 3}', 7);
""",
}
GROUPS = """
CREATE TABLE groups (
    row INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL, size INTEGER NOT NULL,
    origin TEXT NOT NULL, producer TEXT NOT NULL, epoch INTEGER NOT NULL,
    environment TEXT NOT NULL, version TEXT NOT NULL, seed INTEGER NOT NULL, slot INTEGER NOT NULL,
    model TEXT NOT NULL, claimed BLOB NOT NULL, local BLOB NOT NULL, verdict TEXT NOT NULL, detail TEXT NOT NULL,
    received_at REAL NOT NULL, expires_at REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0);
CREATE INDEX groups_task ON groups (producer, epoch, environment, seed, slot);
CREATE INDEX groups_expiry ON groups (expires_at);
CREATE INDEX groups_pool ON groups (expires_at, uses, producer) WHERE origin = 'foreign' AND verdict = 'admitted';
INSERT INTO groups VALUES (1, x'ab', x'c0ffee', 3, 'foreign', 'bob', 7, 'sums', '1', 11, 2, 'm',
    x'000000000000F03F', x'000000000000F03F', 'admitted', '', 5.0, 4102444800.0, 1);
CREATE TABLE peers (
    peer TEXT PRIMARY KEY, accepted REAL NOT NULL, penalty REAL NOT NULL, updated_at REAL NOT NULL,
    banned INTEGER NOT NULL, model TEXT NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL) WITHOUT ROWID;
INSERT INTO peers VALUES ('bob', 3.5, 0.25, 6.0, 0, 'm', 1.0, 6.0);
CREATE TABLE verdicts (
    peer TEXT NOT NULL, verdict TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (peer, verdict)) WITHOUT ROWID;
INSERT INTO verdicts VALUES ('bob', 'admitted', 4), ('bob', 'stale', 1);
"""
EXPERIENCES = {
    1: """
CREATE TABLE experience_schema (version INTEGER NOT NULL);
INSERT INTO experience_schema VALUES (1);
CREATE TABLE announcements (
    row INTEGER PRIMARY KEY, digest BLOB NOT NULL, producer TEXT NOT NULL, sealed BLOB NOT NULL,
    expires_at REAL NOT NULL, UNIQUE (digest, producer));
CREATE INDEX announcements_expiry ON announcements (expires_at);
INSERT INTO announcements VALUES (1, x'ab', 'bob', x'00', 4102444800.0);
""",
    2: """
CREATE TABLE experience_schema (version INTEGER NOT NULL);
INSERT INTO experience_schema VALUES (2);
CREATE TABLE announcements (
    row INTEGER PRIMARY KEY, digest BLOB NOT NULL, producer TEXT NOT NULL, epoch INTEGER NOT NULL,
    seed INTEGER NOT NULL, slot INTEGER NOT NULL, sealed BLOB NOT NULL, heard_at REAL NOT NULL,
    expires_at REAL NOT NULL, UNIQUE (digest, producer));
CREATE INDEX announcements_expiry ON announcements (expires_at);
CREATE INDEX announcements_producer ON announcements (producer, expires_at);
CREATE INDEX announcements_task ON announcements (producer, epoch, seed, slot);
""",
}


def test_every_earlier_version_has_a_way_up_and_a_file_here() -> None:
    """Who raises a version adds what it was before."""
    assert set(history.UPGRADES) == set(range(1, history.VERSION))
    assert set(range(1, history.VERSION)) <= set(HISTORIES)
    assert set(range(1, experience.SCHEMA_VERSION)) <= set(EXPERIENCES)


@pytest.fixture(params=[(1, 1), (2, 1), (2, 2)], ids=str)
def database(request: pytest.FixtureRequest, home: Home) -> Path:
    """node.db of an earlier version: (of the history, of the experience)."""
    of_history, of_experience = request.param
    with closing(sqlite3.connect(home.database)) as made:
        made.executescript(HISTORIES[of_history] + EVENTS + EXPERIENCES[of_experience] + GROUPS)
    return home.database


def test_an_older_database_is_taken_over_whole(database: Path) -> None:
    for _ in range(2):  # the second time it is as today's
        clock = Clock()
        store = ExperienceStore(database, 16 << 20, clock)
        opened = History(database, clock)
        assert [(s["step"], s["at"], s["reward"]) for s in opened.steps(0, 9)] == [(1, 5.0, 0.5), (2, 6.0, 0.25)]
        assert opened.trained_foreign() == 7
        assert [(e["step"], e["mean"], e["scores"]) for e in opened.evaluations(-1, 9)] == [
            (0, 0.125, {"sums": 0.125}), (2, 0.5, {"sums": 0.5})
        ]  # fmt: skip
        assert [(event["kind"], event["message"]) for event in opened.events(0, 9)] == [
            ("share", "one"), ("stop", "two")
        ]  # fmt: skip
        (group,) = store.summaries(None, 9)
        assert (group.digest, group.producer, group.verdict, group.local, group.uses) == (
            b"\xab", "bob", ADMITTED, (1.0,), 1
        )  # fmt: skip
        assert store.body(b"\xab") == b"\xc0\xff\xee"
        assert [(peer.peer, peer.accepted, peer.penalty) for peer in store.peers.all()] == [("bob", 3.5, 0.25)]
        # uses of its groups are counted by producer since version 3: those that are stored stand for the past
        assert store.peers.verdicts(["bob"]) == {"bob": {"admitted": 4, "stale": 1, "trained": 1}}
        opened.close()
        store.close()
    opened = History(database, Clock())
    opened.record_step(3, {"foreign_groups": 2, "reward": 0.75})  # and goes on
    assert opened.trained_foreign() == 9
    assert opened.last_step() == {"step": 3, "at": Clock().now, "foreign_groups": 2, "reward": 0.75}
    opened.close()


def test_an_upgrade_that_is_killed_is_done_anew(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one transaction: the file is as before, or as after."""
    last = max(history.UPGRADES)
    broken = {**history.UPGRADES, last: f"{history.UPGRADES[last]};\nSELECT killed_here FROM nowhere"}
    monkeypatch.setattr(history, "UPGRADES", broken)
    with closing(sqlite3.connect(database)) as looked:
        (version,) = looked.execute("SELECT version FROM history_version").fetchone()
    if version < history.VERSION:  # else there is nothing to upgrade
        with pytest.raises(StoreError, match="nowhere"):
            History(database, Clock())
    monkeypatch.undo()
    opened = History(database, Clock())
    assert (len(opened.steps(0, 9)), opened.trained_foreign()) == (2, 7)
    opened.close()


@pytest.mark.parametrize("table", ["history_version", "experience_schema"])
def test_a_newer_database_is_refused_with_words_and_left_alone(
    run: Callable[..., Result], home: Home, table: str
) -> None:
    ExperienceStore(home.database, 16 << 20, Clock()).close()
    History(home.database, Clock()).close()
    with closing(sqlite3.connect(home.database)) as made:
        made.execute(f"UPDATE {table} SET version = 41")
        made.commit()
    words = rf"{re.escape(str(home.database))}: {table} is of version 41, this Shoal reads version \d+; use the Shoal"
    opening = History if table == "history_version" else partial(ExperienceStore, max_bytes=16 << 20)
    with pytest.raises(StoreError, match=words):
        opening(home.database, clock=Clock())
    with closing(sqlite3.connect(home.database)) as left:
        assert left.execute(f"SELECT version FROM {table}").fetchall() == [(41,)]
    if table == "history_version":
        told = run("--home", home.path, "steps")
        assert (told.exit_code, told.stderr.count("\n"), "use the Shoal that wrote it" in told.stderr) == (1, 2, True)


def test_a_newer_journal_is_refused_with_words(tmp_path: Path) -> None:
    body = msgspec.msgpack.encode([journal.FORMAT + 1, {"whatever": "comes"}])
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    record = journal.HEADER.pack(len(body), zlib.crc32(body)) + body
    (checkpoints / "journal-0.bin").write_bytes(record)
    with pytest.raises(CheckpointError, match=r"not of format 2 .* ; let the version of Shoal that wrote it go on"):
        CheckpointStore(checkpoints, 2).latest()
    assert (checkpoints / "journal-0.bin").read_bytes() == record


def test_settings_an_identity_and_an_invite_of_a_newer_shoal_are_refused_with_words(home: Home) -> None:
    home.config_path.write_text("[rollout]\nthought_police = true\n")
    with pytest.raises(ConfigError, match=r"config\.toml: unknown key rollout\.thought_police ; "):
        load(home)
    key = json.loads(home.identity_path.read_text())
    home.identity_path.write_text(json.dumps({**key, "shoal_identity": 2}))
    with pytest.raises(HomeError, match="written by a newer shoal; upgrade shoal"):
        home.identity()
    with pytest.raises(InviteError, match="version 3, this shoal reads 2; upgrade shoal to join"):
        Invite.parse(newer(Invite(b"d" * 32, (), None, "s").to_uri()))


def newer(link: str) -> str:
    """The invite with the version byte after this one's, and a check that is right."""
    frame = base64.urlsafe_b64decode(link.removeprefix("shoal:") + "==")[:-4]
    frame = bytes([3]) + frame[1:]
    return "shoal:" + base64.urlsafe_b64encode(frame + hashlib.sha256(frame).digest()[:4]).decode().rstrip("=")
