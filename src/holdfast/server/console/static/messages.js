// One message of a queue: its state, its times, its payload, its failed attempts and its result.

import { Table, ago, ask, button, bytes, card, clock, facts, h, opener, payload, pill, pretty, seconds, setText, text } from "./dom.js";

const PILLS = { ready: "accent", delayed: "delayed", waiting: "quiet", leased: "leased", dead: "bad", done: "good", cancelled: "quiet" };
const IN_QUEUE = ["ready", "delayed", "waiting", "leased"];

export function address(queue, id) {
  return `#/queues/${encodeURIComponent(queue)}/messages/${encodeURIComponent(id)}`;
}

// A field that opens the page of a message.
export function finder(queue) {
  const field = h("input", { id: "message-id", type: "search", class: "id", required: true, spellcheck: "false", autocomplete: "off", placeholder: "Message id  /" });
  const open = (event) => {
    event.preventDefault();
    if (field.value.trim()) location.hash = address(queue, field.value.trim());
  };
  return h("form", { class: "inline find", role: "search", onsubmit: open }, h("label", { for: "message-id", text: "Find a message" }), field, h("button", { type: "submit", text: "Find" }));
}

export function open({ api, act, allows }, queue, id) {
  const path = `v1/queues/${encodeURIComponent(queue)}/messages/${encodeURIComponent(id)}`;
  const state = h("span", {});
  const known = h("div", {});
  const about = h("span", {});
  const body = h("pre", { tabindex: "0", "aria-label": "Payload" });
  const answer = h("pre", { tabindex: "0", "aria-label": "Result" });
  const answerAbout = h("span", {});
  const answerCard = card("Result", answerAbout, answer);
  const expiry = h("span", {});
  const question = ask("Cancel this message?", "It is not delivered any more. A consumer that has it cannot acknowledge it. This cannot be undone.", "Cancel the message", "Keep it", () =>
    act(() => api.post(`${path}/cancel`), (found) => (found.state === "cancelled" ? "Cancelled" : `Not cancelled: it is ${found.state}`)),
  );
  const cancel = button("Cancel message", () => question.showModal(), { class: "plain", hidden: true });
  const redrive = button("Redrive", () => act(() => api.post(`v1/queues/${encodeURIComponent(queue)}/redrive`, { ids: [id] }), (moved) => `${moved.count} redriven`), { class: "plain", hidden: true });
  const attempts = failedAttempts();
  const element = h(
    "div",
    {},
    h("div", { class: "columns" }, card("State", "", known), h("div", {}, card("Payload", about, body), answerCard)),
    card("Failed attempts", "the newest first", attempts.element),
    question,
  );
  element.hidden = answerCard.hidden = true;
  let found = null;

  function showExpiry() {
    if (found?.state !== "leased") return;
    const left = found.lease_expires_at_unix - Date.now() / 1000;
    setText(expiry, left > 0 ? `in ${seconds(left)}` : "expired");
  }

  async function load() {
    try {
      found = await api.get(path, { tier: "important" });
    } catch (problem) {
      found = null;
      element.hidden = cancel.hidden = redrive.hidden = true;
      state.replaceChildren();
      throw problem;
    }
    const result = found.has_result && allows("queue:result") ? await api.get(`${path}/result`, { tier: "important" }) : null;
    state.replaceChildren(pill(PILLS[found.state], found.state));
    known.replaceChildren(facts(stateOf(found, expiry)));
    showExpiry();
    const isGone = found.state === "done" || found.state === "cancelled";
    setText(about, isGone ? "" : `${bytes(found.payload_bytes)}, ${found.payload_content_type}`);
    setText(body, isGone ? "The payload was removed with the message." : pretty(payload(found)));
    answerCard.hidden = found.state !== "done";
    setText(answerAbout, result ? `${bytes(result.result_bytes)}, ${result.result_content_type}` : "");
    setText(answer, result ? pretty(payload(asPayload(result))) : found.has_result ? "Your token does not allow queue:result." : "It was acknowledged without a result.");
    attempts.show([...found.failures].reverse());
    cancel.hidden = !IN_QUEUE.includes(found.state) || !allows("queue:cancel");
    redrive.hidden = found.state !== "dead" || !allows("queue:redrive");
    element.hidden = false;
  }

  return {
    heading: [h("a", { href: "#/queues", text: "Queues" }), h("a", { href: `#/queues/${encodeURIComponent(queue)}`, text: queue }), id.slice(-12), state],
    actions: [cancel, redrive],
    element,
    load,
    tick: showExpiry,
  };
}

function stateOf(found, expiry) {
  const time = (unix) => `${clock(unix * 1000)} (${ago(unix * 1000)})`;
  const code = (words) => h("code", { text: words });
  return [
    ["State", pill(PILLS[found.state], found.state)],
    ["Id", code(found.message_id)],
    ["Put", time(found.created_at_unix)],
    found.due_at_unix && ["Delayed until", clock(found.due_at_unix * 1000)],
    found.owner && [found.state === "leased" ? "Leased by" : "Last leased by", found.owner],
    found.leased_at_unix && ["Last delivered", time(found.leased_at_unix)],
    found.state === "leased" && ["Lease ends", expiry],
    found.fencing_token && ["Fence", String(found.fencing_token)],
    found.died_at_unix && ["Dead-lettered", time(found.died_at_unix)],
    found.finished_at_unix && [found.state === "cancelled" ? "Cancelled" : "Done", time(found.finished_at_unix)],
    found.ttl_at_unix && ["Removed at", clock(found.ttl_at_unix * 1000)],
    ["Deliveries", String(found.attempts)],
    ["Failed attempts", `${found.failure_attempts} of ${found.max_attempts}`],
    ["Priority", String(found.priority)],
    found.key !== null && ["Key", found.key],
    found.unique_key !== null && ["Unique key", found.unique_key],
    found.group !== null && ["Group", found.group],
    ["Correlation id", code(found.correlation_id)],
    ...Object.entries(found.attributes).map(([name, value]) => [name, code(value)]),
  ].filter(Boolean);
}

function asPayload(result) {
  return { payload: result.result, payload_base64: result.result_base64, payload_blob: result.result_blob, payload_bytes: result.result_bytes, payload_content_type: result.result_content_type };
}

// The failed attempts of a message; the newest is expanded when the page is opened.
function failedAttempts() {
  const error = (row) => [row.error_type, row.message].filter(Boolean).join(": ");
  const table = new Table(
    "Failed attempts",
    [
      opener("Attempt", (row) => String(row.attempt), (row) => `Attempt ${row.attempt}`),
      text("Consumer", (row) => row.owner),
      text("Outcome", (row) => row.outcome),
      text("Error", (row) => error(row) || "–", { class: "error" }),
      text("Leased", (row) => clock(row.leased_at_unix * 1000)),
      text("Failed", (row) => clock(row.failed_at_unix * 1000)),
    ],
    {
      empty: "No attempt has failed.",
      key: (row) => row.attempt,
      inside: (row) => h("pre", { class: "error", tabindex: "0", text: row.traceback ?? (error(row) || "No error was given.") }),
    },
  );
  let isFirst = true;
  return {
    element: table.element,
    show: (rows) => {
      table.show(rows);
      if (isFirst && rows.length) table.body.querySelector(".opener").click();
      isFirst = isFirst && !rows.length;
    },
  };
}
