"""Which of a node's variables the processes that it starts get."""

import pytest

from swarm.child import SECRETS, inherited

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
