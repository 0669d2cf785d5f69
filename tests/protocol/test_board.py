"""Scores and credit: what counts, what is cut, and that nobody's word about itself counts."""

import math

import msgspec
import pytest

from protocol.board import (
    MAX_GAIN,
    MAX_MEMBERS,
    Board,
    Member,
    MemberList,
    Report,
    Standing,
    fitted,
    list_bytes,
    most_members,
    next_board,
    pass_rates,
    read_list,
)
from protocol.identity import Identity
from protocol.messages import MAX_LIST_BYTES, Trained
from protocol.rejection import Reason, Rejected

SWARM = bytes(32)
PEERS = ("anna", "bert", "carl")


def board(
    before: Board | None = None, heard: dict[str, int] | None = None, **reports: tuple[float, dict[str, int]]
) -> Board:
    """After reports of (score in the one environment, groups trained on by producer)."""
    found = {
        peer: Report((score,), tuple(Trained(producer, groups) for producer, groups in trained.items()))
        for peer, (score, trained) in reports.items()
    }
    heard = {"anna": 100, "bert": 100, "carl": 100} if heard is None else heard
    return next_board(SWARM, 1, PEERS, before.standings if before else (), found, heard)


def credits(found: Board) -> dict[str, float]:
    return {one.peer: round(one.credit, 6) for one in found.standings}


def many(count: int) -> list[str]:
    """Different peer ids by form."""
    digits = "123456789ABCDEFG"
    return ["12D3KooW" + "".join(digits[n >> shift & 15] for shift in (8, 4, 0)) + "x" * 41 for n in range(count)]


def test_the_first_score_credits_nobody() -> None:
    found = board(anna=(0.5, {"bert": 4}), bert=(0.25, {}))
    assert [(one.peer, one.mean, one.best) for one in found.standings] == [
        ("anna", 0.5, 0.5), ("bert", 0.25, 0.25), ("carl", None, None),
    ]  # fmt: skip
    assert set(credits(found).values()) == {0.0}


def test_a_gain_goes_to_whom_it_was_learned_from_in_proportion_and_capped() -> None:
    start = board(anna=(0.2, {}), bert=(0.2, {}))
    assert credits(board(start, anna=(0.4, {"bert": 3, "carl": 3}))) == {"anna": 0, "bert": 0.1, "carl": 0.1}
    # at most half of a gain to one producer, whatever the counts
    assert credits(board(start, anna=(0.4, {"bert": 9, "carl": 1}))) == {"anna": 0, "bert": 0.1, "carl": 0.02}
    # and of a gain at most MAX_GAIN
    assert credits(board(start, anna=(1.0, {"bert": 1, "carl": 1}))) == {
        "anna": 0, "bert": MAX_GAIN / 2, "carl": MAX_GAIN / 2,
    }  # fmt: skip


def test_nobody_credits_itself_strangers_or_more_than_was_heard() -> None:
    start = board(anna=(0.2, {}))
    assert credits(board(start, anna=(0.4, {"anna": 5}))) == {"anna": 0, "bert": 0, "carl": 0}
    assert credits(board(start, anna=(0.4, {"eve": 5}))) == {"anna": 0, "bert": 0, "carl": 0}
    assert credits(board(start, {"carl": 4}, anna=(0.4, {"bert": 1000, "carl": 4}))) == {
        "anna": 0, "bert": 0, "carl": 0.1,
    }  # fmt: skip


def test_what_one_member_can_give_away_is_bounded_for_life() -> None:
    """Sinking and rising again gains nothing: a gain is above the best so far."""
    found = board(anna=(0.0, {}))
    for score in (1.0, 0.0) * 20:
        found = board(found, anna=(score, {"bert": 1, "carl": 1}))
    assert sum(credits(found).values()) == MAX_GAIN
    slowly = board(anna=(0.0, {}))
    for number in range(1, 101):
        slowly = board(slowly, anna=(number / 100, {"bert": 1, "carl": 1}))
    assert sum(credits(slowly).values()) == pytest.approx(1.0)


def test_an_environment_that_was_not_answered_counts_nothing_and_is_no_score() -> None:
    found = next_board(SWARM, 1, PEERS, (), {"anna": Report((1.0, None), ()), "bert": Report((0.5, 0.75), ())}, {})
    assert [(one.peer, one.mean) for one in found.standings] == [("bert", 0.625), ("anna", 0.5), ("carl", None)]
    assert pass_rates(found, ("a", "b", "c")) == {"a": 0.75, "b": 0.75, "c": None}


def test_one_member_does_not_steer_what_the_mix_is_measured_by() -> None:
    honest = {peer: Report((0.5, 0.1), ()) for peer in ("anna", "bert")}
    found = next_board(SWARM, 1, PEERS, (), {**honest, "carl": Report((0.0, 1.0), ())}, {})
    assert pass_rates(found, ("a", "b")) == {"a": 0.5, "b": 0.1}


def test_who_left_is_off_the_board_and_absent_ones_keep_their_best() -> None:
    start = board(anna=(0.5, {}), bert=(0.4, {}))
    later = next_board(SWARM, 2, ("bert",), start.standings, {}, {})
    assert later.standings == (Standing("bert", (), None, 0.4, 0.0),)


def test_the_largest_board_fits() -> None:
    full = Board(SWARM, 1, tuple(Standing(peer, (0.123,) * 256, 0.5, 0.5, 0.1) for peer in many(MAX_MEMBERS)))
    found = fitted(full)
    raw = list_bytes(found)[1]
    assert read_list(raw, Board, SWARM) == found
    assert [one.mean for one in found.standings] == [0.5] * MAX_MEMBERS
    assert [len(one.scores) for one in (found.standings[0], found.standings[-1])] == [256, 0]
    small = Board(SWARM, 1, full.standings[:10])
    assert fitted(small) is small


def test_lists_are_read_strictly() -> None:
    anna, bert, eve = (Identity.from_seed(bytes([number]) * 32).peer_id for number in range(3))
    members = MemberList(SWARM, (Member(anna, "member"), Member(bert, "observer")), (eve,))
    digest, raw = list_bytes(members)
    assert len(digest) == 32
    assert read_list(raw, MemberList, SWARM) == members
    for bad, reason in (
        (raw + b"\x00", Reason.malformed),
        (msgspec.msgpack.encode([SWARM, [[anna, "king"]], []]), Reason.malformed),
        (msgspec.msgpack.encode([SWARM, [["anna", "member"]], []]), Reason.malformed),
        (msgspec.msgpack.encode([SWARM, [], ["../" * 20]]), Reason.malformed),
        (bytes(MAX_LIST_BYTES + 1), Reason.too_large),
        (list_bytes(MemberList(b"x" * 32, ()))[1], Reason.wrong_swarm),
        (b"\x93" * 5000, Reason.malformed),
        (list_bytes(MemberList(SWARM, (Member(anna, "member"), Member(anna, "observer"))))[1], Reason.malformed),
        (list_bytes(MemberList(SWARM, (), (eve, eve)))[1], Reason.malformed),
        (list_bytes(MemberList(SWARM, members.members[::-1]))[1], Reason.malformed),
    ):
        with pytest.raises(Rejected) as refused:
            read_list(bad, MemberList, SWARM)
        assert refused.value.reason is reason


def test_a_board_that_would_spoil_what_follows_it_is_refused() -> None:
    anna = Identity.from_seed(bytes(32)).peer_id
    good = Standing(anna, (0.5, None), 0.25, 0.5, 0.0)
    assert read_list(list_bytes(Board(SWARM, 1, (good,)))[1], Board, SWARM) == Board(SWARM, 1, (good,))
    for bad in (
        (good, good),
        (msgspec.structs.replace(good, scores=(math.nan, None)),),
        (msgspec.structs.replace(good, mean=math.inf),),
        (msgspec.structs.replace(good, best=math.nan),),
        (msgspec.structs.replace(good, credit=-math.inf),),
    ):
        with pytest.raises(Rejected) as refused:
            read_list(list_bytes(Board(SWARM, 1, bad))[1], Board, SWARM)
        assert refused.value.reason is Reason.malformed


@pytest.mark.parametrize("environments", [1, 17, 18, 256])
def test_a_board_of_all_members_can_be_read(environments: int) -> None:
    most = most_members(environments)
    thirds = (1 / 3,) * environments
    full = Board(SWARM, 2**62, tuple(Standing(peer, thirds, 1 / 3, 1 / 3, 1 / 3) for peer in many(most)))
    assert read_list(list_bytes(full)[1], Board, SWARM) == full
    assert (most == MAX_MEMBERS) == (environments <= 17)
