// The messages of a queue that match filters, and what is done with many of them. The filters are in the address.

import { Table, address, ago, button, card, command, count, emptyState, field, h, pill, plural, seconds, setText, text, toggle } from "./dom.js";
import { ACTIONS, apply, question, summary } from "./message_actions.js";
import { PILLS, address as messageAddress } from "./messages.js";

const STATES = ["ready", "delayed", "blocked", "leased", "dead", "done", "cancelled"];
const AGES = { 60: "1 minute", 3600: "1 hour", 86400: "1 day", 604800: "7 days", 2592000: "30 days" };
const ROWS = 100; // On one page.
const CALLS = 10; // For one page; each reads 1,000 records.
const COUNTED_CALLS = 5; // To count what matches, for a question.
const FRESH_MS = 5_000; // Writes to the queue do not start the search again within this time.

export function listAddress(queue, filters = {}) {
  return address(["queues", queue, "list"], filters);
}

export function open(context, queue) {
  const { api, act, allows, pages, query } = context;
  const path = `v1/queues/${encodeURIComponent(queue)}`;
  const selected = new Map(); // Rows by id.
  const shown = new Map();
  let isStopped = false;
  let isBusy = false;
  let lastLoad = { address: "", at: 0 };

  const filters = filterForm(query, () => {
    clear();
    showChosen();
    page.restart();
  });
  const parameters = () => ({
    states: query.get("state"),
    key: query.get("key"),
    group: query.get("group"),
    owner: query.get("owner"),
    error: query.get("error"),
    older_than_seconds: query.get("older"),
    newer_than_seconds: query.get("newer"),
  });
  const search = (after, limit) => api.get(`${path}/messages`, { ...parameters(), after, limit, tier: "important" });

  // A page: several searches, until it is full or they have read enough.
  async function find(after) {
    const found = { messages: [], next: after, scanned: 0 };
    for (let calls = 0; calls < CALLS; calls++) {
      const some = await search(found.next, ROWS - found.messages.length);
      found.messages.push(...some.messages);
      found.scanned += some.scanned;
      found.next = some.next;
      if (!found.next || found.messages.length === ROWS) break;
    }
    return found;
  }

  const page = pages(find);
  const all = h("input", { type: "checkbox", onchange: () => selectAll(all.checked) });
  const table = new Table(
    "Messages",
    [
      { name: "Message", head: true, class: "mono tight", cell: messageCell },
      { name: "State", cell: (cell) => (row) => cell.replaceChildren(pill(PILLS[row.state], row.state)) },
      text("Put", (row) => ago(row.created_at_unix * 1000)),
      text("Attempts", (row) => `${row.failure_attempts || row.attempts} of ${row.max_attempts}`, { class: "number" }),
      text("Owner", (row) => row.owner ?? ""),
      text("Key", (row) => row.key ?? "", { class: "mono" }),
      text("Last error", (row) => row.last_error ?? "", { class: "error" }),
      text("When", (row) => when(row)),
    ],
    { key: (row) => row.message_id, empty: emptyState("This queue has no messages. Put the first one:", command(api, `queue put ${queue} hello`)) },
  );

  // A link to the message, and a box that selects it. The link comes first: the keyboard opens the row with it.
  function messageCell(cell, row) {
    const open = h("a", { href: messageAddress(queue, row.message_id), text: row.message_id.slice(-12) });
    const box = actions.length ? h("input", { type: "checkbox", "aria-label": `Select ${row.message_id}`, onchange: () => select(row, box.checked) }) : null;
    cell.append(h("div", { class: "picked" }, open, box));
    return (now) => {
      if (box) box.checked = selected.has(now.message_id);
      if (box?.checked) selected.set(now.message_id, now);
    };
  }

  function select(row, isSelected) {
    if (isSelected) selected.set(row.message_id, row);
    else selected.delete(row.message_id);
    matching.checked = false;
    showSelection();
  }

  function selectAll(isSelected) {
    for (const row of shown.values()) isSelected ? selected.set(row.message_id, row) : selected.delete(row.message_id);
    matching.checked = false;
    table.show([...shown.values()], hasFilters());
    showSelection();
  }

  function clear() {
    selected.clear();
    matching.checked = false;
    showSelection();
  }

  const counted = h("b", { role: "status" });
  const matching = h("input", { type: "checkbox", onchange: () => showSelection() });
  const matchingLabel = h("label", { class: "check" }, matching, "All that match, on all pages");
  const actions = Object.entries(ACTIONS).filter(([, action]) => allows(action.verb)).map(([name, action]) => [name, button(action.label, () => run(name), { class: action.danger ? "small danger" : "small" })]);
  const stop = button("Stop", () => {
    isStopped = true;
  }, { class: "small", hidden: true });
  const bar = h("div", { class: "inline padded selection" }, counted, actions.map(([, each]) => each), matchingLabel, stop);

  function showSelection() {
    const number = selected.size;
    all.checked = shown.size > 0 && [...shown.keys()].every((id) => selected.has(id));
    if (!isBusy) setText(counted, matching.checked ? "All that match are selected" : number ? `${count(number)} selected` : "Nothing is selected");
    matchingLabel.hidden = !page.next;
    stop.hidden = !isBusy;
    for (const [name, each] of actions) {
      const applies = matching.checked ? isPossible(name, query.get("state")) : [...selected.values()].some((row) => ACTIONS[name].states.includes(row.state));
      toggle(each, "disabled", isBusy || !applies);
    }
  }

  // What is shown has changed: the next load searches again.
  function expire() {
    isBusy = false;
    lastLoad.at = 0;
  }

  const hasFilters = () => Object.values(parameters()).some((value) => value !== null);

  async function run(name) {
    if (matching.checked) await runOnMatching(name);
    else await runOnSelected(name);
  }

  async function runOnSelected(name) {
    const ids = [...selected.values()].filter((row) => ACTIONS[name].states.includes(row.state)).map((row) => row.message_id);
    const answer = await question(name, queue, ids.length);
    if (!answer) return;
    await act(() => apply(name, api, path, ids, answer.to).finally(expire), (all) => {
      for (const id of ids) selected.delete(id);
      return summary(name, all);
    });
    showSelection();
  }

  // Each page that a search finds is acted upon, then the search goes on.
  async function runOnMatching(name) {
    const total = { number: 0, more: false };
    await act(async () => Object.assign(total, await countMatching(name)));
    if (!total.number && !total.more) return;
    const some = total.more ? `more than ${plural(total.number, "message")}` : plural(total.number, "message");
    const answer = await question(name, queue, total.more ? Infinity : total.number, some);
    if (!answer) return;
    isBusy = true;
    isStopped = false;
    showSelection();
    const result = { done: 0, refused: 0, reason: null };
    const work = async () => {
      let after = null;
      do {
        const found = await search(after, ROWS);
        const ids = idsFor(name, found);
        const each = ids.length ? await apply(name, api, path, ids, answer.to) : { done: 0, refused: 0, reason: null };
        result.done += each.done;
        result.refused += each.refused;
        result.reason ??= each.reason;
        after = found.next;
        setText(counted, `${count(result.done)} ${ACTIONS[name].done}`);
      } while (after && !isStopped);
      return result;
    };
    await act(() => work().finally(expire), (all) => `${isStopped ? "Stopped: " : ""}${summary(name, all)}`);
    clear();
  }

  async function countMatching(name) {
    const total = { number: 0, more: false };
    let after = null;
    for (let calls = 0; calls < COUNTED_CALLS; calls++) {
      const found = await search(after, 1_000);
      total.number += idsFor(name, found).length;
      after = found.next;
      if (!after) return total;
    }
    total.more = true;
    return total;
  }

  const chosen = h("summary", {});
  const showChosen = () => setText(chosen, ["Filters", chosenFilters(query)].filter(Boolean).join(": "));
  showChosen();
  const filterCard = h("section", { class: "card" }, h("details", { open: innerWidth > 560, class: "padded" }, chosen, filters)); // A phone has little space.
  const heading = h("h2", { text: "Messages" });
  const searched = h("span", {});
  return {
    heading: [h("a", { href: "#/queues", text: "Queues" }), h("a", { href: address(["queues", queue]), text: queue }), "Messages"],
    element: h("div", {}, filterCard, card(heading, searched, actions.length ? h("div", {}, bar, h("label", { class: "check padded" }, all, "Select this page")) : "", table.element, page.element)),
    load: async () => {
      const isFresh = lastLoad.address === location.hash && Date.now() < lastLoad.at + FRESH_MS;
      if (isBusy || isFresh) return;
      const found = await page.load();
      lastLoad = { address: location.hash, at: Date.now() };
      shown.clear();
      for (const row of found.messages) shown.set(row.message_id, row);
      for (const id of selected.keys()) if (!shown.has(id)) selected.delete(id);
      setText(heading, `${plural(found.messages.length, "message")}${found.next ? " of more" : ""}`);
      setText(searched, `searched ${plural(found.scanned, "record")}${found.next ? "; more follow" : ""}`);
      table.show(found.messages, hasFilters());
      showSelection();
    },
    tick: () => table.show([...shown.values()], hasFilters()),
  };
}

function idsFor(name, found) {
  return found.messages.filter((row) => ACTIONS[name].states.includes(row.state)).map((row) => row.message_id);
}

function isPossible(name, state) {
  return !state || ACTIONS[name].states.includes(state);
}

function when(row) {
  if (row.state === "leased") return `lease ends in ${seconds(Math.max(0, row.lease_expires_at_unix - Date.now() / 1000))}`;
  if (row.state === "delayed") return `due in ${seconds(Math.max(0, row.due_at_unix - Date.now() / 1000))}`;
  if (row.state === "dead") return `dead-lettered ${ago(row.died_at_unix * 1000)}`;
  return row.finished_at_unix ? `${row.state} ${ago(row.finished_at_unix * 1000)}` : "";
}

// The filters of the address in words: what a phone shows of them.
function chosenFilters(query) {
  const words = { state: "", error: "error", owner: "owner", key: "key", group: "group", older: "older than", newer: "newer than" };
  return Object.entries(words)
    .filter(([name]) => query.get(name))
    .map(([name, label]) => `${label} ${AGES[query.get(name)] ?? query.get(name)}`.trim())
    .join(", ");
}

// The filters of the address, as a form.
function filterForm(query, onchange) {
  const choice = (name, words, options) => {
    const select = h("select", { onchange: () => set(name, select.value) }, h("option", { value: "", text: words }), options.map(([value, label]) => h("option", { value, text: label })));
    select.value = query.get(name) ?? "";
    return select;
  };
  const input = (name, placeholder) => {
    const element = h("input", { type: "search", maxlength: "256", placeholder, value: query.get(name) ?? "", autocomplete: "off", spellcheck: "false", onchange: () => set(name, element.value.trim()) });
    return element;
  };
  const set = (name, value) => {
    query.set({ [name]: value });
    onchange();
  };
  return h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    field("State", choice("state", "any", STATES.map((state) => [state, state]))),
    field("Error contains", input("error", "Timeout")),
    field("Owner", input("owner", "worker-7")),
    field("Key", input("key", "")),
    field("Group", input("group", "")),
    field("Older than", choice("older", "any age", Object.entries(AGES))),
    field("Newer than", choice("newer", "any age", Object.entries(AGES))),
  );
}
