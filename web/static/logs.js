// What the node said, live. Bounded: the page keeps as many lines as the frame does.

import { ask } from "./api.js";
import { button, element, eventRow, icon, panel } from "./draw.js";
import { moment, number, plural } from "./text.js";

const LEVELS = [["debug", "Everything"], ["info", "Info and worse"], ["warning", "Warnings and errors"], ["error", "Errors"]];
const RANK = { debug: 0, info: 1, warning: 2, error: 3 };
const MAX_LINES = 2000;
const OLDER = 200;

const stamp = (at) => {
  const day = moment(at);
  const seconds = String(new Date(at * 1000).getSeconds()).padStart(2, "0");
  return day === "–" ? day : `${day}:${seconds}`;
};

export const logs = {
  title: "Logs & events",
  short: "Logs",
  open(body, { live }) {
    let least = "info";
    let text = "";
    let following = true;
    let missed = 0;
    let older = [];
    const list = element("ol", { class: "events" });
    const view = element("div", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Events, newest last" }, list);
    const empty = element("p", { class: "empty", hidden: "" });
    const count = element("span", { class: "quiet" });
    const end = new AbortController();
    const level = element("select", {}, ...LEVELS.map(([value, words]) => element("option", { value }, words)));
    level.value = least;
    const search = element("input", { type: "search", placeholder: "word", maxlength: "80", autocomplete: "off" });
    const follow = button("", () => { following = !following; missed = 0; if (following) draw(); say(); }, { "aria-pressed": "true" });
    const more = button("Load older", () => loadOlder());
    level.addEventListener("change", () => { least = level.value; draw(); });
    search.addEventListener("input", () => { text = search.value.trim().toLowerCase(); draw(); });
    body.append(panel(
      "Newest last", null,
      element("div", { class: "filters", role: "search" }, element("label", { class: "field" }, element("span", {}, "Level"), level), element("label", { class: "field wide" }, element("span", {}, "Contains"), search), follow),
      element("p", { class: "row log-more" }, more, count),
      view, empty,
      element("p", { class: "quiet small" }, "The whole log, with what is no event: ", element("code", {}, "shoal logs -f"), "."),
    ));

    const wanted = (event) => (RANK[event.level] ?? 1) >= RANK[least] && (!text || `${event.kind} ${event.message}`.toLowerCase().includes(text));
    const kept = () => [...older, ...live.events].slice(-MAX_LINES);
    function say() {
      follow.setAttribute("aria-pressed", String(following));
      follow.replaceChildren(icon(following ? "pause" : "play"), following ? "Hold" : missed ? `Follow (${number(missed)} new)` : "Follow");
      const shown = list.children.length;
      count.textContent = `${number(shown)} of ${plural(kept().length, "event")} shown`;
      empty.hidden = shown > 0;
      view.hidden = shown === 0;
      empty.textContent = kept().length ? "Nothing like that among these. Change the level or the word, or load older ones." : "Nothing has happened yet.";
      const first = kept()[0]?.id ?? 1;
      more.hidden = first <= 1 || kept().length >= MAX_LINES;
    }
    function draw() {
      list.replaceChildren(...kept().filter(wanted).map((event) => eventRow(event, stamp(event.at))));
      say();
      if (following) view.scrollTop = view.scrollHeight;
    }
    async function loadOlder() {
      more.disabled = true;
      const first = kept()[0].id;
      try {
        const after = Math.max(0, first - 1 - OLDER);
        const found = await ask(`events?after=${after}&limit=${OLDER}`, end.signal);
        older = [...found.filter((event) => event.id < first), ...older].slice(0, MAX_LINES);
        const height = view.scrollHeight;
        following = false;
        draw();
        view.scrollTop += view.scrollHeight - height;
      } catch (error) {
        if (!end.signal.aborted) live.failed(error);
      }
      more.disabled = false;
    }
    draw();
    return {
      fresh(events) {
        if (following) {
          list.append(...events.filter(wanted).map((event) => eventRow(event, stamp(event.at))));
          while (list.children.length > MAX_LINES) list.firstChild.remove();
        } else missed += events.length;
        say();
        if (following) view.scrollTop = view.scrollHeight;
      },
      events() { older = []; draw(); },
      close: () => end.abort(),
    };
  },
};
