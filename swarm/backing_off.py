"""How long to wait before something that failed is tried again."""


def pause_after(failures: int, first: float, longest: float) -> float:
    """Seconds after so many failures in a row: `first`, then twice as long with each, `longest` at most; 0: none yet.

    However many there are: a node may be left on for months beside something that is gone.
    """
    return min(longest, first * 2.0 ** min(failures - 1, 60)) if failures > 0 else 0.0
