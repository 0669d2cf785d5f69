"""Who may talk to this node: a Bearer token for the command line, a one-time code that becomes a cookie for a browser.

The token never reaches the browser: `shoal open` asks for a code with it, and the code is worth one session.
Codes and sessions are kept as hashes in memory; a restart of the daemon signs browsers out.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

CODE_SECONDS = 120.0
SESSION_SECONDS = 7 * 24 * 3600.0
"""A session ends after this long without a request."""
COOKIE_SECONDS = 400 * 24 * 3600.0
"""As long as browsers keep one at most: a session in use goes on, and the node alone says when it has ended."""
MAX_CODES = 8
MAX_SESSIONS = 32
MIN_TOKEN = 16


@dataclass(slots=True)
class Auth:
    """The secrets in use. `clock` in seconds; all methods are for one thread."""

    token: str
    clock: Callable[[], float]
    _codes: dict[bytes, float] = field(default_factory=dict)
    """hash of a code -> when it ends; oldest first."""
    _sessions: dict[bytes, float] = field(default_factory=dict)
    """hash of a cookie -> when it ends; the one used longest ago first."""

    def __post_init__(self) -> None:
        if len(self.token) < MIN_TOKEN:
            raise ValueError(f"API token of {len(self.token)} characters: at least {MIN_TOKEN} are needed")

    def is_token(self, given: str) -> bool:
        """Whether this is the API token; takes the same time wherever they differ."""
        return hmac.compare_digest(digest(given), digest(self.token))

    def new_code(self) -> str:
        """A code for one sign-in within CODE_SECONDS. Where too many are open, the oldest ends."""
        return self._mint(self._codes, MAX_CODES, CODE_SECONDS)

    def new_session(self, code: str) -> str | None:
        """The cookie of a new session for a code, which is spent by this; None for a code that is not good."""
        ends = self._codes.pop(digest(code), None)
        if ends is None or self.clock() >= ends:
            return None
        return self._mint(self._sessions, MAX_SESSIONS, SESSION_SECONDS)

    def is_session(self, cookie: str) -> bool:
        """Whether this cookie is a live session; using it keeps it alive."""
        key, now = digest(cookie), self.clock()
        ends = self._sessions.pop(key, None)
        if ends is None or now >= ends:
            return False
        self._sessions[key] = now + SESSION_SECONDS
        return True

    def end_session(self, cookie: str) -> None:
        self._sessions.pop(digest(cookie), None)

    def _mint(self, kept: MutableMapping[bytes, float], bound: int, seconds: float) -> str:
        now = self.clock()
        for key in [key for key, ends in kept.items() if now >= ends]:
            del kept[key]
        while len(kept) >= bound:
            del kept[next(iter(kept))]
        secret = secrets.token_urlsafe(32)
        kept[digest(secret)] = now + seconds
        return secret


def digest(secret: str) -> bytes:
    """Secrets are looked up by hash, so that how long a look-up takes says nothing about them."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
