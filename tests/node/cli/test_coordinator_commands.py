"""`shoal coordinator` without a process: what it writes into a home, what it refuses, what it shows."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from node.home import Home
from protocol.board import Board, MemberList, Standing, list_bytes
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.rounds import Facts, Pace, Round, State, advance, first, seal_round, seed_for
from swarm.coordination.chain import Chain
from swarm.coordination.membership import Membership, NotAdmitted
from swarm.coordination.round_log import RoundLog

OTHER = Identity.from_seed(b"o" * 32).peer_id
PACE = Pace(600, 60, 1, 1.0, groups=0, tasks=2, samples=1)


@pytest.fixture
def lead(tmp_path: Path, run: Callable[..., Result]) -> Home:
    done = run("--home", tmp_path / "lead", "coordinator", "init", "lab", "--standby", OTHER, "--json")
    assert done.exit_code == 0, done.output
    home = Home(tmp_path / "lead")
    home.keep_listen_port(7946)
    assert json.loads(done.output)["coordinators"] == [home.identity().peer_id, OTHER]
    return home


def ask(run: Callable[..., Result], home: Home, *words: str) -> Any:
    done = run("--home", home.path, "coordinator", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_init_makes_a_private_swarm_by_invite_only(lead: Home) -> None:
    manifest, membership = lead.manifest(), lead.swarm()
    assert manifest is not None
    assert (manifest.name, manifest.listed_only, manifest.version) == ("lab", True, 2)
    assert membership.psk is not None
    assert lead.invite_path.stat().st_mode & 0o777 == 0o600


def test_a_public_swarm_has_no_key(tmp_path: Path, run: Callable[..., Result]) -> None:
    assert run("--home", tmp_path / "open", "coordinator", "init", "lab", "--public").exit_code == 0
    home = Home(tmp_path / "open")
    manifest = home.manifest()
    assert manifest is not None
    assert not manifest.listed_only
    assert home.swarm().psk is None


def test_who_is_allowed_is_a_member_from_the_beginning(tmp_path: Path, run: Callable[..., Result]) -> None:
    done = run("--home", tmp_path / "lead", "coordinator", "init", "lab", "--allow", OTHER, "--json")
    assert done.exit_code == 0, done.output
    (listed,) = ask(run, Home(tmp_path / "lead"), "members")["members"]
    assert (listed["peer"], listed["role"]) == (OTHER, "member")


def test_a_standby_that_is_no_peer_id_is_refused(tmp_path: Path, run: Callable[..., Result]) -> None:
    done = run("--home", tmp_path / "x", "coordinator", "init", "lab", "--standby", "nobody")
    assert done.exit_code == 2
    assert "--standby" in done.output


def test_an_invite_carries_the_key_and_a_token_that_lets_so_many_in(lead: Home, run: Callable[..., Result]) -> None:
    told = ask(run, lead, "invite", "--uses", "2", "--expires", "1h", "--role", "observer")
    assert told["expires"] == pytest.approx(time.time() + 3600, abs=60)
    invite, mine = Invite.parse(told["invite"]), lead.swarm()
    assert (invite.manifest_digest, invite.psk, mine.token) == (mine.manifest_digest, mine.psk, None)
    assert invite.token is not None
    assert all(address.endswith(f"/tcp/7946/p2p/{lead.identity().peer_id}") for address in invite.bootstrap)
    membership = Membership(lead.database, mine.manifest_digest, time.time, listed_only=True)
    assert membership.enter(OTHER, invite.token) == "observer"
    assert ask(run, lead, "members")["members"][0]["role"] == "observer"
    assert ask(run, lead, "kick", OTHER, "--reason", "why not") == {
        "peer": OTHER, "kicked": True, "uses_taken": 1,
    }  # fmt: skip
    found = ask(run, lead, "members")
    assert found["members"] == []
    assert [(one["peer"], one["reason"]) for one in found["kicked"]] == [(OTHER, "why not")]
    assert "kicked" in run("--home", lead.path, "coordinator", "members").output
    assert ask(run, lead, "kick", OTHER, "--undo")["kicked"] is False
    with pytest.raises(NotAdmitted, match="used up"):
        membership.enter(OTHER, invite.token)
    token = membership.invite(uses=3, expires=time.time() + 60, role="member")
    membership.enter(OTHER, token)
    assert "had 2 uses left and has none now" in run("--home", lead.path, "coordinator", "kick", OTHER).output


def test_what_cannot_be_is_refused_with_a_word(lead: Home, run: Callable[..., Result], home: Home) -> None:
    for words, code, said in (
        (("invite", "--expires", "soon"), 2, "no time like 30m"),
        (("invite", "--uses", "0"), 2, "uses"),
        (("kick", OTHER), 2, "is no member"),
        (("kick", "\udcff"), 2, "is no Ed25519 peer id"),
        (("kick", OTHER, "--reason", "\udcff"), 2, "is no member"),
    ):
        done = run("--home", lead.path, "coordinator", *words)
        assert (done.exit_code, said in done.output) == (code, True), done.output
    done = run("--home", lead.path, "swarm", "invite")
    assert done.exit_code == 1
    assert "(coordinator invite)" in done.output
    assert "is in no swarm" in run("--home", home.path, "coordinator", "members").output
    assert run("--home", home.path, "swarm", "create", "plain").exit_code == 0
    assert "has no coordinator" in run("--home", home.path, "coordinator", "board").output


def test_a_coordinator_that_is_down_is_started_as_one(lead: Home, run: Callable[..., Result], home: Home) -> None:
    assert "coordinator up`" in run("--home", lead.path, "status").output
    assert "coordinator up`" not in run("--home", home.path, "status").output
    lead.identity_path.write_bytes(b"{}")
    assert not lead.coordinates()


def kept(lead: Home, until: State) -> Round:
    """Rounds in this home's log, up to a state."""
    manifest, identity = lead.manifest(), lead.identity()
    assert manifest is not None
    chain = Chain(RoundLog(lead.database, manifest.digest), manifest, time.time)
    members, body = list_bytes(MemberList(manifest.digest, ()))
    chain.keep_list(members, body)
    standing = Standing(OTHER, (0.5, None, 1.0, 0.5), 0.5, 0.75, 0.125)
    board, raw = list_bytes(Board(manifest.digest, 1, (standing,)))
    chain.keep_list(board, raw)
    facts = Facts(members, 1, 1, 0, board, (1000, 500, 250, 250))
    record: Round | None = first(manifest, facts, PACE)
    now = time.time() - 1000
    while record is not None:
        assert chain.take(seal_round(identity, record, time.time()))
        if record.state is until:
            return record
        head = chain.head
        assert head is not None
        now += 700
        record = advance(record, head.digest, now, facts, PACE, lambda n: seed_for(identity, manifest.digest, n, 0))
    raise AssertionError


def test_board_and_epoch_show_what_the_home_knows(lead: Home, run: Callable[..., Result]) -> None:
    assert ask(run, lead, "board") is None
    assert ask(run, lead, "epoch")["round"] is None
    record = kept(lead, State.evaluated)
    shown = ask(run, lead, "epoch")
    assert shown["leader"] == lead.identity().peer_id
    assert (shown["round"]["number"], shown["round"]["state"], shown["faults"]) == (1, "evaluated", [])
    assert shown["round"]["mix"]["letter_counting"] == 0.5
    assert record.board
    assert ask(run, lead, "board") == {
        "number": 1,
        "of": 1,
        "standings": [
            {"peer": OTHER, "mean": 0.5, "best": 0.75, "credit": 0.125, "scores": [0.5, None, 1.0, 0.5]},
        ],
    }
    assert OTHER in run("--home", lead.path, "coordinator", "board").output
    assert "letter_counting 50%" in run("--home", lead.path, "coordinator", "epoch").output


def test_who_does_not_lead_lets_nobody_in(lead: Home, run: Callable[..., Result], tmp_path: Path) -> None:
    manifest = lead.manifest()
    assert manifest is not None
    other = Home(tmp_path / "other")
    other.init()
    other.found(manifest)
    done = run("--home", other.path, "coordinator", "invite")
    assert done.exit_code == 1
    assert f"{lead.identity().peer_id} leads this swarm now" in done.output


def test_a_home_that_does_not_coordinate_says_so(lead: Home, run: Callable[..., Result], tmp_path: Path) -> None:
    done = run("--home", tmp_path / "empty", "coordinator", "up")
    assert done.exit_code == 1
    assert "is in no swarm" in done.output
