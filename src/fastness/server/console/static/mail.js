// Mailboxes: waiting mail by thread, and the receipts of sent mail.

import { Table, address, ago, brief, card, clock, command, count, countHeading, decoded, emptyState, h, link, number, opener, pill, plural, pretty, text } from "./dom.js";

const PAGE = 256;
const SHOWN = 256; // Receipts of an agent, the newest.
const WAITING = 256; // Mails of a mailbox, the oldest.
const SENDERS = 8; // Whose receipts are read.

export const title = "Mailboxes";
export const sections = ["mail"];
export const verbs = ["mail:list"];

export function open(context, name) {
  return name ? openOne(context, name) : openAll(context);
}

function reader(row) {
  return row.joined ? pill("good", "reading") : pill("quiet", "not reading");
}

function openAll({ api, pages, filter }) {
  const table = new Table(
    "Mailboxes",
    [
      link("Agent", (row) => row.agent, (row) => `#/mail/${encodeURIComponent(row.agent)}`),
      { name: "Reader", cell: (cell) => (row) => cell.replaceChildren(reader(row)) },
      { name: "Waiting mail", class: "bar", cell: (cell) => waiting(cell) },
      number("Pending", (row) => row.pending),
      text("Oldest", (row) => ago(row.oldest_ms)),
      text("Since", (row) => clock(row.oldest_ms), { class: "dim" }),
    ],
    { key: (row) => row.agent, empty: emptyState("No agent of this universe has sent or received mail yet. The first mail creates both mailboxes:", command(api, "mail send ada bob hello")) },
  );
  const page = pages(async (after) => {
    const found = await api.get("v1/mailboxes", { after, limit: 100, tier: "important" });
    return { ...found, next: found.mailboxes.length === 100 ? found.mailboxes.at(-1).agent : null };
  });
  let known = [];
  const show = () => {
    const most = Math.max(1, ...known.map((row) => row.pending));
    table.show(known.filter((row) => row.agent.toLowerCase().includes(filter.value)).map((row) => ({ ...row, most })), known.length > 0, page);
  };
  filter.onchange = show;
  const heading = countHeading("mailbox", "mailboxes");
  return {
    element: card(heading.element, filter.element, table.element, page.element),
    load: async () => {
      known = (await page.load()).mailboxes;
      heading.show(known.length, page.next !== null);
      show();
    },
  };
}

function waiting(cell) {
  const fill = h("i", { class: "ready" });
  cell.append(h("div", { class: "depth", "aria-hidden": "true" }, fill));
  return (row) => {
    fill.style.width = `${(100 * row.pending) / row.most}%`;
  };
}

// One mailbox: its threads, and the mail of all threads or of the one in the address.
function openOne({ api, query, allows }, name) {
  const path = `v1/mailboxes/${encodeURIComponent(name)}`;
  const thread = query.get("thread");
  const state = h("span", {});
  const size = h("span", {});
  const threads = new Table(
    "Threads",
    [
      link("Thread", (row) => subject(row.mails[0]), (row) => address(["mail", name], { thread: row.key })),
      number("Mails", (row) => row.mails.length),
      text("From", (row) => [...new Set(row.mails.map((mail) => mail.sender))].join(", "), { class: "words" }),
      text("Last", (row) => ago(row.mails.at(-1).sent_ms)),
      text("Correlation id", (row) => row.key, { class: "mono dim" }),
    ],
    { empty: "No waiting mail, so there are no threads." },
  );
  const mails = new Table(
    "Waiting mail",
    [
      opener("Mail", (row) => `#${row.sequence}`, (row) => row.id),
      text("From", (row) => row.sender),
      text("Body", (row) => brief(bodyOf(row), 100), { class: "mono dim" }),
      { name: "Receipt", cell: (cell) => (row) => cell.replaceChildren(row.receipt ? receiptPill(row.receipt) : "–") },
      text("Sent", (row) => ago(row.sent_ms)),
      text("Expires", (row) => clock(row.expires_ms), { class: "dim" }),
    ],
    {
      key: (row) => row.sequence,
      empty: emptyState(thread ? "This thread has no waiting mail. Confirmed mail is removed." : "No waiting mail. An agent sends one, for instance:", thread ? null : command(api, `mail send ada ${name} hello`)),
      inside: (row) => h("pre", { tabindex: "0", text: pretty(bodyOf(row)) }),
    },
  );
  const receipts = new Table(
    "Receipts of sent mail",
    [
      text("Mail", (row) => row.id, { head: true, class: "mono" }),
      text("To", (row) => row.to),
      { name: "State", cell: (cell, row) => cell.append(receiptPill(row)) },
      text("When", (row) => ago(row.at_ms)),
      text("Waited before delivery", (row) => (row.state === "confirmed" ? (row.was_stored ? "yes" : "no") : "–")),
    ],
    { key: (row) => row.sequence, empty: "This agent has sent no mail, or its receipts have expired." },
  );
  const own = new Receipts(api, name);
  const senders = new Map(); // The receipts of the agents that sent the waiting mail.

  // The last receipt of each waiting mail, which its sender has.
  async function receiptsOf(waiting) {
    if (!allows("mail:receipts")) return new Map();
    const isHere = (sender) => !sender.includes("@") || sender.endsWith(`@${api.universe}`);
    const names = [...new Set(waiting.map((mail) => mail.sender))].filter(isHere).slice(0, SENDERS);
    for (const sender of names) if (!senders.has(sender)) senders.set(sender, new Receipts(api, sender));
    await Promise.all(names.map((sender) => senders.get(sender).load()));
    return new Map(names.flatMap((sender) => senders.get(sender).known.map((receipt) => [receipt.id, receipt])));
  }

  const threadsCard = card("Threads", "mail with the same correlation id", threads.element);
  threadsCard.hidden = thread !== null;
  const all = h("a", { href: address(["mail", name]), text: "All mail", hidden: thread === null });
  const receiptsCard = card("Receipts", "of the mail that this agent sent", receipts.element);
  receiptsCard.hidden = thread !== null || !allows("mail:receipts");
  return {
    heading: [h("a", { href: "#/mail", text: "Mailboxes" }), thread === null ? name : h("a", { href: address(["mail", name]), text: name }), ...(thread === null ? [state] : [`Thread ${brief(thread, 20)}`, state])],
    element: h("div", {}, threadsCard, card(thread === null ? "Waiting" : "Mail of the thread", h("span", { class: "inline" }, size, all), mails.element), receiptsCard),
    load: async () => {
      const [box, found] = await Promise.all([api.get(path, { tier: "important" }), api.get(`${path}/mail`, { peek: true, limit: WAITING, tier: "important" }), receiptsCard.hidden || own.load()]);
      const shown = thread === null ? found.mails : found.mails.filter((mail) => mail.correlation_id === thread);
      const states = await receiptsOf(shown);
      state.replaceChildren(reader(box));
      const first = found.mails.length < box.pending ? `, the first ${count(found.mails.length)} are shown` : "";
      size.textContent = thread === null ? `${count(box.pending)} of at most ${count(box.pending_max)}${first}` : plural(shown.length, "mail");
      threads.show(byThread(found.mails));
      mails.show(shown.map((mail) => ({ ...mail, receipt: states.get(mail.id) })));
      receipts.show([...own.known].reverse());
    },
  };
}

// Receipts are append-only, so each load continues after the last one.
class Receipts {
  constructor(api, agent) {
    this.api = api;
    this.path = `v1/mailboxes/${encodeURIComponent(agent)}/receipts`;
    this.known = [];
  }

  async load() {
    for (;;) {
      const page = (await this.api.get(this.path, { after: this.known.at(-1)?.sequence ?? -1, limit: PAGE, tier: "important" })).receipts;
      this.known = this.known.concat(page).slice(-SHOWN);
      if (page.length < PAGE) return;
    }
  }
}

function receiptPill({ state }) {
  return pill({ stored: "delayed", delivered: "leased", confirmed: "good" }[state], state);
}

function bodyOf(mail) {
  return decoded(mail.body ?? "", mail.content_type ?? "");
}

// What a thread is about: the field `subject` of its first mail, or the beginning of the mail.
function subject(mail) {
  const body = bodyOf(mail);
  return brief(typeof body?.subject === "string" && body.subject ? body.subject : body, 80);
}

// Mails with the same correlation id, the thread with the newest mail first.
function byThread(mails) {
  const threads = new Map();
  for (const mail of mails) threads.set(mail.correlation_id, [...(threads.get(mail.correlation_id) ?? []), mail]);
  return [...threads].map(([key, found]) => ({ key, mails: found })).sort((one, other) => other.mails.at(-1).sent_ms - one.mails.at(-1).sent_ms);
}
