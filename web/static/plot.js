// Charts by plotly, which is large: it is fetched when the first chart comes into view, and the page does without until then.

import { element } from "./draw.js";

// maplibre, a part of plotly, adds an inline style sheet, which the policy of this page refuses, unless it finds its id
const MAP_STYLE = "9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53";
const SMALL = 12;

let library = null;

function load() {
  library ??= new Promise((resolve, reject) => {
    document.head.append(element("template", { id: MAP_STYLE }));
    const script = element("script", { src: "/static/plotly.min.js", async: "" });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => { library = null; script.remove(); reject(new Error("plotly.min.js did not load")); });
    document.head.append(script);
  });
  return library;
}

const probe = element("span", { hidden: "" });
document.body.append(probe);

// A colour of the style sheet as plotly wants it, `strength` of 1.
export function colour(name, strength = 1) {
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  return `rgba(${found[0]},${found[1]},${found[2]},${strength})`;
}

// Smoothed forward, so that a point never changes when later ones come: weights fall by e in `span` points.
export function smoothed(values, span = 8) {
  let kept = null;
  return values.map((value) => {
    if (typeof value === "number") kept = kept === null ? value : kept + (value - kept) / span;
    return typeof value === "number" ? kept : null;
  });
}

// The range between two lines.
export function band(x, low, high, name) {
  const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: colour(name, 0.14) }];
}

export function curve(x, y, name, more = {}) {
  return { x, y, mode: "lines", line: { color: colour(more.tone ?? "own", more.strength ?? 1), width: more.width ?? 2 }, name, hovertemplate: "%{y:.3~f}", connectgaps: false, ...more.trace };
}

export function dots(x, y, name) {
  return { x, y, mode: "lines+markers", name, line: { color: colour("ink"), width: 1.5, dash: "dot" }, marker: { color: colour("ink"), size: 5 }, hovertemplate: "%{y:.3~f}" };
}

export class Chart {
  // `make` gives {traces, layout} with the colours of now, null where there is nothing to show yet; `empty` is said then.
  // `zoomed(from, to)` makes the chart one to drag over; `nulls`: the whole range.
  constructor({ height, label, empty, zoomed = null }) {
    this.holder = element("div", { class: "plot", role: "img", "aria-label": label });
    Object.assign(this, { height, empty, zoomed, make: null, drawn: false, visible: false, dirty: false, gone: false });
    this.watch = new IntersectionObserver((entries) => { this.visible = entries.at(-1).isIntersecting; this.#paint(); }, { rootMargin: "96px" });
    this.watch.observe(this.holder);
    this.sized = new ResizeObserver(() => { if (this.drawn && this.holder.clientWidth !== this.width) this.redraw(); });
    this.sized.observe(this.holder);
    this.redraw = () => { this.dirty = true; this.#paint(); };
    addEventListener("themechange", this.redraw);
  }

  draw(make, label) {
    this.make = make;
    if (label) this.holder.setAttribute("aria-label", label);
    this.redraw();
  }

  async #paint() {
    if (!this.dirty || !this.visible || this.make === null || this.gone) return;
    this.dirty = false;
    const picture = this.make();
    if (picture === null) return this.#say(this.empty);
    try {
      if (!library) await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      const plotly = await load();
      if (this.gone) return;
      if (!this.drawn) this.holder.replaceChildren();
      this.holder.style.minHeight = `${this.height}px`;
      this.width = this.holder.clientWidth;
      await plotly.react(this.holder, picture.traces, this.#layout(picture.layout ?? {}), {
        displayModeBar: false, staticPlot: this.zoomed === null && !picture.hover, doubleClick: false, showTips: false,
      });
      if (!this.drawn && this.zoomed) this.holder.on("plotly_relayout", (change) => {
        if (change["xaxis.range[0]"] !== undefined) this.zoomed(change["xaxis.range[0]"], change["xaxis.range[1]"]);
      });
      this.drawn = true;
    } catch {
      this.#say("The chart could not be drawn; the numbers hold without it. Reload the page to try again.");
    }
  }

  #say(words) {
    this.#purge();
    this.holder.style.minHeight = "";
    this.holder.replaceChildren(element("p", { class: "empty" }, words));
  }

  #layout({ xaxis, yaxis, ...rest }) {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, ticks: "", tickangle: 0, tickfont: { color: colour("quiet"), size: SMALL } };
    const wide = this.width > 480;
    return {
      height: this.height, width: this.width, margin: { l: 36, r: 8, t: 8, b: 24 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", dragmode: this.zoomed ? "zoom" : false,
      font: { family: "system-ui, sans-serif", size: SMALL, color: colour("ink") },
      hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: { color: colour("ink"), size: SMALL } },
      xaxis: { ...axis, showgrid: false, zeroline: false, tickformat: "~s", nticks: wide ? 8 : 6, hoverformat: ",d", ...xaxis },
      yaxis: { ...axis, fixedrange: true, nticks: 5, zeroline: false, ...yaxis },
      ...rest,
    };
  }

  #purge() {
    if (this.drawn) window.Plotly.purge(this.holder);
    this.drawn = false;
  }

  close() {
    this.gone = true;
    this.watch.disconnect();
    this.sized.disconnect();
    removeEventListener("themechange", this.redraw);
    this.#purge();
  }
}
