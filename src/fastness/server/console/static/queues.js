// Queues: depth, next messages, leased messages, dead letters, schedules and policy.

import { Table, ago, ask, brief, button, bytes, card, clock, command, count, countHeading, emptyState, facts, fold, h, link, number, opener, payload, pill, plural, pretty, rate, rowActions, seconds, setText, text, tiles, toggle } from "./dom.js";
import { orNullIfRefused } from "./api.js";
import * as messageList from "./message_list.js";
import * as messagePage from "./messages.js";
import { editPolicy, policyFacts } from "./policy.js";
import { publish } from "./publish.js";
import { queueCharts } from "./queue_charts.js";
import { schedules } from "./schedules.js";

const STATES = ["ready", "leased", "delayed", "blocked", "dead"];
const TILES = { ready: "ready", leased: "leased", delayed: "delayed", blocked: "blocked", dead: "dead", oldest: "oldest", consumers: "consumers" };
const CALLS = 50; // Of one search for queues: 100,000 names.
const PEEK = 25;
const LETTERS = 100;
const LEASED = 100;
const REDRIVEN = 1_000; // By one call.

export const title = "Queues";
export const sections = ["queues"];
export const verbs = ["queue:survey"];

export function open(context, name, section, id) {
  if (section === "messages" && id) return messagePage.open(context, name, id);
  if (section === "list" && context.allows("queue:search")) return messageList.open(context, name);
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
    { key: (row) => row.queue, empty: emptyState("This universe has no queues yet. The first message creates a queue:", command(api, "queue put jobs hello")) },
  );
  const page = pages((after) => findQueues(api, after, filter.value));
  let known = [];
  const show = () => {
    const most = Math.max(1, ...known.map((row) => STATES.reduce((all, state) => all + row[state], 0)));
    table.show(known.map((row) => ({ ...row, most })), filter.value !== "", page);
  };
  filter.onchange = () => page.restart(); // The server searches all queues, not only those of this page.
  const totals = tiles(TILES);
  const part = h("p", { class: "dim part", hidden: true });
  const heading = countHeading("queue", "queues");
  return {
    element: h("div", {}, totals.element, part, card(heading.element, filter.element, table.element, page.element)),
    load: async () => {
      const found = (await page.load()).queues;
      const names = new Set(found.map((row) => row.queue));
      const letters = (row) => row.queue.endsWith(".dlq") && names.has(row.queue.slice(0, -4)); // Its messages count as dead letters of the other queue.
      known = found.filter((row) => !letters(row)).map((row) => ({ ...row, rates: rates.of(row) }));
      heading.show(known.length, page.next !== null);
      part.hidden = !page.isPartial && filter.value === "";
      setText(part, `The numbers above are of the ${plural(known.length, "queue")} listed below, not of all queues.`);
      for (const state of STATES) totals.show(state, count(known.reduce((all, row) => all + row[state], 0)));
      totals.show("consumers", count(known.reduce((all, row) => all + row.waiting_consumers, 0)));
      totals.show("oldest", known.some((row) => row.ready) ? seconds(Math.max(...known.map((row) => row.head_age_seconds))) : "–");
      show();
    },
  };
}

// A page of queues whose names contain the text. Each call looks at a bounded number of names, and may find none.
async function findQueues(api, after, words) {
  let found = { queues: [], next: after };
  for (let calls = 0; calls < CALLS && found.queues.length === 0 && (calls === 0 || found.next); calls++) {
    found = await api.get("v1/surveys/queues", { after: found.next, limit: 100, text: words || null, tier: "important" });
  }
  return found;
}

function openOne(context, name) {
  const { api, act, allows } = context;
  const path = `v1/queues/${encodeURIComponent(name)}`;
  const totals = tiles(TILES);
  const state = h("span", {});
  let stats = null; // Stays null if the token does not allow queue:stats.
  const listed = (words, filters) => allows("queue:search") && h("a", { href: messageList.listAddress(name, filters), text: words });
  const pause = button("Pause…", () => setPaused(), { class: "plain", hidden: !allows("queue:pause") || !allows("queue:stats") });
  const actions = [
    allows("queue:put") && button("Publish…", () => publish(context, name), { class: "plain" }),
    pause,
    allows("queue:purge") && button("Purge…", () => purge(), { class: "plain danger" }),
  ].filter(Boolean);
  const redriveAll = button("Redrive all…", () => redriveLetters(), { class: "small", hidden: !allows("queue:redrive") });
  const redriveOne = rowActions("Redrive", (cell, row) => {
    cell.append(button("Redrive", () => act(() => api.post(`${path}/redrive`, { ids: [row.message_id] }), () => "1 message redriven"), { class: "small", "aria-label": `Redrive ${row.message_id}` }));
  });

  async function setPaused() {
    if (stats === null) return;
    const isPaused = stats.paused;
    const words = `Consumers get no messages of it until it is resumed. Messages that are leased can be settled, and puts are accepted. ${plural(stats.ready, "message")} ${stats.ready === 1 ? "is" : "are"} ready, and ${plural(stats.waiting_consumers, "consumer")} ${stats.waiting_consumers === 1 ? "waits" : "wait"}.`;
    if (!isPaused && !(await ask({ title: `Pause deliveries of ${name}?`, words, yes: "Pause the queue", no: "Let it run" }))) return;
    await act(() => api.post(`${path}/${isPaused ? "resume" : "pause"}`), () => (isPaused ? "Resumed" : "Paused"));
  }

  async function redriveLetters() {
    const some = stats === null ? "all dead letters" : plural(stats.dead, "dead letter");
    if (!(await ask({ title: `Redrive ${some} of ${name}?`, words: "They are delivered again, with no failures counted.", yes: `Redrive ${some}`, no: "Keep them", danger: false }))) return;
    await act(async () => {
      let all = 0;
      for (let last = REDRIVEN; last === REDRIVEN; all += last) last = (await api.post(`${path}/redrive`, { limit: REDRIVEN })).count;
      return all;
    }, (moved) => `${plural(moved, "message")} redriven`);
  }

  async function purge() {
    const removed = stats && stats.ready + stats.delayed + stats.blocked;
    const some = stats ? `${plural(removed, "message")} that ${removed === 1 ? "is" : "are"} not leased` : "All messages that are not leased";
    const kept = stats?.leased === 0 ? "The dead letters stay." : `${stats ? plural(stats.leased, "leased message") : "Leased messages"} and the dead letters stay.`;
    const words = `${some} will be removed, and so are those that arrive meanwhile. ${kept} This cannot be undone.`;
    if (!(await ask({ title: `Purge ${name}?`, words, yes: "Purge the queue", no: "Keep the messages", typed: name }))) return;
    await act(() => api.post(`${path}/purge`), (removed) => `${plural(removed.count, "message")} removed`);
  }

  const ready = messages(name, "Next messages", emptyState("No messages are ready. Put one:", command(api, `queue put ${name} hello`)));
  const error = text("Last error", (row) => row.last_error ?? "–", { class: "error" });
  const died = text("Dead-lettered", (row) => ago(row.died_at_unix * 1000));
  const dead = messages(name, "Dead letters", "No dead letters.", [error], allows("queue:redrive") ? [died, redriveOne] : [died]);
  const policy = h("div", {});
  const sums = h("div", {});
  const leased = leasedMessages(name);
  const leasedCard = card("Leased messages", h("span", {}, `the first ${LEASED}, by age `, listed("Search", { state: "leased" })), leased.element);
  const planned = schedules(context, name);
  const edit = button("Edit…", () => editPolicy(context, name), { class: "small", "aria-label": "Edit the policy", hidden: !allows("queue:policy.set") });
  const charts = queueCharts(context, name);
  totals.element.hidden = charts.element.hidden = !allows("queue:stats");
  const deadCard = card("Dead letters", h("span", { class: "inline" }, listed("Search", { state: "dead" }), redriveAll), dead.element);
  const readyCard = card("Next messages", h("span", {}, `the first ${PEEK}; peeking leases nothing `, listed("Search", { state: "ready" })), ready.element);
  const policyCard = card("Policy", edit, policy);
  const sumsCard = card("Totals", "", sums);
  let held = null;
  let refusal = null;

  // A part of the page: null if the token does not allow its verb, or is not for this queue.
  async function part(verb, load) {
    if (!allows(verb)) return null;
    try {
      return (await load()) ?? true;
    } catch (problem) {
      refusal = problem;
      return orNullIfRefused(problem);
    }
  }

  return {
    heading: [h("a", { href: "#/queues", text: "Queues" }), name, state],
    actions,
    element: h(
      "div",
      {},
      totals.element,
      charts.element,
      h("div", { class: "inline find-row" }, allows("queue:get") && messagePage.finder(name), listed("Search messages")),
      deadCard,
      h("div", { class: "columns wide-first" }, h("div", {}, readyCard, planned.element), h("div", {}, policyCard, sumsCard)),
      leasedCard,
    ),
    mounted: charts.mounted,
    dispose: charts.dispose,
    tick: () => {
      if (held) leased.show(held);
      if (stats) charts.load().catch(() => {}); // The next tick tries again.
    },
    load: async () => {
      refusal = null;
      const tier = "important";
      const [counted, peeked, letters, rules, leases, ...others] = await Promise.all([
        part("queue:stats", () => api.get(path, { tier })),
        part("queue:peek", () => api.get(`${path}/peek`, { limit: PEEK, tier })),
        part("queue:peek", () => api.get(`${path}/dead-letters`, { limit: LETTERS })),
        part("queue:policy.get", () => api.get(`${path}/policy`, { tier })),
        part("queue:leased", () => api.get(`${path}/leased`, { limit: LEASED, tier })),
        part("queue:schedules.list", planned.load),
        part("queue:stats", charts.load),
      ]);
      if ([counted, peeked, rules, leases, ...others].every((each) => each === null)) {
        if (refusal) for (const action of actions) action.hidden = true; // The token is not for this queue.
        if (refusal) throw refusal;
        if (!allows("queue:search") && !allows("queue:get")) await api.get(path, { tier }); // Says which verb is missing.
      }
      stats = counted;
      totals.element.hidden = sumsCard.hidden = charts.element.hidden = stats === null;
      if (stats) {
        setText(pause, stats.paused ? "Resume" : "Pause…");
        state.replaceChildren(stats.paused ? pill("delayed", "paused") : "");
        for (const each of STATES) totals.show(each, count(stats[each]));
        totals.show("consumers", count(stats.waiting_consumers));
        totals.show("oldest", stats.ready ? seconds(stats.head_age_seconds) : "–");
        sums.replaceChildren(totalsOf(stats));
      }
      readyCard.hidden = dead.element.hidden = peeked === null;
      deadCard.hidden = letters === null && !allows("queue:redrive");
      ready.show(peeked?.messages ?? []);
      dead.show(letters?.messages ?? []);
      toggle(redriveAll, "disabled", (letters?.messages.length ?? stats?.dead) === 0);
      policyCard.hidden = rules === null;
      if (rules) policy.replaceChildren(policyFacts(rules, name));
      leasedCard.hidden = leases === null;
      held = leases?.messages ?? [];
      leased.show(held);
    },
  };
}

function messages(queue, caption, empty, before = [], after = []) {
  return new Table(
    caption,
    [
      opener("Message", (row) => row.message_id.slice(-12), (row) => row.message_id),
      text("Payload", (row) => brief(payload(row), 90), { class: before.length ? "mono dim excerpt" : "mono dim" }),
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
      number("Fence", (row) => row.fence),
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

function totalsOf(stats) {
  return facts([
    ["Messages put", count(stats.put_total)],
    ["Messages acked", count(stats.acked_total)],
    ["Failed attempts", count(stats.failed_total)],
    ["Expired leases", count(stats.expired_total)],
    ["Dead letters so far", count(stats.dead_total)],
  ]);
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
