// How a world is run: its program and host, its effects and timers, and the items that were set aside.

import { orNullIfRefused } from "./api.js";
import { Table, ask, brief, button, card, clock, decoded, facts, h, opener, pill, pretty, seconds, setText, text } from "./dom.js";

const LIST = 100;
const EFFECTS = { pending: "delayed", inflight: "leased" };

// The card of the program, the tables, and a button; `load()` reads them, and hides them for a world without a program.
export function hosting({ api, act, allows }, world) {
  const path = `v1/worlds/${encodeURIComponent(world)}`;
  const known = h("div", {});
  const claim = h("span", {});
  const error = h("pre", { class: "error", tabindex: "0", "aria-label": "Error of the last failed turn", hidden: true });
  const effects = effectTable();
  const timers = timerTable();
  const aside = asideTable({ api, act, allows }, path);
  const effectsCard = card("Effects", `the first ${LIST}`, effects.element);
  const timersCard = card("Timers", `the first ${LIST}`, timers.element);
  const asideCard = card("Set aside", "items that the program failed to handle", aside.element);
  const resume = button("Resume program", () => act(() => api.post(`${path}/program/resume`), () => "Resumed"), { class: "plain", hidden: true });
  const element = h("div", { hidden: true }, asideCard, h("div", { class: "columns" }, card("Program", "", known, error), timersCard), effectsCard);
  let info = null;

  function tick() {
    if (info === null) return;
    if (info.owner) setText(claim, left(info.expires_ms));
    effects.show(effects.known);
    timers.show(timers.known);
  }

  async function load() {
    const found = await api.get(`${path}/program`, { tier: "important" }).catch(orNullIfRefused);
    element.hidden = !found?.program;
    resume.hidden = !found?.is_stopped || !allows("hosting:resume");
    info = null;
    if (!found?.program) return null;
    const list = (name) => api.get(`${path}/${name}`, { limit: LIST, tier: "important" }).catch(orNullIfRefused);
    const [asked, due, failed] = await Promise.all([list("effects"), list("timers"), list("aside")]);
    known.replaceChildren(facts(pairs(found, claim)));
    error.hidden = !found.error;
    setText(error, found.error ?? "");
    const isRun = found.program.startsWith("workflow:"); // Its steps are no effects.
    effectsCard.hidden = asked === null || (isRun && asked.effects.length === 0);
    timersCard.hidden = due === null;
    asideCard.hidden = failed === null || (failed.items.length === 0 && found.set_aside === 0);
    effects.known = asked?.effects ?? [];
    timers.known = due?.timers ?? [];
    aside.show(failed?.items ?? []);
    info = found;
    tick();
    return found;
  }

  return { element, resume, load, tick };
}

function pairs(info, claim) {
  const at = (ms) => `${clock(ms)}${ms > Date.now() ? ` (in ${seconds((ms - Date.now()) / 1000)})` : ""}`;
  return [
    ["Program", h("code", { text: info.program })],
    ["State", stateOf(info)],
    info.owner && ["Host", h("code", { text: info.owner })],
    info.owner && ["Claim ends", claim],
    ["Fence", String(info.fence)],
    !info.owner && info.ready_ms !== null && ["Has work from", at(info.ready_ms)],
    info.attempts > 0 && ["Failed turns in a row", String(info.attempts)],
    info.set_aside > 0 && ["Items set aside", String(info.set_aside)],
  ].filter(Boolean);
}

function stateOf(info) {
  if (info.is_stopped) return pill("bad", "stopped by an error");
  if (info.owner && info.expires_ms > Date.now()) return pill("good", "held by a host");
  return info.ready_ms === null ? pill("quiet", "idle") : pill("delayed", "has work");
}

function left(ms) {
  const remaining = (ms - Date.now()) / 1000;
  return remaining > 0 ? `in ${seconds(remaining)}` : "over";
}

function effectTable() {
  return new Table(
    "Effects",
    [
      opener("Effect", (row) => `${row.height}/${row.number}`, () => "Show its parameters"),
      text("Kind", (row) => row.kind, { class: "mono" }),
      { name: "State", cell: (cell) => (row) => cell.replaceChildren(pill(EFFECTS[row.state] ?? "quiet", row.state === "inflight" ? "in flight" : row.state)) },
      text("Attempts", (row) => (row.max_attempts ? `${row.attempts} of ${row.max_attempts}` : String(row.attempts)), { class: "number" }),
      text("Due, or lease ends", (row) => left(row.due_ms)),
      text("Host", (row) => row.owner ?? "–"),
      text("Last error", (row) => row.error ?? "–", { class: "error" }),
    ],
    {
      key: (row) => `${row.height}/${row.number}`,
      empty: "No effect is pending or in flight.",
      inside: (row) => [h("pre", { tabindex: "0", text: pretty(decoded(row.params, "json")) }), row.error && h("pre", { class: "error", tabindex: "0", text: row.error })],
    },
  );
}

function timerTable() {
  return new Table(
    "Timers",
    [text("Timer", (row) => row.timer_id, { head: true, class: "mono" }), text("Fires", (row) => left(row.deliver_at_ms).replace("over", "now")), text("At", (row) => clock(row.deliver_at_ms), { class: "dim" }), text("Set at height", (row) => String(row.height), { class: "number" })],
    { key: (row) => row.timer_id, empty: "No timer is set." },
  );
}

function asideTable({ api, act, allows }, path) {
  const buttons = {
    name: "",
    label: "Retry or drop",
    class: "row-actions",
    cell: (cell, row) => {
      const item = `${path}/aside/${row.sequence}`;
      const question = { title: "Drop this item?", words: `Item ${row.sequence} is removed and never handled. This cannot be undone.`, yes: "Drop the item", no: "Keep it" };
      const drop = async () => (await ask(question)) && act(() => api.delete(item), () => "Dropped");
      cell.append(
        button("Retry", () => act(() => api.post(`${item}/retry`), () => "Back in the inbox"), { class: "small", "aria-label": `Retry item ${row.sequence}` }),
        " ",
        button("Drop", drop, { class: "small danger", "aria-label": `Drop item ${row.sequence}` }),
      );
    },
  };
  return new Table(
    "Set aside",
    [
      opener("Item", (row) => String(row.sequence), () => "Show its error and its payload"),
      text("Kind", (row) => row.item.type),
      text("Name", (row) => nameOf(row.item), { class: "mono" }),
      text("Error", (row) => brief(lastLine(row.error), 200), { class: "error" }),
      text("Set aside", (row) => clock(row.set_aside_ms), { class: "dim" }),
      ...(allows("hosting:aside.retry") ? [buttons] : []),
    ],
    {
      key: (row) => row.sequence,
      empty: "No item is set aside.",
      inside: (row) => [h("pre", { class: "error", tabindex: "0", text: row.error }), h("pre", { tabindex: "0", text: payloadOf(row.item) })],
    },
  );
}

// A traceback ends with its error.
function lastLine(error) {
  return error.trimEnd().split("\n").at(-1);
}

function nameOf(item) {
  return item.schema ?? item.effect_kind ?? item.inbox_name ?? item.timer_id ?? item.command ?? "";
}

function payloadOf(item) {
  if (item.payload_blob) return `In the blob ${item.payload_blob}.`;
  return item.payload ? pretty(decoded(item.payload, "json")) : "No payload.";
}
