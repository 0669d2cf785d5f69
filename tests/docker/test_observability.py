"""What watches a node: the configuration files as they are read, and Prometheus really asking a node."""

import json
import re
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.project import BUILD_SECONDS, ROOT, Project
from web.probes import HELP

OBSERVABILITY = ROOT / "docker" / "observability"
ASK_SECONDS = 300.0


def dashboard() -> Any:
    return json.loads((OBSERVABILITY / "dashboards" / "shoal.json").read_text())


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_every_metric_of_the_dashboard_is_one_of_ours() -> None:
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    named = {name for expression in asked for name in re.findall(r"shoal_\w+", expression)}
    assert named <= set(HELP)
    # the three questions of a newcomer: does it work, does it get better, does the swarm help
    assert {"shoal_up", "shoal_last_step_age_seconds", "shoal_reward", "shoal_trained_foreign_total"} <= named


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_the_files_name_each_other() -> None:
    services = read(ROOT / "docker-compose.yml")["services"]
    (source,) = read(OBSERVABILITY / "grafana" / "datasources" / "prometheus.yml")["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read(OBSERVABILITY / "grafana" / "dashboards" / "shoal.yml")["providers"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "./docker/observability/dashboards"
    (job,) = read(OBSERVABILITY / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["node:8420"]}]
    assert Path(job["authorization"]["credentials_file"]).parent == Path("/token")


def test_prometheus_sees_one_token_and_is_seen_by_grafana_only() -> None:
    compose = read(ROOT / "docker-compose.yml")
    services = compose["services"]
    assert "token:/token:ro" in services["prometheus"]["volumes"]
    assert not [volume for volume in services["prometheus"]["volumes"] if volume.startswith("home")]
    assert services["prometheus"]["networks"] == ["metrics"]
    assert "ports" not in services["prometheus"]
    assert compose["networks"]["metrics"] == {"internal": True}
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    assert all(services[name]["profiles"] == ["observability"] for name in ("token", "prometheus", "grafana"))


@pytest.fixture
def watched(engine: None) -> Iterator[Project]:
    project = Project(
        "shoal-test", "docker-compose.yml", "docker/cpu.yml", "docker/compose.test.yml", profile="observability"
    )
    project.compose("build", "node", "token", "prometheus", timeout=BUILD_SECONDS)
    try:
        project.compose("up", "-d", "node", "prometheus")
        yield project
    finally:
        project.down()


@pytest.mark.docker
def test_prometheus_asks_the_node_with_its_token(watched: Project) -> None:
    deadline = time.monotonic() + ASK_SECONDS
    while not (found := ask(watched, "query?" + urllib.parse.urlencode({"query": "shoal_up"}))["result"]):
        assert time.monotonic() < deadline, f"{ask(watched, 'targets')}\n{watched.logs()}"
        time.sleep(5)
    assert [sample["value"][1] for sample in found] == ["1"]
    (target,) = ask(watched, "targets")["activeTargets"]
    assert target["health"] == "up"


def ask(project: Project, question: str) -> Any:
    """What Prometheus' API answers inside its container: it is published nowhere."""
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090/api/v1/{question}').read().decode())"
    return json.loads(project.python(code, "prometheus"))["data"]
