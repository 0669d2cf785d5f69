"""Tokens, codes and sessions, without HTTP."""

import pytest

from web.auth import CODE_SECONDS, MAX_CODES, MAX_SESSIONS, SESSION_SECONDS, Auth

TOKEN = "t" * 16


def test_only_the_whole_token_is_the_token(clock):
    auth = Auth(TOKEN, clock)
    assert auth.is_token(TOKEN)
    assert not any(auth.is_token(wrong) for wrong in ("", TOKEN[:-1], TOKEN + "t", "T" * 16, "ü", "\ud800"))


def test_a_short_token_is_refused(clock):
    with pytest.raises(ValueError, match="of 15 characters: at least 16"):
        Auth("t" * 15, clock)


def test_a_code_is_worth_one_session(clock):
    auth = Auth(TOKEN, clock)
    code = auth.new_code()
    cookie = auth.new_session(code)
    assert cookie is not None
    assert auth.is_session(cookie)
    assert cookie != code
    assert auth.new_session(code) is None
    assert not auth.is_session(code)


def test_a_code_ends(clock):
    auth = Auth(TOKEN, clock)
    early, late = auth.new_code(), auth.new_code()
    clock.now += CODE_SECONDS - 0.1
    assert auth.new_session(early) is not None
    clock.now += 0.1
    assert auth.new_session(late) is None


def test_a_session_lives_while_it_is_used(clock):
    auth = Auth(TOKEN, clock)
    cookie = auth.new_session(auth.new_code())
    for _ in range(3):
        clock.now += SESSION_SECONDS - 1
        assert auth.is_session(cookie)
    clock.now += SESSION_SECONDS
    assert not auth.is_session(cookie)


def test_signing_out_ends_only_that_session(clock):
    auth = Auth(TOKEN, clock)
    one, other = auth.new_session(auth.new_code()), auth.new_session(auth.new_code())
    auth.end_session(one)
    assert not auth.is_session(one)
    assert auth.is_session(other)


def test_codes_and_sessions_are_bounded(clock):
    auth = Auth(TOKEN, clock)
    codes = [auth.new_code() for _ in range(MAX_CODES + 1)]
    assert auth.new_session(codes[0]) is None
    assert auth.new_session(codes[1]) is not None
    cookies = [auth.new_session(auth.new_code()) for _ in range(MAX_SESSIONS)]
    # the session used longest ago makes room, not the oldest one
    assert auth.is_session(cookies[0])
    auth.new_session(auth.new_code())
    assert auth.is_session(cookies[0])
    assert not auth.is_session(cookies[1])
