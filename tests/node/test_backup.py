"""Backup and restore: round trips, hostile archives, a kill in the middle."""

import hashlib
import json
import os
import stat
import time
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from node import backup as backups
from node.aside import LOCK, making_aside
from node.backup import BackupError, Contents, backup, restore
from node.checkpoint import CheckpointStore
from node.history import History
from node.home import Home, HomeError, HomeLocked
from protocol.manifest import Coordination, embedded_manifest
from protocol.rounds import Facts, Pace, first, open_round, seal_round
from swarm.coordination.membership import Membership, NotAdmitted
from swarm.coordination.round_log import RoundLog
from tests.conftest import Clock


def silent(text: str) -> None:
    pass


def write(home: Home, file: Path, checkpoint: bool = False, history: bool = False) -> Contents:
    return backup(home, file, checkpoint=checkpoint, history=history, clock=Clock(), say=silent)


def put_back(home: Home, file: Path, force: bool = False) -> tuple[Contents, Path | None]:
    return restore(home, file, force=force, clock=Clock(), say=silent)


@pytest.fixture
def full(home: Home) -> Home:
    """A home with settings, a private swarm, a history, two checkpoints and a journal."""
    home.config_path.write_text("[node]\nname = 'anna'  # mine\n")
    home.found(embedded_manifest("mine", 0), b"k" * 32)
    home.keep_listen_port(7000)
    for name in ("listed", "paused", "following.json"):
        (home.path / name).write_text(name)
    history = History(home.database, Clock())
    history.record_step(1, {"foreign_groups": 2, "reward": 0.5})
    history.close()
    store = CheckpointStore(home.checkpoints, 2)
    store.save(25, lambda to: (to / "model.safetensors").write_bytes(b"old") and None, {})
    store.save(50, lambda to: (to / "model.safetensors").write_bytes(b"new") and None, {"rng": 1})
    (home.checkpoints / "journal-50.bin").write_bytes(b"records")
    return home


@pytest.fixture
def elsewhere(tmp_path: Path, no_variables: None) -> Home:
    return Home(tmp_path / "elsewhere" / "home")


def content(home: Home) -> dict[str, bytes]:
    return {str(f.relative_to(home.path)): f.read_bytes() for f in sorted(home.path.rglob("*")) if f.is_file()}


def test_everything_comes_back(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    file = tmp_path / "anna.backup"
    written = write(full, file, checkpoint=True, history=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert written.checkpoint == 50
    found, old = put_back(elsewhere, file)
    assert (found, old) == (written, None)
    assert elsewhere.identity().private_bytes == full.identity().private_bytes
    assert elsewhere.swarm() == full.swarm()
    assert elsewhere.manifest() == full.manifest()
    assert elsewhere.config_path.read_text() == "[node]\nname = 'anna'  # mine\n"
    assert elsewhere.listen_port() == 7000
    assert [(elsewhere.path / name).read_text() for name in ("listed", "paused")] == ["listed", "paused"]
    recovery = CheckpointStore(elsewhere.checkpoints, 2).entries()
    assert [(entry.name, (entry.path / "model.safetensors").read_bytes()) for entry in recovery] == [
        ("step-50", b"new")
    ]
    assert (elsewhere.checkpoints / "journal-50.bin").read_bytes() == b"records"
    history = History(elsewhere.database, Clock())
    assert history.steps(0, 9)[0]["reward"] == 0.5
    history.close()
    assert elsewhere.token() != full.token()  # whoever has the backup cannot steer the node
    assert not elsewhere.restoring.exists()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in elsewhere.path.iterdir() if path.is_file()}
    assert {modes[name] for name in ("identity.key", "invite", "api.token")} == {0o600}
    assert stat.S_IMODE(elsewhere.path.stat().st_mode) == 0o700
    assert elsewhere.init() is False  # what `shoal up` does first keeps all of it


def test_a_small_backup_has_no_training_in_it(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    written = write(full, tmp_path / "small")
    assert sorted(written.members) == sorted(backups.SMALL)
    put_back(elsewhere, tmp_path / "small")
    assert not elsewhere.database.exists()
    assert written.checkpoint is None


def test_a_node_that_runs_is_backed_up_and_not_restored_into(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    writer = History(full.database, Clock())
    writer.record_step(2, {"foreign_groups": 0})
    with full.lock():
        write(full, tmp_path / "live", history=True)
        with pytest.raises(HomeLocked):
            put_back(full, tmp_path / "live", force=True)
    writer.close()
    put_back(elsewhere, tmp_path / "live")
    history = History(elsewhere.database, Clock())
    assert [step["step"] for step in history.steps(0, 9)] == [1, 2]  # what was in the write-ahead log too
    history.close()


def test_a_checkpoint_that_is_damaged_is_not_backed_up(full: Home, tmp_path: Path) -> None:
    (full.checkpoints / "step-50" / "model.safetensors").write_bytes(b"NEW")
    with pytest.raises(BackupError, match=r"model\.safetensors has changed"):
        write(full, tmp_path / "b", checkpoint=True)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert not list(full.path.glob(".backup-*"))


def test_what_a_killed_backup_left_is_removed(full: Home, tmp_path: Path) -> None:
    for directory, name in ((full.path, ".backup-killed"), (tmp_path, ".b-killed")):
        (directory / name).mkdir()
        (directory / name / LOCK).touch()
        (directory / name / "half").write_bytes(b"weights")
    with making_aside(full.path, "backup") as other:  # of another backup that is at work
        write(full, tmp_path / "b", checkpoint=True)
        assert [path.name for path in full.path.glob(".backup-*")] == [other.parent.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "home"]


def test_nothing_is_written_over(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    write(full, tmp_path / "b")
    with pytest.raises(BackupError, match="give another file name"):
        write(full, tmp_path / "b")
    elsewhere.init()
    before = content(elsewhere)
    with pytest.raises(BackupError, match=r"has api\.token, config\.toml, identity\.key already .* --force"):
        put_back(elsewhere, tmp_path / "b")
    assert content(elsewhere) | {"lock": b""} == before | {"lock": b""}


def test_force_moves_what_is_there_aside(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    write(full, tmp_path / "b")
    elsewhere.init()
    History(elsewhere.database, Clock()).close()
    (elsewhere.checkpoints / "journal-0.bin").write_bytes(b"mine")
    key = elsewhere.identity_path.read_bytes()
    _, old = put_back(elsewhere, tmp_path / "b", force=True)
    assert old is not None
    assert (old / "identity.key").read_bytes() == key
    assert (old / "checkpoints" / "journal-0.bin").read_bytes() == b"mine"
    assert not elsewhere.database.exists()  # of another node: its reputations and steps are not this one's
    assert elsewhere.identity().peer_id == full.identity().peer_id
    _, older = put_back(elsewhere, tmp_path / "b", force=True)
    assert older not in (None, old)


# -- archives that are not what they say -----------------------------------------------------------------------


def archive(file: Path, packed: dict[str, bytes], listed: dict[str, Any] | None = None, **fields: Any) -> Path:
    """A backup made by hand: `listed` and `fields` instead of what would be true."""
    index = {
        "format": 1, "shoal": "0.1.0", "made": 1.0, "peer_id": "12D3KooWx",
        "members": {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in packed.items()},
    }  # fmt: skip
    index["members"].update(listed or {})  # type: ignore[attr-defined]
    with zipfile.ZipFile(file, "w") as written:
        for name, data in packed.items():
            written.writestr(name, data)
        written.writestr("backup.json", json.dumps({**index, **fields}))
    return file


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "/etc/cron.d/evil", "checkpoints/../../evil", "checkpoints/step-1/../../evil",
        "checkpoints/step-1/.hidden", "checkpoints/step-1/a/b", "checkpoints\\step-1\\x", "api.token", "lock",
        "Identity.key",
    ],
)  # fmt: skip
def test_names_that_no_backup_has_are_refused(full: Home, elsewhere: Home, tmp_path: Path, name: str) -> None:
    file = archive(tmp_path / "evil", {"identity.key": full.identity_path.read_bytes(), name: b"x"})
    with pytest.raises(BackupError, match="is none of a node"):
        put_back(elsewhere, file)
    assert not list(elsewhere.path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "evil", "home"]


def test_a_link_becomes_a_file_that_is_no_link(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    peer, key = full.identity().peer_id, full.identity_path.read_bytes()
    linked = {"config.toml": [11, hashlib.sha256(b"/etc/passwd").hexdigest()]}
    file = archive(tmp_path / "link", {"identity.key": key}, linked, peer_id=peer)
    with zipfile.ZipFile(file, "a") as written:
        entry = zipfile.ZipInfo("config.toml")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        written.writestr(entry, b"/etc/passwd")
    put_back(elsewhere, file)
    assert not elsewhere.config_path.is_symlink()
    assert elsewhere.config_path.read_text() == "/etc/passwd"
    assert stat.S_IMODE(elsewhere.config_path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 3}, "is of format 3, this Shoal reads 1 to 2 ; restore it with a newer Shoal"),
        ({"format": None}, "no backup of Shoal: format 'None'"),
        ({"format": 0}, "no backup of Shoal: format '0'"),
        ({"format": 1.5}, "no backup of Shoal: format '1.5'"),
        ({"members": []}, "cannot be read"),
        ({"members": {}}, "does not list its members"),
        ({"members": {"identity.key": ["a", "b"]}}, "cannot be read"),
        ({"peer_id": "12D3KooWsomebodyElse"}, "identity.key is not that of 12D3KooWsomebodyElse"),
        ({"made": "soon"}, "cannot be read"),
    ],
)
def test_an_index_that_is_not_true(
    full: Home, elsewhere: Home, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    fields = {"peer_id": full.identity().peer_id, **change}
    file = archive(tmp_path / "b", {"identity.key": full.identity_path.read_bytes()}, **fields)
    with pytest.raises(BackupError, match=words):
        put_back(elsewhere, file)
    assert not list(elsewhere.path.iterdir())


def test_an_older_backup_comes_back(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    members = {"identity.key": full.identity_path.read_bytes(), "config.toml": full.config_path.read_bytes()}
    file = archive(tmp_path / "b", members, peer_id=full.identity().peer_id, format=1)
    put_back(elsewhere, file)
    assert elsewhere.identity().peer_id == full.identity().peer_id
    assert not (elsewhere.path / "following.json").exists()


def test_a_coordinator_is_backed_up_with_its_log_and_goes_on_there(
    run: Callable[..., Result], home: Home, elsewhere: Home, tmp_path: Path
) -> None:
    me = home.identity()
    manifest = embedded_manifest("lab", 0, Coordination((me.peer_id,), listed_only=True))
    home.found(manifest, b"k" * 32)
    now = time.time()
    with closing(RoundLog(home.database, manifest.digest, durable=True)) as log:
        record = first(manifest, Facts(b"m" * 32, 0, 0, 0, b"", (1, 1, 1, 1)), Pace(1, 1, 1, 1.0, 0, 2, 1))
        sealed = seal_round(me, record, now)
        log.add(*open_round(sealed, manifest, now), sealed)
    with closing(Membership(home.database, manifest.digest, time.time, listed_only=True)) as members:
        token = members.invite(uses=1, expires=now + 60, role="member")
        assert members.enter("anna", token) == "member"
    file = tmp_path / "b"
    assert "node.db" in write(home, file).members
    result = run("--home", elsewhere.path, "restore", file)
    assert result.exit_code == 0
    assert "this is a coordinator" in result.stderr
    assert "its log is not in it" not in result.stderr
    assert "coordinator up" in result.stdout
    with closing(RoundLog(elsewhere.database, manifest.digest)) as log:
        kept = log.last()
    assert kept is not None
    assert (kept.sealed, kept.coordinator) == (sealed, me.peer_id)
    with closing(Membership(elsewhere.database, manifest.digest, time.time, listed_only=True)) as members:
        assert [one.peer for one in members.members()] == ["anna"]
        with pytest.raises(NotAdmitted, match="used up"):
            members.enter("bert", token)


def test_a_bomb_is_refused_by_what_it_would_take(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    key = full.identity_path.read_bytes()
    big = archive(tmp_path / "big", {"identity.key": key, "config.toml": b" " * (2 << 20)})
    with pytest.raises(BackupError, match=r"config\.toml has 2097152 bytes"):
        put_back(elsewhere, big)
    many = archive(tmp_path / "many", {"identity.key": key} | {f"checkpoints/step-1/{i}": b"" for i in range(4096)})
    with pytest.raises(BackupError, match="4098 members"):
        put_back(elsewhere, many)
    room = archive(tmp_path / "room", {"identity.key": key, "node.db": b"x"})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backups, "MAX_TOTAL", 100)
        with pytest.raises(BackupError, match="free some disk"):
            put_back(elsewhere, room)
    said = {"node.db": [9, hashlib.sha256(b"x" * 9).hexdigest()]}
    liar = archive(tmp_path / "liar", {"identity.key": key, "node.db": b"x" * 999}, said)
    raw = liar.read_bytes().replace((999).to_bytes(4, "little"), (9).to_bytes(4, "little"))  # in both headers
    liar.write_bytes(raw)
    with pytest.raises(BackupError, match=r"node\.db is (damaged|not as it was written)"):
        put_back(elsewhere, liar)
    assert not list(elsewhere.path.iterdir())


def test_files_that_are_no_backup(full: Home, elsewhere: Home, tmp_path: Path) -> None:
    for data, words in ((b"", "no backup, or cut off"), (b"x" * 100, "no backup, or cut off")):
        (tmp_path / "b").write_bytes(data)
        with pytest.raises(BackupError, match=words):
            put_back(elsewhere, tmp_path / "b")
    with pytest.raises(BackupError, match="is not there"):
        put_back(elsewhere, tmp_path / "none")
    with zipfile.ZipFile(tmp_path / "plain", "w") as written:
        written.writestr("identity.key", full.identity_path.read_bytes())
    with pytest.raises(BackupError, match=r"no backup\.json"):
        put_back(elsewhere, tmp_path / "plain")
    write(full, tmp_path / "good", checkpoint=True)
    good = (tmp_path / "good").read_bytes()
    (tmp_path / "cut").write_bytes(good[: len(good) // 2])
    with pytest.raises(BackupError, match="cut off"):
        put_back(elsewhere, tmp_path / "cut")
    at = good.index(b"new")
    (tmp_path / "bit").write_bytes(good[:at] + b"neW" + good[at + 3 :])
    with pytest.raises(BackupError, match="is damaged"):
        put_back(elsewhere, tmp_path / "bit")
    assert not list(elsewhere.path.iterdir())
    put_back(elsewhere, tmp_path / "good")


# -- a kill ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process had ended there: nothing is tidied up."""


@pytest.mark.parametrize("forced", [False, True])
def test_a_restore_that_is_killed_anywhere_leaves_the_old_node_or_none_and_is_repeated(
    full: Home, tmp_path: Path, no_variables: None, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    write(full, tmp_path / "b", checkpoint=True, history=True)
    wanted, moved = full.identity().peer_id, os.replace
    kills = 0
    for limit in range(40):
        home = Home(tmp_path / f"home-{limit}")
        own = ""
        if forced:
            home.init()
            own = home.identity().peer_id
        left = [limit]

        def replace(self: Path, target: Path, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            moved(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        try:
            put_back(home, tmp_path / "b", force=forced)
        except Killed:
            kills += 1
            monkeypatch.undo()
            if home.identity_path.exists():  # before anything was moved, or all of it: the old node or the new one
                assert home.identity().peer_id in (own, wanted)
            else:
                with pytest.raises(HomeError, match="was interrupted ; run `shoal restore`"):
                    home.init()
            put_back(home, tmp_path / "b", force=forced)  # without a force where there was none before
        else:
            monkeypatch.undo()
        assert home.identity().peer_id == wanted
        assert home.swarm() == full.swarm()
        assert (home.checkpoints / "step-50" / "model.safetensors").read_bytes() == b"new"
        assert not home.restoring.exists()
        if forced:
            kept = [json.loads(key.read_bytes())["peer_id"] for key in home.path.glob("before-restore-*/identity.key")]
            assert own in kept
        if left[0] > 0:
            break
    assert kills >= 7


def test_the_commands(run: Callable[..., Result], full: Home, elsewhere: Home, tmp_path: Path) -> None:
    file = tmp_path / "anna.backup"
    made = run("--home", full.path, "backup", file, "--with-checkpoint")
    assert made.exit_code == 0, made.stderr
    assert made.stdout.startswith(f"Node {full.identity().peer_id} as of ")
    assert "checkpoint of step 50" in made.stderr  # what takes its time is told
    assert "unencrypted" in made.stderr
    back = run("--home", elsewhere.path, "restore", file)
    assert "with the checkpoint of step 50" in back.stdout
    again = run("--home", elsewhere.path, "restore", file, "--json")
    assert (again.exit_code, json.loads(again.stderr)["fix"].startswith("give another --home")) == (1, True)
    forced = run("--home", elsewhere.path, "restore", file, "--json", "--force")
    assert json.loads(forced.stdout)["checkpoint"] == 50
    assert forced.stderr == ""
    assert run("--home", tmp_path / "none", "backup", tmp_path / "c").exit_code == 4
