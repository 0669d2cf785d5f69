"""Combinations of train.* settings: what is refused, by name and with what is allowed, and what is only odd."""

from typing import Any

import pytest
from pydantic import ValidationError

from node.config import Config
from node.home import Home
from node.oddities import oddities
from node.settings import ConfigError, load
from protocol.identity import Identity

LEADER = Identity.from_seed(bytes(32)).peer_id


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"advantage": "gea"}, ["train.advantage = 'gea'", "one of grpo, dr_grpo, rloo, opo, gdpo, reinforce_pp"]),
        ({"advantage": "gigpo"}, ["train.advantage = 'gigpo'", "one of grpo, dr_grpo, rloo", "bilevel_gae"]),
        (
            {"loss": "gmpo", "advantage": "gae"},
            ["gmpo", "which gae does not give", "reinforce_pp_baseline", "soft_gate"],
        ),
        (
            {"kl_in": "reward", "kl_coefficient": "0.1"},
            ["kl_in = reward", "grpo does not see", "reinforce_pp, gae, turn_gae, bilevel_gae", "kl_in to loss"],
        ),
        ({"curriculum_low": "0.8", "curriculum_high": "0.2"}, ["curriculum_low = 0.8", "at most 0.2"]),
        ({"correction": "mis-token"}, ["train.correction", "one of none, tis, tis-sequence, icepop, mis"]),
        ({"kl_estimator": "k3_plus"}, ["train.kl_estimator", "one of k1, k2, k3, k3+"]),
        ({"passes": "0"}, ["train.passes = '0'", "at least 1"]),
        ({"lora_rank": "513"}, ["train.lora_rank = '513'", "at most 512"]),
        ({"shards": "2", "lora_rank": "8"}, ["shards = 2 shares out whole weights", "or train.lora_rank to 0"]),
        ({"shards": "2", "optimizer": "adamw8bit"}, ["shards = 2 shares out moments of 32 bits", "optimizer to adamw"]),
        ({"optimizer": "adam8bit"}, ["train.optimizer", "one of adamw, adamw8bit"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_with_what_can(home: Home, settings: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(home, {f"train.{name}": value for name, value in settings.items()})
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert message.count(" ; ") == 1


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"engine.quantization": "fp8", "train.correction": "none"},
            [
                "correction = none does not correct that",
                "flag",
                "set train.correction to tis, or engine.quantization to",
            ],
        ),
        (
            {"rollout.policy": "partial", "train.correction": "none"},
            ["trains on tokens of older versions", "set train.correction to tis, or rollout.policy to synchronous"],
        ),
        (
            {"rollout.policy": "asynchronous", "rollout.max_staleness": "0"},
            ["takes no token of an older one", "set rollout.max_staleness to 2"],
        ),
        (
            {"train.shards": "2", "model.device": "cuda:1"},
            ["shards = 2 uses the first 2 GPUs", "cuda:1 names one", "set model.device to cuda or auto"],
        ),
        ({"engine.transfer": "nccl", "train.lora_rank": "8"}, ["sends whole weights", "set engine.transfer to files"]),
        (
            {"averaging.method": "diloco", "train.lora_rank": "8"},
            ["averages whole weights of one process", "set train.lora_rank to 0, or averaging.method to none"],
        ),
        ({"averaging.method": "diloco", "train.shards": "2"}, ["train.shards is 2", "set train.shards to 1"]),
        ({"averaging.method": "diloco", "rollout.engine": "vllm"}, ["set rollout.engine to transformers"]),
        ({"averaging.method": "diloco", "averaging.timeout": "590"}, ["= 590 and 30 s more", "lower it"]),
        ({"averaging.method": "diloco", "averaging.timeout": "900"}, ["limits.stage_seconds = 600", "lower it"]),
        ({"averaging.method": "diloco", "federation.publish": "true"}, ["set averaging.method to none"]),
        ({"averaging.robust": "median"}, ["plain mean of two values", "set averaging.min_peers to at least 3"]),
        (
            {"averaging.peers": "/ip4/10.0.0.1/tcp/7"},
            ["averaging.peers", "does not look like /ip4/203.0.113.7/tcp/4711/p2p/"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_between_sections_is_refused(home: Home, settings: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(home, settings)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert message.count(" ; ") == 1
    load(home, {"engine.quantization": "fp8"})  # corrected by tis


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_rank": 16, "learning_rate": 3e-4},
        {"advantage": "gae", "loss": "ppo"},
        {"advantage": "gdpo", "loss": "gmpo"},
        {"kl_in": "reward", "kl_coefficient": 0.1, "advantage": "reinforce_pp"},
        {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
        {"foreign_negatives": "truncated", "passes": 2, "loss": "reinforce"},
    ],
)
def test_what_fits_together_is_not_odd(settings: dict[str, object]) -> None:
    assert oddities(Config.model_validate({"train": settings})) == []


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"loss": "gspo", "aggregation": "token-mean"}, "gspo is meant for train.aggregation = seq-mean-token-mean"),
        ({"lora_rank": 16}, "about ten times the rate of whole weights"),
        ({"kl_in": "reward"}, "does nothing while train.kl_coefficient is 0"),
        ({"kl_estimator": "k1", "kl_coefficient": 0.1}, "k1 measures the KL and does not pull"),
        ({"foreign_negatives": "truncated", "loss": "gpg"}, "does nothing: the ratio of foreign tokens is 1"),
        ({"foreign_negatives": "truncated", "passes": 2}, "train.loss = dapo has the ratio"),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_said(train: dict[str, object], words: str) -> None:
    (said,) = oddities(Config.model_validate({"train": train}))
    assert words in said


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"federation": {"publish": True, "follow": LEADER}}, "a follower has no policy of its own"),
        ({"federation": {"publish": True}, "train": {"lora_rank": 4}}, "train.lora_rank trains adapters"),
        ({"federation": {"follow": LEADER}, "train": {"shards": 2}}, "set train.shards to 1"),
        ({"federation": {"follow": LEADER}, "rollout": {"policy": "partial"}}, "to synchronous"),
        ({"federation": {"follow": "somebody"}}, "follow"),
        ({"federation": {"follow": "12D3KooW" + "z" * 44}}, "is no Ed25519 peer id"),
        ({"federation": {"staleness": 17}}, "staleness"),
    ],
)
def test_a_federation_that_cannot_be(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Config.model_validate(settings)


def test_a_temperature_that_nothing_corrects_is_told() -> None:
    (said,) = oddities(Config.model_validate({"rollout": {"temperature": 0.7}}))
    assert "rollout.temperature = 0.7 samples from another distribution" in said


@pytest.mark.parametrize("limit", ["upload_kbps", "download_kbps"])
def test_a_limit_that_averaging_does_not_keep_is_told(limit: str) -> None:
    averaging, limits = {"method": "diloco"}, {limit: 1000}
    (said,) = oddities(Config.model_validate({"averaging": averaging, "limits": limits}))
    assert "limits.download_kbps do not hold for averaging" in said
    assert oddities(Config.model_validate({"averaging": averaging})) == []
    assert oddities(Config.model_validate({"limits": limits})) == []


def test_a_leader_that_takes_no_groups_is_told() -> None:
    settings = {"federation": {"publish": True}, "swarm": {"foreign_groups": 0}}
    (said,) = oddities(Config.model_validate(settings))
    assert "swarm.foreign_groups = 0 takes none of their groups" in said
