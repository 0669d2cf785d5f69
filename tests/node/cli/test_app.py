import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from node.cli.app import shoal
from node.home import COMMANDS as NAMED
from node.home import Home

Run = Callable[..., Result]
COMMANDS = [
    ["init"], ["up"], ["local"], ["down"], ["status"], ["pause"], ["resume"], ["peers"], ["groups"], ["steps"],
    ["logs"], ["id"], ["paths"], ["open"], ["join"], ["leave"], ["swarm", "create"], ["swarm", "show"],
    ["swarm", "invite"], ["env", "list"], ["env", "show"], ["env", "check"], ["checkpoint", "list"],
    ["checkpoint", "export"], ["checkpoint", "eval"], ["config", "show"], ["config", "set"], ["bench"], ["version"],
    ["health"], ["model", "prepare"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(run: Run, command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: shoal {' '.join(command)}")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    runs = 3
    for _ in range(runs):
        shown = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "node", "--help"], capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {
        "torch", "transformers", "libp2p", "trio", "aiohttp", "pydantic", "rich", "cryptography", "msgspec", "numpy"
    }  # fmt: skip
    assert (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / runs < 0.3


@pytest.mark.parametrize("args", [("--json", "id"), ("id", "--json")], ids=" ".join)
def test_json_before_and_after_the_command(run: Run, home: Home, args: tuple[str, ...]) -> None:
    result = run("--home", home.path, *args)
    assert json.loads(result.stdout) == {"peer_id": home.identity().peer_id}
    result = run(*args, "--home", home.path)
    assert json.loads(result.stdout) == {"peer_id": home.identity().peer_id}


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["stauts"], 2, "stauts"),
        (["status", "--wacth"], 2, "--watch"),
        (["--set", "swarm.own_groups", "config", "show"], 2, "is not section.key=value"),
        (["--set", "swarm.own_grups=1", "config", "show"], 2, "did you mean swarm.own_groups?"),
        (["--set", "rollout.group_size=1", "up"], 2, "at least 2"),
        (["local", "--nodes", "0"], 2, "--nodes"),
        (["join", "shoal:broken"], 2, "invite"),
        (["status"], 3, "start it with `shoal --home"),
        (["down"], 3, "no daemon runs"),
        (["health"], 3, "no daemon runs"),
        (["swarm", "show"], 1, "swarm create NAME`"),
        (["swarm", "invite"], 1, "is in no swarm"),
    ],
)
def test_errors_are_two_lines_with_an_exit_code(run: Run, home: Home, args: list[str], code: int, words: str) -> None:
    result = run("--home", home.path, *args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr
    assert "\nFix: " in result.stderr
    assert " ; " not in result.stderr
    assert result.stderr.count("\n") == 2

    result = run("--home", home.path, *args, "--json")
    error = json.loads(result.stderr)
    assert (result.exit_code, error["code"], result.stdout) == (code, code, "")
    assert error["error"]
    assert error["fix"]


@pytest.mark.parametrize("group", [(), ("config",)])
def test_without_a_command_there_is_the_help_as_it_is(run: Run, group: tuple[str, ...]) -> None:
    told = run(*group)
    assert told.exit_code == 2
    assert told.stderr.startswith("Usage: ")
    assert "\nOptions:\n" in told.stderr
    refused = run("--json", *group)
    assert json.loads(refused.stderr)["code"] == 2


@pytest.mark.parametrize("command", ["status", "id", "down", "leave", "logs"])
def test_not_initialised(run: Run, tmp_path: Path, command: str) -> None:
    result = run("--home", tmp_path / "none", command)
    assert result.exit_code == 4
    assert f"run `shoal --home {tmp_path / 'none'} init`" in result.stderr
    assert not (tmp_path / "none").exists()


def test_traceback_only_when_verbose(run: Run, home: Home) -> None:
    assert "Traceback" not in run("--home", home.path, "status").stderr
    shown = run("--home", home.path, "status", "-v").stderr
    assert "Traceback" in shown
    assert shown.splitlines()[-2].startswith("Error: no daemon runs")


def test_a_directory_that_cannot_be_made_is_a_failure(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--home", tmp_path / "file" / "home", "init")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path}/file")
    assert "\nFix: " in result.stderr
    assert " ; " not in result.stderr


def test_every_command_that_a_message_may_name_is_known() -> None:
    assert set(NAMED) == set(shoal.commands)


def test_commands_in_hints_are_those_for_the_home(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"shoal --home {home.path}"
    said = "run `shoal up`, or shoal config set KEY VALUE; Shoal 0.1, 'shoal[x]', shoal --home X up, shoal-x up"
    assert home.hints(said) == said.replace("`shoal up`", f"`{there} up`").replace("shoal config", f"{there} config")
    assert home.hints(home.hints(said)) == home.hints(said)
    monkeypatch.setenv("SHOAL_HOME", str(home.path))
    assert home.hints(said) == said


def test_version(run: Run) -> None:
    found = json.loads(run("version", "--json").stdout)
    assert found["shoal"] == "0.1.0"
    assert set(found) == {"shoal", "python", "torch", "transformers", "libp2p"}
    assert run("version").stdout.startswith("shoal ")


def test_as_a_process(tmp_path: Path) -> None:
    """Exit codes and streams of the real command, and 130 on Ctrl-C."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
    shoal = [sys.executable, "-m", "node", "--home", str(tmp_path / "home")]

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*shoal, *args], capture_output=True, text=True, timeout=60, env=environment)

    assert call("id").returncode == 4
    made = call("init", "--json")
    assert (made.returncode, json.loads(made.stdout)["created"], made.stderr) == (0, True, "")
    assert json.loads(call("init", "--json").stdout)["created"] is False
    down = call("status", "--json")
    assert (down.returncode, down.stdout, json.loads(down.stderr)["kind"]) == (3, "", "DaemonUnreachable")
    environment["SHOAL_WEB_PROT"] = "1"
    wrong = call("config", "show")
    assert (wrong.returncode, wrong.stderr) == (
        2, "Error: unknown environment variable SHOAL_WEB_PROT\nFix: did you mean SHOAL_WEB_PORT?\n"
    )  # fmt: skip
    del environment["SHOAL_WEB_PROT"]
    # tests that run in the background inherit an ignored SIGINT, and so would the command
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([*shoal, "logs", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follow:
        signal.signal(signal.SIGINT, heard)
        try:
            (tmp_path / "home" / "logs" / "node.log").write_text("a line\n")
            assert follow.stdout
            assert "a line" in follow.stdout.readline()
            follow.send_signal(signal.SIGINT)
            _, errors = follow.communicate(timeout=10)
        finally:
            follow.kill()
    assert (follow.returncode, errors.strip()) == (130, "interrupted")


def test_the_process_ends_without_taking_its_modules_apart(home: Home) -> None:
    code = "import atexit; atexit.register(print, 'slow'); from node.cli import main; main()"
    command = [sys.executable, "-c", code, "--home", str(home.path), "paths", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["home"] == str(home.path)  # flushed, though it went to a pipe
