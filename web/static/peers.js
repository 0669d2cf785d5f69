// Peers: a picture and a table of those this node is connected to or knows.

import { ask, asking } from "./api.js";
import { button, element, icon, meter, panel } from "./draw.js";
import { graphKeys, peerGraph, reputationTone } from "./graph.js";
import { Refresh } from "./refresh.js";
import { ago, counts, line, number, plural, shortPeer } from "./text.js";

const PAGE = 50;
const MOST = 8;
const REFRESH_MS = 5000;
const SEARCH_MS = 300;
// column: title, what the node sorts by
const COLUMNS = [["Peer", "peer_id"], ["Model"], ["Connection"], ["Reputation", "reputation"], ["Admitted", "admitted"], ["Learned from"], ["Refused", "rejected"], ["Last seen", "last_seen"]];
const NUMBERS = new Set(["Admitted", "Learned from"]);

function row(peer) {
  const id = line(peer.peer_id, 80);
  const refused = counts(peer.rejected).replaceAll("_", " ");
  const way = peer.connected ? [line(peer.direction ?? "connected", 20), typeof peer.latency_ms === "number" ? `${number(peer.latency_ms)} ms` : ""].filter(Boolean).join(", ") : "none";
  return element(
    "tr", { "data-key": id },
    element(
      "td", { title: id },
      element("span", { class: peer.connected ? "dot on" : "dot", role: "img", "aria-label": peer.connected ? "connected" : "not connected" }),
      element("a", { class: "mono", href: `#/groups?producer=${encodeURIComponent(id)}`, title: `groups of ${id}` }, shortPeer(id)),
      peer.name ? element("bdi", { class: "clip" }, ` ${line(peer.name, 40)}`) : null,
    ),
    element("td", {}, element("bdi", { class: "clip", title: line(peer.model, 200) }, line(peer.model, 60) || "–")),
    element("td", { class: "quiet" }, way),
    element("td", {}, peer.banned ? element("span", { class: "tag", "data-tone": "bad" }, icon("fail"), "banned") : meter(peer.reputation, reputationTone(peer.reputation))),
    element("td", { class: "number", "data-label": "admitted" }, number(peer.admitted)),
    element("td", { class: "number", "data-label": "learned from" }, number(peer.trained), peer.followed ? element("span", { class: "quiet small", title: "sampled with this node's policy" }, ` (${number(peer.followed)} as follower)`) : null),
    element("td", { "data-label": "refused" }, element("span", { class: "clip", title: refused }, refused || "none")),
    element("td", { class: "quiet" }, peer.connected ? "now" : ago(peer.last_seen)),
  );
}

// Those whose groups this node learned most from.
function helpful(graph) {
  const given = graph.edges.filter((edge) => edge.kind === "groups").sort((a, b) => b.weight - a.weight).slice(0, MOST);
  if (!given.length) return [];
  const item = ({ from, weight }) => {
    const bar = element("i");
    bar.style.width = `${(100 * weight) / given[0].weight}%`;
    return element("li", {}, element("a", { class: "mono", href: `#/groups?producer=${encodeURIComponent(line(from, 80))}` }, shortPeer(from)), element("span", { class: "meter", "data-tone": "foreign", "aria-hidden": "true" }, bar), element("span", {}, number(weight)));
  };
  return [element("h3", {}, "Learned from most"), element("p", { class: "quiet small" }, "How often groups of theirs went into updates here."), element("ol", {}, ...given.map(item))];
}

export const peers = {
  title: "Peers",
  open(body, { live, query }) {
    const asked = { offset: 0, limit: PAGE, sort: "last_seen", descending: 1, search: query.get("search") ?? "" };
    let total = 0;
    let typing = null;
    const lead = element("p", { class: "lead" });
    const picture = element("div", { class: "graph-holder" });
    const best = element("div", { class: "best" });
    const table = element("tbody");
    const empty = element("p", { class: "empty", hidden: "" });
    const where = element("span");
    const turn = (by) => { asked.offset = Math.max(0, asked.offset + by); list.soon(); };
    const previous = button([icon("back"), "Previous"], () => turn(-PAGE));
    const next = button("Next", () => turn(PAGE));
    const search = element("input", { type: "search", placeholder: "peer id or model", maxlength: "80", autocomplete: "off", spellcheck: "false" });
    search.value = asked.search;
    const find = (text) => { Object.assign(asked, { search: text.trim(), offset: 0 }); list.soon(); };
    search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => find(search.value), SEARCH_MS); });
    const heads = COLUMNS.map(([title, sort]) => {
      const cell = element("th", { scope: "col", class: NUMBERS.has(title) ? "number" : "" });
      if (!sort) cell.append(title);
      else cell.append(button(title, () => {
        Object.assign(asked, { sort, descending: asked.sort === sort ? 1 - asked.descending : Number(sort !== "peer_id"), offset: 0 });
        sortHeads();
        list.soon();
      }, { "data-sort": sort }));
      return cell;
    });
    const sortHeads = () => {
      for (const cell of heads) {
        const made = cell.querySelector("button");
        if (!made) continue;
        const here = made.dataset.sort === asked.sort;
        made.replaceChildren(made.textContent, ...(here ? [icon(asked.descending ? "down" : "up")] : []));
        if (here) cell.setAttribute("aria-sort", asked.descending ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      }
    };
    sortHeads();
    const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Peers" }, element("table", { class: "rows dense" }, element("thead", {}, element("tr", {}, ...heads)), table));
    body.append(
      lead,
      panel("Around this node", null, element("div", { class: "around" }, element("div", {}, picture, graphKeys()), best)),
      panel("All peers", null, element("div", { class: "filters", role: "search" }, element("label", { class: "field wide" }, element("span", {}, "Search"), search)), scroll, empty, element("div", { class: "pager" }, where, element("span", { class: "row" }, previous, next))),
    );

    const list = new Refresh(async (until) => {
      const found = await ask(asking("peers", asked), until);
      total = found.total;
      const focused = document.activeElement?.closest("tr")?.dataset.key;
      table.replaceChildren(...found.peers.map(row));
      if (focused) table.querySelector(`[data-key="${CSS.escape(focused)}"] a`)?.focus();
      lead.textContent = total || asked.search ? `${number(found.connected)} connected. Reputation falls where a peer's claims do not hold; its groups count by it.` : "";
      scroll.hidden = total === 0;
      empty.hidden = total > 0;
      empty.replaceChildren(...(asked.search ? ["No peer is like that."] : ["No peers yet. The node trains alone meanwhile. ", element("a", { href: "#/swarm" }, "Invite others"), ", or join them: ", element("code", {}, "shoal join INVITE"), "."]));
      where.textContent = total ? `${number(asked.offset + 1)} to ${number(asked.offset + found.peers.length)} of ${plural(total, "peer")}` : "";
      previous.disabled = asked.offset === 0;
      next.disabled = asked.offset + PAGE >= total;
    }, 250, live.failed);
    let drawn = "";
    const graph = new Refresh(async (until) => {
      const found = await ask("peers/graph", until);
      const said = JSON.stringify(found);
      if (said === drawn) return;
      drawn = said;
      picture.replaceChildren(found.nodes.length > 1 ? peerGraph(found, (id) => { search.value = id; find(id); }) : element("p", { class: "empty" }, "Nobody but this node yet."));
      best.replaceChildren(...helpful(found));
    }, REFRESH_MS, live.failed);
    list.soon();
    graph.soon();
    let last = performance.now();
    return {
      status() {
        if (performance.now() - last < REFRESH_MS) return;
        last = performance.now();
        list.soon();
        graph.soon();
      },
      close() { clearTimeout(typing); list.close(); graph.close(); },
    };
  },
};
