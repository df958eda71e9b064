// One message of a queue: its state, times, payload, workflow state, attempts and result, and what is done with it.

import { Table, ago, button, bytes, card, clock, facts, h, opener, payload, pill, plural, pretty, seconds, setText, text } from "./dom.js";
import { ACTIONS, apply, question, summary } from "./message_actions.js";

export const PILLS = { ready: "accent", delayed: "delayed", blocked: "quiet", leased: "leased", dead: "bad", done: "good", cancelled: "quiet" };

const LABELS = { redrive: "Redrive", cancel: "Cancel message…", move: "Move…", delete: "Delete…" };

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
  const queuePath = `v1/queues/${encodeURIComponent(queue)}`;
  const path = `${queuePath}/messages/${encodeURIComponent(id)}`;
  const state = h("span", {});
  const known = h("div", {});
  const about = h("span", {});
  const body = h("pre", { tabindex: "0", "aria-label": "Payload" });
  const view = button("Raw", () => setRaw(!isRaw), { class: "small", "aria-pressed": "false" });
  let isRaw = false;
  const answer = h("pre", { tabindex: "0", "aria-label": "Result" });
  const answerAbout = h("span", {});
  const answerCard = card("Result", answerAbout, answer);
  const workflowState = h("pre", { tabindex: "0", "aria-label": "Workflow state" });
  const workflowAbout = h("span", {});
  const workflowCard = card("Workflow state", workflowAbout, workflowState);
  const attributes = h("div", {});
  const attributesCard = card("Attributes", "", attributes);
  const expiry = h("span", {});
  const retry = button("Deliver now", () => act(() => api.patch(path, { delay_seconds: 0 }), () => "It is delivered now"), { class: "plain", hidden: true });
  const buttons = Object.fromEntries(Object.keys(ACTIONS).map((name) => [name, button(LABELS[name], () => run(name), { class: ACTIONS[name].danger ? "plain danger" : "plain", hidden: true })]));
  const attempts = attemptTable();
  const element = h(
    "div",
    {},
    h("div", { class: "columns" }, h("div", {}, card("State", "", known), attributesCard), h("div", {}, card("Payload", h("span", { class: "inline" }, about, view), body), workflowCard, answerCard)),
    card("Attempts", "the newest first", attempts.element),
  );
  element.hidden = answerCard.hidden = workflowCard.hidden = attributesCard.hidden = true;
  let found = null;
  let isLeaving = false;

  async function run(name) {
    if (name === "redrive") {
      await act(() => apply(name, api, queuePath, [id]), (all) => summary(name, all));
      return;
    }
    const given = await question(name, queue, 1);
    if (!given) return;
    isLeaving = name === "move" || name === "delete"; // The message is gone from this address before the page is.
    const work = async () => {
      try {
        return summary(name, await apply(name, api, queuePath, [id], given.to));
      } catch (error) {
        isLeaving = false;
        throw error;
      }
    };
    await act(work, (words) => words);
    if (isLeaving && name === "move") location.hash = address(given.to, id);
    else if (isLeaving) location.hash = `#/queues/${encodeURIComponent(queue)}`;
  }

  function setRaw(on) {
    isRaw = on;
    view.setAttribute("aria-pressed", String(on));
    showPayload();
  }

  function isGone() {
    return found.state === "done" || found.state === "cancelled";
  }

  function showPayload() {
    view.hidden = isGone() || found.payload_blob !== undefined;
    setText(body, isGone() ? "The payload was removed with the message." : isRaw ? rawOf(found) : pretty(payload(found)));
  }

  function showExpiry() {
    if (found?.state !== "leased") return;
    const left = found.lease_expires_at_unix - Date.now() / 1000;
    setText(expiry, left > 0 ? `in ${seconds(left)}` : "expired");
  }

  async function load() {
    if (isLeaving) return;
    try {
      found = await api.get(path, { tier: "important" });
    } catch (problem) {
      found = null;
      element.hidden = retry.hidden = true;
      for (const each of Object.values(buttons)) each.hidden = true;
      state.replaceChildren();
      throw problem;
    }
    const result = found.has_result && allows("queue:result") ? await api.get(`${path}/result`, { tier: "important" }) : null;
    state.replaceChildren(pill(PILLS[found.state], found.state));
    known.replaceChildren(facts(stateOf(found, expiry)));
    showExpiry();
    setText(about, isGone() ? "" : `${bytes(found.payload_bytes)}, ${found.payload_content_type}`);
    showPayload();
    const named = Object.entries(found.attributes);
    attributesCard.hidden = named.length === 0;
    attributes.replaceChildren(facts(named.map(([name, value]) => [name, h("code", { text: value })])));
    workflowCard.hidden = found.workflow_state_etag === undefined;
    setText(workflowState, pretty(found.workflow_state ?? null));
    setText(workflowAbout, found.workflow_state_etag === undefined ? "" : `version ${found.workflow_state_etag}`);
    answerCard.hidden = found.state !== "done";
    setText(answerAbout, result ? `${bytes(result.result_bytes)}, ${result.result_content_type}` : "");
    setText(answer, result ? pretty(payload(asPayload(result))) : found.has_result ? "Your token does not allow queue:result." : "It was acknowledged without a result.");
    attempts.show(attemptsOf(found), found.failure_attempts - found.failures.length);
    retry.hidden = found.state !== "delayed" || !allows("queue:update");
    for (const [name, each] of Object.entries(buttons)) each.hidden = !ACTIONS[name].states.includes(found.state) || !allows(ACTIONS[name].verb);
    element.hidden = false;
  }

  return {
    heading: [h("a", { href: "#/queues", text: "Queues" }), h("a", { href: `#/queues/${encodeURIComponent(queue)}`, text: queue }), id.slice(-12), state],
    actions: [retry, ...Object.values(buttons)],
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
    found.fence && ["Fence", String(found.fence)],
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
  ].filter(Boolean);
}

function asPayload(result) {
  return { payload: result.result, payload_base64: result.result_base64, payload_blob: result.result_blob, payload_bytes: result.result_bytes, payload_content_type: result.result_content_type };
}

// The payload as it was put: its text, or its bytes as hexadecimal numbers.
function rawOf(found) {
  if (found.payload !== undefined) return JSON.stringify(found.payload);
  const raw = Uint8Array.from(atob(found.payload_base64 ?? ""), (each) => each.charCodeAt(0));
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(raw);
  } catch {
    return Array.from(raw, (each) => each.toString(16).padStart(2, "0")).join(" ");
  }
}

// The attempts of a message, the newest first: the one that runs or was the last, and those that failed. A message that
// was cancelled while it waited has no last attempt. When that began is not kept.
function attemptsOf(found) {
  const attempts = found.failures.map((failure) => ({ ...failure, ended_at_unix: failure.failed_at_unix, isFailure: true }));
  const last = { attempt: found.attempts, owner: found.owner };
  if (found.state === "leased") attempts.push({ ...last, outcome: "running", leased_at_unix: found.leased_at_unix });
  else if (found.state === "done" || (found.state === "cancelled" && found.owner)) attempts.push({ ...last, outcome: found.state, ended_at_unix: found.finished_at_unix });
  return attempts.reverse();
}

const INSIDE = {
  running: "A consumer has the message. Its errors appear here when the attempt ends.",
  done: "The message was acknowledged.",
  cancelled: "The message was cancelled while the consumer had it.",
};

// The attempts of a message; the newest that failed is expanded when the page is opened.
function attemptTable() {
  const error = (row) => [row.error_type, row.message].filter(Boolean).join(": ");
  const none = h("p", { class: "empty" });
  const older = h("p", { class: "empty" });
  const table = new Table(
    "Attempts",
    [
      opener("Attempt", (row) => String(row.attempt), (row) => `Attempt ${row.attempt}`),
      text("Consumer", (row) => row.owner || "–"),
      text("Outcome", (row) => row.outcome),
      text("Error", (row) => error(row) || "–", { class: "error" }),
      text("Leased", (row) => clock(row.leased_at_unix * 1000)),
      text("Ended", (row) => clock(row.ended_at_unix * 1000)),
    ],
    {
      empty: none,
      key: (row) => `${row.attempt} ${row.outcome}`,
      inside: (row) => (row.isFailure ? h("pre", { class: "error", tabindex: "0", text: row.traceback ?? (error(row) || "No error was given.") }) : h("p", { class: "padded", text: INSIDE[row.outcome] })),
    },
  );
  let isFirst = true;
  return {
    element: h("div", {}, table.element, older),
    show: (rows, notKept) => {
      const words = notKept > 0 ? `${plural(notKept, "older failed attempt is", "older failed attempts are")} not kept.` : "";
      older.hidden = !words || rows.length === 0;
      setText(older, older.hidden ? "" : words);
      setText(none, (rows.length === 0 && words) || "No attempt has failed.");
      table.show(rows);
      const failed = rows.findIndex((row) => row.isFailure);
      if (isFirst && failed >= 0) table.body.querySelectorAll(".opener")[failed].click();
      isFirst = isFirst && failed < 0;
    },
  };
}
