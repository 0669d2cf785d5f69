// Every setting, with where its value comes from. Changes are checked and written by the node.

import { ask, Refused, send } from "./api.js";
import { button, element, panel } from "./draw.js";
import { Refresh } from "./refresh.js";
import { line, number, plural, shown } from "./text.js";

const SECTIONS = {
  limits: ["Limits", "When it trains, and what it may take of this machine and its network."],
  node: ["Node", "Its name, seed and threads."],
  model: ["Model", "What is trained, and where."],
  rollout: ["Answering", "How answers are sampled."],
  engine: ["vLLM engine", "Only where vLLM samples."],
  train: ["Training", "Formulas and sources: docs/algorithms.md."],
  swarm: ["Swarm", "Which swarm, and how much of peers' work an update takes."],
  federation: ["Federation", "Give this node's policy to others of the same base model, or follow theirs."],
  network: ["Network", "Addresses to listen on and to announce."],
  web: ["This dashboard", "Where it is served."],
  eval: ["Held-out tasks", "How often and on how many."],
  checkpoint: ["Checkpoints", "How often and how many."],
  averaging: ["Averaging", "Sharing weights with nodes of the same model, which it then trusts with a share of its own."],
};
const FIRST = ["limits.quiet_hours", "limits.hours_per_day", "limits.upload_kbps", "limits.download_kbps", "limits.disk_mb", "limits.gpu_memory_share"];

const OPEN = new Set(["limits"]);

const SPELLED = { mb: "(MB)", gb: "(GB)", kbps: "(kbit/s)", gpu: "GPU", gpus: "GPUs", url: "URL", kl: "KL", kv: "KV", lora: "LoRA", vllm: "vLLM" };

const titled = (name) => name.split("_").map((word) => SPELLED[word] ?? word).join(" ");

const told = (value) => (Array.isArray(value) ? value.join(", ") : value === "" ? "empty" : String(value));

function input(entry, id) {
  if (entry.type === "bool") {
    const box = element("input", { id, type: "checkbox" });
    box.checked = entry.value === true;
    return { field: box, read: () => box.checked, put: (value) => { box.checked = value === true; } };
  }
  if (entry.choices) {
    const list = element("select", { id }, ...entry.choices.map((choice) => element("option", { value: choice }, line(choice, 60))));
    list.value = entry.value;
    return { field: list, read: () => list.value, put: (value) => { list.value = value; } };
  }
  const numeric = entry.type === "int" || entry.type === "float";
  const field = element("input", { id, type: "text", inputmode: numeric ? "decimal" : null, autocomplete: "off", spellcheck: "false" });
  const put = (value) => { field.value = Array.isArray(value) ? value.join(", ") : String(value ?? ""); };
  put(entry.value);
  const read = () => {
    const text = field.value.trim();
    if (numeric) return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
    if (entry.type !== "list") return text;
    const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
    return entry.default?.some?.((part) => typeof part === "number") ? parts.map(Number) : parts;
  };
  return { field, read, put };
}

// One setting: label, help, field, source; says itself what became of a change.
function setting(key, entry, changed) {
  const id = `set-${key.replace(".", "-")}`;
  const { field, read, put } = input(entry, id);
  const said = element("p", { class: "small said", id: `${id}-said`, role: "status" });
  const source = element("span", { class: "small quiet" });
  field.setAttribute("aria-describedby", `${id}-help ${id}-said`);
  const one = { key, entry, made: null, said, changed: () => JSON.stringify(read()) !== one.before };
  one.value = read;
  one.tell = (words, tone) => { said.textContent = words; said.className = `small said ${tone}`; field.toggleAttribute("aria-invalid", tone === "bad"); };
  one.show = (next) => {
    // what holds from the next start is what a person has chosen
    one.entry = { ...next, value: next.pending ?? next.value };
    put(one.entry.value);
    one.before = JSON.stringify(read());
    const fixed = !["default", "config.toml"].includes(next.source);
    field.disabled = fixed || next.secret;
    const origin = next.source === "default" ? "default" : `from ${line(next.source, 60)}, default ${line(told(next.default), 60)}`;
    source.textContent = `${origin}${next.applies === "restart" ? " · changes need a restart" : ""}`;
    if (fixed) one.tell(`Set by ${next.source === "flag" ? "a flag at the start" : line(next.source, 60)}, which counts more: change it there.`, "quiet");
    else if (next.pending !== undefined) one.tell(`From the next start; now ${line(told(next.value), 60)}.`, "warn");
    else if (next.secret) one.tell("A secret: change it with shoal config set.", "quiet");
  };
  field.addEventListener("input", () => { one.tell("", ""); changed(); });
  one.made = element(
    "div", { class: "setting" },
    element("label", { for: id }, element("strong", {}, titled(key.split(".")[1])), element("code", { class: "small quiet" }, key)),
    element("div", {}, field, source, said),
    element("p", { class: "quiet", id: `${id}-help` }, shown(entry.help, 400)),
  );
  one.show(entry);
  return one;
}

const backup = () => panel(
  "Back up this node's identity", null,
  element("p", {}, "The identity key is what peers know this node and its reputation by. It cannot be made again. Keep a copy:"),
  element("pre", {}, element("code", {}, "shoal backup FILE")),
  element("p", { class: "quiet" }, "The file is a secret: whoever has it can pose as this node. Put it back into an empty home with ", element("code", {}, "shoal restore FILE"), ". Never run two nodes with one identity."),
);

export const settings = {
  title: "Settings",
  open(body, { live, query }) {
    const all = [];
    const search = element("input", { type: "search", placeholder: "name or word, like learning", maxlength: "80", autocomplete: "off" });
    search.value = query.get("search") ?? "";
    const none = element("p", { class: "empty", hidden: "" }, "No setting is like that.");
    const sections = element("div", { class: "body" });
    const save = button("", () => write(), { class: "primary" });
    const revert = button("Undo", () => { for (const one of all) one.show(one.entry); count(); });
    const outcome = element("span", { role: "status" });
    const bar = element("div", { class: "savebar", hidden: "" }, outcome, revert, save);
    body.append(element("div", { class: "filters", role: "search" }, element("label", { class: "field wide" }, element("span", {}, "Search settings"), search)), none, sections, bar);

    function count() {
      const changed = all.filter((one) => one.changed()).length;
      bar.hidden = changed === 0 && !outcome.textContent;
      save.hidden = revert.hidden = changed === 0;
      save.textContent = `Save ${changed === 1 ? "the change" : `${number(changed)} changes`}`;
      if (changed) outcome.textContent = "";
    }
    function filter() {
      const words = search.value.trim().toLowerCase();
      for (const one of all) one.made.hidden = words !== "" && !`${one.key} ${one.key.replaceAll("_", " ")} ${one.entry.help}`.toLowerCase().includes(words);
      for (const section of sections.children) section.hidden = !section.querySelector(".setting:not([hidden])") && (words !== "" || section.querySelector(".setting"));
      for (const section of sections.querySelectorAll("details")) section.open = words !== "" || OPEN.has(section.dataset.name);
      none.hidden = [...sections.children].some((section) => !section.hidden);
    }
    async function write() {
      const wanted = all.filter((one) => one.changed());
      save.disabled = true;
      try {
        const done = await send("config", Object.fromEntries(wanted.map((one) => [one.key, one.value()])));
        for (const one of wanted) {
          one.show(done.config?.[one.key] ?? { ...one.entry, value: one.value(), source: "config.toml" });
          if (done.applied?.includes(one.key)) one.tell("Saved, in force now.", "good");
          else one.tell(`Saved; needs a restart: ${done.restart_by}.`, "warn");
        }
        const later = done.restart?.length ?? 0;
        outcome.textContent = later ? `Saved. ${number(later)} of them need a restart.` : "Saved, in force now.";
      } catch (error) {
        const at = error instanceof Refused ? wanted.find((one) => error.error.includes(one.key)) : null;
        if (at) {
          at.tell(`${error.error}. ${error.fix}. Nothing was saved.`, "bad");
          at.made.querySelector("input, select").focus();
        } else live.failed(error);
      }
      save.disabled = false;
      count();
    }
    search.addEventListener("input", filter);

    const once = new Refresh(async (until) => {
      const config = await ask("config", until);
      sections.replaceChildren();
      all.length = 0;
      const keys = [...FIRST.filter((key) => config[key]), ...Object.keys(config).filter((key) => !FIRST.includes(key))];
      const names = [...new Set([...Object.keys(SECTIONS), ...keys.map((key) => key.split(".")[0])])];
      for (const name of names) {
        const here = keys.filter((key) => key.split(".")[0] === name).map((key) => setting(key, config[key], count));
        if (!here.length) continue;
        all.push(...here);
        const [title, words] = SECTIONS[name] ?? [line(name, 40), ""];
        const changed = here.filter((one) => one.entry.source !== "default").length;
        sections.append(element(
          "details", { class: "panel", "data-name": name },
          element("summary", {}, element("h2", {}, title), element("span", { class: "quiet" }, words), element("span", { class: "small quiet" }, `${plural(here.length, "setting")}${changed ? `, ${number(changed)} set` : ""}`)),
          ...here.map((one) => one.made),
        ));
        if (name === "limits") sections.append(backup());
      }
      filter();
    }, 0, live.failed);
    once.soon();
    return { close: () => once.close() };
  },
};
