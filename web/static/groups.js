// The list of groups, newest first, and the way into one of them.

import { ask, asking } from "./api.js";
import { bars, button, element, panel } from "./draw.js";
import { openGroup, producer, verdictTag } from "./group.js";
import { Refresh } from "./refresh.js";
import { clock, line, mean, number } from "./text.js";
import { verdictWords, VERDICTS } from "./words.js";

const PAGE = 50;
const MAX_ROWS = 500;
const REFRESH_MS = 3000;
const COLUMNS = [["Group"], ["From"], ["Task"], ["Rewards"], ["Mean", "number"], ["Verdict"], ["Time"]];

function row(group) {
  const id = line(group.id, 64);
  return element(
    "tr", { "data-key": id },
    element("td", {}, element("a", { href: `#/groups/${encodeURIComponent(id)}`, class: "mono" }, id.slice(0, 8))),
    element("td", {}, producer(group)),
    element("td", {}, element("bdi", { class: "clip", title: line(group.environment, 200) }, line(group.environment, 60))),
    element("td", {}, bars(group.rewards ?? [], group.origin === "own")),
    element("td", { class: "number", "data-label": "mean" }, number(mean(group.rewards), 2)),
    element("td", {}, verdictTag(group.verdict), group.detail ? element("bdi", { class: "clip small quiet detail", title: line(group.detail, 400) }, line(group.detail, 120)) : null),
    element("td", {}, element("time", { class: "quiet" }, clock(group.at))),
  );
}

function select(name, options, chosen, change) {
  const known = options.some(([value]) => value === chosen) ? options : [...options, [chosen, line(chosen, 40)]];
  const made = element("select", {}, ...known.map(([value, words]) => element("option", { value }, words)));
  made.value = chosen;
  made.addEventListener("change", () => change(made.value));
  return element("label", { class: "field" }, element("span", {}, name), made);
}

function list(body, { live, query }) {
  const wanted = Object.fromEntries(["origin", "verdict", "environment", "producer"].map((name) => [name, query.get(name) ?? ""]));
  let rows = [];
  const table = element("tbody");
  const empty = element("p", { class: "empty", hidden: "" });
  const older = button("Load older", () => loadOlder());
  const set = (name) => (value) => {
    wanted[name] = value.trim();
    history.replaceState(null, "", asking("#/groups", wanted));
    rows = [];
    refresh.soon();
  };
  const peer = element("input", { type: "search", placeholder: "peer id", autocomplete: "off", spellcheck: "false", maxlength: "80" });
  peer.value = wanted.producer;
  peer.addEventListener("change", () => set("producer")(peer.value));
  const environments = element("div", { class: "field" });
  const drawEnvironments = (names) => environments.replaceWith(select("Environment", [["", "All"], ...names.map((name) => [name, line(name, 60)])], wanted.environment, set("environment")));
  const filters = element(
    "div", { class: "filters", role: "search" },
    select("From", [["", "Everybody"], ["own", "This node"], ["foreign", "Peers"]], wanted.origin, set("origin")),
    select("Verdict", [["", "All"], ...Object.keys(VERDICTS).map((name) => [name, verdictWords(name).name])], wanted.verdict, set("verdict")),
    environments,
    element("label", { class: "field wide" }, element("span", {}, "Producer"), peer),
  );
  const head = element("tr", {}, ...COLUMNS.map(([name, kind]) => element("th", { scope: "col", class: kind }, name)));
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups" }, element("table", { class: "rows" }, element("thead", {}, head), table));
  body.append(
    element("p", { class: "quiet" }, "A group is one task with several answers. The node learns from how their rewards differ."),
    panel("Newest first", null, filters, scroll, empty, element("div", { class: "pager" }, element("span"), older)),
  );

  const page = (before, until) => ask(asking("groups", { limit: PAGE, before, ...wanted }), until);
  function draw() {
    const focused = document.activeElement?.closest("tr")?.dataset.key;
    table.replaceChildren(...rows.map(row));
    if (focused) table.querySelector(`[data-key="${CSS.escape(focused)}"] a`)?.focus();
    const filtered = Object.values(wanted).some(Boolean);
    scroll.hidden = rows.length === 0;
    empty.hidden = rows.length > 0;
    empty.textContent = filtered ? "No group is like that. Take a filter away." : "No groups yet: the first appear with the first step.";
    older.hidden = rows.length < PAGE || rows.length % PAGE !== 0 || rows.length >= MAX_ROWS;
    older.previousSibling.textContent = rows.length >= MAX_ROWS ? `${number(rows.length)} shown; filter to see others.` : `${number(rows.length)} shown`;
  }
  const refresh = new Refresh(async (until) => {
    const fresh = await page(null, until);
    // what was loaded besides stays, if it follows on
    const oldest = fresh.at(-1)?.row ?? 0;
    const kept = rows.length > PAGE && rows[0].row >= oldest ? rows.filter((one) => one.row < oldest) : [];
    rows = [...fresh, ...kept].slice(0, MAX_ROWS);
    draw();
  }, REFRESH_MS, live.failed);
  async function loadOlder() {
    older.disabled = true;
    try {
      rows = [...rows, ...(await page(rows.at(-1)?.row, refresh.end.signal))].slice(0, MAX_ROWS);
      draw();
    } catch (error) {
      if (!refresh.end.signal.aborted) live.failed(error);
    }
    older.disabled = false;
  }
  const names = new Refresh(async (until) => drawEnvironments(((await ask("swarm", until)).environments ?? []).map((one) => one.name)), 0, live.failed);
  names.soon();
  refresh.soon();
  return {
    // rows under the eye must not move: only the top of the list follows
    status(now, before) { if (now.step !== before?.step && rows.length <= PAGE && scrollY < 400) refresh.soon(); },
    close() { refresh.close(); names.close(); },
  };
}

export const groups = {
  title: "Groups",
  open: (body, context) => (context.rest ? openGroup(body, context) : list(body, context)),
};
