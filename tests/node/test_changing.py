"""Settings of a running node: what is refused, what is written, and what is in force after that."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.changing import Change, change, in_force
from node.config import AT_ONCE, Config, applies
from node.home import Home
from node.settings import FIELDS, ConfigError, Overridden, load, public_values, value_of, variable
from node.view import DaemonView
from web.view import SettingOverridden, SettingRefused

FILE = "# mine\n[swarm]\n# how many of my own\nown_groups = 3  # three\n"


@pytest.fixture
def ours(home: Home) -> Home:
    home.config_path.write_text(FILE)
    return home


def changed(home: Home, values: dict[str, Any], **flags: Any) -> Change:
    return change(home, load(home, {key.replace("__", "."): value for key, value in flags.items()}), values)


def test_every_setting_says_when_it_holds(home: Home) -> None:
    known = {f"{section}.{name}" for section, names in AT_ONCE.items() for name in names}
    assert known < FIELDS.keys()
    assert {key for key in FIELDS if applies(key) == "now"} == known
    assert {key for key in FIELDS if applies(key) == "restart"} >= {
        "model.path",
        "network.listen",
        "web.port",
        "node.seed",
        "train.lora_rank",
        "train.kl_coefficient",
        "limits.gpu_memory_share",
    }


def test_what_can_change_is_in_force_at_once_and_the_rest_waits(ours: Home) -> None:
    done = changed(ours, {"swarm.own_groups": 2, "web.port": 9000, "train.betas": [0.8, 0.9], "limits.disk_mb": "5000"})
    assert done.applied == ("swarm.own_groups", "train.betas", "limits.disk_mb")
    assert done.restart == ("web.port",)
    assert done.settings.config.swarm.own_groups == 2
    assert (done.settings.config.web.port, done.wanted.web.port) == (8420, 9000)
    assert done.settings.sources["swarm.own_groups"] == "config.toml"
    assert set(done.said.split(", ")) == {
        "swarm.own_groups = 2",
        "train.betas = [0.8",
        "0.9]",
        "web.port = 9000 at the next start",
        "limits.disk_mb = 5000",
    }
    assert ours.config_path.read_text() == (
        "# mine\n[swarm]\n# how many of my own\nown_groups = 2  # three\n\n[web]\nport = 9000\n\n"
        "[train]\nbetas = [0.8, 0.9]\n\n[limits]\ndisk_mb = 5000\n"
    )
    assert load(ours).config == done.wanted
    table = public_values(done.settings, done.wanted)
    assert (table["web.port"]["value"], table["web.port"]["pending"]) == (8420, 9000)
    assert "pending" not in table["swarm.own_groups"]


def test_back_to_what_is_in_force_waits_for_nothing(ours: Home) -> None:
    present = load(ours)
    first = change(ours, present, {"web.port": 9000})
    second = change(ours, first.settings, {"web.port": 8420})
    assert (second.applied, second.restart, second.said) == (("web.port",), (), "")


def test_what_was_edited_by_hand_counts_with_the_next_change(ours: Home) -> None:
    present = load(ours)
    ours.config_path.write_text("[eval]\nevery = 7\n[model]\npath = 'elsewhere'\n")
    done = change(ours, present, {"swarm.foreign_groups": 5})
    assert set(done.applied) == {"swarm.foreign_groups", "swarm.own_groups", "eval.every"}
    assert done.restart == ("model.path",)
    assert done.settings.config.swarm.own_groups == 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"swarm.own_grups": 1}, ["unknown key swarm.own_grups", "did you mean swarm.own_groups?"]),
        ({"swarm": {"own_groups": 1}}, ["unknown key swarm"]),
        ({"": 1}, ["unknown key"]),
        ({"x" * 10_000: 1}, ["unknown key xxx"]),
        ({"swarm.own_groups": "many"}, ["swarm.own_groups = 'many' (the request)", "whole number", "at most 4096"]),
        ({"swarm.own_groups": 5000}, ["4096"]),
        ({"swarm.own_groups": None}, ["swarm.own_groups"]),
        ({"swarm.own_groups": 1.5}, ["whole number"]),
        ({"swarm.own_groups": True}, ["true is no value of it", "whole number"]),
        ({"swarm.own_groups": {"a": 1}}, ["swarm.own_groups"]),
        ({"swarm.own_groups": [1]}, ["swarm.own_groups"]),
        ({"swarm.foreign_adaptive": "perhaps"}, ["swarm.foreign_adaptive", "true or false"]),
        ({"train.learning_rate": float("nan")}, ["train.learning_rate"]),
        ({"train.loss": "none"}, ["one of dapo, ppo"]),
        ({"node.name": "\ud800"}, ["node.name", "half a character"]),
        ({"node.name": "x" * 65}, ["at most 64 characters"]),
        ({"limits.quiet_hours": "22-8"}, ["limits.quiet_hours", "22:00-08:00"]),
        ({"limits.upload_kbps": 3}, ["limits.upload_kbps", "at least 64"]),
        ({"swarm.own_groups": 0, "swarm.foreign_groups": 0}, ["nothing to train on", "from the request"]),
        ({"eval.every": 3, "swarm.own_groups": -1}, ["swarm.own_groups = -1"]),
    ],
)
def test_what_is_not_valid_changes_nothing(ours: Home, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(ours, values)
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert said.count(" ; ") == 1
    assert len(said) < 1000
    assert ours.config_path.read_text() == FILE


@pytest.mark.parametrize("value", [["shoal:secret"], {"a": "shoal:secret"}, 5])
def test_a_secret_is_in_no_answer(ours: Home, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(ours, {"swarm.join": value})
    assert "secret" not in str(caught.value)
    done = changed(ours, {"swarm.join": "shoal:secret"})
    assert "secret" not in done.said
    assert "shoal:secret" not in str(public_values(done.settings, done.wanted))


def test_text_that_toml_has_to_escape_comes_back_as_it_was(ours: Home) -> None:
    name = 'a"b\\c\n\x01\u2028é'
    assert changed(ours, {"node.name": name}).settings.config.node.name == name
    assert load(ours).config.node.name == name


def test_what_a_flag_or_variable_overrides_is_refused(ours: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Overridden, match="set by a flag of the running node"):
        changed(ours, {"eval.every": 3, "swarm.own_groups": 2}, swarm__own_groups="5")
    monkeypatch.setenv(variable("swarm.own_groups"), "6")
    with pytest.raises(Overridden, match="the variable SHOAL_SWARM_OWN_GROUPS"):
        changed(ours, {"swarm.own_groups": 2})
    assert ours.config_path.read_text() == FILE
    done = changed(ours, {"eval.every": 3}, train__betas="0.5,0.6")
    assert done.settings.config.swarm.own_groups == 6
    assert done.settings.config.train.betas == (0.5, 0.6)


def test_what_does_not_go_together_before_a_restart_waits_for_it(ours: Home) -> None:
    present = Config.model_validate({"engine": {"quantization": "fp8"}})
    wanted = Config.model_validate(
        {"train": {"correction": "none"}, "swarm": {"own_groups": 2}, "limits": {"disk_mb": 5, "group_mb": 9}}
    )
    now = in_force(present, wanted)
    assert (now.engine.quantization, now.train.correction, now.swarm.own_groups) == ("fp8", "tis", 4)
    assert (now.limits.disk_mb, now.limits.group_mb) == (5, 8)


def test_a_file_that_is_broken_or_cannot_be_written_is_said(ours: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    present = load(ours)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("node.changing.write_atomic", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        change(ours, present, {"eval.every": 3})
    ours.config_path.write_text("[swarm\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        change(ours, present, {"eval.every": 3})
    assert ours.config_path.read_text() == "[swarm\n"


def test_two_hundred_keys_at_once(ours: Home) -> None:
    values = {key: value_of(Config(), key) for key in FIELDS if key not in ("train.distill_teacher", "swarm.join")}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    done = changed(ours, plain)
    assert set(done.applied) == set(values)
    assert done.wanted == Config()


def test_the_view_says_what_is_in_force(ours: Home) -> None:
    present = load(ours)
    node: Any = SimpleNamespace(home=ours, settings=present, wanted=present.config)

    def apply(values: dict[str, Any]) -> Change:
        made = change(ours, node.settings, values)
        node.settings, node.wanted = made.settings, made.wanted
        return made

    node.change = apply
    view = DaemonView(node)
    answer = view.change({"swarm.own_groups": 2, "web.port": 9000})
    assert (answer["applied"], answer["restart"]) == (["swarm.own_groups"], ["web.port"])
    assert answer["config"]["swarm.own_groups"]["value"] == 2
    assert answer["config"]["web.port"]["pending"] == 9000
    with pytest.raises(SettingRefused, match="did you mean"):
        view.change({"swarm.own_grups": 2})
    node.settings = load(ours, {"swarm.own_groups": 2})
    with pytest.raises(SettingOverridden):
        view.change({"swarm.own_groups": 3})
