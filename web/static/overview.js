// Is it working, is it getting better, is the swarm helping, and what is it doing right now?

import { ask } from "./api.js";
import { element, eventRow, facts, icon, panel, settle } from "./draw.js";
import { band, Chart, colour, curve, dots, smoothed } from "./plot.js";
import { Refresh } from "./refresh.js";
import { ago, clock, counts, duration, line, mean, megabytes, moment, number, plural } from "./text.js";
import { stageWords, stateWords } from "./words.js";

const SERIES_MS = 2000;
const EVENTS = 6;

// -- is it working, and what is it doing right now --

const HELD = { quiet_hours: "quiet hours", hours_per_day: "the hours of training a day", disk: "the disk limit" };

// The clocks of a status, moved on to now: the node says them anew only when something else has changed.
function ticked(now, seconds) {
  const later = (value) => (typeof value === "number" ? value + seconds : value);
  return { ...now, stage_seconds: later(now.stage_seconds), last_step_age: later(now.last_step_age), uptime: later(now.uptime) };
}

function hero(now) {
  const { word, tone, icon: sign } = stateWords(now.state);
  const untrained = now.step === 0 && ["STARTING", "TRAINING"].includes(now.state);
  const reason = line(now.reason, 240) || (untrained ? "The first step is on its way." : "");
  const held = HELD[now.held_by] ? `Held by ${HELD[now.held_by]}${now.resumes_at ? `; goes on by itself at ${moment(now.resumes_at, true)}` : ""}.` : "";
  const sentence = element(
    "div", { class: "sentence" },
    element("h2", {}, element("span", { class: "sign" }, icon(sign)), word),
    element("p", { class: "lead" }, reason),
    held ? element("p", {}, held, " ", element("a", { href: "#/settings?search=limits" }, "Change limits")) : null,
    now.next ? element("p", { class: "next" }, element("strong", {}, "What to do: "), line(now.next, 240)) : null,
  );
  const figures = facts("figures", [
    ["Step", number(now.step)],
    ["Last step", typeof now.last_step_age === "number" ? ago(Date.now() / 1000 - now.last_step_age) : now.step ? "before this start" : "none yet"],
    ["Answering", [number(now.tokens_per_second), " ", element("small", {}, "tokens/s")]],
    ["Trained today", duration(now.trained_today_seconds)],
  ]);
  return { tone, parts: [element("div", { class: "hero-top" }, sentence, figures), timeline(now)] };
}

function timeline(now) {
  const busy = ["STARTING", "RESUMING", "TRAINING", "WAITING", "STOPPING"].includes(now.state);
  if (!busy || !now.stage) return element("div", { hidden: "" });
  const past = Object.entries(now.stages ?? {}).filter(([name]) => name !== now.stage);
  const [done, all] = now.stage_count ?? [];
  const bar = element("div", { class: "stage-bar", "aria-hidden": "true" });
  for (const [name, seconds] of [...past, [now.stage, now.stage_seconds]]) {
    const part = element("i", { class: name === now.stage ? "now" : "" });
    part.style.flexGrow = String(Math.max(0.2, seconds ?? 0));
    bar.append(part);
  }
  const steps = past.map(([name, seconds]) => element("li", {}, icon("good"), stageWords(name), element("span", {}, `${number(seconds, 1)} s`)));
  const current = element(
    "li", { class: "now", "aria-current": "step" },
    icon("run"), stageWords(now.stage),
    element("span", {}, `${all ? `${number(done)} of ${number(all)}, ` : ""}${number(now.stage_seconds, 1)} s`),
  );
  const title = now.state === "TRAINING" ? `Right now: step ${number(now.step + 1)}` : "Right now";
  return element("div", { class: "timeline" }, element("h3", {}, title), bar, element("ol", { class: "stages" }, ...steps, current));
}

// -- is it getting better --

// {tone, words, start, now}: `start` and `now` are means of the first and last fortieth (5 values at least). The words are of
// fifths, which differ where they are more than two standard errors apart.
export function progress(values) {
  const known = values.filter((value) => typeof value === "number");
  const ends = (share) => { const part = Math.max(5, Math.ceil(known.length / share)); return [known.slice(0, part), known.slice(-part)]; };
  const [start, now] = ends(40).map(mean);
  return { start, now, ...judged(known, ...ends(5)) };
}

function judged(known, first, last) {
  if (known.length < 10) return { tone: "quiet", words: "Too early to say: it takes some tens of steps." };
  const spread = (list) => mean(list.map((value) => (value - mean(list)) ** 2)) / list.length;
  const error = 2 * Math.sqrt(spread(first) + spread(last));
  const [from, to] = [mean(first), mean(last)];
  const ends = `from ${number(from, 2)} in the first fifth of its steps to ${number(to, 2)} in the last`;
  if (to - from > error) return { tone: "good", words: from > 0.005 ? `Yes: reward is ${number(to / from, 1)} times the start, ${ends}.` : `Yes: reward rose, ${ends}.` };
  if (from - to > error) return { tone: "bad", words: `No: reward fell, ${ends}.` };
  return { tone: "warn", words: `No clear change yet: about ${number(to, 2)}.` };
}

function since(now, start, step) {
  return typeof start === "number" ? ` from ${number(start, 2)} at ${step ? `step ${number(step)}` : "the start"}` : "";
}

export function rewardPicture(series) {
  if (!series || series.step.length < 2) return null;
  const { step, reward, reward_low: low, reward_high: high, evaluations } = series;
  const held = evaluations ?? { step: [], mean: [] };
  return {
    traces: [
      ...(series.width > 1 ? band(step, low, high, "own") : []),
      curve(step, reward, series.width > 1 ? "mean" : "reward", { width: 1, strength: 0.45 }),
      curve(step, smoothed(reward), "trend", { width: 3 }),
      ...(held.step.length ? [dots(held.step, held.mean, "held-out")] : []),
    ],
    layout: { yaxis: { rangemode: "tozero" }, xaxis: { range: [Math.min(step[0], held.step[0] ?? step[0]), step.at(-1)] } },
    hover: true,
  };
}

export const REWARD_KEYS = element("p", { class: "keys" }, element("span", { class: "key own" }, "reward of its own answers, and their range"), element("span", { class: "key held" }, "held-out tasks, never trained on"));

// -- is the swarm helping --

function helping(now, series) {
  const all = now.own_groups + now.foreign_groups;
  const recent = series?.step.length ? series.foreign_groups.slice(-Math.max(5, Math.ceil(series.step.length / 20))) : [];
  if (!now.swarm) return { tone: "warn", words: "It is in no swarm: it learns from its own answers alone." };
  if (!all) return { tone: "quiet", words: "Nothing trained on yet." };
  if (now.foreign_groups) return { tone: "good", words: `Yes: ${number(now.foreign_groups)} of ${number(all)} groups in the last step came from peers.` };
  if (mean(recent)) return { tone: "good", words: "Yes, though the last step had no group from peers." };
  if (!now.peers) return { tone: "warn", words: "Not now: no peer is connected, it trains alone." };
  return { tone: "warn", words: "Not yet: peers are there, but none of their groups has been trained on lately." };
}

export function mixPicture(series) {
  if (!series || series.step.length < 2) return null;
  const area = (values, name, tone) => ({
    ...curve(series.step, values, name, { tone, width: 0 }), stackgroup: "origin", fillcolor: colour(tone, 0.8), hovertemplate: "%{y:.1f}",
  });
  return { traces: [area(series.own_groups, "own groups", "own"), area(series.foreign_groups, "from peers", "foreign")], layout: { yaxis: { rangemode: "tozero" } }, hover: true };
}

const MIX_KEYS = element("p", { class: "keys" }, element("span", { class: "key own" }, "its own groups"), element("span", { class: "key foreign" }, "groups from peers"));

export const overview = {
  title: "Overview",
  open(body, { live }) {
    let series = null;
    const state = element("section", { class: "panel hero", "aria-label": "State of the node" });
    const chart = new Chart({ height: 248, label: "Reward over the steps", empty: "The curve starts with the second step." });
    const mix = new Chart({ height: 176, label: "Groups trained on, by origin", empty: "Appears with the second step." });
    const better = { lead: element("p", { class: "lead" }), figures: element("div", {}, element("dl")) };
    const help = { lead: element("p", { class: "lead" }), figures: element("div", {}, element("dl")) };
    const events = element("ol", { class: "events" });
    const node = element("div", {}, element("dl"));
    body.append(
      state,
      panel("Is it getting better?", element("a", { href: "#/training" }, "Training"), better.lead, better.figures, chart.holder, REWARD_KEYS.cloneNode(true)),
      panel("Is the swarm helping?", element("a", { href: "#/swarm" }, "Swarm"), help.lead, help.figures, mix.holder, MIX_KEYS.cloneNode(true)),
      panel("What happened lately", element("a", { href: "#/logs" }, "Logs & events"), events),
      panel("This node", element("a", { href: "#/settings" }, "Settings"), node),
    );

    const lead = (place, { tone, words }) => {
      place.dataset.tone = tone;
      place.className = `lead ${tone}`;
      if (place.textContent !== words) place.textContent = words;
    };
    const showHero = () => {
      const { tone, parts } = hero(ticked(live.status, live.age()));
      state.dataset.tone = tone;
      if (state.children.length) parts.forEach((part, i) => settle(state.children[i], part));
      else state.append(...parts);
    };
    const showStatus = (now) => {
      showHero();
      const { start, now: latest } = progress(series?.reward ?? []);
      settle(better.figures.firstChild, facts("figures", [
        ["Reward", [number(latest ?? now.reward, 2), element("small", {}, since(latest, start))]],
        ["Held-out score", [number(now.held_out, 2), element("small", {}, typeof now.held_out === "number" ? since(now.held_out, now.held_out_start, now.held_out_steps?.[0]) : " measured from time to time")]],
      ]));
      lead(help.lead, helping(now, series));
      settle(help.figures.firstChild, facts("figures", [
        ["Peers", number(now.peers)],
        ["Reward of own groups", number(mean(series?.own_reward.slice(-20)), 2)],
        ["Of peers' groups", number(mean(series?.foreign_reward.slice(-20)), 2)],
        ["Learned from, in all", [number(now.groups?.trained_foreign ?? 0), element("small", {}, " peers' groups")]],
      ]));
      const { weights, optimizer } = now.memory ?? {};
      settle(node.firstChild, facts("facts", [
        ["Model", line(now.model, 80)],
        ["Answers by", line(now.engine, 160)],
        ["Memory", `${megabytes(now.rss_mb)}, at most ${megabytes(now.peak_rss_mb)}${optimizer ? `; ${megabytes(weights / 2 ** 20)} weights, ${megabytes(optimizer / 2 ** 20)} optimizer` : ""}`],
        ["Exchange", `${number(now.groups?.published ?? 0)} groups given, ${number(now.groups?.admitted ?? 0)} taken`],
        ["Refused", counts(now.groups?.rejected).replaceAll("_", " ") || "none"],
        ["Running for", duration(now.uptime)],
        ["Peer id", element("code", {}, line(now.peer_id, 80))],
      ]));
    };
    const showEvents = () => {
      const latest = live.events.filter((event) => event.level !== "debug").slice(-EVENTS).reverse();
      events.replaceChildren(...latest.map((event) => eventRow(event, clock(event.at), 240)));
      if (!latest.length) events.replaceChildren(element("li", { class: "empty" }, "Nothing has happened yet."));
    };
    const refresh = new Refresh(async (until) => {
      series = await ask("series?points=300", until);
      lead(better.lead, progress(series.reward));
      chart.draw(() => rewardPicture(series), `Reward over ${plural(series.last ?? 0, "step")}. ${better.lead.textContent}`);
      mix.draw(() => mixPicture(series), `Groups trained on by origin over ${plural(series.last ?? 0, "step")}`);
      showStatus(live.status);
    }, SERIES_MS, live.failed);

    showStatus(live.status);
    showEvents();
    refresh.soon();
    const ticking = setInterval(() => { if (!document.hidden) showHero(); }, 1000);
    return {
      status(now, before) {
        showStatus(now);
        if (now.step !== before?.step || now.held_out_steps?.[1] !== before?.held_out_steps?.[1]) refresh.soon();
      },
      fresh: showEvents,
      events: showEvents,
      close() {
        clearInterval(ticking);
        refresh.close();
        chart.close();
        mix.close();
      },
    };
  },
};
