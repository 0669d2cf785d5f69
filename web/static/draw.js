// Builds elements. Text goes in as text nodes only; there is no way to hand markup in.

import { line, number } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Makes `old` what `made` is and touches only what differs, so that focus and selection in the rest stay.
export function settle(old, made) {
  if (old.isEqualNode(made)) return;
  const children = [...made.childNodes];
  const alike = children.length > 0 && children.length === old.childNodes.length && old.cloneNode(false).isEqualNode(made.cloneNode(false));
  if (!alike) old.replaceWith(made);
  else [...old.childNodes].forEach((child, i) => settle(child, children[i]));
}

// Attributes and children that are null are left out.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function button(label, does, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, ...[label].flat());
  made.addEventListener("click", does);
  return made;
}

const ICONS = {
  overview: "M4 13h6V4H4zM14 9h6V4h-6zM14 20h6v-7h-6zM4 20h6v-3H4z",
  training: "M4 19h16M5 15l4-5 4 3 6-8",
  groups: "M4 5h16v10H11l-4 4v-4H4z M8 9h8M8 12h5",
  peers: "M12 7a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM5 21a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM19 21a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM11 7l-5 10M13 7l5 10M7 19h10",
  swarm: "M2 8c4-5 10-5 14 0l5-4v8l-5-4c-4 5-10 5-14 0zM4 18c3-3 7-3 10 0",
  logs: "M5 6h14M5 10h14M5 14h9M5 18h11",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  run: "M4 12h4l2-6 4 12 2-6h4",
  wait: "M7 3h10M7 21h10M8 3c0 5 8 6 8 9s-8 4-8 9M16 3c0 5-8 6-8 9s8 4 8 9",
  pause: "M9 6v12M15 6v12",
  play: "M8 5l11 7-11 7z",
  start: "M12 4v4M12 16v4M4 12h4M16 12h4M6.5 6.5l2.5 2.5M15 15l2.5 2.5M6.5 17.5L9 15M15 9l2.5-2.5",
  stop: "M7 7h10v10H7z",
  fail: "M12 8v5M12 16.5v.01M12 3l9.5 17h-19z",
  info: "M12 11v6M12 7.5v.01M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18z",
  good: "M5 12l5 5 9-10",
  up: "M6 14l6-6 6 6",
  down: "M6 10l6 6 6-6",
  back: "M14 6l-6 6 6 6",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
};

export function icon(name) {
  return shape("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, shape("path", { d: ICONS[name] }));
}

export function panel(title, tools, ...children) {
  const header = element("header", {}, element("h2", {}, ...[title].flat()), tools ? element("div", { class: "tools" }, ...[tools].flat()) : null);
  return element("section", { class: "panel" }, header, ...children);
}

// dt and dd of each pair; a value may be an element. Pairs without a value are left out.
export function facts(name, pairs) {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return element("dl", { class: name }, ...told.map(([title, value]) => element("div", { class: "pair" }, element("dt", {}, title), element("dd", {}, ...[value].flat()))));
}

// Rewards of one group, one bar a completion, in the range of the group (0 to 1 at least).
export function bars(rewards, own) {
  const known = rewards.filter((reward) => typeof reward === "number").slice(0, 64);
  const top = Math.max(1, ...known);
  const low = Math.min(0, ...known);
  const made = element("span", { class: own ? "bars" : "bars of-peer", role: "img", "aria-label": `rewards ${known.map((r) => number(r, 2)).join(", ")}` });
  for (const reward of known.slice(0, 16)) {
    const bar = element("i");
    bar.style.height = `${(100 * (reward - low)) / (top - low)}%`;
    made.append(bar);
  }
  return made;
}

// A share of 1 as a small bar with its number.
export function meter(value, tone) {
  const part = element("i");
  part.style.width = `${100 * Math.min(1, Math.max(0, value ?? 0))}%`;
  return element("span", { class: "row-meter", "data-tone": tone }, element("span", { class: "meter", "aria-hidden": "true" }, part), ` ${number(value, 2)}`);
}

// One event of the log as a list item.
export function eventRow(event, when, limit = 600) {
  const level = ["warning", "error", "debug"].includes(event.level) ? event.level : "info";
  const sign = level === "error" || level === "warning" ? icon("fail") : icon("info");
  return element(
    "li", { class: level },
    element("time", {}, when),
    sign,
    element("span", { class: "kind clip" }, line(event.kind, 40)),
    element("span", { class: "message" }, level === "info" ? "" : element("span", { class: "sr" }, `${level}: `), line(event.message, limit)),
  );
}
