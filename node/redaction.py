"""Takes secrets out of text: those of this home by their value, those of anybody by their form."""

import base64
import json
import os
import re
from collections.abc import Mapping, Sequence

from node.home import Home
from protocol.invite import Invite, InviteError
from swarm.child import SECRETS

HIDDEN = "(hidden)"
SHORTEST = 4
"""Characters of a value that is looked for: one that is shorter would blacken every second word."""
NAMED = r"\w{0,40}(?:token|secret|pass(?:word|wd|phrase)|_pass|api[_-]?key|[_-]key|credentials?)"
"""What is called so is taken for a secret where a text gives it a value."""
# bounded repetitions: a log may hold megabytes of one letter
FORMS: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"shoal:[A-Za-z0-9_-]{16,}={0,2}", re.IGNORECASE), f"shoal:{HIDDEN}"),
    (re.compile(r"(?i)(\bbearer\s+)[^\s\"',;]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)(\b(?:set-)?cookie\b[\"']?\s*[:=]\s*)[^\n\"]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([?&](?:code|token|key|access_token)=)[^\s&\"']+"), rf"\1{HIDDEN}"),
    (
        re.compile(r"(?i)((?<![\w-])--?[\w-]{0,40}(?:key|token|secret|pass\w{0,9})(?:=|[\"',\s]{1,8}))[^\s\"',]+"),
        rf"\1{HIDDEN}",
    ),
    (re.compile(rf"(?i)(\b{NAMED}\\?[\"']?[ \t]{{0,4}}[:=][ \t]{{0,4}}(\\?[\"']))(?:(?!\2)[^\n])+"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(\b{NAMED}[ \t]{{0,4}}=[ \t]{{0,4}})[^\s\"'\\,;&]+"), rf"\1{HIDDEN}"),
    # of several words, as no password is
    (re.compile(r"(?i)(\b\w{0,40}passphrase[ \t]{0,4}[:=][ \t]{0,4})[^\s\"\\][^\n\"\\]*"), rf"\1{HIDDEN}"),
    # a colon stands before words and counts, too: only what cannot be one is hidden
    (
        re.compile(
            r"(?i)(\b\w{0,40}pass(?:word|wd)[ \t]{0,4}:[ \t]{0,4})(?!(?:none|null|true|false)\b)[^\s\"'\\,;]{4,}"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            rf"(?i)(\b{NAMED}[ \t]{{0,4}}:[ \t]{{0,4}})"
            r"(?=[^\s\"'\\,;]{0,40}\d)(?=[^\s\"'\\,;]{0,40}[a-z])[^\s\"'\\,;]{8,}"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"(?i)(\bauthorization\\?[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\?[\"']?(?:basic|token)[ \t]{1,4})[^\s\"'\\,;]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(\b\w{1,15}://)[^\s/@\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(?:(?:hf|gh[oprsu])_[A-Za-z0-9]{16,}|github_pat_\w{16,})"), HIDDEN),
    (re.compile(r"\bsk-(?=[\w-]{0,80}\d)[\w-]{16,}"), HIDDEN),
)


def values(home: Home, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Every secret of a home and of this process in the forms in which a text may have it, longest first."""
    found = {value for name, value in environment.items() if SECRETS.search(name)}
    found.add(home.passphrase or "")
    found.update(invite_forms(environment.get("SHOAL_JOIN", "")))
    for path in (home.token_path, home.invite_path, home.identity_path):
        try:
            content = path.read_text(errors="replace").strip()
        except OSError:
            continue
        found.add(content)
        if path == home.invite_path:
            found.update(invite_forms(content))
        if path == home.identity_path:
            found.update(key_forms(content))
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)


def invite_forms(link: str) -> set[str]:
    """The key of a private network, if the invite has one."""
    try:
        psk = Invite.parse(link).psk
    except InviteError:
        return set()
    return forms(psk) if psk is not None else set()


def key_forms(content: str) -> set[str]:
    """The key in an identity file, encrypted or not."""
    try:
        key = json.loads(content)["key"]
        return {key, *forms(base64.b64decode(key))}
    except (ValueError, KeyError, TypeError):
        return set()


def forms(secret: bytes) -> set[str]:
    """A byte string as text."""
    encoded = {base64.b64encode(secret).decode(), base64.urlsafe_b64encode(secret).decode()}
    return {secret.hex(), secret.hex().upper(), repr(secret)[2:-1], *encoded, *(text.rstrip("=") for text in encoded)}


def scrub(text: str, secrets: Sequence[str]) -> str:
    """The text without them."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
        text = text.replace(json.dumps(secret)[1:-1], HIDDEN)  # as a JSON string has it
    return by_form(text)


def by_form(text: str) -> str:
    """The text without what looks like a secret, whoever's it is."""
    for form, instead in FORMS:
        text = form.sub(instead, text)
    return text
