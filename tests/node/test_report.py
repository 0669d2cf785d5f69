"""The report's page: parsed, with the numbers in it, hostile text escaped, nothing loaded from elsewhere."""

import json
import re
import sqlite3
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import Result

from node.history import History
from node.home import Home
from node.report import ReportError, read_run
from node.report_page import POLICY, page, text
from protocol.manifest import embedded_manifest
from swarm.experience import ExperienceStore, PeerRecord
from tests.conftest import Clock

HOSTILE = "</script><img src=//evil.example/x onerror=alert(1)>\u202e&<b>"


class Parsed(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.shown, self.scripts = "", list[str]()
        self._inside: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.shown += data + "\n"
        elif self._inside[-1] == "script":
            self.scripts.append(data)


def fill(home: Home, reward: float = 0.5) -> None:
    clock = Clock()
    history = History(home.database, clock)
    for step in range(1, 31):
        clock.now += 60
        history.record_step(
            step,
            {
                "reward": reward if step > 3 else 0.125, "rewards": {"sums": reward, HOSTILE: 0.25}, "own_groups": 4,
                "foreign_groups": 3, "tokens_per_second": 40.0, "loss": 0.001 * step, "kl_behaviour": 0.0, "ess": 1.0,
                "entropy": 1.5, "clip_fraction": 0.0, "grad_norm": 2.0, "unparsed": 0.125, "rollout_tokens": 1000,
                "prepare_seconds": 20.0, "update_seconds": 10.0,
            },
        )  # fmt: skip
    history.record_evaluation(0, {"sums": 0.25, HOSTILE: 0.25})
    history.record_evaluation(30, {"sums": 0.75, HOSTILE: 0.25})
    history.event("warning", "share", f"a peer said {HOSTILE}")
    history.event("info", "resume", "not shown: no trouble")
    history.close()
    store = ExperienceStore(home.database, 16 << 20, clock)
    store.peers.save(PeerRecord("12D3KooWpeer", 1.0, 0.0, 1.0, False, HOSTILE, 1.0, 1.0), "admitted")
    store.peers.save(PeerRecord("12D3KooWpeer", 1.0, 0.0, 1.0, False, HOSTILE, 1.0, 1.0), "stale")
    store.peers.save(PeerRecord("12D3KooWpeer", 1.0, 0.0, 1.0, False, HOSTILE, 1.0, 1.0), "followed")
    store.close()


@pytest.fixture
def run_directory(tmp_path: Path, no_variables: None) -> Path:
    for name, reward in (("node-1", 0.5), ("node-2", 0.25), ("node-10", 0.25), ("large-1", 0.25)):
        home = Home(tmp_path / "run" / name)
        home.init()
        home.found(embedded_manifest("mine", 0))
        fill(home, reward)
    (tmp_path / "run" / "node-1" / "config.toml").write_text(
        "[swarm]\nown_groups = 6\njoin = 'shoal:secretsecretsecret'\n[rollout]\ngroup_size = 8\n"
    )
    return tmp_path / "run"


def test_a_run_of_several_nodes(run: Callable[..., Result], run_directory: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run_directory.rglob("node.db")}
    result = run("report", run_directory, "-o", tmp_path / "out.html", "--json")
    assert json.loads(result.stdout)["nodes"] == ["large-1", "node-1", "node-2", "node-10"]
    parsed = Parsed((tmp_path / "out.html").read_text())
    for words in (
        "node-1", "0.125 to 0.500", "0.250, 0.500, 0.500", "30000", "swarm.own_groups", "(hidden)", "12D3KooWpeer",
        "1 stale", "a peer said </script><img", "Reward by environment", "Verdicts on peers' groups", "torch 2.",
    ):  # fmt: skip
        assert words in parsed.shown, words
    assert "rollout.group_size" not in parsed.shown  # set to what it is anyway
    own = [script for script in parsed.scripts if len(script) < 1_000_000]
    assert "followed" not in "".join((parsed.shown, *own))  # uses of admitted groups are no refusals
    assert "secretsecret" not in (tmp_path / "out.html").read_text()
    assert "not shown: no trouble" not in parsed.shown
    assert sum(tag == "figure" for tag, _ in parsed.tags) == 15
    rewards = next(script for script in parsed.scripts if "plot-2" in script)
    assert '"y":[0.125,0.125,0.125,0.5,0.5' in rewards
    assert {path: path.read_bytes() for path in before} == before


def test_what_peers_say_is_text_and_nothing_is_loaded(run_directory: Path) -> None:
    source = page(read_run(run_directory))
    parsed = Parsed(source)
    assert {tag for tag, _ in parsed.tags} <= {
        "html", "head", "meta", "title", "style", "script", "body", "h1", "h2", "p", "section", "div", "figure",
        "figcaption", "strong", "table", "thead", "tbody", "tr", "th", "td",
    }  # fmt: skip
    for tag, attributes in parsed.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "data", "onerror", "onload"}, tag
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in parsed.tags
    assert "default-src 'none'" in POLICY
    own = [script for script in parsed.scripts if "Plotly.newPlot(" in script and len(script) < 1_000_000]
    assert len(own) == 15
    for script in own:
        assert "<" not in script  # no tag in a label: plotly reads some of them
        assert "//evil" not in script
        assert "&lt;img" in script or "evil" not in script
    assert "\u202e" not in source
    styles = re.findall(r"<style>(.*?)</style>", source, re.S)
    assert styles
    assert not any("url(" in style or "@import" in style for style in styles)


def test_text_is_bounded() -> None:
    assert text("x" * 10_000) == "x" * 300 + "…"
    assert text(("a", "<")) == "a, &lt;"
    assert (text(None), text(()), text(0.123456), text(0)) == ("-", "(none)", "0.1235", "0")


def test_a_running_node_is_only_read(home: Home) -> None:
    fill(home)
    writer = History(home.database, Clock())  # its write-ahead log has what its file has not yet
    writer.record_step(31, {"reward": 0.875, "foreign_groups": 0})
    (node,) = read_run(home.path)
    assert (node.steps[-1]["reward"], node.peer_id, node.trained_foreign) == (0.875, home.identity().peer_id, 90)
    writer.record_step(32, {"reward": 0.5, "foreign_groups": 0})
    writer.close()


def test_an_older_history_is_migrated_in_a_copy(home: Home) -> None:
    with sqlite3.connect(home.database) as database:
        database.executescript(
            "CREATE TABLE history_version (version INTEGER NOT NULL); INSERT INTO history_version VALUES (1);"
            "CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL,"
            " foreign_groups INTEGER NOT NULL);"
            "CREATE TABLE evaluations (step INTEGER PRIMARY KEY, at REAL NOT NULL, mean REAL NOT NULL,"
            " scores TEXT NOT NULL);"
            "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, level TEXT NOT NULL,"
            " kind TEXT NOT NULL, message TEXT NOT NULL);"
            """INSERT INTO steps VALUES (1, 5.0, '{"reward": 0.5}', 4);"""
        )
    (node,) = read_run(home.path)
    assert (node.trained_foreign, node.peers, "0.500 to 0.500" in page([node])) == (4, [], True)
    with sqlite3.connect(home.database) as database:
        assert database.execute("SELECT version FROM history_version").fetchall() == [(1,)]


def test_no_run(run: Callable[..., Result], home: Home, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no node with a history"):
        read_run(home.path)
    result = run("report", tmp_path / "nothing")
    assert (result.exit_code, "has no node with a history" in result.stderr) == (1, True)
    History(home.database, Clock()).close()
    assert "<h1>Shoal: home</h1>" in page(read_run(home.path))  # a node that has not stepped yet


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    run: Callable[..., Result], run_directory: Path, tmp_path: Path
) -> None:
    refused = run("report", run_directory, "-o", tmp_path / "missing" / "run.html")
    assert refused.exit_code == 1
    assert f"Error: {tmp_path / 'missing' / 'run.html'} cannot be written (No such file" in refused.stderr
    assert "give another file: -o FILE" in refused.stderr
