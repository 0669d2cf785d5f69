"""What `shoal report` tells of a run, read from the homes of its nodes. Nothing there is written to."""

import json
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from node.aside import making_aside
from node.config import Config
from node.history import KEPT_STEPS, History
from node.home import Home, HomeError
from node.settings import FIELDS, Settings, public_values
from swarm.database import Database, copy_tables
from swarm.experience import LARGE_TABLES
from swarm.peer_records import PeerRecords
from swarm.records import PeerRecord

MAX_PEERS, MAX_EVENTS = 500, 200
_NODE = re.compile(r"(large|node)-(\d{1,6})")
MOST_STEPS = 10 * KEPT_STEPS


class ReportError(Exception):
    """There is no run to report on, or no file to be written; the message names the path and the fix."""


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One node's run. All text may be from peers: whoever shows it escapes it."""

    name: str
    peer_id: str
    swarm: str
    steps: Sequence[Mapping[str, Any]]
    """Step records, oldest first (node/summary.py, and the update's numbers)."""
    evaluations: Sequence[Mapping[str, Any]]
    """Held-out: `step`, `mean`, `scores` by environment."""
    events: Sequence[Mapping[str, Any]]
    """The newest ones that are warnings or errors."""
    trained_foreign: int
    peers: Sequence[PeerRecord]
    verdicts: Mapping[str, Mapping[str, int]]
    """Of those peers, by peer."""
    changed: Mapping[str, tuple[Any, Any]]
    """Settings of config.toml that are not the default: (value, default)."""


def read_run(directory: Path) -> list[NodeRun]:
    """The nodes of a run: of one home, or of the large-N and node-N in it. Raises ReportError, StoreError."""
    homes = [Home(path) for path in (directory, *node_directories(directory)) if (path / "node.db").is_file()]
    if not homes:
        raise ReportError(
            f"{directory} has no node with a history ; give a home (shoal paths) or the directory of a `shoal local`"
        )
    return [read_node(home) for home in homes]


def node_directories(directory: Path) -> list[Path]:
    """large-1, ..., node-1, node-2, ... in their order."""
    found = [(match, path) for path in directory.glob("*-*") if (match := _NODE.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda one: (one[0][1], int(one[0][2])))]


def read_node(home: Home) -> NodeRun:
    """Of a copy of what is shown: a history of an older version is migrated there, and not in the home."""
    with making_aside(Path(tempfile.gettempdir()), "shoal-report") as aside:
        copied = aside / "node.db"
        copy_tables(home.database, copied, leave=LARGE_TABLES)
        history = History(copied, clock=lambda: 0.0)
        database = Database(copied)
        try:
            records = PeerRecords(database)
            known = database.one("SELECT 1 FROM sqlite_master WHERE name = 'peers'") is not None
            met = sorted(records.all(), key=lambda peer: peer.last_seen, reverse=True) if known else []
            peers = met[:MAX_PEERS]
            return NodeRun(
                name=home.path.name,
                peer_id=peer_id_of(home),
                swarm=swarm_of(home),
                steps=history.steps(0, MOST_STEPS),
                evaluations=history.evaluations(-1, MOST_STEPS),
                events=[event for event in history.events(None, 2000) if event["level"] != "info"][-MAX_EVENTS:],
                trained_foreign=history.trained_foreign(),
                peers=peers,
                verdicts=records.verdicts([peer.peer for peer in peers]),
                changed=changed_settings(home),
            )
        finally:
            database.close()
            history.close()


def peer_id_of(home: Home) -> str:
    """Of the key file, which says it in the clear."""
    try:
        return str(json.loads(home.identity_path.read_bytes())["peer_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def swarm_of(home: Home) -> str:
    try:
        return home.swarm().name
    except HomeError:
        return ""


def changed_settings(home: Home) -> dict[str, tuple[Any, Any]]:
    """Of config.toml alone: the environment of this process is not that of the run. Secrets are masked."""
    try:
        config = Config.model_validate(tomllib.loads(home.config_path.read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, ValidationError) as error:
        return {"config.toml": (f"not readable: {error}", None)}
    table = public_values(Settings(config, dict.fromkeys(FIELDS, "config.toml")))
    return {
        key: (entry["value"], entry["default"]) for key, entry in table.items() if entry["value"] != entry["default"]
    }
