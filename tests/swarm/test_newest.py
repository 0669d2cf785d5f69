"""Of a bounded dict the newest stay, and what is put in again is new."""

from swarm.newest import remember


def test_the_entry_not_put_in_for_longest_gives_way() -> None:
    kept: dict[str, int] = {}
    for value, key in enumerate("abacd"):
        remember(kept, key, value, 3)
    assert list(kept.items()) == [("a", 2), ("c", 3), ("d", 4)]
