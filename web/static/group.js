// One group whole: the prompt and every completion, as text.

import { ask } from "./api.js";
import { element } from "./draw.js";
import { line, number, shown } from "./text.js";

const MAX_TEXT = 20000;
const MAX_COMPLETIONS = 64;

export async function showGroup(id) {
  const group = await ask(`groups/${encodeURIComponent(id)}`);
  const text = (value) => element("pre", { dir: "auto" }, shown(value, MAX_TEXT));
  const prompt = (group.prompt ?? []).flatMap((message) => [element("h3", {}, line(message.role, 40)), text(message.content)]);
  const completions = (group.completions ?? []).slice(0, MAX_COMPLETIONS).flatMap((completion, i) => [
    element("h3", {}, `Completion ${i + 1}: reward ${number(completion.reward, 2)}${claim(completion)}, ${number(completion.tokens)} tokens, ${line(completion.finish, 40)}`),
    text(completion.text),
  ]);
  document.getElementById("group-title").textContent = `${line(group.environment, 80)}, ${line(group.verdict, 40).replaceAll("_", " ")}`;
  document.getElementById("group-body").replaceChildren(...(group.detail ? [element("p", { class: "why" }, line(group.detail, 400))] : []), ...prompt, ...completions);
  document.getElementById("group").showModal();
}

function claim(completion) {
  const differs = typeof completion.reward === "number" && completion.claimed !== completion.reward;
  return differs ? ` (claimed ${number(completion.claimed, 2)})` : "";
}
