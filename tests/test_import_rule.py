"""The house has four rooms; imports run one way (docs/architecture.md)."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"protocol", "swarm", "web", "node"}
MAY_IMPORT = {"protocol": set(), "swarm": {"protocol"}, "web": {"protocol"}, "node": {"protocol", "swarm", "web"}}
PROTOCOL_LIBRARIES = set(sys.stdlib_module_names) - {"asyncio", "socket", "time"} | {"msgspec", "cryptography"}
TRIO_FILES = {"swarm/libp2p_host.py", "swarm/libp2p_connections.py", "swarm/bridge.py"}
AVERAGER = "swarm/averaging_worker.py"
"""A process of its own: hivemind and libp2p cannot be imported into one, and it averages what torch holds."""


def imported(path: Path, *, at_start: bool = False) -> set[str]:
    """First parts of the names that a file imports; `at_start`: as it is imported itself, not in a function later."""
    names: set[str] = set()
    module = ast.parse(path.read_text())
    for entry in module.body if at_start else ast.walk(module):
        if isinstance(entry, ast.Import):
            names |= {alias.name.split(".")[0] for alias in entry.names}
        elif isinstance(entry, ast.ImportFrom):
            assert entry.level == 0, f"{path}: relative import; import absolutely"
            names.add((entry.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")), ids=str)
def test_imports_run_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT)
    room, names = relative.parts[0], imported(path)
    assert not (names & ROOMS) - MAY_IMPORT[room] - {room}
    if room == "protocol":
        assert not names - PROTOCOL_LIBRARIES - {room}
    if room in {"swarm", "web"}:
        assert "torch" not in (imported(path, at_start=True) if str(relative) == AVERAGER else names)
    assert "hivemind" not in names or str(relative) == AVERAGER
    assert "trio" not in names or str(relative) in TRIO_FILES


def test_docker_is_no_package() -> None:
    assert not (ROOT / "docker" / "__init__.py").exists()
