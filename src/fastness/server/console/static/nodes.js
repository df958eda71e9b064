// Nodes: the processes that have the plane open, their load, and which of them does the maintenance.

import { Table, ago, card, countHeading, h, number, pill, rate, setText, text, tiles } from "./dom.js";

export const title = "Nodes";
export const sections = [];
export const verbs = ["node:list"];
export const everywhere = true;

export function open({ api, filter }) {
  const table = nodeTable();
  const totals = tiles({ calls: "calls/s", connections: "connections", waiting: "waiting consumers", format: "data format" });
  const heading = countHeading("node", "nodes");
  let known = [];
  const show = () => {
    const found = known.filter((row) => [row.id, row.address, row.host].some((words) => words.toLowerCase().includes(filter.value)));
    table.show(found, known.length > 0);
  };
  filter.onchange = show;
  const note = h("p", { class: "empty", hidden: true });
  return {
    element: h("div", {}, totals.element, card(heading.element, filter.element, table.element, note)),
    load: async () => {
      const found = await api.get("v1/nodes");
      known = found.nodes;
      const alive = known.filter((row) => row.alive);
      const sum = (name) => alive.reduce((total, row) => total + row.load[name], 0);
      totals.show("calls", rate(sum("calls_per_second")));
      totals.show("connections", String(sum("connections")));
      totals.show("waiting", String(sum("waiting_consumers")));
      totals.show("format", String(found.data_format));
      heading.show(known.length);
      const isUnmaintained = known.length > 0 && !alive.some((row) => row.maintenance);
      note.hidden = known.length > 1 && !isUnmaintained;
      setText(note, isUnmaintained ? "No node does the maintenance now: schedules, expiry and compaction wait. Another node takes it over within 30 seconds." : "One process has this plane open. Several servers share a plane on PostgreSQL: start them with the same postgresql:// URL.");
      show();
    },
    tick: show,
  };
}

// The overview has this table, too.
export function nodeTable() {
  return new Table(
    "Nodes",
    [
      text("Node", (row) => row.id, { head: true, class: "mono" }),
      { name: "State", cell: (cell) => (row) => cell.replaceChildren(row.alive ? pill("good", "alive") : pill("bad", "gone"), row.maintenance ? pill("leased", "maintenance") : "") },
      text("Address", (row) => row.address || `${row.kind}, process ${row.pid} on ${row.host}`, { class: "mono" }),
      text("Version", (row) => `${row.version}, format ${row.oldest_format === row.newest_format ? row.newest_format : `${row.oldest_format} to ${row.newest_format}`}`),
      text("Calls/s", (row) => rate(row.load.calls_per_second), { class: "number" }),
      number("Connections", (row) => row.load.connections),
      number("Consumers", (row) => row.load.waiting_consumers),
      text("Processor", (row) => `${Math.round(row.load.processor_share * 100)} %`, { class: "number" }),
      text("Seen", (row) => ago(row.seen_ms), { class: "dim" }),
      text("Started", (row) => ago(row.started_ms), { class: "dim" }),
    ],
    { key: (row) => row.id, empty: "No node has the plane open." },
  );
}
