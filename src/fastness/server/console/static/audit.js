// The audit log: who did what, when, from where, and with what outcome.

import { Table, card, clock, countHeading, emptyState, h, labelled, pill, text } from "./dom.js";

const PERIODS = { 3600: "last hour", 86400: "last day", 604800: "last week", "": "all" };
const EMPTY_PAGES_MAX = 20; // Pages without a match that are read before the page says so.
const OUTCOMES = { ok: "good", started: "delayed" };

export const title = "Audit log";
export const sections = [];
export const verbs = ["audit:read"];

export function open({ api, pages, query, session }) {
  const table = new Table(
    "Audit log",
    [
      text("When", (row) => clock(row.at_ms), { head: true }),
      text("Who", (row) => row.actor || "no token"),
      text("From", (row) => [row.entry, row.client].filter(Boolean).join(" ")),
      text("Action", (row) => row.action, { class: "mono narrow" }),
      text("What", (row) => row.target || "–", { class: "mono narrow" }),
      text("Detail", (row) => [row.detail, row.count !== undefined && row.count !== null && `count ${row.count}`].filter(Boolean).join(", ") || "–", { class: "words" }),
      { name: "Outcome", cell: (cell) => (row) => cell.replaceChildren(pill(OUTCOMES[row.outcome ?? "started"] ?? "bad", row.outcome ?? "started")) },
    ],
    { key: (row) => row.id, empty: emptyState("No action is recorded yet. Purges, changed policies, tokens, cancelled messages and similar actions appear here with the token that did them.") },
  );
  const scope = h("select", { id: "scope" }, h("option", { value: "", text: "this universe" }), session.limited ? "" : h("option", { value: "plane", text: "the whole plane" }));
  const period = h("select", { id: "period" }, Object.entries(PERIODS).map(([value, words]) => h("option", { value, text: words })));
  const actor = h("input", { id: "actor", type: "search", placeholder: "all", spellcheck: "false" });
  const action = h("input", { id: "action", type: "search", placeholder: "queue:*", spellcheck: "false" });
  const controls = { scope, period, actor, action };
  for (const [name, control] of Object.entries(controls)) {
    control.value = query.get(name) ?? "";
    control.addEventListener("change", () => {
      query.set({ [name]: control.value.trim() });
      page.restart();
    });
  }
  const page = pages(async (after) => {
    const filters = { actor: actor.value.trim() || null, action: action.value.trim() || null, since_ms: period.value ? Date.now() - Number(period.value) * 1_000 : null, limit: 100 };
    let found = { entries: [], next: after };
    // Each call reads a bounded number of entries, and may find none that match.
    for (let calls = 0; calls < EMPTY_PAGES_MAX && found.entries.length === 0 && (calls === 0 || found.next); calls++) {
      const place = scope.value === "plane" ? ["v1/audit/plane", {}] : ["v1/audit", { universe: api.universe }];
      found = await api.get(place[0], { ...place[1], ...filters, after: found.next });
    }
    return found;
  });
  const heading = countHeading("entry", "entries");
  const choice = h("div", { class: "inline" }, labelled("Of", scope), labelled("Period", period), labelled("Who", actor), labelled("Action", action));
  return {
    element: card(heading.element, choice, table.element, page.element),
    load: async () => {
      const { entries } = await page.load();
      heading.show(entries.length, page.next !== null);
      table.show(entries, Boolean(actor.value || action.value || period.value));
    },
  };
}
