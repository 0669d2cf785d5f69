// Builds elements. Text goes in as text nodes only; there is no way to hand markup in.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Rewards of one group, one bar a completion, in the range of the group (0 to 1 at least).
export function bars(rewards, own) {
  const top = Math.max(1, ...rewards);
  const low = Math.min(0, ...rewards);
  const made = element("span", { class: own ? "bars" : "bars of-peer", role: "img", "aria-label": rewards.map((r) => r.toFixed(2)).join(", ") });
  for (const reward of rewards.slice(0, 32)) {
    const bar = element("i");
    bar.style.height = `${(100 * (reward - low)) / (top - low)}%`;
    made.append(bar);
  }
  return made;
}

export function mixBar(holder, own, foreign) {
  const parts = [["own", own], ["foreign", foreign]].filter(([, count]) => count > 0);
  holder.replaceChildren(
    ...parts.map(([name, count]) => {
      const part = element("i", { class: name });
      part.style.flex = String(count);
      return part;
    }),
  );
}

// A line of values per step: each one faint, the mean around it strong (weights fall by e every 3 steps). Held-out scores
// are a line of their own.
export function trendChart(holder, steps, scores) {
  const points = steps.filter((step) => typeof step.reward === "number");
  holder.classList.toggle("is-empty", points.length < 2);
  if (points.length < 2) {
    holder.replaceChildren("The curve starts with the second step.");
    return;
  }
  const values = points.map((step) => step.reward);
  const first = points[0].step;
  const last = points.at(-1).step;
  const held = scores.filter((score) => score.step >= first - 1 && score.step <= last);
  const low = Math.min(0, ...values);
  const top = niceTop(Math.max(...values, ...held.map((score) => score.mean), low + 0.1));
  const x = (step) => (1000 * Math.max(0, step - first)) / Math.max(1, last - first);
  // the middle 80 % of the height is the range; what is under it is room for the steps
  const y = (value) => 170 - (160 * (value - low)) / (top - low);
  const path = (heights) => "M" + heights.map((value, i) => `${x(points[i].step).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
  const trend = values.map((_, i) => meanAround(values, i));
  const picture = shape("svg", { viewBox: "0 0 1000 200", preserveAspectRatio: "none", role: "img" });
  const title = shape("title", {});
  title.textContent = `Reward from step ${first} to ${last}: from about ${trend[0].toFixed(2)} to about ${trend.at(-1).toFixed(2)}`;
  picture.append(
    title,
    ...[top, (top + low) / 2, low].map((value) => shape("line", { x1: 0, x2: 1000, y1: y(value), y2: y(value) })),
    shape("path", { class: "each", d: path(values) }),
    shape("path", { class: "trend", d: path(trend) }),
    ...(held.length ? [shape("path", { class: "held-out", d: "M" + held.map((s) => `${x(s.step).toFixed(1)} ${y(s.mean).toFixed(1)}`).join("L") })] : []),
  );
  const label = (name, text) => element("span", { class: name }, text);
  holder.replaceChildren(
    picture,
    label("top", top.toFixed(2)),
    label("mid", ((top + low) / 2).toFixed(2)),
    label("low", low.toFixed(2)),
    label("from", `step ${first}`),
    label("to", `step ${last}`),
  );
}

function meanAround(values, middle) {
  let sum = 0;
  let weights = 0;
  for (let i = Math.max(0, middle - 12); i <= Math.min(values.length - 1, middle + 12); i++) {
    const weight = Math.exp(-Math.abs(i - middle) / 3);
    sum += weight * values[i];
    weights += weight;
  }
  return sum / weights;
}

function niceTop(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * unit).find((top) => top >= value) ?? value;
}
