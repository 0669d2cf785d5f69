"""The house has four rooms; imports run one way (docs/architecture.md)."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"protocol", "swarm", "web", "node"}
MAY_IMPORT = {"protocol": set(), "swarm": {"protocol"}, "web": {"protocol"}, "node": {"protocol", "swarm", "web"}}
PROTOCOL_LIBRARIES = set(sys.stdlib_module_names) - {"asyncio", "socket", "time"} | {"msgspec", "cryptography"}
TRIO_FILES = {"swarm/libp2p_host.py", "swarm/bridge.py"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for entry in ast.walk(ast.parse(path.read_text())):
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
        assert "torch" not in names
    assert "trio" not in names or str(relative) in TRIO_FILES


def test_docker_is_no_package() -> None:
    assert not (ROOT / "docker" / "__init__.py").exists()
