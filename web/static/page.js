// The status page: asks the API, shows the answers, follows events. Stops asking while nobody looks.

import { ask, send, SignedOut } from "./api.js";
import { bars, element, mixBar, trendChart } from "./draw.js";
import { showGroup } from "./group.js";
import { change, clock, counts, duration, line, megabytes, number, shortPeer, shown } from "./text.js";

const STATUS_MS = 2000;
const MAX_STEPS = 500;
const MAX_EVENTS = 100;
const byId = (id) => document.getElementById(id);
const say = (id, text) => { if (byId(id).textContent !== text) byId(id).textContent = text; };

const seen = { steps: [], scored: undefined, event: 0, tables: "", answered: 0, pauseAsked: null };
let stream = null;
let timer = null;

// -- status --

const counted = (count) => (count ? ` ${number(count[0])} of ${number(count[1])}` : "");

function showStatus(now) {
  document.title = `${now.state === "TRAINING" ? `${number(now.reward, 2)} · ` : ""}${line(now.state, 20)} · ${line(now.name, 40)} · Shoal`;
  say("name", line(now.name, 64));
  say("swarm", now.swarm ? `in the swarm ${line(now.swarm, 64)}, ${number(now.peers)} ${now.peers === 1 ? "peer" : "peers"} connected` : "in no swarm yet");
  byId("state").dataset.state = now.state;
  say("state-word", line(now.state, 20));
  say("state-reason", line(now.reason, 240) || (now.stage ? `${line(now.stage, 40)}${counted(now.stage_count)} for ${duration(now.stage_seconds)}` : ""));
  byId("state-next").hidden = !now.next;
  say("state-next", line(now.next, 240));
  const stages = { ...now.stages };
  if (now.stage) stages[now.stage] = now.stage_seconds;
  byId("stages").replaceChildren(
    ...Object.entries(stages).map(([name, seconds]) =>
      element("li", name === now.stage ? { class: "now" } : {}, element("span", {}, line(name, 40) + (name === now.stage ? counted(now.stage_count) : "")), element("span", {}, `${number(seconds, 1)} s`)),
    ),
  );
  say("reward", number(now.reward, 2));
  say("reward-change", change(now.reward, now.reward_start));
  say("step", number(now.step));
  say("held-out", number(now.held_out, 2));
  say("held-out-change", change(now.held_out, now.held_out_start, now.held_out_steps?.[0]) || "measured from time to time");
  say("mix", `${number(now.own_groups)} + ${number(now.foreign_groups)}`);
  mixBar(byId("mix-bar"), now.own_groups, now.foreign_groups);
  say("speed", number(now.tokens_per_second));
  say("memory", megabytes(now.rss_mb));
  const { weights, optimizer } = now.memory ?? {};
  const parts = optimizer ? `, ${megabytes(weights / 2 ** 20)} weights, ${megabytes(optimizer / 2 ** 20)} optimizer` : "";
  say("memory-peak", `${megabytes(now.peak_rss_mb)} at most${parts}`);
  const groups = now.groups ?? {};
  say("exchange", `${number(groups.published ?? 0)} out, ${number(groups.admitted ?? 0)} in`);
  say("rejected", counts(groups.rejected) ? `refused: ${counts(groups.rejected)}` : "none refused");
  say("uptime", duration(now.uptime));
  say("model", line(now.model, 80));
  say("version", `Shoal ${line(now.version, 40)}`);
  say("peer-id", line(now.peer_id, 80));
  showPause(now);
}

// A pause begins after the step in progress: until then the button says that it is coming.
function showPause(now) {
  const paused = now.state === "PAUSED";
  if (paused || (seen.pauseAsked !== null && now.step > seen.pauseAsked + 1)) seen.pauseAsked = null;
  const coming = seen.pauseAsked !== null;
  say("pause", coming ? "Pausing after this step…" : paused ? "Resume" : "Pause");
  byId("pause").dataset.does = paused ? "resume" : "pause";
  byId("pause").disabled = coming || ["FAILED", "STOPPING"].includes(now.state);
}

async function extendSteps(step, scored) {
  const last = seen.steps.at(-1)?.step ?? Math.max(0, step - MAX_STEPS);
  if (step === last && seen.steps.length && scored === seen.scored) return;
  // a node that went back to a checkpoint counts from there again
  if (step < last) seen.steps = [];
  const after = step < last ? Math.max(0, step - MAX_STEPS) : last;
  const fresh = await ask(`steps?after=${after}&limit=${MAX_STEPS}`);
  seen.steps = [...seen.steps, ...fresh].slice(-MAX_STEPS);
  seen.scored = scored;
  // the score before the first step shown is of the step before, and 0 is the initial model's
  const before = (seen.steps[0]?.step ?? 0) - 2;
  trendChart(byId("chart"), seen.steps, await ask(before < 0 ? "evaluations" : `evaluations?after=${before}`));
}

// -- tables --

function peerRow(peer) {
  const name = element("td", { title: line(peer.peer_id, 80) });
  name.append(
    element("span", { class: peer.connected ? "dot on" : "dot", role: "img", "aria-label": peer.connected ? "connected" : "not connected" }),
    element("code", {}, shortPeer(peer.peer_id)),
  );
  return element(
    "tr", {},
    name,
    element("td", {}, element("bdi", { class: "text" }, line(peer.model, 80) || "–")),
    element("td", { class: "number", "data-label": "reputation" }, peer.banned ? "banned" : number(peer.reputation, 2)),
    element("td", { class: "number", "data-label": "announced" }, number(peer.published)),
    element("td", { class: "number", "data-label": "admitted" }, number(peer.admitted)),
    element("td", { "data-label": "refused" }, element("span", { class: "text" }, counts(peer.rejected) || "none")),
    element("td", {}, element("time", {}, clock(peer.last_seen))),
  );
}

function groupRow(group) {
  const rewards = Array.isArray(group.rewards) ? group.rewards.filter((r) => typeof r === "number") : [];
  const own = group.origin === "own";
  const open = element("button", { class: "link", type: "button", "data-group": line(group.id, 64) }, line(group.id, 8).slice(0, 8));
  open.addEventListener("click", () => guarded(() => showGroup(group.id)));
  const admitted = group.verdict === "admitted";
  const mild = ["uninformative", "stale", "replayed", "equivocation"].includes(group.verdict);
  const verdict = element("td", {}, element("span", { class: `verdict ${admitted ? "admitted" : mild ? "mild" : ""}` }, line(group.verdict, 40).replaceAll("_", " ")));
  if (group.detail) verdict.append(element("bdi", { class: "detail", title: line(group.detail, 400) }, line(group.detail, 200)));
  return element(
    "tr", {},
    element("td", {}, element("time", {}, clock(group.at))),
    element("td", {}, open),
    element("td", { title: line(group.producer, 80) }, own ? "this node" : element("code", {}, shortPeer(group.producer))),
    element("td", {}, element("bdi", { class: "text" }, line(group.environment, 80))),
    element("td", {}, bars(rewards, own)),
    element("td", { class: "number" }, rewards.length ? number(rewards.reduce((a, b) => a + b, 0) / rewards.length, 2) : "–"),
    verdict,
  );
}

async function showTables() {
  const [peers, groups] = await Promise.all([ask("peers"), ask("groups?limit=15")]);
  const said = JSON.stringify([peers, groups]);
  if (said === seen.tables) return;
  seen.tables = said;
  const focused = document.activeElement?.dataset?.group;
  byId("peers").replaceChildren(...peers.slice(0, 100).map(peerRow));
  byId("groups").replaceChildren(...groups.map(groupRow));
  if (focused) document.querySelector(`[data-group="${CSS.escape(focused)}"]`)?.focus();
  for (const [name, rows] of [["peers", peers], ["groups", groups]]) {
    byId(`no-${name}`).hidden = rows.length > 0;
    byId(name).closest(".scroll").hidden = rows.length === 0;
  }
}

// -- events --

function addEvents(events) {
  const list = byId("events");
  for (const event of events.filter((event) => event.id > seen.event)) {
    seen.event = event.id;
    const level = ["warning", "error"].includes(event.level) ? event.level : "info";
    list.prepend(
      element(
        "li", { class: level },
        element("time", {}, clock(event.at)),
        element("span", { class: "kind" }, line(event.kind, 40)),
        element("bdi", { class: "message" }, line(event.message, 400)),
      ),
    );
  }
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
  byId("no-events").hidden = list.children.length > 0;
}

async function follow() {
  if (stream && stream.readyState !== EventSource.CLOSED) return;
  // the newest ones first: a page that was away for long must not replay a week
  addEvents(await ask(`events?limit=${MAX_EVENTS}`));
  if (document.hidden) return;
  stream = new EventSource(`/api/v1/events/stream?after=${seen.event}`);
  stream.addEventListener("message", (message) => addEvents([JSON.parse(message.data)]));
}

function leave() {
  clearTimeout(timer);
  stream?.close();
  stream = null;
}

// -- the round --

async function guarded(work) {
  try {
    await work();
    seen.answered = Date.now();
    byId("offline").hidden = true;
    byId("node").classList.remove("is-stale");
    return true;
  } catch (error) {
    if (error instanceof SignedOut) {
      leave();
      byId("node").hidden = true;
      byId("signin").hidden = false;
      document.title = "Sign in · Shoal";
      return false;
    }
    const silent = seen.answered ? ` for ${duration((Date.now() - seen.answered) / 1000)}` : "";
    say("offline", error instanceof TypeError || error.name === "TimeoutError" ? `The node has not answered${silent}. Start it with: shoal up` : shown(error.message, 400));
    byId("offline").hidden = false;
    byId("node").hidden = false;
    byId("node").classList.add("is-stale");
    return true;
  }
}

async function round() {
  clearTimeout(timer);
  const goOn = await guarded(async () => {
    const now = await ask("status");
    byId("signin").hidden = true;
    byId("node").hidden = false;
    showStatus(now);
    await Promise.all([extendSteps(now.step, now.held_out_steps?.[1]), showTables(), follow()]);
  });
  clearTimeout(timer);
  if (goOn && !document.hidden) timer = setTimeout(round, STATUS_MS);
}

byId("pause").addEventListener("click", async () => {
  byId("pause").disabled = true;
  const does = byId("pause").dataset.does;
  await guarded(async () => {
    const now = await send(does, does === "pause" ? { reason: "asked for on the status page" } : {});
    seen.pauseAsked = does === "pause" ? now.step : null;
    showStatus(now);
  });
});
byId("signout").addEventListener("click", () => guarded(async () => { await send("logout", {}); throw new SignedOut(); }));
document.addEventListener("visibilitychange", () => (document.hidden ? leave() : round()));

// a sign-in that was refused ends on /login: say so, and leave the spent code out of the address bar
if (location.pathname === "/login") {
  byId("signin-problem").hidden = false;
  history.replaceState(null, "", "/");
}
round();
