// Work that is asked for again and again: one at a time, at most every so often, and not while nobody looks.

import { Refused, SignedOut } from "./api.js";

const AGAIN_MS = 2000;

export class Refresh {
  // `work` gets an AbortSignal that ends with `close`; what it throws goes to `failed`, and it is done again by itself
  // unless the node has refused it.
  constructor(work, milliseconds, failed) {
    Object.assign(this, { work, milliseconds, failed });
    this.last = -Infinity;
    this.timer = null;
    this.busy = false;
    this.wanted = false;
    this.end = new AbortController();
    document.addEventListener("visibilitychange", () => { if (this.wanted) this.soon(); }, { signal: this.end.signal });
  }

  soon() {
    this.wanted = true;
    if (this.busy || this.timer !== null || this.end.signal.aborted || document.hidden) return;
    const wait = Math.max(0, this.last + this.milliseconds - performance.now());
    this.timer = setTimeout(() => this.#run(), wait);
  }

  async #run() {
    this.timer = null;
    this.wanted = false;
    this.busy = true;
    let late = 0;
    try {
      await this.work(this.end.signal);
    } catch (error) {
      if (!this.end.signal.aborted) {
        this.failed(error);
        this.wanted ||= !(error instanceof Refused || error instanceof SignedOut);
        late = AGAIN_MS;
      }
    }
    this.busy = false;
    this.last = performance.now() + late;
    if (this.wanted) this.soon();
  }

  close() {
    clearTimeout(this.timer);
    this.end.abort();
  }
}
