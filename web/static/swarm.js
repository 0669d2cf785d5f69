// The swarm this node is in: what was agreed on, where it stands, and how others come in.

import { ask } from "./api.js";
import { coordinatorPanel } from "./coordinator.js";
import { button, element, facts, icon, panel } from "./draw.js";
import { Refresh } from "./refresh.js";
import { duration, line, number, plural } from "./text.js";

const REFRESH_MS = 30000;
const COPIED_MS = 2500;

async function copy(text, field, told) {
  try {
    await navigator.clipboard.writeText(text);
    told.textContent = "Copied.";
  } catch {
    // not allowed here, as over plain HTTP from another machine: then by hand
    field.focus();
    field.select();
    told.textContent = "Press Ctrl+C to copy.";
  }
  setTimeout(() => { told.textContent = ""; }, COPIED_MS);
}

function capital(words) {
  return words.slice(0, 1).toUpperCase() + words.slice(1);
}

function invitation(found) {
  if (found.coordinator?.listed_only) return panel("Invite others", null, element("p", { class: "quiet" }, "Members are let in by the coordinator: ", element("code", {}, "shoal coordinator invite"), ", on its machine."));
  if (!found.invite) return panel("Invite others", null, element("p", { class: "empty" }, "No invite yet: the node has no address that others could reach. ", element("code", {}, "shoal doctor"), " says why."));
  const field = element("input", { class: "mono", readonly: "", "aria-label": "Invite" });
  field.value = line(found.invite, 4000);
  const told = element("span", { class: "quiet", role: "status" });
  const code = element("img", { src: "/api/v1/swarm/invite.svg", alt: "The invite as a QR code", class: "qr", width: "196", height: "196" });
  code.addEventListener("error", () => code.remove());
  return panel(
    "Invite others", null,
    found.private ? element("p", { class: "notice mild" }, icon("fail"), " This swarm is private: the invite holds its key. Whoever has it can join and read along. Send it only to people you trust, and not in public.") : null,
    found.invite_caution ? element("p", { class: "notice mild" }, icon("fail"), " ", `${capital(line(found.invite_caution, 400))}.`) : null,
    element(
      "div", { class: "invite" }, code,
      element("div", {}, element("p", {}, "Whoever opens a node with this invite joins the swarm:"), field, element("p", { class: "row" }, button([icon("copy"), "Copy"], () => copy(found.invite, field, told), { class: "primary" }), told), element("p", { class: "quiet" }, "On their machine: ", element("code", {}, "shoal join INVITE"), ", or ", element("code", {}, "SHOAL_JOIN=INVITE docker compose up"), ".")),
    ),
  );
}

function environments(found) {
  const all = (found.environments ?? []).reduce((sum, one) => sum + one.weight, 0);
  const row = (one) => {
    const settings = Object.entries(one.settings ?? {}).slice(0, 12).map(([name, value]) => `${line(name, 40)} ${line(value, 60)}`).join(", ");
    return element(
      "tr", {},
      element("td", {}, element("bdi", { class: "clip" }, line(one.name, 60))),
      element("td", { class: "number", "data-label": "share" }, `${number((100 * one.weight) / all)} %`),
      element("td", { "data-label": "version" }, line(one.version, 40)),
      element("td", { class: "quiet" }, element("span", { class: "clip", title: settings }, settings || "–")),
    );
  };
  const head = ["Environment", "Share of tasks", "Version", "Settings"].map((title, i) => element("th", { scope: "col", class: i === 1 ? "number" : "" }, title));
  return panel("What it practises", null, element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Environments" }, element("table", { class: "rows" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...(found.environments ?? []).map(row)))));
}

export const swarm = {
  title: "Swarm",
  open(body, { live }) {
    let ends = 0;
    let length = 1;
    let timer = null;
    const left = element("strong");
    const bar = element("i");
    const tick = () => {
      const seconds = Math.max(0, (ends - Date.now()) / 1000);
      left.textContent = seconds < 60 ? `${number(seconds)} s` : duration(seconds);
      bar.style.width = `${100 * Math.min(1, 1 - seconds / length)}%`;
      if (seconds === 0) refresh.soon();
    };
    function draw(found) {
      if (!found.name) {
        body.replaceChildren(panel("In no swarm yet", null, element("p", { class: "empty" }, "The node trains alone. Join others with an invite, ", element("code", {}, "shoal join INVITE"), ", or make a swarm of your own: ", element("code", {}, "shoal swarm create"), ".")));
        return;
      }
      ends = Date.now() + 1000 * (found.epoch?.ends_in ?? 0);
      length = found.epoch_seconds || 1;
      const caps = Object.entries(found.caps ?? {}).map(([name, value]) => [line(name, 40).replaceAll("_", " "), number(value, Number.isInteger(value) ? 0 : 4)]);
      body.replaceChildren(
        panel(
          [element("bdi", {}, line(found.name, 64))], found.private ? element("span", { class: "tag", "data-tone": "warn" }, "private") : element("span", { class: "tag", "data-tone": "quiet" }, "open"),
          element("ul", { class: "sentences" }, ...(found.words ?? []).slice(0, 24).map((words) => element("li", {}, line(words, 400)))),
          facts("figures", [["Members seen in a day", number(found.members)], ["Connected now", number(live.status.peers)], ["Epoch", number(found.epoch?.number)], ["Next one in", left]]),
          element("div", { class: "epoch meter", "aria-hidden": "true", "data-tone": "own" }, bar),
          element("p", { class: "small quiet" }, "Manifest ", element("code", {}, line(found.digest, 64))),
        ),
        invitation(found),
        environments(found),
        coordinatorPanel(found.coordinator, found.environments ?? []),
        panel("Caps", null, element("p", { class: "quiet" }, "What every member holds others' groups to."), facts("facts", caps)),
      );
      tick();
    }
    const refresh = new Refresh(async (until) => {
      const found = await ask("swarm", until);
      const said = JSON.stringify({ ...found, epoch: { ...found.epoch, ends_in: 0 } });
      ends = Date.now() + 1000 * (found.epoch?.ends_in ?? 0);
      // drawn anew only when something changed, so that nobody loses the place or the selection
      if (said !== body.dataset.said) draw(found);
      body.dataset.said = said;
    }, 1000, live.failed);
    refresh.soon();
    timer = setInterval(tick, 1000);
    let last = performance.now();
    return {
      status() {
        if (performance.now() - last < REFRESH_MS) return;
        last = performance.now();
        refresh.soon();
      },
      close() { clearInterval(timer); refresh.close(); },
    };
  },
};
