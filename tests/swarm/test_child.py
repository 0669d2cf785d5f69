"""What of a node's variables the processes it starts get, where they keep what may go with them, and their logs."""

import tempfile
from pathlib import Path

import pytest

from swarm.child import KEPT_BYTES, LOG_BYTES, SECRETS, cut_log, inherited, open_log, scratch_directory

KEPT = (
    "HF_TOKEN", "hf_token", "GITHUBTOKEN", "NPM_TOKEN_2", "npm_config__authToken", "TOKEN_KEY", "API_KEY", "KEY",
    "WANDB_APIKEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "SSH_KEY_2", "CLIENTSECRET", "SECRET", "APP_SECRETS",
    "PGPASSWORD", "DB_PASSWORD", "MYSQL_PASS", "SMTP_PASSWD", "SHOAL_PASSPHRASE", "GOOGLE_APPLICATION_CREDENTIALS",
    "AWS_CREDENTIAL_FILE",
)  # fmt: skip
PASSED_ON = (
    "TOKENIZERS_PARALLELISM", "VLLM_MOE_DP_CHUNK_TOKENS", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "PYTHONPATH",
    "VLLM_SOME_TOKEN_THRESHOLD", "KEYBOARD", "MONKEY", "XKB_KEYMAP", "COMPASS", "BYPASS_CACHE", "PASSES",
)  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_secrets_stay_with_the_node(name: str) -> None:
    assert SECRETS.search(name)
    assert inherited({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_only_sounds_like_a_secret_is_passed_on(name: str) -> None:
    assert inherited({name: "x"}) == {name: "x"}


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = scratch_directory(tmp_path / "home" / "vllm.log")
    (left / "socket").write_text("")
    other = scratch_directory(tmp_path / "home" / "trainer.log")
    assert scratch_directory(tmp_path / "home" / "vllm.log") == left != other
    assert not list(left.iterdir())
    assert left.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = scratch_directory(tmp_path / "log")
    elsewhere = tmp_path / "of another"
    elsewhere.mkdir()
    taken.rmdir()
    taken.symlink_to(elsewhere)  # as one that may not be removed: it is not followed
    (elsewhere / "theirs").write_text("")
    assert scratch_directory(tmp_path / "log") not in (taken, elsewhere)
    assert (elsewhere / "theirs").exists()


def test_processes_that_share_a_log_do_not_write_over_each_other(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "trainer.log"
    with open_log(path) as first, open_log(path) as second:
        for log, text in ((first, b"1 loads\n"), (second, b"2 loads\n"), (first, b"1 fails\n")):
            log.write(text)
            log.flush()
    assert path.read_bytes() == b"1 loads\n2 loads\n1 fails\n"


def test_a_long_log_is_cut_to_its_end_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    with open_log(path) as log:
        log.write(b"a line\n" * (LOG_BYTES // 7))
        log.flush()
        before = path.stat().st_size
        cut_log(path)
        assert path.stat().st_size == before  # not over the bound
        log.write(b"the last\n")
        log.flush()
        cut_log(path)
        log.write(b"goes on\n")
    lines = path.read_bytes().splitlines()
    assert lines[-2:] == [b"the last", b"goes on"]
    assert set(lines[:-2]) == {b"a line"}
    assert KEPT_BYTES - 10 < path.stat().st_size < KEPT_BYTES + 10
