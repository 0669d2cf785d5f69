from typing import Any

import pytest

from protocol.rules import Reason
from swarm.experience import ExperienceStore
from swarm.records import PeerRecord
from swarm.reputation import BAN_AT, DOUBT, HALF_LIFE, PENALTIES, Reputation, faded, weight, weight_at

NOW = 1_800_000_000.0


def test_a_newcomer_starts_low_and_earns_its_weight(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    assert reputation.weight("new") == 1 / DOUBT
    for _ in range(10):
        reputation.record("good", "admitted")
    assert reputation.weight("good") == pytest.approx(11 / 14)
    assert reputation.weight("new") == 1 / DOUBT, "being asked about changes nothing"


def test_what_honest_nodes_do_too_costs_nothing(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    for reason in (
        Reason.stale,
        Reason.from_future,
        Reason.uninformative,
        Reason.unknown_environment,
        Reason.equivocation,
        "announced",
    ):
        for _ in range(50):
            assert not reputation.record("peer", reason)
    assert reputation.weight("peer") == 1 / DOUBT


@pytest.mark.parametrize("reason", [reason for reason, cost in PENALTIES.items() if cost == 5])
def test_four_grave_offences_ban_a_newcomer(store: ExperienceStore, clock: Any, reason: Reason) -> None:
    reputation = Reputation(store, clock)
    assert [reputation.record("bad", reason) for _ in range(5)] == [False, False, False, True, False]
    assert reputation.is_banned("bad")
    assert reputation.weight("bad") == 0
    assert reputation.banned() == ["bad"]
    assert not reputation.is_banned("other")


def test_much_good_work_outweighs_a_few_offences(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    for _ in range(30):
        reputation.record("peer", "admitted")
    for _ in range(5):
        assert not reputation.record("peer", Reason.reward_mismatch)
    assert not reputation.is_banned("peer")
    assert reputation.weight("peer") == pytest.approx(31 / (30 + 25 + 4))


def test_much_work_does_not_outweigh_groups_that_were_lies(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    for _ in range(500):  # a lie about log-probs is found out after it was admitted, and has earned for itself
        reputation.record("peer", "admitted")
    assert [reputation.record("peer", Reason.logprob_mismatch) for _ in range(4)] == [False, False, False, True]


def test_everything_fades_and_so_does_a_ban(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    for _ in range(8):
        reputation.record("good", "admitted")
    for _ in range(4):
        reputation.record("bad", Reason.malformed)
    clock.now += HALF_LIFE
    assert reputation.weight("good") == pytest.approx(5 / 8)
    assert reputation.of("bad").penalty == pytest.approx(10)
    assert reputation.is_banned("bad"), "below the threshold by now, but not below half of it"
    clock.now += HALF_LIFE
    assert not reputation.is_banned("bad")
    assert reputation.weight("bad") == pytest.approx(1 / 9)


def test_a_clock_that_goes_back_changes_nothing(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    reputation.record("good", "admitted")
    clock.now -= 10 * HALF_LIFE
    assert reputation.of("good").accepted == 1


@pytest.mark.parametrize("penalty", [0.0, 3.0, BAN_AT, 4 * BAN_AT])
@pytest.mark.parametrize("banned", [False, True])
@pytest.mark.parametrize("later", [-5.0, 0.0, 0.3 * HALF_LIFE, HALF_LIFE, 9 * HALF_LIFE])
def test_the_weight_of_numbers_is_that_of_their_record(penalty: float, banned: bool, later: float) -> None:
    record = PeerRecord("p", 2.5, penalty, NOW, banned, "", NOW, NOW)
    assert weight_at(NOW + later, 2.5, penalty, NOW, banned) == pytest.approx(weight(faded(record, NOW + later)))


def test_reputation_survives_a_restart(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    reputation.record("good", "announced", "tiny model")
    reputation.record("good", "admitted")
    for _ in range(4):
        reputation.record("bad", Reason.hash_mismatch)
    again = Reputation(store, clock)
    assert again.is_banned("bad")
    assert again.of("good") == reputation.of("good")
    assert again.of("good").model == "tiny model"
    assert store.peers.verdicts(["good", "bad"]) == {
        "good": {"announced": 1, "admitted": 1},
        "bad": {"hash_mismatch": 4},
    }


def test_last_seen_is_when_it_was_seen(store: ExperienceStore, clock: Any) -> None:
    reputation = Reputation(store, clock)
    reputation.record("peer", "announced")
    clock.now += 50
    assert reputation.of("peer").last_seen == NOW
    reputation.seen("peer")
    assert (reputation.of("peer").first_seen, reputation.of("peer").last_seen) == (NOW, NOW + 50)


def test_who_only_came_to_ask_is_not_remembered(store: ExperienceStore, clock: Any) -> None:
    store.peers.save(PeerRecord("of an older shoal", 0.0, 0.0, NOW, False, "", NOW, NOW))
    Reputation(store, clock).seen("asks for public swarms")
    store.tidy()
    assert store.peers.all() == []


def test_memory_and_rows_are_bounded(store: ExperienceStore, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.reputation.MAX_PEERS", 3)
    reputation = Reputation(store, clock)
    for n in range(10):
        reputation.record(f"sybil{n}", "announced")
    assert len(reputation._records) == 3
    assert {record.peer for record in store.peers.all()} == set(reputation._records), "without waiting for tidy()"
    assert len(store.peers.verdicts([f"sybil{n}" for n in range(10)])) == 3


def test_a_flood_of_identities_pushes_out_neither_the_proven_nor_the_banned(
    store: ExperienceStore, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.reputation.MAX_PEERS", 5)
    monkeypatch.setattr("swarm.peer_records.MAX_PEERS", 5)
    reputation = Reputation(store, clock)
    for _ in range(10):
        reputation.record("good", "admitted")
        reputation.record("bad", Reason.malformed)
    for n in range(50):
        clock.now += 1
        reputation.record(f"sybil{n}", "announced")
    store.tidy()
    for kept in (reputation, Reputation(store, clock)):
        assert kept.is_banned("bad")
        assert kept.weight("good") == pytest.approx(11 / 14, rel=1e-3)
        assert len(kept._records) == 5
    for n in range(50):
        for _ in range(4):
            reputation.record(f"banned sybil{n}", Reason.malformed)
    store.tidy()
    for kept in (reputation, Reputation(store, clock)):
        assert kept.weight("good") == pytest.approx(11 / 14, rel=1e-2), "bans crowd out bans only"


def test_memory_and_database_forget_the_same_ones(
    store: ExperienceStore, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer that is still here stays, though others came later and went."""
    monkeypatch.setattr("swarm.reputation.MAX_PEERS", 5)
    monkeypatch.setattr("swarm.peer_records.MAX_PEERS", 5)
    reputation = Reputation(store, clock)
    reputation.record("newcomer", "announced")
    for n in range(20):
        clock.now += 1
        reputation.seen("newcomer")
        clock.now += 1
        reputation.record(f"sybil{n}", "announced")
    kept = {"newcomer", *(f"sybil{n}" for n in range(16, 20))}
    assert set(reputation._records) == kept
    store.tidy()
    assert {record.peer for record in store.peers.all()} == kept
    assert list(Reputation(store, clock)._records) == list(reputation._records)
