"""What the coordinator's page and API say, held to openapi.json."""

import json
import time
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest

from node.coordinator.view import CoordinatorView
from node.home import Home
from node.settings import load
from node.view_coordinator import coordination
from protocol.board import Board, Standing
from protocol.manifest import Coordination, embedded_manifest
from protocol.rounds import Facts, Pace, State, first
from web.answers import encode
from web.probes import HELP, readiness
from web.schemas import SCHEMAS
from web.view import NotFound, NothingToHold, SettingOverridden


def is_as_described(name: str, answer: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    jsonschema_rs.validator_for(schema).validate(json.loads(encode(answer)))
    return True


def test_the_view_of_a_coordinator_is_a_nodes(home: Home) -> None:
    me = home.identity().peer_id
    manifest = embedded_manifest("lab", time.time(), Coordination((me,), listed_only=True))
    home.found(manifest, b"k" * 32)
    pace = Pace(1, 1, 1, 1.0, 0, 2, 1)
    record = first(manifest, Facts(b"m" * 32, 0, 0, 0, b"", (1000, 500, 250, 250)), pace)
    fault = SimpleNamespace(coordinator=me, reason="equivocation", detail="signed two records")
    chain: Any = SimpleNamespace(
        round=record,
        board=Board(
            manifest.digest,
            1,
            (Standing(me, (0.5, None, 1.0, 0.0), 0.375, 0.5, 0.25), Standing("x", (), None, None, 0.0)),
        ),
        manifest=manifest,
        members=None,
        leader=me,
        faults={me: fault},
        heard=lambda: {me: 1.0},
    )
    shown = coordination(chain, leading=True)
    assert is_as_described("Coordination", shown)
    assert shown["round"]["mix"] == {
        "letter_counting": 0.5, "chain_sum": 0.25, "spell_backward": 0.125, "word_sorting": 0.125,
    }  # fmt: skip
    assert (shown["round"]["closes"], shown["round"]["state"]) == (None, State.waiting.name)
    assert shown["faults"] == [{"coordinator": me, "reason": "equivocation", "detail": "signed two records"}]

    history = SimpleNamespace(series=lambda *asked: {}, events=lambda after, limit: [], event_range=lambda: (1, 0))
    progress = SimpleNamespace(told=lambda: ("IDLE", "round 1 is waiting, 0 members present", ""))
    lead = SimpleNamespace(
        chain=chain, membership=SimpleNamespace(members=lambda: [1, 2]), leading=True, heard=lambda: {me: 2.0}
    )
    stats = SimpleNamespace(bytes_in=1, bytes_out=2)
    process: Any = SimpleNamespace(
        home=home, settings=load(home), config=load(home).config, identity=home.identity(), manifest=manifest,
        coordinator=lead, clock=time.time, started_at=time.time() - 5, progress=progress, history=history,
        transport=SimpleNamespace(peers=lambda: ("b", "a"), stats=lambda: stats),
        presence=SimpleNamespace(
            invite_uri=lambda: "shoal:x", invite_caution=lambda: "", stopped=SimpleNamespace(set=lambda: None)
        ),
    )  # fmt: skip
    view = CoordinatorView(process)
    assert is_as_described("Status", view.status())
    assert set(view.status()) == set(SCHEMAS["Status"]["properties"])
    assert readiness(view.status()) == []
    assert is_as_described("Swarm", view.swarm())
    assert (shown["heard"], view.swarm()["coordinator"]["heard"]) == ({me: 1.0}, {me: 2.0})
    assert view.swarm()["members"] == 2
    assert "others need an invite of the coordinator" in view.swarm()["invite_caution"]
    assert is_as_described("Peers", view.peers(0, 10, sort="peer_id", descending=False, search=""))
    assert [one["peer_id"] for one in view.peers(0, 1, sort="peer_id", descending=False, search="")["peers"]] == ["a"]
    assert is_as_described("PeerGraph", view.peer_graph())
    assert is_as_described("Config", view.config())
    assert {name.partition("{")[0] for name in view.metrics()} <= set(HELP)
    assert view.metrics()["shoal_round"] == 1
    with pytest.raises(SettingOverridden, match="next start"):
        view.change({"coordinator.groups": 1})
    for asked in (lambda: view.pause("x"), view.resume):
        with pytest.raises(NothingToHold, match="shoal down"):
            asked()
    process.manifest = None
    assert view.swarm() == {}


async def test_it_keeps_no_groups() -> None:
    view = CoordinatorView(SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="keeps no groups"):
        await view.group("abcd")
    assert view.groups(None, 5, {}) == view.steps(0, 5) == view.evaluations(0, 5) == []
