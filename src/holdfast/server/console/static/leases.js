// Leases and locks: holders, expiry and waiters.

import { Table, ago, card, count, countHeading, h, number, pill, seconds, setText, text } from "./dom.js";

export const title = "Leases and locks";
export const sections = ["leases"];

export function open({ api, pages, filter }) {
  const left = (row) => Math.max(0, (row.expires_ms - Date.now()) / 1000);
  const table = new Table(
    "Held leases",
    [
      text("Key", (row) => row.key, { head: true, class: "mono" }),
      text("Holder", (row) => row.owner),
      number("Fence", (row) => row.fencing_token),
      text("Acquired", (row) => ago(row.acquired_ms)),
      {
        name: "Expires in",
        class: "bar",
        cell: (cell) => {
          const words = h("span", {});
          const fill = h("i", { class: "leased" });
          cell.append(h("div", { class: "beside" }, h("div", { class: "depth thin", "aria-hidden": "true" }, fill), words));
          return (row) => {
            fill.style.width = `${Math.min(100, (100 * left(row)) / Math.max(0.001, (row.expires_ms - row.acquired_ms) / 1000))}%`;
            setText(words, left(row) > 0 ? seconds(left(row)) : "expired");
          };
        },
      },
      { name: "Waiting", class: "number", cell: (cell) => (row) => cell.replaceChildren(row.waiting ? pill("delayed", `${count(row.waiting)} for ${seconds(row.waited)}`) : "–") },
    ],
    { key: (row) => row.lease_id, empty: "No lease is held." },
  );
  const locks = new Table(
    "Locks of this process",
    [
      text("Lock", (row) => row.path.filter(Boolean).join(" / "), { head: true, class: "mono" }),
      text("Mode", (row) => row.mode),
      text("Owner", (row) => row.owner),
      text("Held for", (row) => (row.held_seconds === null ? "–" : seconds(row.held_seconds))),
      text("Waits for", (row) => (row.waiting_seconds === null ? "–" : seconds(row.waiting_seconds))),
    ],
    { empty: "No locks are held." },
  );
  const page = pages((after) => api.get("v1/locks", { after, limit: 100, tier: "important" }));
  let known = [];
  const show = () => table.show(known.filter((row) => row.key.includes(filter.value)));
  filter.onchange = show;
  const heading = countHeading("lease", "leases");
  return {
    element: h("div", {}, card(heading.element, filter.element, table.element, page.element), card("Locks in this process", "on rows and tables of entities, held during a write", locks.element)),
    load: async () => {
      const [held, waits] = await Promise.all([page.load(), api.get("v1/surveys/waits", { tier: "important" })]);
      const lines = new Map(waits.lines.map((line) => [line.key, line]));
      known = held.leases.map((row) => ({ ...row, waiting: lines.get(row.key)?.waiting ?? 0, waited: lines.get(row.key)?.waited_seconds ?? 0 }));
      heading.show(known.length, page.next !== null);
      show();
      locks.show(waits.locks.map((row, index) => ({ ...row, key: `${index} ${row.path.join("/")} ${row.owner}` })));
    },
    tick: show,
  };
}
