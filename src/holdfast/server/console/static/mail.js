// Mailboxes: waiting mail, and the receipts of sent mail.

import { Table, ago, brief, card, clock, count, countHeading, decoded, h, link, number, opener, pill, pretty, text } from "./dom.js";

const PAGE = 256;
const SHOWN = 100;

export const title = "Mailboxes";
export const sections = ["mail"];

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
    { key: (row) => row.agent, empty: "No agent of this universe has sent or received mail yet." },
  );
  const page = pages(async (after) => {
    const found = await api.get("v1/mailboxes", { after, limit: 100, tier: "important" });
    return { ...found, next: found.mailboxes.length === 100 ? found.mailboxes.at(-1).agent : null };
  });
  let known = [];
  const show = () => {
    const most = Math.max(1, ...known.map((row) => row.pending));
    table.show(known.filter((row) => row.agent.includes(filter.value)).map((row) => ({ ...row, most })));
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

function openOne({ api }, name) {
  const path = `v1/mailboxes/${encodeURIComponent(name)}`;
  const state = h("span", {});
  const size = h("span", {});
  const mails = new Table(
    "Waiting mail",
    [
      opener("Mail", (row) => `#${row.sequence}`, (row) => row.id),
      text("From", (row) => row.sender),
      text("Body", (row) => brief(decoded(row.body ?? "", row.content_type ?? ""), 100), { class: "mono dim" }),
      text("Sent", (row) => ago(row.sent_ms)),
      text("Expires", (row) => clock(row.expires_ms), { class: "dim" }),
    ],
    {
      key: (row) => row.sequence,
      empty: "No waiting mail.",
      inside: (row) => h("pre", { tabindex: "0", text: pretty(decoded(row.body ?? "", row.content_type ?? "")) }),
    },
  );
  const receipts = new Table(
    "Receipts of sent mail",
    [
      text("Mail", (row) => row.id, { head: true, class: "mono" }),
      text("To", (row) => row.to),
      { name: "State", cell: (cell, row) => cell.append(pill({ stored: "delayed", delivered: "leased", confirmed: "good" }[row.state], row.state)) },
      text("When", (row) => ago(row.at_ms)),
      text("Waited before delivery", (row) => (row.state === "confirmed" ? (row.was_stored ? "yes" : "no") : "–")),
    ],
    { key: (row) => row.sequence, empty: "This agent has sent no mail, or its receipts have expired." },
  );
  // Receipts are append-only, so each load continues after the last one.
  let known = [];
  async function readReceipts() {
    for (;;) {
      const page = (await api.get(`${path}/receipts`, { after: known.at(-1)?.sequence ?? -1, limit: PAGE, tier: "important" })).receipts;
      known = known.concat(page).slice(-SHOWN);
      if (page.length < PAGE) return;
    }
  }
  return {
    heading: [h("a", { href: "#/mail", text: "Mailboxes" }), name, state],
    element: h("div", {}, card("Waiting", size, mails.element), card("Receipts", "of the mail that this agent sent", receipts.element)),
    load: async () => {
      const [box, waiting] = await Promise.all([
        api.get(path, { tier: "important" }),
        api.get(`${path}/mail`, { peek: true, limit: 50, tier: "important" }),
        readReceipts(),
      ]);
      state.replaceChildren(reader(box));
      size.textContent = `${count(box.pending)} of at most ${count(box.pending_max)}`;
      mails.show(waiting.mails);
      receipts.show([...known].reverse());
    },
  };
}
