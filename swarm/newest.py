"""Dicts that hold their newest entries only: what peers make up without end is remembered up to a bound."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(kept: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Put an entry last, and drop the first when there are more than `most`."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
