"""What text of others may hold, wherever people read it."""

import re

# NUL and other C0 controls but tab, newline, carriage return; DEL and C1; and the bidi controls that make a text
# read other than it is (Trojan Source, CVE-2021-42574). Lone surrogates never pass the UTF-8 decoder.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def forbidden_character(text: str) -> str | None:
    """The first control character of `text` that may not be there, as `U+202E`; None: there is none."""
    found = _FORBIDDEN.search(text)
    return f"U+{ord(found[0]):04X}" if found else None
