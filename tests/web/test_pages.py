"""The seven pages in a real browser: a long run, hostile text, an empty node, a phone, the keyboard, and axe-core."""

import pytest

from tests.web.browsing import AXE, CHROMIUM, PAGES, PHONE, browser
from tests.web.fixture_view import FixtureView

pytest.importorskip("playwright", reason="needs playwright from the dev dependencies")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]
MAX_ELEMENTS = 4000
SIDEWAYS = "document.documentElement.scrollWidth - innerWidth"


def shared_group(node):
    """A foreign group on a task that everybody got."""
    return node.row(len(node.group_rows) // 8 * 8 - 7)["id"]


async def test_every_page_shows_a_long_run_without_a_complaint():
    async with browser(FixtureView()) as tab:
        assert await tab.text(".hero h2") == "Training"
        assert "1.8 times the start" in await tab.text(".overview > .panel:nth-child(2) .lead")
        assert "4 of 8 groups" in await tab.text(".overview > .panel:nth-child(3) .lead")
        await tab.until(lambda: tab.count(".js-plotly-plot .main-svg"))
        for page in (*PAGES, f"groups/{shared_group(tab.node)}"):
            await tab.go(page)
            assert await tab.page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS, page
            assert await tab.page.evaluate(SIDEWAYS) <= 0, page
        await tab.go("groups")
        assert await tab.count("tbody tr") == 50
        await tab.page.click("text=Load older")
        await tab.until(lambda: tab.page.evaluate("document.querySelectorAll('tbody tr').length === 100"))
        await tab.go("peers")
        assert await tab.count("tbody tr") == 50
        assert await tab.count(".graph circle") == 200
        assert await tab.text(".pager span") == "1 to 50 of 1,000 peers"
        assert await tab.count(".tag[data-tone=bad]") == 1
        await tab.go("training")
        await tab.sees("Steps 1 to 100,000, 250 a point.")
        await tab.page.click("text=Last 100")
        await tab.sees("Steps 99,901 to 100,000.")
        begin, end = await tab.page.evaluate("document.querySelector('.js-plotly-plot').layout.xaxis.range")
        assert (begin, end) == (99_901, 100_000)
        assert tab.complaints == []


async def test_the_first_paint_waits_for_no_chart():
    async with browser(FixtureView()) as tab:
        await tab.until(lambda: tab.count(".js-plotly-plot"))
        painted, asked = await tab.page.evaluate(
            """[performance.getEntriesByName("first-contentful-paint")[0].startTime,
                performance.getEntriesByType("resource").map(({name, startTime, encodedBodySize}) =>
                    [name.split("/").pop(), startTime, encodedBodySize])]"""
        )
        plotly = next(start for name, start, _ in asked if name == "plotly.min.js")
        assert painted < plotly
        assert sum(size for _, start, size in asked if start < plotly) < 300_000


async def test_charts_that_do_not_load_are_told_and_the_numbers_stay():
    async with browser(FixtureView(steps=500, peers=3)) as tab:
        await tab.page.route("**/plotly.min.js", lambda route: route.abort())
        await tab.page.reload()
        await tab.sees("The chart could not be drawn")
        assert "times the start" in await tab.text(".overview > .panel:nth-child(2) .lead")


async def test_what_hostile_peers_write_is_text():
    async with browser(FixtureView(hostile=True), viewport=PHONE) as tab:
        for page in (*PAGES, f"groups/{shared_group(tab.node)}"):
            await tab.go(page)
            assert await tab.page.evaluate(SIDEWAYS) <= 0, page
            body = await tab.page.evaluate("document.documentElement.textContent")
            assert len(body) < 200_000, page
            assert "\u202e" not in body, page
            if page in ("overview", "logs"):  # the others cut it off before that
                assert "\\u202egnp.exe" in body, page
            assert await tab.count("[onerror], img[src='x'], #body script") == 0, page
            assert await tab.page.title() != "owned", page
        assert tab.complaints == []


async def test_a_node_in_its_first_minute_says_what_to_do():
    async with browser(FixtureView(steps=0, peers=0, groups=0)) as tab:
        tab.node.state |= {"swarm": "", "reason": ""}
        assert "Too early" in await tab.text(".overview > .panel:nth-child(2) .lead")
        await tab.sees("The curve starts with the second step.")
        await tab.go("groups")
        assert "first step" in await tab.text(".empty:not([hidden])")
        await tab.go("peers")
        await tab.sees("Invite others")
        assert tab.complaints == []


async def test_a_phone_shows_every_page_without_scrolling_sideways():
    async with browser(FixtureView(), viewport=PHONE) as tab:
        assert not await tab.page.is_visible('#nav a[data-page="settings"]')
        for page in (*PAGES, f"groups/{shared_group(tab.node)}"):
            await tab.go(page)
            assert await tab.page.evaluate(SIDEWAYS) <= 0, page
        await tab.page.click("#more")
        await tab.page.click('#nav a[data-page="swarm"]')
        await tab.has(".sentences")
        assert not await tab.page.is_visible('#nav a[data-page="settings"]')


async def test_the_keyboard_alone_gets_everywhere():
    async with browser(FixtureView(steps=50, peers=4, groups=40)) as tab:
        focused = "document.activeElement"
        await tab.page.keyboard.press("Tab")
        assert await tab.page.evaluate(f"{focused}.textContent") == "Skip to the page"
        await tab.page.keyboard.press("Enter")
        assert await tab.page.evaluate(f"{focused}.id") == "title"
        await tab.page.evaluate(f"{focused}.blur()")
        reached = []
        for _ in range(16):
            await tab.page.keyboard.press("Tab")
            reached.append(await tab.page.evaluate(f"{focused}.dataset.page ?? {focused}.id"))
            if reached[-1] == "groups":
                break
        await tab.page.keyboard.press("Enter")
        await tab.has("tbody tr")
        assert await tab.page.evaluate(f"{focused}.id") == "title"
        assert await tab.text("#title") == "Groups"
        await tab.page.focus("tbody tr a")
        assert await tab.page.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
        await tab.page.keyboard.press("Enter")
        await tab.has(".answer")
        assert (await tab.text("#title")).startswith("Group ")


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: sh .ci/install-axe, or AXE_CORE=axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(scheme):
    found = []
    # only here is the policy left out: axe is put into the page as a script
    async with browser(FixtureView(steps=2000, peers=40, groups=400), color_scheme=scheme, bypass_csp=True) as tab:
        await tab.page.evaluate(AXE.read_text())
        for page in (*PAGES, f"groups/{shared_group(tab.node)}"):
            await tab.go(page)
            result = await tab.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            found += [
                (page, one["id"], one["nodes"][0]["html"][:200])
                for one in result["violations"]
                if one["impact"] in ("serious", "critical")
            ]
    assert found == []


async def test_the_chosen_colours_are_remembered():
    async with browser(FixtureView(steps=50, peers=4, groups=40), color_scheme="light") as tab:
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await tab.page.evaluate(ground)
        await tab.page.click("#theme label:has-text('Dark')")
        dark = await tab.page.evaluate(ground)
        assert dark != light
        await tab.page.reload()
        await tab.has(".hero .figures")
        assert await tab.page.evaluate(ground) == dark
