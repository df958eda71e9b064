// Runs of workflows: their states, and the timeline of one run with its waits, signals and cancelling.

import { Table, ago, ask, brief, button, card, clock, command, countHeading, emptyState, facts, field, fold, h, labelled, link, pill, plural, pretty, seconds, setText, text } from "./dom.js";
import { hosting } from "./hosting.js";
import { Timeline } from "./timeline.js";

const PILLS = { running: "leased", stopped: "bad", completed: "good", failed: "bad", cancelled: "quiet" };
const KINDS = { step: "good", retry: "delayed", failed: "bad", sleep: "quiet", wait: "accent", signal: "accent", queued: "leased", child: "leased", started: "quiet", ended: "quiet", cancel: "bad", "set aside": "bad" };
const READ = 1_000; // Records of one call.
const RECORDS = 5_000; // Of the journal, the newest.
const ROWS = 500; // Of the timeline, the newest.

export const title = "Runs";
export const sections = ["runs", "worlds"];
export const verbs = ["run:list"];

export function open(context, id) {
  return id ? openOne(context, id) : openAll(context);
}

function address(id) {
  return `#/runs/${encodeURIComponent(id)}`;
}

function openAll({ api, pages, filter, query }) {
  const table = new Table(
    "Runs",
    [
      link("Run", (row) => row.id, (row) => address(row.id)),
      text("Workflow", (row) => row.workflow, { class: "mono" }),
      { name: "State", cell: (cell) => (row) => cell.replaceChildren(...states(row)) },
      text("Started", (row) => ago(row.started_ms)),
      text("Took", (row) => took(row), { class: "number" }),
      text("Parent", (row) => row.parent ?? "–", { class: "mono dim" }),
      text("Error", (row) => brief(row.error ?? "–", 200), { class: "error" }),
    ],
    { key: (row) => row.id, empty: emptyState("This universe has no runs yet. A host runs workflows, and this command starts one:", command(api, "workflow start research")) },
  );
  const state = h("select", { id: "state", onchange: () => again() }, h("option", { value: "", text: "all" }), Object.keys(PILLS).map((each) => h("option", { value: each, text: each })));
  const workflow = h("input", { id: "workflow", type: "search", placeholder: "all", spellcheck: "false", onchange: () => again() });
  state.value = query.get("state") ?? "";
  workflow.value = query.get("workflow") ?? "";
  const page = pages((after) => api.get("v1/runs", { after, limit: 100, state: state.value || null, workflow: workflow.value.trim() || null, tier: "important" }));
  const again = () => {
    query.set({ state: state.value, workflow: workflow.value.trim() });
    page.restart();
  };
  let known = [];
  const show = () => table.show(known.filter((row) => row.id.toLowerCase().includes(filter.value)), known.length > 0 || Boolean(state.value || workflow.value.trim()), page);
  filter.onchange = show;
  const heading = countHeading("run", "runs");
  const choice = h("div", { class: "inline" }, filter.element, labelled("State", state), labelled("Workflow", workflow));
  return {
    element: card(heading.element, choice, table.element, page.element),
    load: async () => {
      known = (await page.load()).runs;
      heading.show(known.length, page.next !== null);
      show();
    },
    tick: show,
  };
}

function states(run) {
  return [pill(PILLS[run.state] ?? "quiet", run.state), run.state === "running" && run.is_cancelling ? pill("bad", "cancelling") : ""];
}

function took(run) {
  return seconds(Math.max(0, (run.ended_ms ?? Date.now()) - run.started_ms) / 1000);
}

function openOne(context, id) {
  const { api, act, allows } = context;
  const path = `v1/runs/${encodeURIComponent(id)}`;
  const world = `run:${id}`;
  const state = h("span", {});
  const known = h("div", {});
  const elapsed = h("span", {});
  const published = h("pre", { tabindex: "0", "aria-label": "Published state" });
  const publishedCard = card("Published state", "", published);
  const outcome = h("pre", { tabindex: "0", "aria-label": "Result" });
  const outcomeCard = card("Result", "", outcome);
  const run = hosting(context, world);
  const send = (name, value) => act(() => api.post(`${path}/signals/${encodeURIComponent(name)}`, { value }), () => `Signal ${name} sent`);
  const waits = waitTable(allows("run:signal") ? send : null);
  const waitsCard = card("Waits for a signal", "", waits.element);
  const signalCard = card("Send a signal", "", signalForm(send));
  const cancelRun = async () => {
    const how = await askToCancel();
    if (how) await act(() => api.post(`${path}/cancel`, how), (after) => (after.ended_ms === null ? "It is asked to end" : `It is ${after.state}`));
  };
  const cancel = button("Cancel run", cancelRun, { class: "plain", hidden: true });
  const events = timelineTable();
  const about = h("span", {});
  const eventsCard = card("Timeline", about, events.element);
  const element = h("div", {}, h("div", { class: "columns" }, card("Run", "", known), h("div", {}, publishedCard, outcomeCard)), waitsCard, eventsCard, signalCard, run.element);
  element.hidden = true;
  let found = null;
  let timeline = new Timeline();
  let first = 0; // The height from which the timeline is read.

  async function readJournal() {
    const journal = `v1/worlds/${encodeURIComponent(world)}`;
    if (timeline.next === 0) {
      const { head } = await api.get(journal, { tier: "important" });
      first = timeline.next = Math.max(0, head - RECORDS);
    }
    for (;;) {
      const { records } = await api.get(`${journal}/entries`, { start: timeline.next, limit: READ, tier: "important" });
      timeline.add(records);
      if (records.length < READ) return;
    }
  }

  function showTimeline() {
    const rows = [...timeline.events].sort((one, other) => one.at - other.at).slice(-ROWS);
    const begin = rows.length ? rows[0].at : 0;
    const end = Math.max(...rows.map((row) => (row.pending ? Date.now() : row.at + (row.duration ?? 0))), begin + 1);
    events.show(rows.map((row) => ({ ...row, begin, end, elapsed: row.pending ? Math.max(0, Date.now() - row.at) : row.duration })));
    waits.show(timeline.waits.map((each) => ({ ...each })));
    const isRunning = found.ended_ms === null;
    waitsCard.hidden = !isRunning || timeline.waits.length === 0;
    setText(about, first || timeline.events.length > ROWS ? `the last ${plural(rows.length, "event")}` : plural(timeline.events.length, "event"));
  }

  async function load() {
    let next;
    try {
      next = await api.get(path, { tier: "important" });
    } catch (problem) {
      found = null;
      element.hidden = cancel.hidden = run.resume.hidden = true;
      state.replaceChildren();
      throw problem;
    }
    if (found && found.incarnation !== next.incarnation) timeline = new Timeline(); // Deleted, and started again.
    found = next;
    const isRunning = found.ended_ms === null;
    state.replaceChildren(...states(found));
    known.replaceChildren(facts(aboutRun(found, elapsed)));
    publishedCard.hidden = found.published === null;
    setText(published, pretty(found.published));
    const isFailure = found.error !== null;
    outcomeCard.hidden = isRunning && !isFailure;
    outcome.className = isFailure ? "error" : "";
    setText(outcome, isFailure ? `${found.error_code ?? found.state}: ${found.error}` : found.result_blob ? `In the blob ${found.result_blob}.` : pretty(found.result));
    cancel.hidden = !isRunning || !allows("run:cancel");
    signalCard.hidden = !isRunning || !allows("run:signal");
    eventsCard.hidden = !allows("world:read") || !allows("world:describe");
    if (!eventsCard.hidden) await readJournal();
    tick();
    element.hidden = false;
    await run.load();
  }

  function tick() {
    if (!found) return;
    setText(elapsed, took(found));
    showTimeline();
    run.tick();
  }

  return { heading: [h("a", { href: "#/runs", text: "Runs" }), id, state], actions: [cancel, run.resume], element, load, tick };
}

function aboutRun(found, elapsed) {
  return [
    ["Id", h("code", { text: found.id })],
    ["Workflow", h("code", { text: found.workflow })],
    ["Started", `${clock(found.started_ms)} (${ago(found.started_ms)})`],
    found.ended_ms !== null && ["Ended", `${clock(found.ended_ms)} (${ago(found.ended_ms)})`],
    [found.ended_ms === null ? "Running for" : "Took", elapsed],
    found.parent && ["Parent", h("a", { href: address(found.parent), text: found.parent })],
    ["World", h("a", { href: `#/worlds/${encodeURIComponent(`run:${found.id}`)}`, text: `run:${found.id}` })],
  ].filter(Boolean);
}

function until(ms) {
  return ms === null ? "for ever" : `until ${clock(ms)}`;
}

function waitTable(send) {
  const buttons = {
    name: "",
    label: "Answer",
    class: "number",
    cell: (cell, row) => {
      cell.append(
        button("Approve", () => send(row.name, true), { class: "small", "aria-label": `Approve ${row.name}` }),
        " ",
        button("Reject", () => send(row.name, false), { class: "small", "aria-label": `Reject ${row.name}` }),
      );
    },
  };
  return new Table(
    "Waits for a signal",
    [text("Signal", (row) => row.name, { head: true, class: "mono" }), text("Since", (row) => ago(row.at)), text("Waits", (row) => until(row.until)), ...(send ? [buttons] : [])],
    { empty: "It waits for no signal." },
  );
}

// A name and a value in JSON. The value of "approve" is true, that of "reject" is false.
function signalForm(send) {
  const name = h("input", { id: "signal-name", required: true, spellcheck: "false", autocomplete: "off" });
  const value = h("input", { id: "signal-value", class: "id", value: "true", spellcheck: "false", autocomplete: "off" });
  const fault = h("p", { class: "verdict bad", role: "alert" });
  const submit = (event) => {
    event.preventDefault();
    let sent;
    try {
      sent = value.value.trim() ? JSON.parse(value.value) : null;
    } catch {
      setText(fault, 'The value is not JSON. Put text in quotes: "yes".');
      return;
    }
    setText(fault, "");
    send(name.value.trim(), sent);
  };
  const form = h("form", { class: "inline padded", onsubmit: submit }, h("label", { for: "signal-name", text: "Name" }), name, h("label", { for: "signal-value", text: "Value (JSON)" }), value, h("button", { type: "submit", text: "Send" }));
  return [form, fault];
}

// Asks for the reason, and whether the run ends at once; null: it is not cancelled.
async function askToCancel() {
  const reason = h("input", { class: "id", autocomplete: "off" });
  const force = h("input", { type: "checkbox" });
  const content = [field("Reason", reason), h("label", { class: "check" }, force, "End it at once, without its code")];
  const words = "Its code is told, and may clean up before it ends. This cannot be undone.";
  const isConfirmed = await ask({ title: "Cancel this run?", words, yes: "Cancel the run", no: "Keep it", content });
  return isConfirmed ? { reason: reason.value.trim(), force: force.checked } : null;
}

function timelineTable() {
  const bar = (cell) => {
    const fill = h("i", {});
    cell.append(h("div", { class: "span", "aria-hidden": "true" }, fill));
    return (row) => {
      const width = row.end - row.begin;
      const start = (100 * (row.at - row.begin)) / width;
      fill.className = row.pending ? "waiting" : row.error ? "bad" : "";
      fill.style.left = `${Math.min(99.5, start)}%`;
      fill.style.width = `${Math.max(0.5, Math.min(100 - start, (100 * (row.elapsed ?? 0)) / width))}%`;
    };
  };
  return new Table(
    "Timeline",
    [
      text("At", (row) => time(row.at), { head: true, class: "mono tight" }),
      { name: "Event", class: "tight", cell: (cell) => (row) => cell.replaceChildren(pill(KINDS[row.kind] ?? "quiet", row.kind)) },
      text("Name", (row) => brief(row.name || "–", 32), { class: "mono" }),
      { name: "Span", class: "bar", cell: bar },
      text("Duration", (row) => (row.elapsed === null ? "–" : `${seconds(row.elapsed / 1000)}${row.pending ? " so far" : ""}`), { class: "number" }),
      text("Attempts", (row) => (row.attempts === null ? "–" : String(row.attempts)), { class: "number" }),
      {
        name: "Details",
        class: "mono words",
        cell: (cell) => {
          let shown = null;
          return (row) => {
            const value = row.error ?? row.details ?? (row.until === null ? undefined : until(row.until));
            const words = value === undefined ? "–" : brief(value, 100);
            if (words === shown) return;
            shown = words;
            cell.replaceChildren(value === undefined ? words : fold(words, () => h("pre", { class: row.error ? "error" : null, tabindex: "0", text: pretty(value) })));
          };
        },
      },
    ],
    { empty: "Nothing has happened yet." },
  );
}

function time(ms) {
  return `${clock(ms)}.${String(ms % 1_000).padStart(3, "0")}`;
}
