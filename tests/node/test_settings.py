import itertools

import pytest
from pydantic import ValidationError

from node.config import Config, SwarmConfig
from node.home import Home
from node.settings import FIELDS, ConfigError, load, nearest, public_values, set_value, variable

FILE, VARIABLE, FLAG = "config.toml", "SHOAL_ROLLOUT_GROUP_SIZE", "flag"


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=3)), ids=str)
def test_later_sources_win(home: Home, monkeypatch: pytest.MonkeyPatch, present: tuple[bool, bool, bool]) -> None:
    in_file, in_environment, in_flags = present
    if in_file:
        home.config_path.write_text("[rollout]\ngroup_size = 3\ntemperature = 0.5\n")
    if in_environment:
        monkeypatch.setenv(VARIABLE, "5")
    settings = load(home, {"rollout.group_size": "7"} if in_flags else {})
    expected = (7, FLAG) if in_flags else (5, VARIABLE) if in_environment else (3, FILE) if in_file else (8, "default")
    assert (settings.config.rollout.group_size, settings.sources["rollout.group_size"]) == expected
    # a source that sets one key of a section leaves the section's other keys to the sources below it
    assert settings.config.rollout.temperature == (0.5 if in_file else 1.0)
    assert settings.sources["rollout.temperature"] == (FILE if in_file else "default")


def test_defaults_are_those_of_the_models(home: Home) -> None:
    settings = load(home)
    assert settings.config == Config()
    assert set(settings.sources.values()) == {"default"}
    assert settings.sources.keys() == FIELDS.keys()


@pytest.mark.parametrize("key", FIELDS)
def test_every_key_has_a_variable_of_its_own(key: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    default = FIELDS[key].default
    text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    monkeypatch.setenv(variable(key), text)
    settings = load(home)
    assert settings.config == Config()
    assert settings.sources[key] == (variable(key) if text else "default")


def test_join_has_a_short_variable(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_JOIN", "shoal:short")
    settings = load(home)
    assert (settings.config.swarm.join, settings.sources["swarm.join"]) == ("shoal:short", "SHOAL_JOIN")
    monkeypatch.setenv("SHOAL_SWARM_JOIN", "shoal:long")
    settings = load(home)
    assert (settings.config.swarm.join, settings.sources["swarm.join"]) == ("shoal:long", "SHOAL_SWARM_JOIN")


def test_an_empty_variable_is_none(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    # docker compose passes `${SHOAL_JOIN:-}` on as an empty text
    monkeypatch.setenv("SHOAL_JOIN", "")
    monkeypatch.setenv(VARIABLE, "")
    assert set(load(home).sources.values()) == {"default"}


def test_lists_are_commas_in_text_and_arrays_in_the_file(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.config_path.write_text('[web]\nallowed_hosts = ["a.example", "b.example"]\n')
    monkeypatch.setenv("SHOAL_TRAIN_BETAS", "0.8, 0.99")
    config = load(home, {"network.announce": "/ip4/192.0.2.1/tcp/1,/ip4/192.0.2.2/tcp/2"}).config
    assert config.web.allowed_hosts == ("a.example", "b.example")
    assert config.train.betas == (0.8, 0.99)
    assert config.network.announce == ("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/2")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[swarm]\nown_group = 3\n", ["config.toml", "swarm.own_group ", "did you mean swarm.own_groups?"]),
        ("[swarms]\nown_groups = 3\n", ["swarms.own_groups", "did you mean swarm.own_groups?"]),
        ("own_groups = 3\n", ["own_groups = 3", "no section", "did you mean swarm.own_groups?"]),
        ("[swarm]\nown_groups = 'x'\n", ["swarm.own_groups = 'x' (config.toml)", "integer", "at most 4096"]),
        ("[swarm]\nown_groups = 5000\n", ["swarm.own_groups = 5000", "4096"]),
        (
            "[swarm]\nown_groups = 0\nforeign_groups = 0\n",
            ["nothing to train on", "set swarm.own_groups to at least 1"],
        ),
        ("[rollout]\ngroup_size = 1\n", ["rollout.group_size = 1", "at least 2", "G, completions per task"]),
        ("[train]\nkl_estimator = 'k4'\n", ["train.kl_estimator = 'k4'", "one of k1, k2, k3"]),
        ("[train]\nlearning_rate = nan\n", ["train.learning_rate = nan", "finite"]),
        ("[train]\nbetas = [0.9, 1.5]\n", ["train.betas", "less than 1"]),
        ("[network]\nlisten = 'here'\n", ["network.listen = 'here'", "/ip4/0.0.0.0/tcp/0"]),
        ("[network]\nlisten = '/ip4/999.1.1.1/tcp/1'\n", ["network.listen", "999.1.1.1"]),
        ("[network]\nlisten = '/ip4/127.0.0.1/tcp/99999'\n", ["network.listen", "99999", "0..65535"]),
        ("[network]\nannounce = ['/foo']\n", ["network.announce", "/foo", "/tcp/PORT"]),
        ("[network]\nbootstrap = ['/ip4/192.0.2.1/tcp/1']\n", ["network.bootstrap", "/p2p/"]),
        ("[network]\nbootstrap = ['/foo/p2p/abc']\n", ["network.bootstrap", "/foo/p2p/abc"]),
        ("[limits]\nscorer_memory_mb = 99999999999999\n", ["limits.scorer_memory_mb", "1048576"]),
        ("[limits]\nquiet_hours = '9 to 5'\n", ["(config.toml): '9 to 5' is not like 22:00-08:00", "set it to text"]),
        ("[web]\nport = 8420\nport = 8421\n", ["config.toml is not valid TOML", "line 3"]),
        ("[web\n", ["config.toml is not valid TOML", "line 1", "correct that line"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(home: Home, text: str, parts: list[str]) -> None:
    home.config_path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(home)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert message.count(" ; ") == 1
    assert "\n" not in message


def test_a_file_that_is_no_text(home: Home) -> None:
    home.config_path.write_bytes(b"[node]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match=r"config\.toml is not UTF-8"):
        load(home)


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("SHOAL_SWARM_OWNGROUPS", "3", ["SHOAL_SWARM_OWNGROUPS", "did you mean SHOAL_SWARM_OWN_GROUPS?"]),
        ("SHOAL_ZZZZ", "3", ["SHOAL_ZZZZ", "unset it"]),
        ("SHOAL_ROLLOUT_GROUP_SIZE", "1", ["rollout.group_size = '1' (SHOAL_ROLLOUT_GROUP_SIZE)", "at least 2"]),
        ("SHOAL_SWARM_OWN_GROUPS", "four", ["swarm.own_groups = 'four' (SHOAL_SWARM_OWN_GROUPS)", "whole number"]),
    ],
)
def test_a_wrong_variable_is_refused_by_name(
    home: Home, monkeypatch: pytest.MonkeyPatch, name: str, value: str, parts: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load(home)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_a_wrong_flag_is_refused_by_name(home: Home) -> None:
    with pytest.raises(ConfigError, match=r"flag --set: unknown key swarm\.own_grups ; did you mean swarm\.own_groups"):
        load(home, {"swarm.own_grups": "1"})
    with pytest.raises(ConfigError, match=r"web\.port = '70000' \(flag\).*65535"):
        load(home, {"web.port": "70000"})


def test_a_rule_over_two_sources_names_both(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.config_path.write_text("[swarm]\nown_groups = 0\n")
    monkeypatch.setenv("SHOAL_SWARM_FOREIGN_GROUPS", "0")
    with pytest.raises(ConfigError) as caught:
        load(home)
    assert "swarm.own_groups from config.toml" in str(caught.value)
    assert "swarm.foreign_groups from SHOAL_SWARM_FOREIGN_GROUPS" in str(caught.value)


def test_solo_and_pure_foreign_are_allowed() -> None:
    assert SwarmConfig(own_groups=8, foreign_groups=0).own_groups == 8
    assert SwarmConfig(own_groups=0, foreign_groups=8).foreign_groups == 8
    with pytest.raises(ValidationError):
        SwarmConfig(own_groups=-1)


def test_set_keeps_comments_and_order(home: Home) -> None:
    home.config_path.write_text("# mine\n[web]\nport = 1  # the old one\n\n[swarm]\n# I\nown_groups = 2\n")
    assert set_value(home, "web.port", "9000") == 9000
    assert set_value(home, "train.betas", "0.8,0.9") == (0.8, 0.9)
    assert set_value(home, "swarm.foreign_groups", "6") == 6
    assert home.config_path.read_text() == (
        "# mine\n[web]\nport = 9000  # the old one\n\n[swarm]\n# I\nown_groups = 2\nforeign_groups = 6\n"
        "\n[train]\nbetas = [0.8, 0.9]\n"
    )
    config = load(home).config
    assert (config.web.port, config.train.betas, config.swarm.foreign_groups) == (9000, (0.8, 0.9), 6)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("web.prt", "1", "did you mean web.port"),
        ("rollout.group_size", "1", r"group_size = '1' \(argument VALUE\)"),
        ("swarm.own_groups", "0", "nothing to train on"),
        ("model.path", "/nowhere", r"/nowhere is no directory of a model.* ; set it to .*local model directory"),
    ],
)
def test_set_refuses_what_would_not_load(home: Home, key: str, value: str, words: str) -> None:
    home.config_path.write_text("[swarm]\nforeign_groups = 0\n")
    with pytest.raises(ConfigError, match=words):
        set_value(home, key, value)
    assert home.config_path.read_text() == "[swarm]\nforeign_groups = 0\n"


def test_set_refuses_a_broken_file(home: Home) -> None:
    home.config_path.write_text("[swarm\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        set_value(home, "web.port", "1")


def test_public_values_hide_the_invite(home: Home) -> None:
    values = public_values(load(home, {"swarm.join": "shoal:secret"}))
    assert values["swarm.join"]["value"] == "(hidden)"
    assert values["web.port"] == {
        "value": 8420, "source": "default", "default": 8420,
        "help": "port; 0: a free one", "applies": "restart", "type": "int", "choices": None, "secret": False,
    }  # fmt: skip
    assert "shoal:secret" not in str(values)


def test_json_in_an_argument_of_the_engine_stays_whole(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = '--speculative-config={"method":"ngram","num_speculative_tokens":4,"more":[1,{"a":2}]}'
    wanted = ("--dtype=half", guess, "--seed", "3")
    text = f"--dtype=half, {guess},--seed,3,"
    assert load(home, {"engine.args": text}).config.engine.args == wanted
    assert set_value(home, "engine.args", text) == wanted
    assert load(home, {}).config.engine.args == wanted
    monkeypatch.setenv("SHOAL_ENGINE_ARGS", guess)
    assert load(home, {}).config.engine.args == (guess,)


def test_public_values_hide_what_engines_are_asked_with(home: Home) -> None:
    values = public_values(
        load(
            home,
            {
                "engine.url": "http://me:pass1@host:8000/x",
                "engine.others": "http://you:pass2@host",
                "engine.args": "--api-key,pass3,--dtype=half,--hf-token=pass4",
            },
        )
    )
    assert values["engine.url"]["value"] == "http://(hidden)@host:8000/x"
    assert values["engine.others"]["value"] == ["http://(hidden)@host"]
    assert values["engine.args"]["value"] == ["--api-key", "(hidden)", "--dtype=half", "--hf-token=(hidden)"]
    assert "pass" not in str(values["engine.args"])


def test_public_values_hide_what_a_teacher_is_asked_with_and_nothing_harmless(home: Home) -> None:
    values = public_values(load(home, {"train.distill_teacher": "http://me:pass1@host:8000"}))
    assert values["train.distill_teacher"]["value"] == "http://(hidden)@host:8000"
    assert all(entry["value"] == entry["default"] for entry in public_values(load(home)).values())


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trian", "train"),
        ("trian.lerning_rate", "train.learning_rate"),
        ("prot", "web.port"),
        ("port", "web.port"),
        ("swarm.learning_rate", "train.learning_rate"),
        ("swarm.lerning_rate", "train.learning_rate"),
    ],
)
def test_what_is_meant(key: str, near: str | None) -> None:
    assert nearest(key) == near
