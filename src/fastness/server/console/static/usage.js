// Usage: what each universe holds, and how much of its quota that is.

import { Table, ago, ask, bytes, button, card, command, count, countHeading, emptyState, field, h, rate, rowActions, setText, text } from "./dom.js";

const UNIVERSES_MAX = 100; // One request each.
const NEARLY_FULL = 0.9;
const KINDS = { messages: "Messages", bytes: "Bytes", connections: "Connections", rate_per_second: "Calls per second" };

export const title = "Usage and quotas";
export const sections = [];
export const verbs = ["universe:usage"];

export function open({ api, act, allows, filter, session }) {
  const table = new Table(
    "Usage of universes",
    [
      text("Universe", (row) => row.universe, { head: true }),
      share("Messages", count, (row) => [row.messages, row.quota.messages]),
      share("Bytes", bytes, (row) => [row.bytes, row.quota.bytes]),
      share("Connections", count, (row) => [row.connections, row.quota.connections]),
      share("Calls/s", rate, (row) => [row.calls_per_second, row.quota.rate_per_second]),
      text("Measured", (row) => ago(row.measured_ms), { class: "dim" }),
      ...(allows("universe:quota.set") && !session.limited ? [rowActions("Quota", edit)] : []),
    ],
    { key: (row) => row.universe, empty: emptyState("There are no universes yet. The first message creates one, and a quota limits it:", command(api, "quota set main --messages 1000000")) },
  );

  function edit(cell, row) {
    let now = row;
    cell.append(button("Quota…", () => editQuota({ api, act }, now), { class: "small", "aria-label": `Quota of ${row.universe}` }));
    return (next) => {
      now = next;
    };
  }

  const heading = countHeading("universe", "universes");
  const rest = h("p", { class: "empty", hidden: true });
  let known = [];
  const show = () => table.show(known.filter((row) => row.universe.toLowerCase().includes(filter.value)), known.length > 0);
  filter.onchange = show;
  return {
    every: 10,
    element: card(heading.element, filter.element, table.element, rest),
    load: async () => {
      const { universes } = session;
      const shown = universes.slice(0, UNIVERSES_MAX);
      known = await Promise.all(shown.map(async (universe) => ({ universe, ...(await api.get(`v1/universes/${encodeURIComponent(universe)}/usage`)) })));
      heading.show(known.length, universes.length > shown.length);
      rest.hidden = universes.length <= shown.length;
      setText(rest, `The first ${UNIVERSES_MAX} universes are shown. For another one use: fastness quota show NAME`);
      show();
    },
    tick: show,
  };
}

// A column with a value, its limit, and the share of the limit as a bar.
function share(name, write, read) {
  const cell = (cell) => {
    const words = h("span", {});
    const fill = h("i", {});
    const bar = h("div", { class: "depth", "aria-hidden": "true" }, fill);
    cell.append(words, bar);
    return (row) => {
      const [used, limit] = read(row);
      const has = limit !== null && limit !== undefined;
      const part = has ? (limit > 0 ? Math.max(0, used ?? 0) / limit : 1) : 0;
      bar.hidden = !has;
      fill.className = part >= NEARLY_FULL ? "dead" : "ready";
      fill.style.width = `${Math.min(100, 100 * part)}%`;
      setText(words, has ? `${write(used)} of ${write(limit)} (${Math.round(100 * part)} %)` : `${write(used)}, no limit`);
    };
  };
  return { name, cell };
}

async function editQuota({ api, act }, row) {
  const inputs = Object.fromEntries(
    Object.keys(KINDS).map((kind) => [kind, h("input", { type: "number", min: "0", step: kind === "rate_per_second" ? "any" : "1", placeholder: "no limit", value: String(row.quota[kind] ?? "") })]),
  );
  const content = Object.entries(KINDS).map(([kind, words]) => field(words, inputs[kind]));
  const words = "What is over a limit is refused. Reads, acks and deletions always work. An empty field is no limit.";
  if (!(await ask({ title: `Quota of ${row.universe}`, words, yes: "Set the quota", content, danger: false }))) return;
  const quota = Object.fromEntries(Object.entries(inputs).filter(([, input]) => input.value !== "").map(([kind, input]) => [kind, Number(input.value)]));
  await act(() => api.put(`v1/universes/${encodeURIComponent(row.universe)}/quota`, quota), () => `The quota of ${row.universe} is set`);
}
