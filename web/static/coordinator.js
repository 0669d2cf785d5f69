// The coordinator's part of the Swarm page: who leads, the present round, how members stand.

import { element, facts, icon, meter, panel } from "./draw.js";
import { clock, line, number, shortPeer } from "./text.js";

const NONE = "There is none, and none is needed: members agree on the manifest above, choose tasks from it and the time, and check what they get themselves.";
const STATES = {
  waiting: "waits for members",
  open: "is open: members practise",
  closing: "is closing: members answer tasks that nobody knew before",
  evaluated: "is evaluated",
};

function warnings(found) {
  const faults = (found.faults ?? []).map((fault) => element("p", { class: "notice" }, icon("fail"), ` Coordinator ${shortPeer(line(fault.coordinator, 80))} is not followed any more: `, element("bdi", {}, line(fault.detail, 300)), ". The swarm goes on by the clock."));
  if (!found.listed && found.said) faults.push(element("p", { class: "notice mild" }, icon("fail"), " This node is no member: ", element("bdi", {}, line(found.said, 300)), "."));
  return faults;
}

function standings(board, environments) {
  const score = (value) => (value === null ? "–" : number(value, 2));
  const names = environments.slice(0, 6).map((one) => line(one.name, 40));
  const head = ["Member", "Held-out", "Best", "Credit", ...names].map((title, i) => element("th", { scope: "col", class: i ? "number" : "" }, element("span", { class: "clip" }, title)));
  const row = (one) => element(
    "tr", {},
    element("td", { title: line(one.peer, 80) }, element("span", { class: "mono" }, shortPeer(line(one.peer, 80)))),
    element("td", { class: "number", "data-label": "held-out" }, one.mean === null ? element("span", { class: "quiet" }, "absent") : meter(one.mean, "own")),
    element("td", { class: "number", "data-label": "best" }, score(one.best)),
    element("td", { class: "number", "data-label": "credit" }, number(one.credit, 3)),
    ...names.map((name, i) => element("td", { class: "number", "data-label": name }, score(one.scores?.[i] ?? null))),
  );
  return [
    element("h3", { class: "apart" }, `Board of round ${number(board.number)}`),
    element("p", { class: "quiet small" }, "Scores are the coordinator's own, of tasks that were told after the round. Credit is what others gained while they learned from a member's groups." + (board.of > board.standings.length ? ` The first ${number(board.standings.length)} of ${number(board.of)} members; shoal coordinator board prints all.` : "")),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Board" }, element("table", { class: "rows" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...board.standings.map(row)))),
  ];
}

export function coordinatorPanel(found, environments) {
  if (!found) return panel("Coordinator", null, element("p", { class: "quiet" }, NONE));
  const { round, board } = found;
  const until = round?.closes ?? round?.answers_by;
  const mix = Object.entries(round?.mix ?? {}).slice(0, 12).map(([name, share]) => `${line(name, 40)} ${number(100 * share)} %`).join(", ");
  return panel(
    "Coordinator", found.leading ? element("span", { class: "tag", "data-tone": "own" }, "this node leads") : null,
    ...warnings(found),
    element("p", {}, round ? `Round ${number(round.number)} ${STATES[round.state] ?? line(round.state, 20)}${until ? `, until ${clock(until)}` : ""}.` : "No round is known yet: the swarm goes by the clock."),
    facts("facts", [
      ["Leader", found.leader ? shortPeer(line(found.leader, 80)) : "none"],
      ["Members", number(found.members)],
      ["Who takes part", found.listed_only ? "members by invite" : "whoever asks"],
      ["Mix", mix || "–"],
    ]),
    ...(board ? standings(board, environments) : []),
  );
}
