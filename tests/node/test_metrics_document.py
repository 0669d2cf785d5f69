"""docs/metrics.md and docs/alerts.yml against what a node tells."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml

from node.config import LimitsConfig
from node.limits import Holder
from node.view import LONG_STAGES, DaemonView
from protocol.rejection import Reason
from web.probes import EXCHANGE_TROUBLE, HELP, trouble

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\bshoal_[a-z_]+")


class Everything(dict[str, Any]):
    """A step record that has every number."""

    def get(self, key: str, default: Any = None) -> Any:
        return 1.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of all that /metrics can say: of a node with peers, a scorer and a teacher."""
    counts = {
        "published": 1,
        "fetched": 1,
        "admitted": 1,
        "rejected": {"stale": 1},
        "trained_foreign": 1,
        "trained_followers": 1,
    }
    status = {
        "step": 1, "peers": 1, "state": "TRAINING", "reward": 0.5, "held_out": 0.5, "tokens_per_second": 1.0,
        "last_step_age": 1.0, "held_by": "disk", "policy_version": 1,
        "rss_mb": 1.0, "uptime": 1.0, "memory": {"weights": 1}, "stages": {"update": 1.0},
        "groups": {**counts, **dict.fromkeys(EXCHANGE_TROUBLE, 0)},
    }  # fmt: skip
    monkeypatch.setattr(DaemonView, "status", lambda self: status)
    stats = SimpleNamespace(bytes_in=1, bytes_out=1, dropped_events=0, dropped_publishes=0)
    node: Any = SimpleNamespace(
        history=SimpleNamespace(last_step=lambda: Everything(step=1)),
        transport=SimpleNamespace(stats=lambda: stats),
        rounds=SimpleNamespace(
            chain=SimpleNamespace(round=SimpleNamespace(number=3), members=SimpleNamespace(members=("me",)))
        ),
        loop=SimpleNamespace(leading=SimpleNamespace(publisher=SimpleNamespace(skipped=1))),
        scorer=SimpleNamespace(answers=1, failures=0, restarts=0, turned_away=0),
    )
    samples = {**DaemonView(node).metrics(), **trouble(status["groups"])}  # type: ignore[arg-type]
    return {name.partition("{")[0] for name in samples}


def test_every_metric_is_documented_and_none_besides(told: set[str]) -> None:
    text = (DOCS / "metrics.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(told)
    assert set(rows) == set(HELP)
    for name in EXCHANGE_TROUBLE:
        assert name in text


def test_alerts_use_what_there_is(told: set[str]) -> None:
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) == 13
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "fix"}
        used = set(NAME.findall(rule["expr"]))
        assert used <= told, rule["alert"]
        assert used or rule["alert"] == "ShoalDown"
        for label, value in re.findall(r'(\w+)!?="(\w+)"', rule["expr"]):
            assert (label, value) == ("job", "shoal") or value in (*Reason, *EXCHANGE_TROUBLE, *get_args(Holder))


def test_alerts_wait_as_long_as_they_say() -> None:
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    asked = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    deadline = LONG_STAGES * LimitsConfig().stage_seconds
    assert (
        f"(shoal_last_step_age_seconds or shoal_uptime_seconds and shoal_step) > {deadline:g} " in asked["ShoalNoStep"]
    )
    for page in ("api.md", "metrics.md", "operations.md"):
        text = " ".join((DOCS / page).read_text().split())
        assert "three times `limits.stage_seconds`" in text, page
    # a node that has just begun has earned nothing for minutes, not for six hours
    assert asked["ShoalRewardIsZero"].endswith(f" and shoal_uptime_seconds > {6 * 3600}")
