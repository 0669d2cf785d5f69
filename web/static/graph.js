// Who is around this node, as a picture: this node in the middle, connected peers near it, known ones further out.
// Places follow from the peer ids alone, so that the picture does not jump about.

import { element, shape } from "./draw.js";
import { line, number, plural, shortPeer } from "./text.js";

const MAX_NODES = 200;
const CENTRE = 300;
const INNER = [96, 144];
const OUTER = [196, 232, 268];

export function reputationTone(reputation) {
  if (typeof reputation !== "number") return "quiet";
  return reputation >= 0.75 ? "good" : reputation >= 0.4 ? "warn" : "bad";
}

// Peers spread evenly over rings, the more the larger the ring.
function places(nodes, rings) {
  const total = rings.reduce((sum, radius) => sum + radius, 0);
  const found = new Map();
  let taken = 0;
  rings.forEach((radius, i) => {
    const here = i === rings.length - 1 ? nodes.slice(taken) : nodes.slice(taken, taken + Math.round((nodes.length * radius) / total));
    here.forEach((node, j) => {
      const angle = (2 * Math.PI * (j + (i % 2) / 2)) / here.length - Math.PI / 2;
      found.set(node.peer_id, [CENTRE + radius * Math.cos(angle), CENTRE + radius * Math.sin(angle)]);
    });
    taken += here.length;
  });
  return found;
}

// `chosen(id)` is called for a peer that was clicked. The table beside it says the same to who sees no picture.
export function peerGraph(graph, chosen) {
  const nodes = graph.nodes.slice(0, MAX_NODES);
  const byId = (a, b) => (a.peer_id < b.peer_id ? -1 : 1);
  const others = nodes.filter((node) => !node.self).sort(byId);
  const near = others.filter((node) => node.connected);
  const far = others.filter((node) => !node.connected);
  const self = nodes.find((node) => node.self);
  const at = new Map([...places(near, near.length > 16 ? INNER : [INNER[1]]), ...places(far, far.length > 24 ? OUTER : [OUTER[1]])]);
  if (self) at.set(self.peer_id, [CENTRE, CENTRE]);
  const most = Math.max(1, ...graph.edges.filter((edge) => edge.kind === "groups").map((edge) => edge.weight));
  const edges = graph.edges.slice(0, 4 * MAX_NODES).filter((edge) => at.has(edge.from) && at.has(edge.to)).map((edge) => {
    const [[x1, y1], [x2, y2]] = [at.get(edge.from), at.get(edge.to)];
    const width = edge.kind === "groups" ? 1 + 4 * Math.sqrt(edge.weight / most) : 1;
    return shape("line", { x1, y1, x2, y2, class: edge.kind === "groups" ? "given" : "wire", "stroke-width": width.toFixed(1), "stroke-opacity": edge.kind === "groups" ? (0.08 + 0.6 * Math.sqrt(edge.weight / most)).toFixed(2) : 1 });
  });
  const dots = others.map((node) => {
    const [cx, cy] = at.get(node.peer_id);
    const r = 4 + Math.min(7, Math.log10(1 + (node.admitted ?? 0)) * 2);
    const title = shape("title", {}, `${shortPeer(node.peer_id)}${node.connected ? "" : ", not connected"}, reputation ${number(node.reputation, 2)}, ${plural(node.admitted ?? 0, "group")} admitted`);
    return shape("circle", { cx, cy, r: r.toFixed(1), class: node.connected ? "" : "known", "data-tone": reputationTone(node.reputation), "data-peer": line(node.peer_id, 80) }, title);
  });
  const picture = shape(
    "svg", { viewBox: "0 0 600 600", class: "graph", role: "img", "aria-label": `${plural(near.length, "peer")} connected, ${number(far.length)} more known` },
    ...edges, ...dots,
    shape("circle", { cx: CENTRE, cy: CENTRE, r: 16, class: "self" }),
    shape("text", { x: CENTRE, y: CENTRE + 34, class: "label" }, "this node"),
  );
  picture.addEventListener("click", (event) => { if (event.target.dataset?.peer) chosen(event.target.dataset.peer); });
  return picture;
}

export function graphKeys() {
  const key = (tone, words, more = "") => element("li", { "data-tone": tone }, element("i", { class: more }), words);
  return element("ul", { class: "graph-keys small quiet" }, key("good", "trusted"), key("warn", "doubtful"), key("bad", "distrusted"), key("quiet", "known, not connected", "known"), key("foreign", "thick: groups learned from", "thick"));
}
