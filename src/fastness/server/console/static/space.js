// Space: what is kept, why and until when; the disk; and the collections that delete what nothing needs.

import { Table, ago, button, bytes, card, clock, count, facts, h, number, pill, plural, setText, text, tiles } from "./dom.js";

export const title = "Space";
export const sections = [];
export const verbs = ["space:status"];
export const everywhere = true;

const UNREFERENCED = "unreferenced";

export function open({ api, act, filter }) {
  const totals = tiles({ stored: "stored", waiting: "in the grace period", free: "disk free", reserve: "disk reserve" });
  const uses = new Table(
    "What is kept",
    [
      text("Kind", (row) => row.kind, { head: true }),
      text("Universe", (row) => row.universe || "–"),
      number("Count", (row) => row.count),
      text("Size", (row) => bytes(row.bytes), { class: "number" }),
      { name: "Reason", class: "words", cell: (cell) => (row) => (row.reason === UNREFERENCED ? cell.replaceChildren(pill("delayed", row.reason)) : setText(cell, row.reason)) },
      text("Kept", (row) => row.until, { class: "words" }),
      text("Next goes", (row) => (row.next_ms ? clock(row.next_ms) : "–"), { class: "dim" }),
    ],
    { key: (row) => `${row.universe} ${row.kind} ${row.reason}`, empty: "Nothing is stored yet." },
  );
  const measured = h("span", { text: "being measured" });
  const unsearched = h("p", { class: "banner", role: "alert", hidden: true });
  const disk = h("div", {});
  const collection = h("div", {});
  const outcome = h("p", { class: "verdict", role: "status" });
  const again = button("Measure again", () => act(measure), { class: "plain" });
  const dry = button("Dry run", () => act(() => collect(true)), { class: "plain", title: "Show what would be deleted now" });
  const now = button("Collect now", () => act(() => collect(false)), { class: "plain", title: "Delete what nothing needs any more, after its grace period" });
  let report = null; // Measuring reads the whole key space, so it is done once, and when the user asks for it.

  const show = () => {
    if (!report) return;
    const known = report.uses.filter((row) => `${row.universe} ${row.kind} ${row.reason}`.toLowerCase().includes(filter.value));
    uses.show(known, report.uses.length > 0);
    setText(measured, `all universes, measured ${ago(report.measured_ms)}`);
  };
  filter.onchange = show;

  async function measure() {
    report = await api.get("v1/space");
    const sum = (rows) => bytes(rows.reduce((total, row) => total + row.bytes, 0));
    totals.show("stored", sum(report.uses));
    totals.show("waiting", sum(report.uses.filter((row) => row.reason === UNREFERENCED || row.kind === "deleted blobs")));
    unsearched.hidden = !report.unsearched.length;
    setText(unsearched, report.unsearched.length ? `No blob can be deleted, because this could not be searched: ${report.unsearched.join("; ")}. Run fastness doctor.` : "");
    show();
  }

  async function collect(isDry) {
    const done = await api.post("v1/space/collect", { dry_run: isDry });
    const verb = isDry ? "Would delete" : "Deleted";
    const failed = done.unsearched.length > 0;
    outcome.className = `verdict ${failed ? "bad" : "good"}`;
    setText(
      outcome,
      failed
        ? `No blob was deleted, because this could not be searched: ${done.unsearched[0]}`
        : `${verb} ${plural(done.deleted, "blob", "blobs")} (${bytes(done.deleted_bytes)}) and ${plural(done.freed, "body", "bodies")} of blobs deleted earlier. In the grace period: ${plural(done.waiting, "blob", "blobs")} (${bytes(done.waiting_bytes)}).`,
    );
    if (!isDry) await measure();
  }

  function showStatus(status) {
    const last = status.collection;
    totals.show("free", bytes(status.disk_free_bytes));
    totals.show("reserve", bytes(status.disk_reserve_bytes));
    disk.replaceChildren(
      facts([
        ["Key space", status.failure ? pill("bad", "failed") : pill("good", "works")],
        status.failure ? ["Cause", status.failure] : null,
        ["Disk", status.disk_free_bytes === null ? "not a local directory, or no reserve" : status.disk_low ? pill("bad", "nearly full") : pill("good", "has space")],
        ["New data is refused below", `${bytes(status.disk_reserve_bytes)} free`],
      ].filter(Boolean)),
    );
    collection.replaceChildren(
      facts([
        ["Last success", last.succeeded_ms ? `${ago(last.succeeded_ms)}, ${clock(last.succeeded_ms)}` : "none since the server started"],
        ["Deleted then", last.result ? `${plural(last.result.deleted, "blob", "blobs")} (${bytes(last.result.deleted_bytes)}), ${plural(last.result.freed, "body", "bodies")}` : last.succeeded_ms ? "nothing was due" : "–"],
        ["Failures since the server started", count(last.failures)],
        last.error ? ["Last failure", last.error] : null,
      ].filter(Boolean)),
    );
  }

  return {
    actions: [again, dry, now],
    element: h(
      "div",
      {},
      totals.element,
      unsearched,
      card("What is kept", h("span", { class: "inline" }, measured, filter.element), uses.element),
      h("div", { class: "columns" }, card("Key space and disk", "of this server", disk), card("Collection", "deletes blobs that nothing names", collection, outcome)),
    ),
    load: async () => {
      showStatus(await api.get("v1/space/status"));
      if (!report) await measure();
    },
    reload: measure,
    tick: show,
  };
}
