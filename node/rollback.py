"""Going on from an earlier checkpoint: what it holds becomes the node's next step, as a checkpoint."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.checkpoint import BEST, FILES, STATE, TRAINER, CheckpointError, CheckpointStore, Entry, damage


def roll_back(checkpoints: CheckpointStore, entry: Entry, step: int, optimizer: str, state: Mapping[str, Any]) -> Path:
    """Have what `entry` holds as the checkpoint of a new `step`, and return where it is. Raises CheckpointError.

    The state of its optimizer comes along; with the best weights there is none, and an empty one of that kind begins.
    """
    if fault := damage(entry.path):
        raise CheckpointError(f"{entry.path} is damaged: {fault} ; take another one (shoal checkpoint list)")

    def write(aside: Path) -> None:
        for file in entry.path.iterdir():
            if file.name not in (FILES, STATE, BEST):
                shutil.copyfile(file, aside / file.name)
        trainer = aside / TRAINER
        counts = json.loads(trainer.read_text()) if trainer.exists() else {"updates": 0, "optimizer": optimizer}
        trainer.write_text(json.dumps({**counts, "step": step}))

    return checkpoints.save(step, write, state)
