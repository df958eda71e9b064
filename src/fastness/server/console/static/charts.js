// Charts: uPlot in the colours of the page, with a text alternative for screen readers, and the choice of their range.

import { button, h, seconds, setText } from "./dom.js";
import { RANGES, Series } from "./series.js";

const HEIGHT = 132;
const AXIS_LEAST = 40;
const AXIS_FONT = "11px system-ui, sans-serif";
const AXIS_GAP = 14; // Between a label and the plot, and a label and the edge.

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// The label of a time tick; empty if the edge of the chart would cut it off.
function hour(plot, tick) {
  const label = new Date(tick * 1000).toLocaleTimeString("sv-SE").slice(0, tick % 60 ? 8 : 5);
  const half = textWidth(plot, label) / 2;
  const at = plot.valToPos(tick, "x");
  return at + half > plot.over.clientWidth || at + plot.over.offsetLeft < half ? "" : label;
}

function textWidth(plot, label) {
  plot.ctx.save();
  plot.ctx.font = AXIS_FONT;
  const { width } = plot.ctx.measureText(label);
  plot.ctx.restore();
  return width;
}

// As wide as the longest label, so that none is cut off.
function axisWidth(plot, labels) {
  return Math.ceil(Math.max(AXIS_LEAST, ...(labels ?? []).map((label) => textWidth(plot, label) + AXIS_GAP)));
}

export class Chart {
  // lines: [{ name, colour, of: (series) => [values], fill }]
  constructor(title, { lines, write, least = 1 }) {
    this.title = title;
    this.lines = lines;
    this.write = write;
    this.least = least;
    this.at = null;
    this.seconds = RANGES[0].seconds;
    this.now = h("strong", { class: "now", text: "–" });
    this.keys = lines.map((line) => h("span", { class: "key" }, h("i", { class: `dot ${line.colour}` }), line.name, " ", h("b", { text: "–" })));
    this.container = h("div", { class: "plot", role: "img", "aria-label": `${title}: no data yet` });
    this.element = h("section", { class: "card chart" }, h("header", {}, h("h2", { text: title }), this.now), this.container, h("p", { class: "keys" }, this.keys));
    this.data = [[], ...lines.map(() => [])];
  }

  mount() {
    const axis = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: AXIS_FONT };
    this.plot = new globalThis.uPlot(
      {
        width: this.#width(),
        height: HEIGHT,
        padding: [8, 8, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "fastness" }, points: { size: 6 }, drag: { x: false, y: false }, y: false },
        scales: {
          x: { time: true, range: () => this.#window() },
          y: { range: (_, low, high) => [0, Math.max(this.least, (high ?? 0) * 1.15)] },
        },
        axes: [
          { ...axis, size: 26, space: 64, values: (plot, ticks) => ticks.map((tick) => hour(plot, tick)) },
          { ...axis, size: axisWidth, space: 30, values: (_, ticks) => ticks.map((tick) => this.write(tick)) },
        ],
        series: [{}, ...this.lines.map((line) => ({
          label: line.name,
          stroke: () => colour(line.colour),
          width: 1.5,
          points: { show: false },
          spanGaps: false,
          fill: line.fill ? () => `${colour(line.colour)}22` : undefined,
        }))],
        hooks: { setCursor: [(plot) => this.#point(plot.cursor.idx)] },
      },
      this.data,
      this.container,
    );
    this.sizes = new ResizeObserver(() => this.plot.setSize({ width: this.#width(), height: HEIGHT }));
    this.sizes.observe(this.container);
    this.repaint = () => this.plot.redraw(false);
    addEventListener("fastness-theme", this.repaint);
    return this;
  }

  // The samples of a series; the chart begins `seconds` before the last one, if there are as many.
  show(series, seconds = RANGES[0].seconds) {
    this.seconds = seconds;
    this.data = [series.times, ...this.lines.map((line) => line.of(series))];
    this.plot.setData(this.data);
    this.#updateLabels();
  }

  dispose() {
    this.sizes.disconnect();
    removeEventListener("fastness-theme", this.repaint);
    this.plot.destroy();
  }

  #width() {
    return Math.max(160, this.container.clientWidth);
  }

  #window() {
    const last = this.data[0].at(-1) ?? Date.now() / 1000;
    const first = this.data[0][0] ?? last;
    return [Math.max(last - this.seconds, Math.min(first, last - 60)), last];
  }

  #point(index) {
    this.at = index ?? null;
    this.#updateLabels();
  }

  #updateLabels() {
    const index = this.at ?? this.data[0].length - 1;
    const words = this.lines.map((line, number) => this.write(this.data[number + 1][index]));
    words.forEach((word, number) => setText(this.keys[number].querySelector("b"), word));
    setText(this.now, words[0]);
    const times = this.data[0];
    const span = times.length > 1 ? `, ${seconds(Math.round(times.at(-1) - times[0]))} of samples` : "";
    this.container.setAttribute("aria-label", `${this.title}${span}: ${this.lines.map((line, number) => `${line.name} ${words[number]}`).join(", ")}`);
  }
}

const HISTORY_MS = 10_000; // How often the server stores a sample.

// The range of a page's charts: buttons, which the address remembers, and the samples of the chosen range.
export class History {
  // `of`: the parameters of the history. `onchange` is called after another range was loaded.
  constructor({ api, query }, of, onchange) {
    this.api = api;
    this.query = query;
    this.of = of;
    this.onchange = onchange;
    this.samples = [];
    this.loadedAt = -Infinity;
    this.kept = null; // Seconds that the server keeps; null: not asked yet.
    this.range = RANGES.find((range) => range.name === query.get("range")) ?? RANGES[0];
    this.buttons = RANGES.map((range) => button(range.name, () => this.#choose(range), { class: "small", "aria-pressed": String(range === this.range) }));
    this.servers = h("span", { class: "dim", hidden: true });
    this.element = h("div", { class: "ranges", role: "group", "aria-label": "Time range of the charts" }, this.buttons, this.servers);
  }

  get seconds() {
    return this.range.seconds;
  }

  get isLive() {
    return this.range === RANGES[0];
  }

  // The samples of the range; of the shortest one with the newer samples of `live`, if it is given.
  series(live = null) {
    if (live && this.isLive) return live.after(this.samples);
    const series = new Series(Infinity);
    this.samples.forEach((sample) => series.add(sample));
    return series;
  }

  // Loads the samples, if the server may have new ones.
  async load(force = false) {
    const now = performance.now();
    const pause = this.range.seconds > 3_600 ? 6 * HISTORY_MS : HISTORY_MS;
    if (!force && now - this.loadedAt < pause) return false;
    this.loadedAt = now;
    const { range } = this;
    const isOwn = this.isLive && !this.of.queue; // The newer samples of a page are those of its server.
    const asked = { ...this.of, universe: this.api.universe, seconds: range.seconds, ...(isOwn && { servers: "own" }) };
    const found = await this.api.get("console/history", asked);
    if (range !== this.range) return false;
    this.samples = found.samples;
    this.servers.hidden = this.of.queue || found.servers < 2;
    setText(this.servers, `Calls of ${found.servers} servers`);
    this.kept = found.kept_seconds;
    this.queuesMax = found.queues_max;
    RANGES.forEach((each, index) => (this.buttons[index].hidden = index > 0 && RANGES[index - 1].seconds >= this.kept));
    return true;
  }

  async #choose(range) {
    this.range = range;
    this.query.set({ range: range === RANGES[0] ? null : range.name });
    RANGES.forEach((each, index) => this.buttons[index].setAttribute("aria-pressed", String(each === range)));
    this.samples = [];
    try {
      await this.load(true);
    } finally {
      this.onchange();
    }
  }
}
