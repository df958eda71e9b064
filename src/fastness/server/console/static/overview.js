// The overview: eight charts, the operations, facts about the server, and the nodes that share the plane.

import { Chart, History } from "./charts.js";
import { Table, bytes, card, count, facts, h, number, rate, seconds, setText, text } from "./dom.js";
import { nodeTable } from "./nodes.js";
import { SECONDS, SIZES } from "./series.js";

export const title = "Overview";
export const sections = [];
export const verbs = [];

export function open({ api, series, session, allows, query }) {
  const of = (name) => (sample) => sample.queues?.[api.universe]?.[name] ?? 0;
  const charts = [
    new Chart("Throughput", {
      write: (value) => (value === null || value === undefined ? "–" : `${rate(value)}/s`),
      lines: [
        { name: "calls", colour: "accent", fill: true, of: (all) => all.rates((sample) => sample.calls) },
        { name: "errors", colour: "bad", of: (all) => all.rates((sample) => sample.errors) },
      ],
    }),
    new Chart(`Messages in ${api.universe}`, {
      write: (value) => (value === null || value === undefined ? "–" : `${rate(value)}/s`),
      lines: [
        { name: "put", colour: "accent", of: (all) => all.rates(of("put")) },
        { name: "delivered", colour: "leased", of: (all) => all.rates(of("delivered")) },
        { name: "acked", colour: "good", of: (all) => all.rates(of("acked")) },
      ],
    }),
    new Chart(`Depth in ${api.universe}`, {
      write: count,
      lines: [
        { name: "ready", colour: "accent", fill: true, of: (all) => all.values(of("ready")) },
        { name: "leased", colour: "leased", of: (all) => all.values(of("leased")) },
        { name: "delayed", colour: "delayed", of: (all) => all.values((sample) => of("delayed")(sample) + of("blocked")(sample)) },
        { name: "dead", colour: "bad", of: (all) => all.values(of("dead")) },
      ],
    }),
    new Chart(`Oldest in ${api.universe}`, {
      write: seconds,
      lines: [{ name: "age of the next message", colour: "delayed", fill: true, of: (all) => all.values(of("oldest")) }],
    }),
    new Chart("Sync latency", {
      write: seconds,
      least: 0.001,
      lines: [
        { name: "p99", colour: "leased", of: (all) => all.quantiles("sync", SECONDS, 0.99) },
        { name: "p50", colour: "accent", of: (all) => all.quantiles("sync", SECONDS, 0.5) },
      ],
    }),
    new Chart("Group size", {
      write: (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0)),
      least: 2,
      lines: [
        { name: "mean", colour: "accent", fill: true, of: (all) => all.means("group") },
        { name: "p99", colour: "leased", of: (all) => all.quantiles("group", SIZES, 0.99) },
      ],
    }),
    new Chart("Rejects", {
      write: (value) => (value === null || value === undefined ? "–" : `${rate(value)}/s`),
      lines: [
        { name: "rejected", colour: "bad", fill: true, of: (all) => all.rates((sample) => sum(sample.rejects)) },
        { name: "fenced", colour: "delayed", of: (all) => all.rates((sample) => sample.fenced) },
      ],
    }),
    new Chart("Lock waits", {
      write: seconds,
      least: 0.001,
      lines: [
        { name: "p99", colour: "leased", of: (all) => all.quantiles("lock_wait", SECONDS, 0.99) },
        { name: "p50", colour: "accent", of: (all) => all.quantiles("lock_wait", SECONDS, 0.5) },
      ],
    }),
  ];
  const history = new History({ api, query }, {}, () => showCharts());
  const table = new Table(
    "Operations",
    [
      text("Operation", (row) => row.key, { head: true, class: "mono" }),
      text("Calls/s", (row) => rate(row.rate), { class: "number" }),
      number("Calls", (row) => row.calls),
      text("Errors", (row) => (row.errors ? count(row.errors) : "–"), { class: "number" }),
      text("p50", (row) => seconds(row.p50), { class: "number" }),
      text("p99", (row) => seconds(row.p99), { class: "number" }),
    ],
    { empty: "No calls yet." },
  );
  const server = h("div", {});
  const nodes = nodeTable();
  const format = h("span", {});
  const showsNodes = session.metrics && allows("node:list");
  const pushes = h("div", {});
  const showsPushes = session.metrics && allows("ingress:stats");
  const refused = h("p", { class: "empty", text: "This token does not allow metrics:read in every universe and queue, so there are no charts. The other pages work.", hidden: session.metrics });
  const body = h(
    "div",
    { hidden: !session.metrics },
    history.element,
    h("div", { class: "charts" }, charts.map((chart) => chart.element)),
    h("div", { class: "columns wide-first" }, card("Operations", "since the server started", table.element), card("Server", `Fastness ${session.version}`, server)),
    showsPushes && card("Pushes", "since the server started", pushes),
    showsNodes && card("Nodes", format, nodes.element),
  );
  const showCharts = () => {
    const shown = history.series(series);
    for (const chart of charts) chart.show(shown, history.seconds);
  };
  const show = () => {
    if (!series.samples.length) return;
    showCharts();
    table.show(series.table().sort((one, other) => other.calls - one.calls).slice(0, 40));
    const last = series.samples.at(-1);
    server.replaceChildren(
      facts([
        ["Uptime", seconds(Math.max(0, Math.floor((last.at_ms - last.started_ms) / 1000)))],
        ["Memory", bytes(last.memory)],
        ["Calls in flight", `${count(last.in_flight)}, of which ${count(last.waiting)} are waiting`],
        ["Open streams", count(last.streams)],
        ["Agents connected to the relay", count(last.agents)],
        ["Buffered pushes", count(last.ingress)],
        ["Compaction lag (records)", count(last.lag)],
        ["Rejected calls", count(sum(last.rejects))],
        ["Fenced calls", count(last.fenced)],
      ]),
    );
  };
  return {
    element: h("div", {}, refused, body),
    mounted: () => {
      for (const chart of charts) chart.mount();
      show();
    },
    sample: () => {
      show();
      if (!history.isLive) history.load().then((isNew) => isNew && showCharts(), () => {}); // The next sample tries again.
    },
    load: async () => {
      if (session.metrics && (await history.load())) showCharts();
      if (showsPushes) pushes.replaceChildren(facts(pushFacts(await api.get("v1/pushes/stats"))));
      if (!showsNodes) return;
      const found = await api.get("v1/nodes");
      nodes.show(found.nodes);
      setText(format, `that have the plane open; data format ${found.data_format}`);
    },
    dispose: () => charts.forEach((chart) => chart.dispose()),
  };
}

function pushFacts(stats) {
  const limit = stats.pushes_per_minute ? `${count(stats.pushes_per_minute)} a minute and sender` : "none";
  return [
    ["Accepted", count(stats.accepted)],
    ["Duplicates", count(stats.duplicates)],
    ["Refused", byReason(stats.refused)],
    ["Accepted and lost", byReason(stats.lost)],
    ["Waiting to be stored", `${count(stats.depth)}, the oldest for ${seconds(stats.lag_seconds)}`],
    ["Rate limit", limit],
    ["Waiting watches", count(stats.watches)],
  ];
}

function byReason(counts) {
  const found = Object.entries(counts).sort();
  return found.length ? found.map(([reason, times]) => `${reason} ${count(times)}`).join(", ") : "0";
}

function sum(counts) {
  return Object.values(counts ?? {}).reduce((total, each) => total + each, 0);
}
