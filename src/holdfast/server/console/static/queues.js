// Queues: depth, next messages, leased messages and dead letters.

import { Table, ago, brief, button, bytes, card, clock, count, countHeading, fold, h, link, number, opener, payload, pill, pretty, rate, seconds, setText, text, tiles, toggle } from "./dom.js";
import { orNullIfRefused } from "./api.js";
import * as messagePage from "./messages.js";

const STATES = ["ready", "leased", "delayed", "blocked", "dead"];
const TILES = { ready: "ready", leased: "leased", delayed: "delayed", blocked: "blocked", dead: "dead", oldest: "oldest", consumers: "consumers" };
const PEEK = 25;
const LETTERS = 100;
const LEASED = 100;

export const title = "Queues";
export const sections = ["queues"];

export function open(context, name, section, id) {
  if (section === "messages" && id) return messagePage.open(context, name, id);
  return name ? openOne(context, name) : openAll(context);
}

function openAll({ api, pages, filter }) {
  const rates = new Rates();
  const table = new Table(
    "Queues",
    [
      { name: "Queue", head: true, cell: (cell) => named(cell) },
      { name: "Messages", class: "bar", cell: (cell) => depths(cell) },
      ...STATES.map((state) => number(state[0].toUpperCase() + state.slice(1), (row) => row[state])),
      text("Oldest", (row) => (row.ready ? seconds(row.head_age_seconds) : "–"), { class: "number" }),
      text("Put/s", (row) => rate(row.rates?.put), { class: "number" }),
      text("Acked/s", (row) => rate(row.rates?.acked), { class: "number" }),
      number("Consumers", (row) => row.waiting_consumers),
    ],
    { key: (row) => row.queue, empty: "This universe has no queues yet. The first message creates a queue." },
  );
  const page = pages((after) => api.get("v1/surveys/queues", { after, limit: 100, tier: "important" }));
  let known = [];
  const show = () => {
    const most = Math.max(1, ...known.map((row) => STATES.reduce((all, state) => all + row[state], 0)));
    table.show(known.filter((row) => row.queue.includes(filter.value)).map((row) => ({ ...row, most })));
  };
  filter.onchange = show;
  const totals = tiles(TILES);
  const heading = countHeading("queue", "queues");
  return {
    element: h("div", {}, totals.element, card(heading.element, filter.element, table.element, page.element)),
    load: async () => {
      const found = (await page.load()).queues;
      const names = new Set(found.map((row) => row.queue));
      const letters = (row) => row.queue.endsWith(".dlq") && names.has(row.queue.slice(0, -4)); // Its messages count as dead letters of the other queue.
      known = found.filter((row) => !letters(row)).map((row) => ({ ...row, rates: rates.of(row) }));
      heading.show(known.length, page.next !== null);
      for (const state of STATES) totals.show(state, count(known.reduce((all, row) => all + row[state], 0)));
      totals.show("consumers", count(known.reduce((all, row) => all + row.waiting_consumers, 0)));
      totals.show("oldest", known.some((row) => row.ready) ? seconds(Math.max(...known.map((row) => row.head_age_seconds))) : "–");
      show();
    },
  };
}

function openOne({ api, act, allows }, name) {
  const path = `v1/queues/${encodeURIComponent(name)}`;
  const totals = tiles(TILES);
  const state = h("span", {});
  const pause = button("Pause", () => setPaused(!paused), { class: "plain", hidden: !allows("queue:pause") });
  const redriveAll = button("Redrive all", () => act(async () => api.post(`${path}/redrive`, {}), (moved) => `${moved.count} redriven`), { class: "plain", hidden: !allows("queue:redrive") });
  let paused = false;
  const setPaused = (off) => act(() => api.post(`${path}/${off ? "pause" : "resume"}`), () => (off ? "Paused" : "Resumed"));
  const ready = messages(name, "Next messages", "No messages are ready.");
  const error = { name: "Last error", class: "error", cell: (cell) => (row) => setText(cell, row.last_error ?? "–") };
  const redriveOne = {
    name: "",
    label: "Redrive",
    class: "number",
    cell: (cell, row) => {
      cell.append(button("Redrive", () => act(() => api.post(`${path}/redrive`, { ids: [row.message_id] }), () => "Redriven"), { class: "small", "aria-label": `Redrive ${row.message_id}` }));
    },
  };
  const died = text("Dead-lettered", (row) => ago(row.died_at_unix * 1000));
  const dead = messages(name, "Dead letters", "No dead letters.", [error], allows("queue:redrive") ? [died, redriveOne] : [died]);
  const policy = h("div", {});
  const leased = leasedMessages(name);
  const leasedCard = card("Leased messages", `the first ${LEASED}, by age`, leased.element);
  let held = null;
  return {
    heading: [h("a", { href: "#/queues", text: "Queues" }), name, state],
    actions: [pause],
    element: h(
      "div",
      {},
      totals.element,
      allows("queue:get") && messagePage.finder(name),
      card("Dead letters", redriveAll, dead.element),
      h("div", { class: "columns wide-first" }, card("Next messages", `the first ${PEEK}; peeking leases nothing`, ready.element), card("Policy and totals", "", policy)),
      leasedCard,
    ),
    tick: () => held && leased.show(held),
    load: async () => {
      const [stats, peeked, letters, rules, leases] = await Promise.all([
        api.get(path, { tier: "important" }),
        api.get(`${path}/peek`, { limit: PEEK, tier: "important" }),
        api.get(`${path}/dead-letters`, { limit: LETTERS }),
        api.get(`${path}/policy`, { tier: "important" }),
        api.get(`${path}/leased`, { limit: LEASED, tier: "important" }).catch(orNullIfRefused),
      ]);
      paused = stats.paused;
      setText(pause, paused ? "Resume" : "Pause");
      state.replaceChildren(paused ? pill("delayed", "paused") : "");
      for (const each of STATES) totals.show(each, count(stats[each]));
      totals.show("consumers", count(stats.waiting_consumers));
      totals.show("oldest", stats.ready ? seconds(stats.head_age_seconds) : "–");
      ready.show(peeked.messages);
      dead.show(letters.messages);
      leasedCard.hidden = leases === null;
      held = leases?.messages ?? [];
      leased.show(held);
      toggle(redriveAll, "disabled", letters.messages.length === 0);
      policy.replaceChildren(policyOf(rules, stats));
    },
  };
}

function messages(queue, caption, empty, before = [], after = []) {
  return new Table(
    caption,
    [
      opener("Message", (row) => row.message_id.slice(-12), (row) => row.message_id),
      text("Payload", (row) => brief(payload(row), 90), { class: "mono dim" }),
      ...before,
      text("Attempts", (row) => `${row.failure_attempts || row.attempts} of ${row.max_attempts}`, { class: "number" }),
      text("Put", (row) => ago(row.created_at_unix * 1000)),
      ...after,
    ],
    { empty, key: (row) => row.message_id, inside: (row) => inside(queue, row) },
  );
}

// A token without queue:leased sees the rest of the page.
function leasedMessages(queue) {
  const left = (row) => row.lease_expires_at_unix - Date.now() / 1000;
  return new Table(
    "Leased messages",
    [
      link("Message", (row) => row.message_id, (row) => messagePage.address(queue, row.message_id), { class: "mono" }),
      text("Owner", (row) => row.owner),
      text("Attempt", (row) => `${row.attempts} (${row.failure_attempts} of ${row.max_attempts} failed)`, { class: "number" }),
      text("Expires in", (row) => (left(row) > 0 ? seconds(left(row)) : "expired"), { class: "number" }),
      number("Fence", (row) => row.fencing_token),
      text("Put", (row) => ago(row.created_at_unix * 1000)),
    ],
    { empty: "No messages are leased.", key: (row) => row.lease_id },
  );
}

function inside(queue, row) {
  const facts = [
    ["id", h("a", { href: messagePage.address(queue, row.message_id), text: row.message_id })],
    ["put", clock(row.created_at_unix * 1000)],
    ["priority", row.priority],
    ["group", row.group ?? "–"],
    ["correlation id", row.correlation_id],
    ["payload", `${bytes(row.payload_bytes)}, ${row.payload_content_type}`],
    ...Object.entries(row.attributes ?? {}),
  ];
  return h(
    "div",
    { class: "columns" },
    h("div", {}, failuresOf(row), h("pre", { tabindex: "0", text: pretty(payload(row)) })),
    h("dl", { class: "facts small" }, facts.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { class: "mono" }, value instanceof Element ? value : String(value))))),
  );
}

// The failed attempts of a message, the newest first and expanded.
function failuresOf(row) {
  if (!row.failures.length) return row.last_error ? h("pre", { class: "error", tabindex: "0", text: row.last_error }) : "";
  return [...row.failures].reverse().map((failure, number) => {
    const error = [failure.error_type, failure.message].filter(Boolean).join(": ");
    const summary = `Attempt ${failure.attempt} by ${failure.owner}: ${failure.outcome}, ${clock(failure.failed_at_unix * 1000)}`;
    const details = fold(summary, () => h("pre", { class: "error", tabindex: "0", text: failure.traceback ?? (error || "No error was given.") }));
    details.open = number === 0;
    return details;
  });
}

function policyOf(rules, stats) {
  const rows = [
    ["Visibility timeout", seconds(rules.visibility_seconds)],
    ["Maximum attempts", count(rules.max_attempts)],
    ["Back-off after failures", backOff(rules)],
    ["Failures kept of a message", count(rules.failures_kept)],
    ["Dead-letter queue", rules.dead_letter_queue ?? `${stats.queue}.dlq`],
    ["Dead letters are kept for", seconds(rules.dead_letter_retention_seconds)],
    ["Messages are kept for", rules.retention_seconds ? seconds(rules.retention_seconds) : "no limit"],
    ["Deliveries per second", rules.rate_per_second ? rate(rules.rate_per_second) : "no limit"],
    ["Rate of a key", rules.rate_per_key ? `${rate(rules.rate_per_key)} per second` : "no limit"],
    ["Leases of a key at a time", rules.concurrency_per_key ? count(rules.concurrency_per_key) : "no limit"],
    ["Keys take turns", rules.fair ? "yes" : "no"],
    ["Results are kept for", seconds(rules.result_ttl_seconds)],
    ["Messages put", count(stats.put_total)],
    ["Messages acked", count(stats.acked_total)],
    ["Failed attempts", count(stats.failed_total)],
    ["Expired leases", count(stats.expired_total)],
  ];
  return h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))));
}

function backOff(rules) {
  const grows = rules.retry_factor > 1 && rules.retry_delay_max_seconds > rules.retry_delay_seconds;
  const most = seconds(rules.retry_delay_max_seconds);
  return grows ? `${seconds(rules.retry_delay_seconds)}, × ${rules.retry_factor}, up to ${most}` : seconds(Math.min(rules.retry_delay_seconds, rules.retry_delay_max_seconds));
}

function named(cell) {
  const anchor = h("a", {});
  const paused = pill("delayed", "paused");
  cell.append(h("div", { class: "named" }, anchor, paused));
  return (row) => {
    setText(anchor, row.queue);
    anchor.href = `#/queues/${encodeURIComponent(row.queue)}`;
    paused.hidden = !row.paused;
  };
}

// Messages by state as a bar: its length compares queues, its parts compare states.
function depths(cell) {
  const parts = STATES.map((state) => [state, h("i", { class: state })]);
  const bar = h("div", { class: "depth", role: "img" }, parts.map(([, part]) => part));
  cell.append(bar);
  return (row) => {
    for (const [state, part] of parts) part.style.width = `${(100 * row[state]) / row.most}%`;
    bar.setAttribute("aria-label", STATES.map((state) => `${row[state]} ${state}`).join(", "));
  };
}

// The growth rates of counters between two loads.
class Rates {
  constructor() {
    this.seen = new Map();
  }

  of(row) {
    const now = performance.now();
    const known = this.seen.get(row.queue);
    if (known && now - known.at < 900) return known.rates;
    const grown = known && ((total) => Math.max(0, row[total] - known[total]) / ((now - known.at) / 1000));
    const rates = grown ? { put: grown("put_total"), acked: grown("acked_total") } : null;
    this.seen.set(row.queue, { at: now, put_total: row.put_total, acked_total: row.acked_total, rates });
    return rates;
  }
}
