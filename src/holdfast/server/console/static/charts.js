// Live charts: uPlot in the colours of the page, with a text alternative for screen readers.

import { h, setText } from "./dom.js";

const HEIGHT = 132;
const WINDOW_SECONDS = 300;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// The label of a time tick; empty if the edge of the chart would cut it off.
function hour(plot, tick) {
  if (plot.valToPos(tick, "x") > plot.over.clientWidth - 20) return "";
  return new Date(tick * 1000).toLocaleTimeString("sv-SE").slice(0, tick % 60 ? 8 : 5);
}

export class Chart {
  // lines: [{ name, colour, of: (series) => [values], fill }]
  constructor(title, { lines, write, least = 1 }) {
    this.title = title;
    this.lines = lines;
    this.write = write;
    this.least = least;
    this.at = null;
    this.now = h("strong", { class: "now", text: "–" });
    this.keys = lines.map((line) => h("span", { class: "key" }, h("i", { class: `dot ${line.colour}` }), line.name, " ", h("b", { text: "–" })));
    this.container = h("div", { class: "plot", role: "img", "aria-label": `${title}: no data yet` });
    this.element = h("section", { class: "card chart" }, h("header", {}, h("h2", { text: title }), this.now), this.container, h("p", { class: "keys" }, this.keys));
    this.data = [[], ...lines.map(() => [])];
  }

  mount() {
    const axis = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new globalThis.uPlot(
      {
        width: this.#width(),
        height: HEIGHT,
        padding: [8, 8, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "holdfast" }, points: { size: 6 }, drag: { x: false, y: false }, y: false },
        scales: {
          x: { time: true, range: () => this.#window() },
          y: { range: (_, low, high) => [0, Math.max(this.least, (high ?? 0) * 1.15)] },
        },
        axes: [
          { ...axis, size: 26, space: 64, values: (plot, ticks) => ticks.map((tick) => hour(plot, tick)) },
          { ...axis, size: 52, space: 30, values: (_, ticks) => ticks.map((tick) => this.write(tick)) },
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
    addEventListener("holdfast-theme", this.repaint);
    return this;
  }

  show(series) {
    this.data = [series.times, ...this.lines.map((line) => line.of(series))];
    this.plot.setData(this.data);
    this.#updateLabels();
  }

  dispose() {
    this.sizes.disconnect();
    removeEventListener("holdfast-theme", this.repaint);
    this.plot.destroy();
  }

  #width() {
    return Math.max(160, this.container.clientWidth);
  }

  #window() {
    const last = this.data[0].at(-1) ?? Date.now() / 1000;
    const first = this.data[0][0] ?? last;
    return [Math.max(last - WINDOW_SECONDS, Math.min(first, last - 60)), last];
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
    this.container.setAttribute("aria-label", `${this.title}: ${this.lines.map((line, number) => `${line.name} ${words[number]}`).join(", ")}`);
  }
}
