"""The pages of a node that goes on: events and steps as they come, a node that was away, what a person asks of it."""

import pytest

from tests.web.browsing import CHROMIUM, browser, make_server
from tests.web.fixture_view import FixtureView

pytest.importorskip("playwright", reason="needs playwright from the dev dependencies")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]
MESSAGES = "[...document.querySelectorAll('.log .message')].map(one => one.textContent)"


def small():
    return FixtureView(steps=300, peers=6, groups=80)


async def test_events_and_steps_arrive_by_themselves():
    async with browser(small()) as tab:
        tab.node.say("info", "share", "something new")
        await tab.sees("something new")
        tab.node.step()
        await tab.sees("301", ".hero .figures")
        tab.node.state |= {"state": "FAILED", "reason": "out of memory", "next": "lower train.tokens_per_micro_batch"}
        await tab.sees("Failed", "#state")
        assert "What to do: lower train.tokens_per_micro_batch" in await tab.text(".hero .next")
        assert await tab.page.is_disabled("#pause")
        assert tab.complaints == []


async def test_a_node_that_was_away_comes_back_and_nothing_is_missed():
    async with browser(small()) as tab:
        await tab.go("logs")
        before = tab.node.event_range()[1]
        tab.node.calls.clear()
        await tab.server.stop()
        for i in range(30):
            tab.node.say("warning", "share", f"while away {i}")
        await tab.sees("shoal up", "#offline")
        assert await tab.count(".log li") > 50
        await tab.server.start()
        await tab.sees("while away 29")
        seen = [text for text in await tab.page.evaluate(MESSAGES) if "while away" in text]
        assert seen == [f"warning: while away {i}" for i in range(30)]
        assert not await tab.page.is_visible("#offline")
        # by the browser itself, or by the page asking anew: never from the start
        resumed = [int(call[1]) for call in tab.node.calls if call[0] == "events"]
        assert resumed
        assert min(resumed) >= before


async def test_a_restarted_node_knows_no_session_and_the_page_says_how_to_sign_in():
    async with browser(small()) as tab:
        await tab.server.stop()
        tab.server = make_server(tab.node, tab.server.port)
        await tab.server.start()
        await tab.sees("shoal open", "#signin")
        assert not await tab.page.is_visible("#node")


async def test_lists_are_bounded():
    async with browser(small()) as tab:
        await tab.go("logs")
        for i in range(2400):
            tab.node.say("info", "step", f"burst {i}")
        await tab.sees("burst 2399")
        assert await tab.count(".log li") == 2000


async def test_pause_and_resume():
    async with browser(small()) as tab:
        await tab.page.click("#pause")
        await tab.sees("Paused", "#state")
        assert await tab.text("#pause") == "Resume"
        await tab.page.click("#pause")
        await tab.sees("Training", "#state")
        tab.node.state |= {"state": "PAUSED", "held_by": "quiet_hours", "resumes_at": tab.node.now() + 3600}
        await tab.sees("Held by quiet hours; goes on by itself at")
        assert await tab.text("#pause") == "Train now"
        tab.node.state |= {"state": "IDLE", "held_by": "person", "resumes_at": None}  # all its steps are done
        await tab.sees("Idle", "#state")
        assert await tab.text("#pause") == "Resume"
        assert not await tab.page.is_disabled("#pause")
        asked = [call for call in tab.node.calls if call[0] in ("pause", "resume")]
        assert asked == [("pause", "asked for on the dashboard"), ("resume",)]
        assert tab.complaints == []
        await tab.page.click("#signout")
        await tab.sees("shoal open", "#signin")
        await tab.page.reload()  # the node knows the session no more, and the page says so
        await tab.sees("shoal open", "#signin")


async def test_a_group_shows_its_answers_their_heat_and_what_others_answered():
    async with browser(small()) as tab:
        await tab.go(f"groups/{tab.node.row(73)['id']}")
        assert await tab.count(".answer") == 8
        assert await tab.count(".turn") == 2
        assert await tab.count(".answer [class^=heat]") == 0
        await tab.page.check(".check input")
        assert await tab.count(".answer [class^=heat]") > 8
        await tab.has(".sibling:nth-child(4)")
        assert await tab.count(".sibling li.differs") == 4
        assert await tab.count(".sibling li") > 8
        assert tab.complaints == []


async def test_filters_of_groups_are_in_the_address():
    async with browser(small()) as tab:
        await tab.go("groups")
        await tab.page.select_option(".filters select >> nth=0", "foreign")
        await tab.until(lambda: tab.page.evaluate("document.querySelectorAll('tbody tr').length === 40"))
        assert await tab.page.evaluate("location.hash") == "#/groups?origin=foreign"
        await tab.page.reload()
        await tab.has("tbody tr")
        assert await tab.count("tbody tr") == 40
        await tab.page.select_option(".filters select >> nth=1", "equivocation")
        await tab.sees("No group is like that.")


async def test_peers_are_sorted_and_found_by_the_node():
    async with browser(FixtureView(steps=50, peers=300, groups=40)) as tab:
        await tab.go("peers")
        await tab.page.click("th button:has-text('Admitted')")
        await tab.sees("Admitted", "th[aria-sort=descending]")
        most = f"{max(peer['admitted'] for peer in tab.node.peer_rows):,}"
        await tab.until(
            lambda: tab.page.evaluate(f"document.querySelector('tbody td.number').textContent === '{most}'")
        )
        wanted = tab.node.peer_rows[211]["peer_id"]
        await tab.page.fill("input[type=search]", wanted[-12:])
        await tab.until(lambda: tab.page.evaluate("document.querySelectorAll('tbody tr').length === 1"))
        assert await tab.page.get_attribute("tbody tr", "data-key") == wanted
        assert tab.complaints == []


async def test_settings_are_saved_and_refused_next_to_their_field():
    async with browser(small()) as tab:
        await tab.go("settings")
        await tab.page.fill("#set-limits-hours_per_day", "30")
        await tab.page.click("text=Save the change")
        await tab.sees("less than or equal to 24", "#set-limits-hours_per_day-said")
        await tab.page.fill("#set-limits-hours_per_day", "8")
        await tab.page.fill("#set-limits-group_mb", "4")
        await tab.page.click("text=Save 2 changes")
        await tab.sees("in force now", "#set-limits-hours_per_day-said")
        assert "needs a restart: shoal down, then shoal up." in await tab.text("#set-limits-group_mb-said")
        assert tab.node.settings.entries["limits.hours_per_day"]["value"] == 8
        assert tab.node.settings.entries["limits.group_mb"]["pending"] == 4
        await tab.page.fill("input[type=search]", "port")
        assert await tab.page.is_disabled("#set-web-port")
        assert "SHOAL_WEB_PORT" in await tab.text("#set-web-port-said")
        # the refusal that was asked for is the one complaint
        assert [text for text in tab.complaints if "400" not in text] == []
