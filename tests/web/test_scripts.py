"""Modules of the page under Node.js, with no page around them: what needs no browser to be tried."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import web

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js on the PATH")
STUB = """
const anything = new Proxy(function () {}, {
  get: (_, name) => (name === Symbol.toPrimitive ? () => "" : anything),
  set: () => true, apply: () => anything, construct: () => anything,
});
globalThis.document = Object.assign(new EventTarget(), {
  hidden: false, body: anything, head: anything, createElement: () => anything, createElementNS: () => anything,
});
globalThis.window = anything;
const wait = (milliseconds) => new Promise((on) => setTimeout(on, milliseconds));
const until = async (holds) => { for (let i = 0; i < 500 && !holds(); i++) await wait(10); };
"""


@pytest.fixture
def run(tmp_path):
    """Runs the body of an async function; what it returns."""
    shutil.copytree(Path(web.__file__).parent / "static", tmp_path / "static")
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(body):
        script = f"{STUB} console.log(JSON.stringify(await (async () => {{ {body} }})())); process.exit(0);"
        (tmp_path / "script.js").write_text(script)
        done = subprocess.run(
            [NODE, "script.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


REFRESH = """
const { Refresh } = await import("./static/refresh.js");
const { Refused, SignedOut } = await import("./static/api.js");
let done = 0, failed = 0;
const quiet = () => wait(50);
"""


def test_what_was_wanted_in_a_hidden_tab_is_done_once_it_is_seen(run):
    got = run(
        REFRESH
        + """
        document.hidden = true;
        const refresh = new Refresh(() => { done++; }, 0, () => { failed++; });
        refresh.soon();
        await quiet();
        const before = done;
        document.hidden = false;
        document.dispatchEvent(new Event("visibilitychange"));
        await until(() => done);
        document.dispatchEvent(new Event("visibilitychange"));
        await quiet();
        refresh.soon();
        refresh.close();
        await quiet();
        return [before, done, failed];
        """
    )
    assert got == [0, 1, 0]


def test_what_failed_is_done_again_unless_the_node_refused_it(run):
    got = run(
        REFRESH
        + """
        const fails = (error) => new Refresh(() => { if (++done === 1) throw error; }, 0, () => { failed++; });
        const counts = [];
        for (const error of [new TypeError("fetch failed"), new Refused(404, "none", "look"), new SignedOut()]) {
          done = failed = 0;
          const refresh = fails(error);
          refresh.soon();
          await until(() => failed);
          await quiet();
          const early = done;
          if (refresh.timer !== null) await until(() => done > 1);
          refresh.close();
          counts.push([early, done, failed]);
        }
        return counts;
        """
    )
    assert got == [[1, 2, 1], [1, 1, 1], [1, 1, 1]]


def test_a_stream_that_is_opened_again_begins_after_the_newest_event(run):
    got = run(
        """
        const opened = [];
        globalThis.EventSource = class extends EventTarget {
          constructor(url) { super(); opened.push(this); this.after = Number(url.split("after=")[1]); }
          close() {}
        };
        const event = (id) => ({ id, at: 0, level: "info", kind: "step", message: "" });
        const status = { state: "TRAINING", held_by: null, name: "node", swarm: "", version: "", groups: {} };
        let release = null;
        globalThis.fetch = async (url) => {
          if (!url.includes("/status")) return { ok: true, json: async () => [event(1)] };
          if (opened.length) await new Promise((on) => { release = on; });
          return { ok: true, json: async () => status };
        };
        Object.assign(globalThis, { location: { hash: "#/logs", pathname: "/" }, addEventListener: () => {} });
        document.getElementById = document.querySelector = () => anything;
        await import("./static/page.js");
        await until(() => opened.length === 1);
        opened[0].dispatchEvent(new Event("gap"));
        await until(() => release);
        await wait(50);  // the older events are there by then, and the status is not
        opened[0].dispatchEvent(new MessageEvent("message", { data: JSON.stringify(event(2)) }));
        release();
        await until(() => opened.length === 2);
        return opened.map((one) => one.after);
        """
    )
    assert got == [1, 2]


def test_a_time_of_the_node_is_told_with_its_zone(run):
    got = run(
        """
        process.env.TZ = "UTC";
        const { moment } = await import("./static/text.js");
        const noon = new Date().setUTCHours(12, 0, 0, 0) / 1000;
        return [moment(noon), moment(noon, true)];
        """
    )
    assert got == ["12:00", "12:00 UTC"]


def test_whether_it_gets_better_is_told_by_the_means_that_decide_it(run):
    got = run(
        """
        const { progress } = await import("./static/overview.js");
        const parts = [[5, 0.9], [35, 0.2], [115, 0.4], [40, 0.6], [5, 0.1]];  // ends and fifths disagree
        const run = parts.flatMap(([count, value]) => Array(count).fill(value));
        return [run, run.toReversed(), Array(20).fill(0.25), [0.5]].map((values) => progress(values).words);
        """
    )
    assert got == [
        "Yes: reward is 1.9 times the start, from 0.29 in the first fifth of its steps to 0.54 in the last.",
        "No: reward fell, from 0.54 in the first fifth of its steps to 0.29 in the last.",
        "No clear change yet: about 0.25.",
        "Too early to say: it takes some tens of steps.",
    ]
