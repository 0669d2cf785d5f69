// How training goes: every measure over the steps, with what it means and what would be worrying.

import { ask, asking } from "./api.js";
import { button, element, panel } from "./draw.js";
import { mixPicture, progress, rewardPicture, REWARD_KEYS } from "./overview.js";
import { Chart, curve, dots, smoothed } from "./plot.js";
import { Refresh } from "./refresh.js";
import { line, mean, number, plural } from "./text.js";
import { MEASURES } from "./words.js";

const SERIES_MS = 2000;
const RANGES = [["All", null], ["Last 1,000", 1000], ["Last 100", 100]];
const MAX_ENVIRONMENTS = 24;

// A measure by itself: its latest value, what it is and what would be worrying, its curve.
function small(title, meaning, worry, height = 112) {
  const chart = new Chart({ height, label: title, empty: "Nothing measured yet." });
  const value = element("strong");
  const made = element(
    "section", { class: "panel small-multiple" },
    element("header", {}, element("h3", {}, title), value),
    meaning ? element("p", { class: "quiet small" }, meaning) : null,
    worry ? element("p", { class: "quiet small" }, element("span", { class: "warn" }, "Worrying: "), worry) : null,
    chart.holder,
  );
  return { made, chart, value };
}

export const training = {
  title: "Training",
  open(body, { live }) {
    let series = null;
    let last = null; // how many of the last steps are shown; null: as `range` says
    let range = [null, null];
    const lead = element("p", { class: "lead" });
    const shown = element("span", { class: "quiet" });
    const main = new Chart({ height: 288, label: "Reward over the steps", empty: "The curve starts with the second step.", zoomed: (from, to) => zoom([Math.max(1, Math.floor(from)), Math.ceil(to)]) });
    const choices = RANGES.map(([name, steps]) => button(name, () => { last = steps; zoom([null, null]); }, { "aria-pressed": "false" }));
    body.append(panel("Reward", choices, element("div", { class: "row" }, lead, shown), main.holder, element("div", { class: "row" }, REWARD_KEYS.cloneNode(true), element("span", { class: "quiet small" }, "Drag over the chart to look closer."))));

    const mix = small("Groups by origin", "Groups an update was made of: its own (teal) and from peers (orange).", "no orange although there are peers.");
    const rewards = small("Reward by origin", "Mean reward, scored here, of own and peers' groups.", "peers' far under the own for long.");
    const informative = small("Groups that teach", "Groups whose answers got different rewards.", "0: tasks are too hard or too easy.");
    const held = small("Held-out score", "Tasks that are never trained on.", "falling while reward rises.");
    const measures = MEASURES.map(([key, title, digits, meaning, worry]) => ({ key, digits, ...small(title, meaning, worry) }));
    const grid = element("div", { class: "multiples" }, ...[held, mix, rewards, informative, ...measures].map((one) => one.made));
    const kinds = element("div", { class: "multiples narrow" });
    const environments = new Map();
    body.append(element("h2", {}, "Reward by environment"), kinds, element("h2", {}, "Measures"), grid);

    const pair = (own, foreign, digits) => ({
      traces: [curve(series.step, smoothed(series[own]), "own"), curve(series.step, smoothed(series[foreign]), "from peers", { tone: "foreign" })],
      layout: { yaxis: { rangemode: "tozero", tickformat: digits ? "" : ",d" } },
    });
    const one = (values, tone) => (mean(values) === null ? null : {
      traces: [curve(series.step, values, "", { width: 1, strength: 0.35, tone }), curve(series.step, smoothed(values), "", { tone })],
    });
    const latest = (values) => mean((values ?? []).slice(-10));

    function drawEnvironments() {
      for (const [name, values] of Object.entries(series.environments).slice(0, MAX_ENVIRONMENTS)) {
        if (!environments.has(name)) {
          environments.set(name, small(line(name, 60), "", "", 104));
          kinds.append(environments.get(name).made);
        }
        const { chart, value } = environments.get(name);
        value.textContent = number(latest(values), 2);
        chart.draw(() => ({ ...(one(values) ?? { traces: [] }), layout: { yaxis: { range: [0, 1.02] } } }), `${line(name, 60)}: ${number(latest(values), 2)} lately`);
      }
      kinds.previousSibling.hidden = kinds.hidden = environments.size === 0;
    }

    function draw() {
      const { tone, words } = progress(series.reward);
      lead.className = `lead ${tone}`;
      lead.textContent = words;
      const begin = Math.max(series.first, series.step[0] - series.width + 1); // the first point may have fewer steps
      const steps = series.step.length ? `Steps ${number(begin)} to ${number(series.step.at(-1))}` : "";
      shown.textContent = steps && `${steps}${series.width > 1 ? `, ${number(series.width)} a point` : ""}.`;
      choices.forEach((choice, i) => choice.setAttribute("aria-pressed", String(range[0] === null && last === RANGES[i][1])));
      main.draw(() => rewardPicture(series), `Reward. ${steps}. ${words}`);
      held.value.textContent = number(live.status.held_out, 2);
      const scores = series.evaluations ?? { step: [], mean: [] };
      held.chart.draw(() => (scores.step.length ? { traces: [dots(scores.step, scores.mean, "")] } : null), `Held-out score: ${number(live.status.held_out, 2)} now`);
      mix.value.textContent = `${number(live.status.own_groups)} + ${number(live.status.foreign_groups)}`;
      mix.chart.draw(() => (mixPicture(series) ? { ...mixPicture(series), hover: false } : null));
      rewards.value.textContent = `${number(latest(series.own_reward), 2)} / ${number(latest(series.foreign_reward), 2)}`;
      rewards.chart.draw(() => (mean(series.own_reward) === null ? null : pair("own_reward", "foreign_reward", 2)));
      informative.value.textContent = number(latest(series.own_informative), 1);
      informative.chart.draw(() => (mean(series.own_informative) === null ? null : pair("own_informative", "foreign_informative", 0)));
      for (const { key, digits, chart, value } of measures) {
        value.textContent = number(latest(series[key]), digits);
        chart.draw(() => one(series[key] ?? []), `${value.textContent} lately`);
      }
      drawEnvironments();
    }

    const refresh = new Refresh(async (until) => {
      const [from, to] = last === null ? range : [Math.max(1, live.status.step - last + 1), null];
      series = await ask(asking("series", { points: 400, from, to }), until);
      draw();
    }, SERIES_MS, live.failed);
    function zoom(wanted) {
      if (wanted[0] !== null) last = null;
      range = wanted;
      refresh.soon();
    }
    lead.textContent = live.status.step ? "" : `${plural(0, "step")} so far: curves appear once it has trained.`;
    refresh.soon();
    return {
      status(now, before) {
        if (now.step !== before?.step && (range[1] === null || range[1] >= now.step - 1)) refresh.soon();
      },
      close() {
        refresh.close();
        for (const { chart } of [mix, rewards, informative, held, ...measures, ...environments.values()]) chart.close();
        main.close();
      },
    };
  },
};
