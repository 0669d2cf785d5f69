"""The page's files: served as they are, with nothing in them that could turn text into markup or ask another host."""

import re
from pathlib import Path

import plotly
import pytest

import web
from web import files
from web.files import TYPES

STATIC = Path(web.__file__).parent / "static"
FILES = sorted(path.name for path in STATIC.iterdir())


@pytest.mark.parametrize("name", FILES)
async def test_files_are_served_as_they_are(anyone, name):
    async with anyone.get(f"/static/{name}") as answer:
        assert answer.status == 200
        assert answer.content_type == TYPES[Path(name).suffix]
        assert await answer.read() == (STATIC / name).read_bytes()


async def test_a_file_that_the_browser_has_is_not_sent_again(anyone):
    async with anyone.get("/static/icon.svg") as answer:
        tag = answer.headers["ETag"]
        assert answer.headers["Cache-Control"] == "no-cache"
    async with anyone.get("/static/icon.svg", headers={"If-None-Match": tag}) as answer:
        assert (answer.status, answer.headers["ETag"], await answer.read()) == (304, tag, b"")
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
    async with anyone.get("/static/icon.svg", headers={"If-None-Match": '"another"'}) as answer:
        assert answer.status == 200


async def test_the_chart_library_comes_from_the_installed_package(anyone, monkeypatch):
    bundle = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    async with anyone.get("/static/plotly.min.js") as answer:
        assert (answer.status, answer.content_type) == (200, "text/javascript")
        assert await answer.read() == bundle.read_bytes()
        tag = answer.headers["ETag"]
    monkeypatch.setattr(files, "_plotly", lambda: pytest.fail("it is read once"))
    async with anyone.get("/static/plotly.min.js", headers={"If-None-Match": tag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")


async def test_without_the_chart_library_the_page_is_told(anyone, monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    async with anyone.get("/static/plotly.min.js") as answer:
        assert answer.status == 404
        assert "plotly" in (await answer.json())["error"]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_scripts_have_no_way_to_make_markup_or_code_of_text(name):
    source = (STATIC / name).read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|srcdoc|setHTML|document\.write"
        r"|\beval\b(?!:)|\bFunction\(|javascript:|https?://(?!www\.w3\.org/2000/svg)|\.href\b|localStorage|document\.cookie"
    )
    # what is remembered in the browser is light or dark, and nothing else
    allowed = {"localStorage"} if name == "theme.js" else set()
    assert set(re.findall(forbidden, source)) <= allowed


def test_the_page_obeys_its_own_policy():
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=\"/static/)|https?://|//[a-z]", page) == []
    for asked in re.findall(r"(?:src|href)=\"([^\"#][^\"]*)\"", page):
        assert (STATIC / asked.removeprefix("/static/")).is_file()
    assert [path.name for path in STATIC.glob("*.css") if "url(" in path.read_text()] == []


def test_scripts_ask_only_for_elements_that_exist():
    page = (STATIC / "index.html").read_text()
    ids = set(re.findall(r"\bid=\"([a-z-]+)\"", page))
    sources = "".join(path.read_text() for path in STATIC.glob("*.js"))
    asked = set(re.findall(r"(?:byId|say|getElementById)\(\"([a-z-]+)\"", sources))
    assert asked
    assert asked <= ids
