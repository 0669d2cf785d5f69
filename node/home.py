"""A node's home directory: where its files are, who may write them, and that only one process runs on it.

Everything is written aside, fsynced and renamed, so a kill at any instant leaves the old file or the new one.
Files with secrets (identity, API token, invite with its private-network key) are 0600; the directory is 0700.
"""

import fcntl
import json
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import psutil

from node.disk import write_atomic
from node.supervised import how_to_end, supervisor
from protocol.identity import Identity, IdentityError
from protocol.invite import Invite, InviteError
from protocol.manifest import Manifest, ManifestError

CONFIG_HEADER = """\
# Settings of this node: [section] and key = value. `shoal config show` lists every key, its value, default and source;
# `shoal config set KEY VALUE` edits this file and keeps your comments.
"""
MAX_PID_DIGITS = 9
COMMANDS = (
    "backup", "bench", "checkpoint", "completion", "config", "coordinator", "doctor", "down", "env", "groups", "health",
    "id", "init", "join", "leave", "local", "logs", "model", "open", "paths", "pause", "peers", "report", "restore",
    "resume", "status", "steps", "swarm", "train", "up", "version",
)  # fmt: skip
NAMED_COMMAND = re.compile(rf"(?<![\w./@-])shoal (?=(?:{'|'.join(COMMANDS)})\b)")
"""A command as messages name it."""


class HomeError(Exception):
    """A file in the home is missing, damaged or not allowed; the message names it and the way out."""


class NotInitialised(HomeError):
    """There is no node in this directory."""


class HomeLocked(HomeError):
    """Another process runs on this home."""

    def __init__(self, home: "Home", pid: int | None) -> None:
        who, supervising = f"process {pid}" if pid else "another process", supervisor(pid)
        who += f", run in a local swarm by process {supervising}" if supervising else ""
        way = how_to_end(supervising) if supervising else f"stop it with `{home.command('down')}`"
        super().__init__(f"home {home.path} is in use by {who} ; {way}, or give another --home")
        self.pid = pid


class NoSwarm(HomeError):
    """The home belongs to no swarm yet."""


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """What the running daemon leaves for clients on this machine."""

    pid: int
    url: str
    """Base address of the local API, without a trailing slash."""
    started: float
    """Unix seconds."""
    addresses: tuple[str, ...] = ()
    """Own multiaddrs with /p2p/<peer id>, as the transport reports them."""


def default_home() -> Path:
    """SHOAL_HOME, or the platform's directory for a user's data."""
    given = os.environ.get("SHOAL_HOME")
    return Path(given) if given else platformdirs.user_data_path("shoal", appauthor=False)


def models_dir() -> Path:
    """Where converted models are kept once for all homes of this user: SHOAL_CACHE or the platform's cache."""
    given = os.environ.get("SHOAL_CACHE")
    return (Path(given) if given else platformdirs.user_cache_path("shoal", appauthor=False)) / "models"


class Home:
    """Paths and small files of one node. `passphrase` opens (or, in `init`, seals) its identity."""

    def __init__(self, path: Path | str | None = None, passphrase: str | None = None) -> None:
        self.path = (Path(path) if path else default_home()).expanduser().resolve()
        self.passphrase = passphrase or os.environ.get("SHOAL_PASSPHRASE") or None
        self.config_path = self.path / "config.toml"
        self.identity_path = self.path / "identity.key"
        self.token_path = self.path / "api.token"
        self.database = self.path / "node.db"
        self.manifest_path = self.path / "manifest.bin"
        self.invite_path = self.path / "invite"
        self.daemon_path = self.path / "daemon.json"
        self.lock_path = self.path / "lock"
        self.port_path = self.path / "listen.port"
        self.page_port_path = self.path / "web.port"
        self.listed_path = self.path / "listed"
        self.checkpoints = self.path / "checkpoints"
        self.policies = self.path / "policies"
        self.logs = self.path / "logs"
        self.log_path = self.logs / "node.log"
        self.restoring = self.path / ".restore"
        """What a restore unpacks into (node/backup.py); it is gone when that is done."""

    def command(self, words: str) -> str:
        """How a person calls `shoal` for this home."""
        named = "" if self.path == default_home().resolve() else f"--home {shlex.quote(str(self.path))} "
        return f"shoal {named}{words}"

    def hints(self, text: str) -> str:
        """Words for a person, in which every command is one for this home."""
        return text if self.path == default_home().resolve() else NAMED_COMMAND.sub(self.command(""), text)

    def coordinates(self) -> bool:
        """Whether this home's swarm names it as a coordinator, as far as can be told without a passphrase."""
        try:
            manifest = self.manifest()
            peer_id = json.loads(self.identity_path.read_bytes())["peer_id"]
        except (HomeError, OSError, ValueError, KeyError, TypeError):  # whoever needs these files says so
            return False
        return manifest is not None and peer_id in manifest.coordinators

    def starting(self) -> str:
        """The command that starts what this home is, as a person calls it."""
        return self.command("coordinator up" if self.coordinates() else "up")

    def init(self) -> bool:
        """Create what is missing and keep what is there. True: a new identity was made. Raises HomeError, OSError."""
        if self.path.exists() and not self.path.is_dir():
            raise HomeError(f"home {self.path} is a file ; give a directory with --home")
        if self.restore_interrupted():
            raise HomeError(f"a restore into {self.path} was interrupted ; run `shoal restore` with its file again")
        fresh = not self.path.exists() or not any(self.path.iterdir())
        for directory in (self.path, self.checkpoints, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        if fresh:
            self.path.chmod(0o700)
        if not self.config_path.exists():
            write_atomic(self.config_path, CONFIG_HEADER.encode())
        if not self.token_path.exists():
            write_atomic(self.token_path, secrets.token_urlsafe(32).encode(), 0o600)
        if self.identity_path.exists():
            return False
        if self.database.exists():
            raise HomeError(
                f"{self.identity_path} is gone but the node's database is there ; "
                "put your backup of identity.key back, or start anew in another --home"
            )
        write_atomic(self.identity_path, Identity.generate().seal_bytes(self.passphrase), 0o600)
        return True

    def restore_interrupted(self) -> bool:
        """Whether a restore was killed before its last file: the identity comes last."""
        return self.restoring.exists() and not self.identity_path.exists()

    def require(self) -> None:
        """Raises NotInitialised where `init` has not been."""
        if not self.identity_path.exists():
            raise NotInitialised(f"no node in {self.path} ; run `shoal init` (or point --home at one)")

    def identity(self) -> Identity:
        """The node's key. Raises NotInitialised, HomeError (damaged, wrong or missing passphrase, open to others)."""
        self.require()
        mode = self.identity_path.stat().st_mode & 0o777
        if mode & 0o077:
            raise HomeError(f"{self.identity_path} is open to other users (mode {mode:o}) ; chmod 600 it")
        try:
            return Identity.open_bytes(self.identity_path.read_bytes(), self.passphrase)
        except IdentityError as error:
            raise HomeError(f"{self.identity_path}: {error} (passphrase: SHOAL_PASSPHRASE)") from error

    def identity_is_sealed(self) -> bool:
        """Whether `identity` needs a passphrase."""
        return b'"protection":"none"' not in self.identity_path.read_bytes()

    def token(self) -> str:
        """Secret of the local API. Raises NotInitialised."""
        self.require()
        try:
            return self.token_path.read_text().strip()
        except UnicodeDecodeError as error:
            raise HomeError(f"{self.token_path} is damaged ; delete it, `shoal init` makes a new one") from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the home for this process. The kernel lets go when the process dies. Raises HomeLocked."""
        self.require()
        with os.fdopen(os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HomeLocked(self, self._noted()) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def holder(self) -> int | None:
        """The living process that holds the home, as it wrote itself down."""
        pid = self._noted()
        if pid is None:
            return None
        try:
            # one that began after the note is another one with the same number
            return pid if psutil.Process(pid).create_time() <= self.lock_path.stat().st_mtime + 2.0 else None
        except (psutil.Error, OSError):
            return None

    def clear_holder(self) -> None:
        """Of a process that is about to end: nobody is to take it for the holder any more."""
        self.lock_path.write_bytes(b"")

    def _noted(self) -> int | None:
        """The process number in the lock file, if there is one."""
        try:
            text = self.lock_path.read_bytes().strip()
        except OSError:
            return None
        return int(text) if text.isdigit() and len(text) <= MAX_PID_DIGITS else None

    def write_daemon(self, info: DaemonInfo) -> None:
        write_atomic(self.daemon_path, json.dumps(asdict(info)).encode(), 0o600)

    def remove_daemon(self) -> None:
        self.daemon_path.unlink(missing_ok=True)

    def daemon(self) -> DaemonInfo | None:
        """What the daemon left, or None when there is none or its process is gone (killed before it could tidy)."""
        try:
            fields = json.loads(self.daemon_path.read_bytes())
            info = DaemonInfo(**{**fields, "addresses": tuple(fields["addresses"])})
            if type(info.pid) is not int or not 0 < info.pid < 10**MAX_PID_DIGITS:
                raise ValueError(f"pid {info.pid!r}")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise HomeError(f"{self.daemon_path} is damaged ({error}) ; delete it") from error
        return info if psutil.pid_exists(info.pid) else None

    def listen_port(self) -> int | None:
        """The TCP port once chosen for `network.listen` with tcp/0, so that invites stay good over restarts."""
        return _kept_port(self.port_path)

    def keep_listen_port(self, port: int) -> None:
        write_atomic(self.port_path, str(port).encode())

    def page_port(self) -> int | None:
        """The port that the dashboard took last where it was free to choose, so that a bookmark stays good."""
        return _kept_port(self.page_port_path)

    def keep_page_port(self, port: int) -> None:
        write_atomic(self.page_port_path, str(port).encode())

    def swarm(self) -> Invite:
        """The swarm this home belongs to: manifest digest, bootstrap peers, private key. Raises NoSwarm."""
        try:
            return Invite.parse(self.invite_path.read_text())
        except FileNotFoundError:
            raise NoSwarm(
                f"{self.path} is in no swarm ; run `shoal join INVITE` or `shoal swarm create NAME`"
            ) from None
        except (InviteError, UnicodeDecodeError) as error:
            raise HomeError(f"{self.invite_path} is damaged ({error}) ; delete it and join again") from error

    def manifest(self) -> Manifest | None:
        """The swarm's manifest; None: known by digest only, to be fetched from a peer."""
        try:
            return Manifest.from_bytes(self.manifest_path.read_bytes())
        except FileNotFoundError:
            return None
        except ManifestError as error:
            raise HomeError(f"{self.manifest_path} is damaged ({error}) ; delete it: peers have it") from error

    def is_closed(self) -> bool:
        """Whether only who was let in takes part in the swarm: by its key, or by a coordinator. Raises HomeError."""
        manifest = self.manifest()
        return self.swarm().psk is not None or (manifest is not None and manifest.listed_only)

    def keep_manifest(self, manifest: Manifest) -> None:
        write_atomic(self.manifest_path, manifest.to_bytes())

    def join(self, invite: Invite) -> None:
        """Belong to the invite's swarm; a new invite to the same swarm replaces its bootstrap peers.

        Raises HomeError when the home already belongs to another swarm.
        """
        self.refuse_another(invite.manifest_digest)
        if not self.invite_path.exists():
            self.manifest_path.unlink(missing_ok=True)
        write_atomic(self.invite_path, invite.to_uri().encode(), 0o600)

    def refuse_another(self, digest: bytes) -> None:
        """Raises HomeError when the home belongs to another swarm than this one."""
        self.require()
        try:
            present = self.swarm()
        except NoSwarm:
            return
        if present.manifest_digest != digest:
            raise HomeError(
                f"home {self.path} is in swarm {present.name!r} already ; "
                f"run `shoal --home {self.path} leave` first, of a container `docker compose run --rm node leave`"
            )

    def found(self, manifest: Manifest, psk: bytes | None = None, *, listed: bool = False) -> None:
        """Belong to a new swarm of one's own; `listed`: as after `list_publicly`, for a swarm without a `psk`.

        Raises HomeError when the home already belongs to another one.
        """
        self.refuse_another(manifest.digest)
        self.keep_manifest(manifest)
        if listed:
            write_atomic(self.listed_path, manifest.digest.hex().encode())
        # it comes last: a kill before it leaves a home that is in no swarm, and founds one at the next call
        founded = Invite(manifest_digest=manifest.digest, bootstrap=(), psk=psk, name=manifest.name)
        write_atomic(self.invite_path, founded.to_uri().encode(), 0o600)

    def list_publicly(self, listed: bool) -> None:
        """Whether this node tells the public directory of its swarm, of this one only. Raises NoSwarm, HomeError."""
        swarm = self.swarm()
        if not listed:
            self.listed_path.unlink(missing_ok=True)
            return
        if swarm.psk is not None:
            raise HomeError(
                f"swarm {swarm.name} is private: nobody without its key could join ; hand out invites instead"
            )
        write_atomic(self.listed_path, swarm.manifest_digest.hex().encode())

    def is_listed(self) -> bool:
        """Whether this node tells the public directory of its swarm. Raises NoSwarm."""
        swarm = self.swarm()
        try:
            return swarm.psk is None and self.listed_path.read_bytes() == swarm.manifest_digest.hex().encode()
        except FileNotFoundError:
            return False

    def leave(self) -> str:
        """Belong to no swarm; model, identity and experience stay. Returns its name. Raises NoSwarm."""
        name = self.swarm().name
        self.invite_path.unlink()
        self.manifest_path.unlink(missing_ok=True)
        self.listed_path.unlink(missing_ok=True)
        return name


def _kept_port(path: Path) -> int | None:
    try:
        port = int(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise HomeError(f"{path} is damaged ; delete it") from error
    if not 0 < port < 1 << 16:
        raise HomeError(f"{path} is damaged: there is no port {port} ; delete it")
    return port
