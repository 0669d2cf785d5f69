// What happens on the node, as it happens (server-sent events). The browser comes back by itself and says which event
// it saw last; where it gives up, this opens the stream again at the same place.

import { ask } from "./api.js";

const AGAIN_MS = 2000;
const SILENT_MS = 40000; // the node says its status every 15 s at the latest

export class Stream {
  // `told` has status(now), event(event), gap(), up(), down(error): whether to go on trying.
  constructor(told) {
    this.told = told;
    this.source = null;
    this.timer = null;
    this.watch = null;
    this.seen = null;
    this.heard = 0;
  }

  // `seen`: id of the newest event that is known.
  open(seen) {
    this.close();
    this.seen = seen;
    this.heard = Date.now();
    const source = new EventSource(`/api/v1/events/stream?after=${seen}`);
    const on = (kind, does) => source.addEventListener(kind, (message) => { this.heard = Date.now(); does(message); });
    on("open", () => this.told.up());
    on("message", (message) => {
      const event = JSON.parse(message.data);
      if (event.id <= this.seen) return;
      this.seen = event.id;
      this.told.event(event);
    });
    on("status", (message) => this.told.status(JSON.parse(message.data)));
    on("gap", () => this.told.gap());
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) this.#again();
      else this.told.down(null);
    });
    this.source = source;
    this.watch = setInterval(() => { if (Date.now() - this.heard > SILENT_MS) this.#again(); }, SILENT_MS / 4);
  }

  // The browser gave up (the node refused), or nothing comes: ask plainly what is the matter.
  #again() {
    this.close();
    const mine = setTimeout(async () => {
      try {
        const now = await ask("status");
        if (this.timer !== mine) return;
        this.open(this.seen);
        this.told.status(now);
      } catch (error) {
        if (this.timer === mine && this.told.down(error)) this.#again();
      }
    }, AGAIN_MS);
    this.timer = mine;
  }

  close() {
    clearTimeout(this.timer);
    this.timer = null;
    clearInterval(this.watch);
    this.source?.close();
    this.source = null;
  }
}
