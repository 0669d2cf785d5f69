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
"""


@pytest.fixture
def run(tmp_path):
    """Runs the body of an async function; what it returns."""
    shutil.copytree(Path(web.__file__).parent / "static", tmp_path / "static")
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(body):
        script = f"{STUB}\nconst got = await (async () => {{ {body} }})();\nconsole.log(JSON.stringify(got)); process.exit(0);"
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
const until = async (holds) => { for (let i = 0; i < 500 && !holds(); i++) await new Promise((on) => setTimeout(on, 10)); };
const quiet = () => new Promise((on) => setTimeout(on, 50));
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
