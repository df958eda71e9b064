// The charts of a queue: its depth, its rates and the age of its next message, from the server's history.

import { Chart, History } from "./charts.js";
import { count, h, rate, seconds, setText } from "./dom.js";

export function queueCharts({ api, query }, queue) {
  const of = (name) => (sample) => (sample.queues[api.universe] ? (sample.queues[api.universe][name] ?? 0) : null);
  const written = (value) => (value === null || value === undefined ? "–" : `${rate(value)}/s`);
  const charts = [
    new Chart("Depth", {
      write: (value) => (value === null || value === undefined ? "–" : count(value)),
      lines: [
        { name: "ready", colour: "accent", fill: true, of: (all) => all.values(of("ready")) },
        { name: "leased", colour: "leased", of: (all) => all.values(of("leased")) },
        { name: "dead", colour: "bad", of: (all) => all.values(of("dead")) },
      ],
    }),
    new Chart("Rates", {
      write: written,
      lines: [
        { name: "put", colour: "accent", of: (all) => all.rates(of("put")) },
        { name: "acked", colour: "good", of: (all) => all.rates(of("acked")) },
        { name: "failed", colour: "bad", of: (all) => all.rates(of("failed")) },
      ],
    }),
    new Chart("Oldest", {
      write: (value) => (value === null || value === undefined ? "–" : seconds(value)),
      lines: [{ name: "age of the next message", colour: "delayed", fill: true, of: (all) => all.values(of("oldest")) }],
    }),
  ];
  const show = () => {
    const shown = history.series();
    plots.hidden = history.element.hidden = history.kept === 0;
    note.hidden = history.kept === 0 || shown.samples.some((sample) => sample.queues[api.universe]);
    const measured = `The server stores samples of the ${count(history.queuesMax)} measured queues with the most messages, and has none of this queue in this range.`;
    setText(note, shown.samples.length ? measured : "There are no samples yet: the server stores one every ten seconds.");
    for (const chart of charts) chart.show(shown, history.seconds);
  };
  const history = new History({ api, query }, { queue }, show);
  const plots = h("div", { class: "charts three" }, charts.map((chart) => chart.element));
  const note = h("p", { class: "dim part", role: "status", hidden: true });
  const element = h("div", {}, history.element, plots, note);
  return {
    element,
    mounted: () => charts.forEach((chart) => chart.mount()),
    load: async () => {
      if (await history.load()) show();
    },
    dispose: () => charts.forEach((chart) => chart.dispose()),
  };
}
