"""The page's files: served as they are, with nothing in them that could turn text into markup or ask another host."""

import re
from pathlib import Path

import pytest

import web

STATIC = Path(web.__file__).parent / "static"
FILES = sorted(path.name for path in STATIC.iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.mark.parametrize("name", FILES)
async def test_files_are_served_as_they_are(anyone, name):
    async with anyone.get(f"/static/{name}") as answer:
        assert answer.status == 200
        assert answer.content_type == TYPES[Path(name).suffix]
        assert await answer.read() == (STATIC / name).read_bytes()


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
