// Leases and locks: holders, expiry and waiters; the sessions of ordered locks. Operators end what hangs.

import { orNullIfRefused } from "./api.js";
import { Table, ago, ask, button, card, command, countHeading, emptyState, h, number, pill, plural, rowActions, seconds, setText, text } from "./dom.js";

export const title = "Leases and locks";
export const sections = ["leases"];
export const verbs = ["lease:list"];

export function open({ api, act, allows, pages, filter }) {
  const left = (row) => Math.max(0, (row.expires_ms - Date.now()) / 1000);
  const table = new Table(
    "Held leases",
    [
      text("Key", (row) => row.key, { head: true, class: "mono" }),
      text("Holder", (row) => row.owner),
      number("Fence", (row) => row.fence),
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
      { name: "Waiting at this server", class: "chips", cell: (cell) => (row) => cell.replaceChildren(...waiters(row.line)) },
      ...(allows("lease:break") ? [rowActions("Release", release)] : []),
    ],
    { key: (row) => `${row.lease_id} ${row.fence}`, empty: emptyState("No lease is held. A program holds one while it works. This command holds one for ten minutes:", command(api, "lease acquire deploy --ttl 10m")) },
  );

  function release(cell, row) {
    const question = {
      title: `Release the lease on ${row.key}?`,
      words: `${row.owner} is fenced off: its next write under the lease is refused. The next caller in line gets the lease. The lease with the fence ${row.fence} is ended, and none that was granted since.`,
      yes: "Release the lease",
      no: "Keep it",
    };
    const end = async () => (await ask(question)) && act(() => api.post("v1/lease/break", { key: row.key, fence: row.fence }), (done) => (done.released ? `The lease on ${row.key} is released` : `The lease on ${row.key} was not held any more`));
    cell.append(button("Release…", end, { class: "small", "aria-label": `Release ${row.key}` }));
  }

  function endSession(cell, row) {
    const question = { title: "End this session?", words: `All locks of ${row.owner} are released, and it is fenced off: its next write under them is refused.`, yes: "End the session", no: "Keep it" };
    const end = async () => (await ask(question)) && act(() => api.post("v1/locks/end", { number: row.number }), () => `The session of ${row.owner} has ended`);
    cell.append(button("End…", end, { class: "small", "aria-label": `End session ${row.number}` }));
  }

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
  const named = (lock) => [lock.level, lock.name, lock.mode].filter(Boolean).join(" ");
  const sessions = new Table(
    "Sessions of ordered locks",
    [
      text("Session", (row) => row.number, { head: true, class: "mono" }),
      text("Holder", (row) => row.owner),
      text("Holds", (row) => row.locks.filter((lock) => !lock.is_waiting && !lock.is_intent).map(named).join(", ") || "–"),
      {
        name: "Waits for",
        cell: (cell) => (row) => {
          const waiting = row.locks.find((lock) => lock.is_waiting);
          cell.replaceChildren(waiting ? pill("delayed", named(waiting)) : "–");
        },
      },
      text("Since", (row) => ago(row.since_ms)),
      text("Expires in", (row) => (left(row) > 0 ? seconds(left(row)) : "expired")),
      ...(allows("lock:end") ? [rowActions("End", endSession)] : []),
    ],
    { key: (row) => row.number, empty: "No ordered lock is held." },
  );
  const sessionPage = pages((after) => api.get("v1/locks", { after, limit: 100, tier: "important" }), "session");
  const page = pages((after) => api.get("v1/leases", { after, limit: 100, tier: "important" }));
  let known = [];
  let holding = [];
  const show = () => {
    const matches = (...words) => words.some((each) => each.toLowerCase().includes(filter.value));
    table.show(known.filter((row) => matches(row.key, row.owner)), known.length > 0, page);
    sessions.show(holding.filter((row) => matches(row.owner, ...row.locks.map(named))), holding.length > 0, sessionPage);
  };
  filter.onchange = show;
  const heading = countHeading("lease", "leases");
  return {
    element: h("div", {}, card(heading.element, filter.element, table.element, page.element), card("Ordered locks", "of the database, entity types and records, which processes share", sessions.element, sessionPage.element), card("Locks in this process", "on rows and tables of entities, held during a write", locks.element)),
    load: async () => {
      const [held, found, sharing] = await Promise.all([page.load(), api.get("v1/surveys/waits", { tier: "important" }).catch(orNullIfRefused), sessionPage.load().catch(orNullIfRefused)]);
      const waits = found ?? { lines: [], locks: [] };
      holding = sharing?.sessions ?? [];
      const lines = new Map(waits.lines.map((line) => [line.key, line]));
      known = held.leases.map((row) => ({ ...row, line: lines.get(row.key) }));
      heading.show(known.length, page.next !== null);
      show();
      locks.show(waits.locks.map((row, index) => ({ ...row, key: `${index} ${row.path.join("/")} ${row.owner}` })));
    },
    tick: show,
  };
}

// The callers that wait for a lease at this server, the first ones by name.
function waiters(line) {
  if (!line) return ["–"];
  const rest = line.waiting - line.callers.length;
  return [...line.callers.map((caller) => pill("delayed", `${caller.owner} ${seconds(caller.waited_seconds)}`)), rest > 0 ? `and ${plural(rest, "other")}` : ""];
}
