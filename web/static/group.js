// One group whole: the task, every answer with its parts, what became of it, and what others answered.

import { ask, Refused } from "./api.js";
import { button, element, facts, icon, panel } from "./draw.js";
import { Refresh } from "./refresh.js";
import { line, mean, moment, number, shortPeer, shown } from "./text.js";
import { verdictWords } from "./words.js";

const MAX_TEXT = 6000;
const LONG = 240;
const MAX_PIECES = 3000;
const CARDS = 8;
const MAX_CARDS = 64;
const SIBLINGS = 3;
// probabilities between the six steps of heat
const STEPS = [0.9, 0.5, 0.2, 0.05, 0.01];
const HEAT = ["likely, over 90 %", "50 to 90 %", "20 to 50 %", "5 to 20 %", "1 to 5 %", "a surprise, under 1 %"];

export function verdictTag(verdict) {
  const { name, tone, meaning } = verdictWords(verdict);
  return element("span", { class: "tag", "data-tone": tone, title: meaning }, name);
}

export function producer(group) {
  return group.origin === "own"
    ? element("span", { class: "from" }, "this node")
    : element("span", { class: "from peer", title: line(group.producer, 80) }, element("code", {}, shortPeer(group.producer)));
}

function heat(logprob) {
  if (typeof logprob !== "number") return null;
  const probability = Math.exp(logprob);
  const step = STEPS.findIndex((least) => probability >= least);
  return step < 0 ? STEPS.length : step;
}

// Text that may be long scrolls in itself, and is then a stop for the keyboard.
function quoted(text) {
  return element("pre", { dir: "auto", tabindex: text.length > LONG ? "0" : null }, text);
}

// Neighbours of one step become one element, so that long answers stay light.
function heated(pieces) {
  const text = element("pre", { dir: "auto", tabindex: pieces.length > LONG / 8 ? "0" : null });
  let run = "";
  let step = null;
  const put = () => {
    if (run) text.append(step === null ? run : element("span", { class: `heat-${step}` }, run));
    run = "";
  };
  for (const piece of pieces.slice(0, MAX_PIECES)) {
    const next = heat(piece.logprob);
    if (next !== step) put();
    step = next;
    run += shown(piece.text, 200);
  }
  put();
  if (pieces.length > MAX_PIECES) text.append(`… (${number(pieces.length)} tokens)`);
  return text;
}

function card(completion, i, hot) {
  const claimed = typeof completion.reward === "number" && completion.claimed !== completion.reward ? `claimed ${number(completion.claimed, 2)}` : "";
  const parts = Object.entries(completion.parts ?? {}).filter(([name]) => name !== "reward").slice(0, 8);
  const text = hot && completion.pieces ? heated(completion.pieces) : quoted(shown(completion.text, MAX_TEXT));
  const reward = completion.reward ?? completion.claimed;
  return element(
    "article", { class: "answer", "data-tone": reward >= 0.5 ? "good" : "quiet" },
    element("header", {}, element("h3", {}, `Answer ${i + 1}`), element("span", { class: "tag", "data-tone": reward >= 0.5 ? "good" : "quiet" }, `reward ${number(reward, 2)}`), claimed ? element("span", { class: "tag", "data-tone": "bad" }, claimed) : null),
    text,
    element("footer", { class: "quiet small" }, [`${number(completion.tokens)} tokens`, completion.finish === "length" ? "cut off" : `ended by ${line(completion.finish, 40)}`, ...parts.map(([name, value]) => `${line(name, 40)} ${number(value, 2)}`)].join(" · ")),
  );
}

// -- what others answered --

const answerOf = (completion) => String(completion.text ?? "").trim();

// Answers of one group, equal ones together, most frequent first; those that no other group has are marked.
function column(group, elsewhere) {
  const found = new Map();
  for (const completion of (group.completions ?? []).slice(0, MAX_CARDS)) {
    const text = answerOf(completion);
    const entry = found.get(text) ?? { count: 0, reward: completion.reward ?? completion.claimed };
    entry.count += 1;
    found.set(text, entry);
  }
  const answers = [...found].sort((a, b) => b[1].count - a[1].count).slice(0, CARDS);
  return element(
    "div", { class: "sibling" },
    element("h3", {}, producer(group), element("span", { class: "quiet" }, ` mean ${number(mean(group.rewards), 2)}`)),
    element("ol", {}, ...answers.map(([text, { count, reward }]) => element(
      "li", { class: elsewhere.has(text) ? "" : "differs" },
      quoted(shown(text, 600)),
      element("p", { class: "small quiet" }, `${count === 1 ? "once" : `${number(count)} times`}, reward ${number(reward, 2)}`, elsewhere.has(text) ? null : element("span", { class: "tag", "data-tone": "foreign" }, "only here")),
    ))),
  );
}

function siblings(group, live, end) {
  const place = element("div", { class: "siblings", tabindex: "0", role: "region", "aria-label": "Answers of this node and of peers" });
  const loaded = [group];
  const waiting = [...(group.siblings ?? [])];
  const more = button("Show more", () => load());
  const made = panel(`What others answered (${number(waiting.length)})`, null, element("p", { class: "quiet" }, "This task went to everybody in the swarm. Answers that no other group here gave are marked."), place, more);
  async function load() {
    more.disabled = true;
    try {
      const next = waiting.slice(0, SIBLINGS);
      loaded.push(...(await Promise.all(next.map((one) => ask(`groups/${encodeURIComponent(one.id)}`, end)))));
      waiting.splice(0, next.length);
      const texts = loaded.map((one) => new Set((one.completions ?? []).map(answerOf)));
      place.replaceChildren(...loaded.map((one, i) => column(one, new Set(texts.flatMap((set, j) => (i === j ? [] : [...set]))))));
    } catch (error) {
      if (end.aborted) return;
      if (loaded.length === 1) place.replaceChildren(element("p", { class: "empty" }, "Their answers could not be loaded."));
      live.failed(error);
    }
    more.disabled = false;
    more.hidden = waiting.length === 0;
  }
  if (waiting.length) load();
  else {
    more.hidden = true;
    place.append(element("p", { class: "empty" }, "No peer's answers to it have arrived here yet."));
  }
  return made;
}

// -- the page --

function draw(body, group, live, end) {
  const { meaning } = verdictWords(group.verdict);
  const completions = (group.completions ?? []).slice(0, MAX_CARDS);
  const cards = element("div", { class: "answers" });
  const hot = element("input", { type: "checkbox" });
  hot.disabled = !completions.some((completion) => completion.pieces);
  let count = CARDS;
  const all = button(`Show all ${number(completions.length)}`, () => { count = MAX_CARDS; drawCards(); });
  const legend = element("p", { class: "legend small", hidden: "" }, ...HEAT.map((words, step) => element("span", { class: `heat-${step}` }, words)));
  const drawCards = () => {
    cards.replaceChildren(...completions.slice(0, count).map((completion, i) => card(completion, i, hot.checked)));
    all.hidden = completions.length <= count;
    legend.hidden = !hot.checked;
  };
  hot.addEventListener("change", drawCards);
  drawCards();
  const turns = (group.prompt ?? []).slice(0, 32).map((message) => element("div", { class: `turn ${message.role === "user" ? "user" : ""}` }, element("h3", {}, line(message.role, 40)), quoted(shown(message.content, MAX_TEXT))));
  body.replaceChildren(
    element("p", {}, element("a", { class: "row back", href: "#/groups" }, icon("back"), "All groups")),
    panel(
      [element("bdi", {}, line(group.environment, 60))], verdictTag(group.verdict),
      element("p", { class: "lead" }, meaning || "What it means is not known here."),
      group.detail ? element("p", { class: "why" }, line(group.detail, 400)) : null,
      facts("figures", [
        ["From", producer(group)],
        ["Mean reward", number(mean(group.rewards), 2)],
        ["Answers", number(completions.length)],
        // uses of own groups are not counted: they are trained on once, or not at all
        ...(group.origin === "own" ? [] : [["Used in updates", ["not yet", "once", "twice"][group.uses] ?? (typeof group.uses === "number" ? `${number(group.uses)} times` : null)]]),
        ["Epoch", number(group.epoch)],
        ["Arrived", moment(group.at)],
      ]),
      element("p", { class: "small quiet" }, "Model ", element("bdi", {}, line(group.model, 80) || "not told"), ", group ", element("code", {}, line(group.id, 64)), group.task ? `, task ${line(group.task.index, 20)} of seed ${line(group.task.seed, 24)}` : ""),
    ),
    panel("The task", null, ...(turns.length ? turns : [element("p", { class: "empty" }, "The prompt cannot be shown: the scorer does not have this environment, or is busy.")])),
    panel(
      "Answers", element("label", { class: "row check" }, hot, hot.disabled ? "No log-probabilities for this group" : "Colour by how likely each token was"),
      legend, cards, element("p", {}, all),
    ),
    ...(group.shared ? [siblings(group, live, end)] : []),
  );
}

export function openGroup(body, { live, rest }) {
  body.append(element("p", { class: "empty" }, `Loading group ${shortPeer(rest)}…`));
  const once = new Refresh(async (until) => draw(body, await ask(`groups/${encodeURIComponent(rest)}`, until), live, until), 0, (error) => {
    if (error instanceof Refused) body.replaceChildren(element("p", {}, element("a", { class: "row back", href: "#/groups" }, icon("back"), "All groups")), element("p", { class: "empty" }, "This group is not here (any more): the node keeps as many as limits.store_mb allows."));
    live.failed(error);
  });
  once.soon();
  return { title: `Group ${line(rest, 64).slice(0, 8)}`, close: () => once.close() };
}
