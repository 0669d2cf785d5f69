import http.client
import json
import os
import time
import webbrowser
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import Result

from node.cli.output import clock
from node.client import DaemonUnreachable, RequestRefused, connect
from node.history import History
from node.home import DaemonInfo, Home

Run = Callable[..., Result]


def test_status_is_a_state_a_reason_and_an_action(run: Run, home: Home, daemon: Any) -> None:
    result = run("--home", home.path, "status")
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first == f"WAITING  no peer reachable (3 tried), training alone; run shoal --home {home.path} peers"
    facts = dict(line.split("  ", 1) for line in rest)
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["step"] == "12"
    assert facts["stage"] == "evaluate 3 of 8 for 2 s"
    assert facts["reward"] == "0.250 (first step 0.125)"
    assert facts["held-out"] == "0.500 at step 10 (0.250 at step 0)"
    assert facts["memory"] == "900 MB (peak 1200 MB; weights 3, optimizer 6)"
    assert facts["rejected"] == "1 stale"


def test_status_json_is_what_the_daemon_says(run: Run, home: Home, daemon: Any) -> None:
    status = json.loads(run("--home", home.path, "status", "--json").stdout)
    assert {"state", "reason", "next", "step", "peers", "reward", "peer_id"} <= status.keys()
    assert (status["step"], status["reward"]) == (12, 0.25)


def test_status_is_watched_until_ctrl_c(run: Run, home: Home, daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_time(seconds: float) -> None:
        if daemon.now["step"] % 10 == 3:
            raise KeyboardInterrupt
        daemon.now = {**daemon.now, "step": daemon.now["step"] + 1}

    monkeypatch.setattr("node.cli.status.time", SimpleNamespace(sleep=pass_time))
    plain = run("--home", home.path, "status", "--watch")
    assert plain.exit_code == 130
    assert [line.partition(f"{home.path} peers")[2] for line in plain.stdout.splitlines()] == [
        "  step 12  reward 0.250  peers 1",
        "  step 13  reward 0.250  peers 1",
    ]
    daemon.now = {**daemon.now, "step": 22, "reward": None}
    watched = run("--home", home.path, "status", "--watch", "--json")
    assert watched.exit_code == 130
    lines = [json.loads(line) for line in watched.stdout.splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(22, None), (23, None)]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_watch_of_a_node_that_fails_says_why_and_goes_on(
    run: Run, home: Home, daemon: Any, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    info = home.daemon()
    assert info is not None

    def restart(seconds: float) -> None:
        if home.daemon() is None:
            home.write_daemon(info)
            monkeypatch.setattr("node.cli.status.time", SimpleNamespace(sleep=leave, time=time.time))
            return
        history = History(home.database, lambda: 86_400.0)
        history.event("error", "failed", "StageTimeout: stage 'update' took too long")
        history.close()
        home.remove_daemon()

    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("node.cli.status.time", SimpleNamespace(sleep=restart, time=time.time))
    result = run("--home", home.path, "status", "--watch", *["--json"] * as_json)
    assert result.exit_code == 130, result.stderr
    before, between, after = result.stdout.splitlines()
    assert before == after
    if as_json:
        assert json.loads(after)["step"] == 12
        between = json.loads(between)["error"]
    assert "StageTimeout: stage 'update' took too long" in between


def test_status_of_a_node_that_is_down_says_how_it_ended(run: Run, home: Home) -> None:
    def told() -> str:
        result = run("--home", home.path, "status")
        assert result.exit_code == 3
        return result.stderr.strip().replace(str(home.path), "HOME")

    assert told() == "Error: no daemon runs on HOME\nFix: start it with `shoal --home HOME up`"
    home.write_daemon(DaemonInfo(2**22 + 1, "http://127.0.0.1:9", 1.0))  # no process has such a number
    history = History(home.database, lambda: 86_400.0)
    history.event("info", "resume", "continues after step 3")
    assert told() == "Error: no daemon runs on HOME, the last one was killed\nFix: start it with `shoal --home HOME up`"
    home.remove_daemon()
    assert told() == "Error: no daemon runs on HOME\nFix: start it with `shoal --home HOME up`"
    history.event("error", "failed", "CheckpointError: step 4 cannot be repeated ; free some memory")
    history.event("info", "stop", "step 3 is saved")
    at = clock(86_400.0)
    assert told() == (
        f"Error: no daemon runs on HOME, the last one failed at {at}: CheckpointError: step 4 cannot be repeated; "
        "free some memory\nFix: start it with `shoal --home HOME up`"
    )
    home.write_daemon(DaemonInfo(2**22 + 1, "http://127.0.0.1:9", 1.0))
    assert "the last one was killed" in told()  # the one that failed was started again since
    home.remove_daemon()
    history.event("info", "resume", "continues after step 3")
    history.event("info", "stop", "step 3 is saved")
    history.close()
    assert told() == "Error: no daemon runs on HOME\nFix: start it with `shoal --home HOME up`"


def test_peers_and_steps(run: Run, home: Home, daemon: Any) -> None:
    header, row = run("--home", home.path, "peers").stdout.splitlines()
    assert header.split()[:2] == ["peer", "connected"]
    assert row.split()[:9] == ["12D3KooWzzzzzzzz", "yes", "qwen", "0.75", "5", "4", "3", "2", "1"]
    header, row = run("--home", home.path, "steps").stdout.splitlines()
    assert row.split()[:2] == ["12", "0.25"]
    assert json.loads(run("--home", home.path, "steps", "--json").stdout)[0]["step"] == 12


def test_steps_of_a_node_that_is_down(run: Run, home: Home) -> None:
    assert run("--home", home.path, "steps").exit_code == 3
    history = History(home.database, lambda: 5.0)
    for step in range(1, 6):
        history.record_step(step, {"reward": step / 10, "foreign_groups": 4})
    history.close()
    found = json.loads(run("--home", home.path, "steps", "-n", "2", "--json").stdout)
    assert [(step["step"], step["reward"]) for step in found] == [(4, 0.4), (5, 0.5)]


def test_groups_and_one_group(run: Run, home: Home, daemon: Any) -> None:
    _, row = run("--home", home.path, "groups").stdout.splitlines()
    assert row.split()[:7] == ["abababababab", "foreign", "zzzzzzzz", "chain_sum", "3", "0.5", "admitted"]
    shown = run("--home", home.path, "groups", "abab").stdout
    assert "    2+2\n" in shown
    assert "    4\\x1b[2J\n" in shown  # a completion cannot drive the terminal
    assert "\x1b" not in shown


def test_an_unknown_group_is_a_failure(run: Run, home: Home, daemon: Any) -> None:
    result = run("--home", home.path, "groups", "cdcd")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: no group cdcd\nFix: list them: shoal --home {home.path} groups\n",
    )
    assert run("--home", home.path, "groups", "../status").exit_code == 1


def test_pause_resume_and_down(run: Run, home: Home, daemon: Any) -> None:
    paused = run("--home", home.path, "pause", "--reason", "playing")
    assert (
        paused.stdout.replace(str(home.path), "HOME")
        == "PAUSED  playing (after the step in progress); run shoal --home HOME resume to go on\n"
    )
    resumed = json.loads(run("--home", home.path, "resume", "--json").stdout)
    assert resumed == {"state": "TRAINING", "reason": "with 1 peer", "next": ""}
    history = History(home.database, lambda: 86_400.0)
    history.event("info", "stop", "step 3 is saved")
    history.close()
    assert run("--home", home.path, "down").stdout == (
        f"STOPPED  step 3 is saved; run shoal --home {home.path} up to go on\n"
    )
    assert daemon.asked == ["pause: playing", "resume", "stop"]
    assert run("--home", home.path, "down").exit_code == 3


def test_a_node_of_a_local_swarm_is_not_stopped_only_to_start_again(
    run: Run, home: Home, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.supervised.supervisor", lambda pid: 77)
    refused = run("--home", home.path, "down")
    assert (refused.exit_code, daemon.asked) == (1, [])
    assert "process 77 runs this node in a local swarm" in refused.stderr
    assert f"`kill 77`, or hold this one with `shoal --home {home.path} pause`" in refused.stderr


def test_settings_go_through_the_running_daemon(run: Run, home: Home, daemon: Any) -> None:
    def set_key(key: str, value: str, *more: str) -> Result:
        return run("--home", home.path, "config", "set", key, value, *more)

    now = set_key("eval.every", "5")
    assert (now.stdout, now.exit_code) == (f"eval.every = 5 in {home.config_path}, in force now\n", 0)
    later = set_key("web.port", "9000")
    assert later.stdout == f"web.port = 9000 in {home.config_path}\n"
    assert later.stderr == "Warning: the running node takes up web.port at its next start\nFix: ask the captain\n"
    as_json = set_key("web.port", "9000", "--json")
    assert as_json.stderr == later.stderr
    assert json.loads(as_json.stdout) == {
        "key": "web.port",
        "value": 9000,
        "file": str(home.config_path),
        "applied": [],
        "restart": ["web.port"],
        "restart_by": "ask the captain",
    }
    wrong = set_key("eval.tasks", "0")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "Error: eval.tasks = 0 (the request): too few\nFix: set it to a whole number at least 1\n",
    )
    assert set_key("eval.evry", "5").exit_code == 2
    assert "own_groups" not in home.config_path.read_text()
    overridden = set_key("swarm.own_groups", "2")  # the file is for the next start
    assert overridden.stderr == "Warning: swarm.own_groups is set by a flag of the running node\nFix: leave that out\n"
    assert home.config_path.read_text().endswith("[swarm]\nown_groups = 2\n")
    assert daemon.asked == [
        f"change: {change}"
        for change in (
            {"eval.every": "5"},
            {"web.port": "9000"},
            {"web.port": "9000"},
            {"eval.tasks": "0"},
            {"swarm.own_groups": "2"},
        )
    ]
    daemon.stop()
    alone = set_key("eval.every", "6")
    assert (alone.stdout, alone.stderr) == (f"eval.every = 6 in {home.config_path}\n", "")


def test_a_setting_for_a_daemon_that_does_not_answer_is_for_its_next_start(run: Run, home: Home) -> None:
    home.write_daemon(DaemonInfo(os.getpid(), "http://127.0.0.1:9", 1.0))
    result = run("--home", home.path, "config", "set", "eval.every", "5")
    assert result.stderr.replace(str(home.path), "HOME") == (
        "Warning: the running daemon goes on with what it had\nFix: shoal --home HOME down, then shoal --home HOME up\n"
    )
    assert home.config_path.read_text().endswith("every = 5\n")


def test_open_prints_and_opens_a_one_time_link(
    run: Run, home: Home, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    first = run("--home", home.path, "open").stdout.strip()
    assert opened == [first]
    second = json.loads(run("--home", home.path, "open", "--json").stdout)["url"]
    assert opened == [first]
    assert second != first
    where = urlsplit(second)
    assert f"{where.scheme}://{where.netloc}" == daemon.url
    for expected in (303, 401):  # good for one browser, once
        connection = http.client.HTTPConnection(where.netloc, timeout=10)
        connection.request("GET", f"{where.path}?{where.query}")
        assert connection.getresponse().status == expected
        connection.close()


def test_health(run: Run, home: Home, daemon: Any) -> None:
    assert run("--home", home.path, "health").exit_code == 0
    daemon.now = {**daemon.now, "last_step_age": 900.0}
    result = run("--home", home.path, "health", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ready"] is False
    assert answer["reasons"][0].startswith("no step for 900 s, the deadline is 600 s")


def test_client_errors_are_typed(home: Home, daemon: Any) -> None:
    client = connect(home)
    client.token = "wrong"
    with pytest.raises(RequestRefused, match=r"wrong API token ; .*shoal open") as caught:
        client.get("status")
    assert caught.value.status == 401
    client.url = "http://127.0.0.1:9"  # the discard port: nobody there
    with pytest.raises(DaemonUnreachable, match="start it with `shoal up`"):
        client.get("status")


def test_logs(run: Run, home: Home) -> None:
    entry = {"at": "2026-01-01T00:00:00+00:00", "level": "info", "logger": "node", "message": "m\x1b[0m"}
    home.log_path.write_text(json.dumps(entry) + "\n")
    assert run("--home", home.path, "logs").stdout.endswith("info    node  m\\x1b[0m\n")
    assert json.loads(run("--home", home.path, "logs", "--json").stdout) == [entry]
