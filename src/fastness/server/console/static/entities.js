// Entities: their kinds, their fields by tier, and their changes.

import { Table, ago, brief, card, clock, command, count, countHeading, emptyState, h, link, number, pill, pretty, text } from "./dom.js";

const TIERS = { critical: "bad", important: "accent", best_effort: "quiet" };
const KINDS = 100;
const WORDS = { critical: "critical", important: "important", best_effort: "best effort" };

export const title = "Entities";
export const sections = ["entities"];
export const verbs = ["entity:kinds"];

export function open(context, kind, id) {
  if (id) return openOne(context, kind, id);
  return kind ? openKind(context, kind) : openAll(context);
}

function fieldsOf(tiers, tier) {
  return Object.keys(tiers).filter((name) => tiers[name] === tier);
}

function chips(names, tier) {
  return names.map((name) => pill(TIERS[tier], name));
}

// The tier of a field. `hasOwn`, because a field may be named "constructor".
function tierOf(tiers, name) {
  return Object.hasOwn(tiers, name) ? tiers[name] : "important";
}

// The tiers of the fields of a kind, found by paging through all kinds.
async function tiersOf(api, kind) {
  for (let after = ""; ; ) {
    const { kinds } = await api.get("v1/surveys/kinds", { after: after || null, limit: KINDS, tier: "important" });
    const found = kinds.find((each) => each.kind === kind);
    if (found || kinds.length < KINDS) return found?.tiers ?? {};
    after = kinds.at(-1).kind;
  }
}

function openAll({ api, pages, filter }) {
  const table = new Table(
    "Kinds of entities",
    [
      link("Kind", (row) => row.kind, (row) => `#/entities/${encodeURIComponent(row.kind)}`),
      ...Object.keys(TIERS).map((tier) => ({
        name: WORDS[tier][0].toUpperCase() + WORDS[tier].slice(1),
        class: "chips",
        cell: (cell) => (row) => {
          const names = fieldsOf(row.tiers, tier);
          cell.replaceChildren(...(names.length ? chips(names, tier) : ["–"]));
        },
      })),
    ],
    { key: (row) => row.kind, empty: emptyState("This universe has no entities yet. Their fields are versioned. This command writes the first one:", command(api, "entity set task t-1 status=open")) },
  );
  const page = pages(async (after) => {
    const found = await api.get("v1/surveys/kinds", { after, limit: KINDS, tier: "important" });
    return { ...found, next: found.kinds.length === KINDS ? found.kinds.at(-1).kind : null };
  });
  let known = [];
  const show = () => table.show(known.filter((row) => row.kind.toLowerCase().includes(filter.value)), known.length > 0, page);
  filter.onchange = show;
  const heading = countHeading("kind", "kinds");
  const patterns = h("div", { class: "chips" });
  return {
    element: h("div", {}, card(heading.element, filter.element, table.element, page.element), h("div", { class: "columns" }, tiers(), card("Policy patterns", "the first pattern that matches a kind or a field applies", patterns))),
    load: async () => {
      const found = await page.load();
      known = found.kinds;
      heading.show(known.length, page.next !== null);
      patterns.replaceChildren(h("dl", { class: "facts left" }, Object.entries(found.patterns).map(([pattern, tier]) => h("div", {}, h("dt", {}, h("code", { text: pattern })), h("dd", {}, pill(TIERS[tier], WORDS[tier]))))));
      show();
    },
  };
}

function tiers() {
  const rows = [
    ["critical", "synced to disk before it is acknowledged; survives a power loss"],
    ["important", "in the log at once, synced within 5 seconds; survives a crash of the process"],
    ["best_effort", "in memory, then in a session log; not part of the entity"],
  ];
  return card("Durability tiers", "", h("dl", { class: "facts left" }, rows.map(([tier, words]) => h("div", {}, h("dt", {}, pill(TIERS[tier], WORDS[tier])), h("dd", { text: words })))));
}

function openKind({ api, pages, filter }, kind) {
  const known = { tiers: {}, entities: [] };
  const table = new Table(
    `Entities of the kind ${kind}`,
    [
      link("Id", (row) => row.id, (row) => `#/entities/${encodeURIComponent(kind)}/${encodeURIComponent(row.id)}`),
      number("Version", (row) => row.version),
      text("Changed", (row) => ago(row.updated_ms)),
      ...["critical", "important"].map((tier) => ({
        name: `${WORDS[tier][0].toUpperCase()}${WORDS[tier].slice(1)} fields`,
        class: "mono",
        cell: (cell) => (row) => {
          const words = Object.keys(row.fields).filter((name) => tierOf(known.tiers, name) === tier).map((name) => `${name}: ${brief(row.fields[name], 40)}`);
          if (cell.textContent !== words.join("")) cell.replaceChildren(...words.map((each) => h("div", { text: each })));
        },
      })),
    ],
    { key: (row) => row.id, empty: "No entities of this kind." },
  );
  const page = pages(async (after) => {
    const found = await api.get(`v1/entities/${encodeURIComponent(kind)}`, { after, limit: 100, tier: "important" });
    return { ...found, next: found.entities.length === 100 ? found.entities.at(-1).id : null };
  });
  const show = () => table.show(known.entities.filter((row) => row.id.toLowerCase().includes(filter.value)), known.entities.length > 0, page);
  filter.onchange = show;
  const heading = countHeading("entity", "entities");
  return {
    heading: [h("a", { href: "#/entities", text: "Entities" }), kind],
    element: card(heading.element, filter.element, table.element, page.element),
    load: async () => {
      const [tiers, found] = await Promise.all([tiersOf(api, kind), page.load()]);
      known.tiers = tiers;
      known.entities = found.entities;
      heading.show(known.entities.length, page.next !== null);
      show();
    },
  };
}

function openOne({ api }, kind, id) {
  const path = `v1/entities/${encodeURIComponent(kind)}/${encodeURIComponent(id)}`;
  const about = h("span", {});
  const fields = new Table(
    "Fields",
    [
      text("Field", (row) => row.key, { head: true, class: "mono" }),
      { name: "Tier", cell: (cell, row) => cell.append(pill(TIERS[row.tier], WORDS[row.tier])) },
      text("Value", (row) => pretty(row.value), { class: "mono" }),
    ],
    { empty: "No durable fields." },
  );
  const changes = new Table(
    "Changes",
    [
      number("Version", (row) => row.version, { head: true }),
      text("When", (row) => clock(row.at_ms), { class: "dim" }),
      { name: "Durability", cell: (cell, row) => cell.append(pill(TIERS[row.durability], WORDS[row.durability])) },
      text("Set", (row) => (row.deleted ? "deleted" : brief(row.fields, 120)), { class: "mono" }),
      text("Removed", (row) => row.removed.join(", ") || "–"),
    ],
    { key: (row) => row.version, empty: "No stored changes." },
  );
  return {
    heading: [h("a", { href: "#/entities", text: "Entities" }), h("a", { href: `#/entities/${encodeURIComponent(kind)}`, text: kind }), id],
    element: h("div", {}, card("Fields", about, fields.element), card("Changes", "latest first", changes.element)),
    load: async () => {
      const [entity, tiers] = await Promise.all([api.get(path, { tier: "important" }), tiersOf(api, kind)]);
      const history = await api.get(`${path}/history`, { after: Math.max(0, entity.version - 50), limit: 50, tier: "important" });
      about.textContent = `version ${count(entity.version)}, created ${clock(entity.created_ms)}`;
      fields.show(Object.entries(entity.fields).map(([key, value]) => ({ key, value, tier: tierOf(tiers, key) })));
      changes.show(history.changes.reverse());
    },
  };
}
