// The frame around the pages: which one is shown, the node's state and pause button, signed out, not reachable.

import { ask, Refused, send, SignedOut } from "./api.js";
import { button, element, icon } from "./draw.js";
import { groups } from "./groups.js";
import { logs } from "./logs.js";
import { overview } from "./overview.js";
import { peers } from "./peers.js";
import { settings } from "./settings.js";
import { Stream } from "./stream.js";
import { swarm } from "./swarm.js";
import { clock, duration, line, number, plural, shown } from "./text.js";
import { training } from "./training.js";
import { stateWords } from "./words.js";

const PAGES = { overview, training, groups, peers, swarm, logs, settings };
const entries = Object.entries(PAGES);
const IN_BAR = 4; // pages that a phone shows without "More"
const MAX_EVENTS = 2000;
const FIRST_EVENTS = 200;
const SILENT_MS = 3000;
const BURST_MS = 150;
const byId = (id) => document.getElementById(id);
const say = (id, text) => { if (byId(id).textContent !== text) byId(id).textContent = text; };

// What pages are given: `status` and the seconds since it was true, `events` (oldest first, bounded), and how to say that
// something failed.
const live = { status: null, events: [], failed, age: () => ((downSince ?? Date.now()) - answered) / 1000 };
let open = null; // the page that is shown
let answered = 0;
let downSince = null;
let ticking = null;
let fresh = 0; // events that the page has not been told of
let burst = null;

// -- what is said of the node everywhere --

function tell(now) {
  const before = live.status;
  live.status = now;
  reached();
  const { word, tone, icon: sign } = stateWords(now.state);
  document.title = `${word}${typeof now.reward === "number" ? ` ${number(now.reward, 2)}` : ""} · ${line(now.name, 40)} · Shoal`;
  say("name", line(now.name, 64));
  say("swarm", now.swarm ? `${line(now.swarm, 64)}, ${plural(now.peers, "peer")}` : "in no swarm yet");
  if (byId("state").dataset.state !== now.state) {
    byId("state").dataset.state = now.state;
    byId("state").dataset.tone = tone;
    byId("state").replaceChildren(icon(sign), word);
  }
  say("version", `Shoal ${line(now.version, 24)}`);
  showPause(now);
  if (open === null) route();
  else open.status?.(now, before);
}

// By what holds it, because a node that has done all its steps is idle whether it is paused or not.
function showPause(now) {
  const byLimit = now.state === "PAUSED" && ["quiet_hours", "hours_per_day"].includes(now.held_by);
  const paused = byLimit || now.held_by === "person";
  const does = paused ? "resume" : "pause";
  const told = byLimit ? "Train now" : paused ? "Resume" : "Pause";
  const pause = byId("pause");
  pause.disabled = ["FAILED", "STOPPING"].includes(now.state);
  if (pause.dataset.told === told) return;
  Object.assign(pause.dataset, { does, told });
  pause.title = byLimit ? "Train in spite of the limit, until it ends" : paused ? "Go on training" : "Stop training after the step in progress; nothing is lost. The node stays in the swarm.";
  pause.replaceChildren(icon(paused ? "play" : "pause"), told);
}

async function togglePause() {
  const does = byId("pause").dataset.does;
  byId("pause").disabled = true;
  try {
    tell(await send(does, does === "pause" ? { reason: "asked for on the dashboard" } : {}));
  } catch (error) {
    byId("pause").disabled = false;
    failed(error);
  }
}

// -- which page --

function route() {
  if (live.status === null) return;
  const [path, query = ""] = location.hash.slice(2).split("?");
  const [name, ...rest] = path.split("/");
  const key = Object.hasOwn(PAGES, name) ? name : "overview";
  const first = open === null;
  open?.close?.();
  byId("nav").classList.remove("open");
  byId("more").setAttribute("aria-expanded", "false");
  for (const link of byId("links").querySelectorAll("a")) {
    if (link.dataset.page === key) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("more").classList.toggle("here", entries.findIndex(([one]) => one === key) >= IN_BAR);
  const body = element("div", { class: `body ${key}`, id: "body" });
  byId("body").replaceWith(body);
  open = PAGES[key].open(body, { live, query: new URLSearchParams(query), rest: plain(rest.join("/")) });
  say("title", open.title ?? PAGES[key].title);
  if (first) return;
  scrollTo(0, 0);
  byId("title").focus({ preventScroll: true });
}

// What an address says, where it is encoded as it should be.
function plain(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function drawFrame() {
  byId("links").replaceChildren(
    ...entries.map(([key, page]) => element("li", {}, element("a", { href: `#/${key}`, "data-page": key }, icon(key), page.short ?? page.title))),
  );
  byId("more").replaceChildren(icon("more"), "More");
  byId("more").addEventListener("click", () => byId("more").setAttribute("aria-expanded", String(byId("nav").classList.toggle("open"))));
  for (const choice of byId("theme").querySelectorAll("input")) {
    choice.checked = choice.value === window.storedTheme();
    choice.addEventListener("change", () => window.setTheme(choice.value));
  }
  // not a jump to an id: what follows # is the page
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); byId("title").focus(); });
  byId("pause").addEventListener("click", togglePause);
  byId("signout").addEventListener("click", async () => {
    try {
      await send("logout", {});
      signedOut();
    } catch (error) {
      failed(error);
    }
  });
}

// -- reached, not reached, signed out --

function reached() {
  answered = Date.now();
  downSince = null;
  clearInterval(ticking);
  ticking = null;
  byId("offline").hidden = true;
  byId("signin").hidden = true;
  byId("node").hidden = false;
  byId("node").classList.remove("is-stale");
}

function sayDown() {
  if (downSince === null || Date.now() - downSince < SILENT_MS) return;
  const since = answered ? ` for ${duration((Date.now() - answered) / 1000)}. What you see is from ${clock(answered / 1000)}` : "";
  byId("offline").replaceChildren(`The node does not answer${since}. If it was stopped, start it with `, element("code", {}, "shoal up"), "; this page goes on by itself.");
  byId("offline").hidden = false;
  byId("node").hidden = false;
  byId("node").classList.add("is-stale");
}

function signedOut() {
  stream.close();
  open?.close?.();
  open = null;
  clearInterval(ticking);
  live.status = null;
  byId("node").hidden = true;
  byId("signin").hidden = false;
  document.title = "Sign in · Shoal";
}

// Whether it is worth trying again by itself.
function failed(error) {
  if (error instanceof SignedOut) {
    signedOut();
    return false;
  }
  if (error instanceof Refused) {
    const words = element("p", { class: "notice", role: "alert" }, shown(error.message, 400), " ");
    words.append(button("Dismiss", () => words.remove()));
    byId("page").querySelector(".notice[role=alert]:not(#offline)")?.remove();
    byId("body").before(words);
    return true;
  }
  downSince ??= Date.now();
  sayDown();
  ticking ??= setInterval(sayDown, 1000);
  return true;
}

// -- events --

// Pages are told of several at once: in a burst each one by itself would cost a layout.
function addEvent(event) {
  live.events.push(event);
  if (live.events.length > MAX_EVENTS) live.events.splice(0, live.events.length - MAX_EVENTS);
  fresh = Math.min(fresh + 1, MAX_EVENTS);
  burst ??= setTimeout(() => {
    burst = null;
    open?.fresh?.(live.events.slice(-fresh));
    fresh = 0;
  }, BURST_MS);
}

// The newest events: those that follow on what is known are added; where there is a hole, they take its place.
async function catchUp() {
  const newest = await ask(`events?limit=${FIRST_EVENTS}`);
  const known = live.events.at(-1)?.id ?? 0;
  if (newest.length && live.events.length && newest[0].id <= known + 1 && newest.at(-1).id >= known) {
    for (const event of newest.filter((event) => event.id > known)) addEvent(event);
  } else {
    live.events = newest;
    fresh = 0;
    open?.events?.();
  }
  return live.events.at(-1)?.id ?? 0;
}

const stream = new Stream({
  status: tell,
  event: addEvent,
  gap: () => begin(),
  up: reached,
  down: (error) => failed(error ?? new TypeError("the stream was cut")),
});

async function begin() {
  try {
    const [now, seen] = await Promise.all([ask("status"), catchUp()]);
    tell(now);
    if (!document.hidden) stream.open(live.events.at(-1)?.id ?? seen); // others may have come while this was asked
  } catch (error) {
    if (failed(error)) setTimeout(() => { if (!document.hidden) begin(); }, 2000);
  }
}

document.addEventListener("visibilitychange", () => (document.hidden ? stream.close() : begin()));
addEventListener("hashchange", route);
// a sign-in that was refused ends on /login: say so, and leave the spent code out of the address bar
if (location.pathname === "/login") {
  byId("signin-problem").hidden = false;
  history.replaceState(null, "", "/");
}
drawFrame();
begin();
