import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.disk import write_atomic
from node.home import DaemonInfo, Home, HomeError, HomeLocked, NoSwarm, NotInitialised, default_home, models_dir
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import embedded_manifest

HOLD = """
import sys
from node.home import Home
with Home(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_makes_a_private_home_once(tmp_path: Path, no_variables: None) -> None:
    before = os.umask(0)  # the modes must not lean on the umask
    try:
        home = Home(tmp_path / "a" / "home")
        assert home.init() is True
    finally:
        os.umask(before)
    assert mode(home.path) == 0o700
    assert mode(home.identity_path) == mode(home.token_path) == 0o600
    peer_id, token = home.identity().peer_id, home.token()
    assert len(token) >= 43
    home.config_path.write_text("# mine\n")
    assert home.init() is False
    assert (home.identity().peer_id, home.token(), home.config_path.read_text()) == (peer_id, token, "# mine\n")


def test_init_keeps_the_mode_of_a_directory_with_other_things(tmp_path: Path, no_variables: None) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    Home(tmp_path).init()
    assert mode(tmp_path) == 0o755


def test_a_file_is_no_home(tmp_path: Path, no_variables: None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="is a file ; give a directory"):
        Home(tmp_path / "file").init()


def test_a_lost_identity_is_not_replaced_in_silence(home: Home) -> None:
    home.identity_path.unlink()
    home.database.touch()
    with pytest.raises(HomeError, match="put your backup"):
        home.init()


def test_not_initialised(tmp_path: Path, no_variables: None) -> None:
    home = Home(tmp_path)
    for use in (home.require, home.identity, home.token):
        with pytest.raises(NotInitialised, match="run `shoal init`"):
            use()
    with pytest.raises(NotInitialised), home.lock():
        pass


def test_where_the_home_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_variables: None) -> None:
    assert default_home().name == "shoal"
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "env"))
    assert Home().path == tmp_path / "env"
    assert Home(tmp_path / "flag").path == tmp_path / "flag"
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    assert models_dir() == tmp_path / "cache" / "models"


def test_a_passphrase_seals_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_variables: None) -> None:
    home = Home(tmp_path / "home", passphrase="open sesame")
    home.init()
    assert home.identity_is_sealed()
    peer_id = home.identity().peer_id
    with pytest.raises(HomeError, match="SHOAL_PASSPHRASE"):
        Home(home.path).identity()
    with pytest.raises(HomeError, match="wrong passphrase"):
        Home(home.path, passphrase="guess").identity()
    monkeypatch.setenv("SHOAL_PASSPHRASE", "open sesame")
    assert Home(home.path).identity().peer_id == peer_id


def test_a_plain_identity_is_not_sealed(home: Home) -> None:
    assert not home.identity_is_sealed()


def test_an_identity_that_others_can_read_is_refused(home: Home) -> None:
    home.identity_path.chmod(0o644)
    with pytest.raises(HomeError, match="open to other users"):
        home.identity()


def test_a_damaged_identity_is_named(home: Home) -> None:
    home.identity_path.write_bytes(b"\x00garbage")
    with pytest.raises(HomeError, match=r"identity\.key"):
        home.identity()


def test_a_home_that_another_process_holds(home: Home) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        with pytest.raises(HomeLocked, match=f"in use by process {other.pid} ; .*shoal .*down") as caught, home.lock():
            pass
        assert caught.value.pid == other.pid
        other.kill()
        other.wait(10)
        with home.lock():  # the kernel let go when it died
            assert home.lock_path.read_text() == str(os.getpid())
    with home.lock():
        pass


def test_the_daemon_file(home: Home) -> None:
    assert home.daemon() is None
    info = DaemonInfo(os.getpid(), "http://127.0.0.1:8420", 12.5, ("/ip4/192.0.2.1/tcp/1/p2p/x",))
    home.write_daemon(info)
    assert home.daemon() == info
    home.write_daemon(DaemonInfo(2**22 + 1, "http://127.0.0.1:8420", 12.5))  # beyond the largest pid
    assert home.daemon() is None
    home.daemon_path.write_text(json.dumps({"pid": 1}))
    with pytest.raises(HomeError, match="damaged"):
        home.daemon()
    home.remove_daemon()
    home.remove_daemon()
    assert home.daemon() is None


def test_the_listen_port_is_kept(home: Home) -> None:
    assert home.listen_port() is None
    home.keep_listen_port(7946)
    assert Home(home.path).listen_port() == 7946


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old", 0o600)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new", 0o600)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_found_join_and_leave(home: Home) -> None:
    with pytest.raises(NoSwarm, match="shoal join INVITE"):
        home.swarm()
    manifest = embedded_manifest("mine", 1000.0)
    home.found(manifest, psk=b"k" * 32)
    assert home.manifest() == manifest
    assert home.swarm() == Invite(manifest.digest, (), b"k" * 32, "mine")
    assert mode(home.invite_path) == 0o600

    other = Invite(embedded_manifest("theirs", 2000.0).digest, (), None, "theirs")
    with pytest.raises(HomeError, match=r"in swarm 'mine' already ; run `shoal --home .* leave` first"):
        home.join(other)
    assert home.leave() == "mine"
    with pytest.raises(NoSwarm):
        home.leave()
    home.join(other)
    assert home.swarm().name == "theirs"
    assert home.manifest() is None


def test_a_new_invite_to_the_same_swarm_brings_new_bootstrap_peers(home: Home) -> None:
    manifest = embedded_manifest("mine", 1000.0)
    home.found(manifest)
    address = f"/ip4/192.0.2.1/tcp/7946/p2p/{Identity.generate().peer_id}"
    home.join(Invite(manifest.digest, (address,), None, "mine"))
    assert home.swarm().bootstrap == (address,)
    assert home.manifest() == manifest


def test_damaged_swarm_files_are_named(home: Home) -> None:
    home.manifest_path.write_bytes(b"junk")
    with pytest.raises(HomeError, match=r"manifest\.bin is damaged"):
        home.manifest()
    home.invite_path.write_text("shoal:junk")
    with pytest.raises(HomeError, match="invite is damaged"):
        home.swarm()


@pytest.mark.parametrize("pid", ['"x"', "-1", "9" * 30])
def test_a_daemon_file_with_a_number_that_no_process_has(tmp_path: Path, pid: str) -> None:
    home = Home(tmp_path / "home")
    home.init()
    home.daemon_path.write_text(f'{{"pid": {pid}, "url": "http://127.0.0.1:1", "started_at": 1.0, "addresses": []}}')
    with pytest.raises(HomeError, match=r"daemon\.json is damaged"):
        home.daemon()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"9" * 23])
def test_a_lock_file_with_nonsense_names_no_process(tmp_path: Path, content: bytes) -> None:
    home = Home(tmp_path / "home")
    home.init()
    home.lock_path.write_bytes(content)
    assert home.holder() is None
    with home.lock():
        assert home.holder() == os.getpid()
        home.lock_path.write_bytes(content)
        with pytest.raises(HomeLocked, match="another process"), Home(home.path).lock():
            pass


def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.init()
    home.token_path.write_bytes(b"\xff\xfe")
    with pytest.raises(HomeError, match=r"api\.token is damaged"):
        home.token()


def test_a_command_names_the_home_unless_it_is_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Home(tmp_path).command("open") == f"shoal --home {tmp_path} open"
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert Home(tmp_path).command("open") == "shoal open"
