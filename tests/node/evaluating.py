"""An environment that evaluates answers, as if `pip install` had brought it."""

from pathlib import Path

from protocol.rollout import TaskRef

DEADLINE = 0.5

EVALUATING = """
from node.interfaces import Message, Score, Task

def attempt(call, *values):
    try:
        return call(*values)
    except OSError:
        return None

class Evaluating:
    "What no environment may be: it evaluates the answer. Here it stands for the scorer bug that nobody knew of."
    name, version = "evaluating", "1"

    def __init__(self, settings): ...

    def task(self, seed, index):
        if index == 13:
            raise ValueError("no task 13")
        return Task((Message("user", f"{seed}/{index}"),), 8)

    def score(self, seed, index, answer):
        known = {"__builtins__": __builtins__, "attempt": attempt}
        return Score(float(eval(answer, known) == 42), True)

    def gold(self, seed, index):
        if index == 13:
            raise ValueError("no task 13")
        return "6 * 7" if index else None

    def self_check(self):
        return []
"""
REF = TaskRef("evaluating", "1", 1, 1)


def install(site: Path, module: str, source: str, entry_point: str) -> None:
    """What `pip install` leaves behind for a one-file distribution."""
    info = site / f"{module}-1.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[shoal.environments]\n{entry_point}\n")
