import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from node.addresses import interface_addresses
from node.cli.up import enter_swarm
from node.home import DaemonInfo, Home, HomeError
from node.own_swarm import own_manifest
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import embedded_manifest
from swarm.experience import ExperienceStore
from swarm.records import PeerRecord

Run = Callable[..., Result]
MANIFEST = """
epoch_seconds = 60
[caps]
max_completions = 16
[[environments]]
name = "chain_sum"
weight = 2
settings = { min_terms = 2, max_terms = 3, examples = 1, max_tokens = 8 }
"""


def test_init_twice(run: Run, tmp_path: Path) -> None:
    first = run("--home", tmp_path / "home", "init")
    assert first.stdout.startswith("Node 12D3KooW")
    assert "nothing changed" in run("--home", tmp_path / "home", "init").stdout


def test_init_asks_for_a_passphrase_and_id_needs_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run("--home", tmp_path / "home", "init", "--passphrase", "--json", input="secret\nsecret\n")
    peer_id = json.loads(made.stdout)["peer_id"]
    without = run("--home", tmp_path / "home", "id")
    assert without.exit_code == 1
    assert "SHOAL_PASSPHRASE" in without.stderr
    monkeypatch.setenv("SHOAL_PASSPHRASE", "secret")
    assert run("--home", tmp_path / "home", "id").stdout.strip() == peer_id


def test_paths_and_config(run: Run, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = json.loads(run("--home", home.path, "paths", "--json").stdout)
    assert paths["config"] == str(home.path / "config.toml")
    header = home.config_path.read_text()
    assert header.startswith("# Settings of this node")
    assert run("--home", home.path, "config", "set", "web.port", "9000").exit_code == 0
    assert home.config_path.read_text() == header + "\n[web]\nport = 9000\n"
    shown = json.loads(run("--home", home.path, "--set", "web.host=::1", "config", "show", "web", "--json").stdout)
    assert (shown["web.port"]["value"], shown["web.port"]["source"]) == (9000, "config.toml")
    assert (shown["web.host"]["value"], shown["web.host"]["source"]) == ("::1", "flag")
    assert set(shown) == {"web.port", "web.host", "web.allowed_hosts"}
    monkeypatch.setenv("SHOAL_WEB_PORT", "9001")
    assert "SHOAL_WEB_PORT overrides it" in run("--home", home.path, "config", "set", "web.port", "9002").stderr


def test_config_set_refuses(run: Run, home: Home) -> None:
    result = run("--home", home.path, "config", "set", "web.prt", "1")
    assert (result.exit_code, "did you mean web.port?" in result.stderr) == (2, True)
    result = run("--home", home.path, "config", "show", "wbe.port")
    assert (result.exit_code, "did you mean web.port?" in result.stderr) == (2, True)


def test_config_set_takes_a_negative_value_for_a_value(run: Run, home: Home) -> None:
    result = run("--home", home.path, "config", "set", "eval.every", "-5")
    assert (result.exit_code, result.stderr.startswith("Error: eval.every = ")) == (2, True), result.stderr


def test_create_show_leave(run: Run, home: Home) -> None:
    created = json.loads(run("--home", home.path, "swarm", "create", "mine", "--private", "--json").stdout)
    shown = json.loads(run("--home", home.path, "swarm", "show", "--json").stdout)
    assert shown["digest"] == created["digest"]
    assert (shown["name"], shown["private"]) == ("mine", True)
    assert [entry["name"] for entry in shown["environments"]] == [
        "letter_counting", "chain_sum", "spell_backward", "word_sorting"
    ]  # fmt: skip
    assert "chain_sum" in run("--home", home.path, "swarm", "show").stdout
    again = run("--home", home.path, "swarm", "create", "other")
    assert (again.exit_code, f"run `shoal --home {home.path} leave` first" in again.stderr) == (1, True)
    assert run("--home", home.path, "leave").stdout == "Left swarm mine\n"


def test_create_from_a_file(run: Run, home: Home, tmp_path: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(MANIFEST)
    assert run("--home", home.path, "swarm", "create", "mine", "--manifest", file).exit_code == 0
    manifest = home.manifest()
    assert manifest is not None
    assert (manifest.epoch_seconds, manifest.caps.max_completions, manifest.caps.max_turns) == (60, 16, 16)
    assert [(spec.name, spec.weight, spec.settings["max_terms"]) for spec in manifest.environments] == [
        ("chain_sum", 2, 3)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[environments]\n", "not valid TOML"),
        ("epoch_seconds = 60\n", "environments"),
        (MANIFEST.replace("weight", "wieght"), "wieght"),
        (MANIFEST.replace("max_completions = 16", "max_completions = 1"), ">= 2"),
        (MANIFEST.replace("max_completions", "max_completion"), "max_completion"),
        (MANIFEST.replace("max_tokens = 8", "max_tokens = 0"), "max_tokens"),
    ],
)
def test_a_wrong_manifest_file_is_refused(run: Run, home: Home, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(text)
    result = run("--home", home.path, "swarm", "create", "mine", "--manifest", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}")
    assert words in result.stderr
    assert "\nFix: " in result.stderr
    assert not home.invite_path.exists()


def test_invite_and_join(run: Run, home: Home, tmp_path: Path) -> None:
    run("--home", home.path, "swarm", "create", "mine", "--private")
    unknown = run("--home", home.path, "swarm", "invite")
    assert (unknown.exit_code, " up` once" in unknown.stderr) == (1, True)

    home.keep_listen_port(7946)
    link = run("--home", home.path, "swarm", "invite").stdout.strip()
    invite = Invite.parse(link)
    peer_id = home.identity().peer_id
    assert invite.bootstrap == tuple(f"/ip4/{a}/tcp/7946/p2p/{peer_id}" for a in interface_addresses(4))

    other = Home(tmp_path / "other")
    other.init()
    joined = json.loads(run("--home", other.path, "join", link, "--json").stdout)
    assert joined["swarm"] == "mine"
    assert other.swarm() == invite


def test_an_invite_that_only_this_machine_can_use_says_so(run: Run, home: Home) -> None:
    assert run("--home", home.path, "swarm", "create", "mine").exit_code == 0
    listen = ["--set", "network.listen=/ip4/127.0.0.1/tcp/7946", "swarm", "invite"]
    made = run("--home", home.path, *listen)
    assert made.stdout.startswith("shoal:")
    assert "nobody elsewhere can use the invite" in made.stderr


def test_invite_names_announced_and_daemon_addresses(run: Run, home: Home) -> None:
    run("--home", home.path, "swarm", "create", "mine")
    peer_id = home.identity().peer_id
    home.write_daemon(DaemonInfo(1, "http://127.0.0.1:1", 1.0, (f"/ip4/192.0.2.9/tcp/5/p2p/{peer_id}",)))
    invite = json.loads(run("--home", home.path, "swarm", "invite", "--json").stdout)
    assert invite["bootstrap"] == [f"/ip4/192.0.2.9/tcp/5/p2p/{peer_id}"]
    flag = "network.announce=/dns4/node.example/tcp/6"
    invite = json.loads(run("--home", home.path, "--set", flag, "swarm", "invite", "--json").stdout)
    assert invite["bootstrap"] == [f"/dns4/node.example/tcp/6/p2p/{peer_id}"]


def test_join_while_the_daemon_runs_is_refused(run: Run, home: Home) -> None:
    link = Invite(embedded_manifest("theirs", 1.0).digest, (), None, "theirs").to_uri()
    with home.lock():
        result = run("--home", home.path, "join", link)
    assert (result.exit_code, f"shoal --home {home.path} down" in result.stderr) == (1, True)


def test_up_enters_a_swarm(home: Home) -> None:
    address = f"/ip4/192.0.2.1/tcp/1/p2p/{Identity.generate().peer_id}"
    link = Invite(embedded_manifest("theirs", 1.0).digest, (address,), None, "theirs").to_uri()
    enter_swarm(home, Invite.parse(link))
    enter_swarm(home, Invite.parse(link))  # SHOAL_JOIN stays set over restarts
    enter_swarm(home, None)
    assert home.swarm().name == "theirs"
    with pytest.raises(HomeError, match="leave"):
        enter_swarm(home, Invite(b"x" * 32, (address,), None, "third"))


def test_up_without_a_swarm_founds_one(home: Home) -> None:
    enter_swarm(home, None)
    first = home.swarm()
    assert home.manifest() is not None
    enter_swarm(home, None)
    assert home.swarm() == first


def test_up_leaves_a_swarm_that_it_founded_and_was_alone_in(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    address = f"/ip4/192.0.2.1/tcp/1/p2p/{Identity.generate().peer_id}"
    theirs = Invite(embedded_manifest("theirs", 1.0).digest, (address,), None, "theirs")
    enter_swarm(home, None)
    own = home.swarm()
    ExperienceStore(home.database, clock=lambda: 1.0, max_bytes=1 << 20).close()  # it has run, and met nobody
    enter_swarm(home, theirs)
    assert home.swarm() == theirs
    assert home.manifest() is None
    told = f"Left swarm {own.name}, which this node had founded for itself and was alone in"
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", told)]


def test_up_keeps_a_swarm_that_others_may_be_in(home: Home, tmp_path: Path) -> None:
    theirs = Invite(embedded_manifest("theirs", 1.0).digest, (), None, "theirs")
    enter_swarm(home, None)
    store = ExperienceStore(home.database, clock=lambda: 1.0, max_bytes=1 << 20)
    store.peers.save(PeerRecord("them", 0.0, 0.0, 1.0, False, "", 1.0, 1.0))
    store.close()
    with pytest.raises(HomeError, match="docker compose run --rm node leave"):
        enter_swarm(home, theirs)

    public, private, asked_for = (Home(tmp_path / name) for name in ("public", "private", "asked-for"))
    for other in (public, private, asked_for):
        other.init()
    enter_swarm(public, None)
    public.list_publicly(True)
    private.found(own_manifest(private, 1.0), psk=b"k" * 32)
    asked_for.found(embedded_manifest("mine", 1.0))
    for other in (public, private, asked_for):
        with pytest.raises(HomeError, match="leave"):
            enter_swarm(other, theirs)


def test_join_says_which_swarm_it_left(run: Run, home: Home) -> None:
    theirs = Invite(embedded_manifest("theirs", 1.0).digest, (), None, "theirs").to_uri()
    enter_swarm(home, None)
    name = home.swarm().name
    assert f"Left swarm {name}" in run("--home", home.path, "join", theirs).stdout


def test_env(run: Run, home: Home) -> None:
    listed = {entry["name"]: entry for entry in json.loads(run("--home", home.path, "env", "list", "--json").stdout)}
    assert len(listed) > 80
    assert (listed["chain_sum"]["installed"], listed["chain_sum"]["weight"]) == (True, 1)
    assert listed["sudoku"]["weight"] == 0
    shown = json.loads(run("--home", home.path, "env", "show", "chain_sum", "--json").stdout)
    assert shown["settings"]["examples"] == 3
    assert [message["role"] for message in shown["task"]["prompt"]] == ["system", *["user", "assistant"] * 3, "user"]
    checked = run("--home", home.path, "env", "check", "--json")
    assert (checked.exit_code, json.loads(checked.stdout)["ok"]) == (0, True)
    unknown = run("--home", home.path, "env", "show", "chain_sun")
    assert (unknown.exit_code, "did you mean chain_sum?" in unknown.stderr) == (1, True)


def test_the_settings_say_what_there_is_to_choose_from(run: Run, home: Home) -> None:
    shown = run("--home", home.path, "config", "show", "coordinator").stdout
    assert "(measured | manifest)" in next(line for line in shown.splitlines() if line.startswith("coordinator.mix "))
    assert "|" not in next(line for line in shown.splitlines() if line.startswith("coordinator.tasks "))


@pytest.mark.parametrize(
    ("name", "given"), [("", "it is empty"), ("x" * 65, "of 65 characters"), ("a\nb", "'a\\nb' of 3 characters")]
)
def test_a_name_that_no_swarm_can_have(run: Run, home: Home, name: str, given: str) -> None:
    for command in (("swarm", "create"), ("coordinator", "init"), ("coordinator", "up", "--begin")):
        refused = run("--home", home.path, *command, name)
        assert refused.exit_code == 2
        assert f"{given}; give a swarm 1 to 64 printable characters" in refused.stderr
    assert not home.invite_path.exists()


def test_a_section_that_is_none(run: Run, home: Home) -> None:
    for key, meant in (("zzz", ""), ("limts", "did you mean limits? ")):
        refused = run("--home", home.path, "config", "show", key)
        assert refused.exit_code == 2
        assert f"Error: there is no setting or section {key}\nFix: {meant}Sections: node, " in refused.stderr


def test_a_file_that_is_no_text_is_named_with_its_line(run: Run, home: Home) -> None:
    home.config_path.write_bytes(b"[node]\nname = '\xff'\n")
    for command in (("show",), ("set", "web.port", "9")):
        refused = run("--home", home.path, "config", *command)
        assert refused.exit_code == 2
        assert (
            f"{home.config_path} is not UTF-8 text: byte 0xff in line 2\nFix: save the file as UTF-8" in refused.stderr
        )


def test_a_link_to_a_page_is_no_invite(run: Run, home: Home) -> None:
    for command in (("join",), ("up", "--join")):
        refused = run("--home", home.path, *command, "http://example.org")
        assert refused.exit_code == 2
        assert "no invite: it begins with 'http://examp'\nFix: paste the whole link, which begins with shoal:" in (
            refused.stderr
        )
