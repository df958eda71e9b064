// Live aggregates and reports of the pipeline. A report is in a sandboxed frame without an origin. The policy of the file allows only the scripts of reports.

import { Table, ago, bytes, card, clock, emptyState, h, link, number, seconds, setText, text } from "./dom.js";

export const title = "Reports";
export const sections = [];
export const verbs = ["metrics:read"];
export const metrics = true;

export function open({ api, session }) {
  const live = session.live ? liveCard(api) : null;
  if (!session.reports) {
    const words = "Reports are not available. Start the server with the folder of the pipeline's lake, and use a token that allows metrics:read.";
    return { element: emptyState(words, "fastness serve --pipeline-lake FOLDER"), load: async () => {} };
  }
  const container = h("div", { class: "report" });
  const note = h("span", {});
  const files = new Table(
    "Files of the pipeline",
    [
      { ...link("File", (row) => row.name, (row) => row.at + encodeURIComponent(row.name)), cell: newTab },
      text("Size", (row) => bytes(row.size), { class: "number" }),
      text("Written", (row) => ago(row.modified_ms)),
    ],
    { key: (row) => row.name, empty: "The pipeline has not written any files yet." },
  );
  let shown = null;
  return {
    every: 30,
    element: h("div", {}, live?.element, card("Latest report", note, container), card("Files", "", files.element)),
    load: async () => {
      await live?.load();
      const found = await api.post("console/reports");
      files.show(found.files.map((row) => ({ ...row, at: found.at })));
      const latest = found.files.find((row) => row.name === "latest.html") ?? found.files.find((row) => row.name.endsWith(".html"));
      if (!latest) {
        container.replaceChildren(h("p", { class: "empty", text: "No report yet. Run the pipeline to create one." }));
        return;
      }
      note.textContent = `${latest.name}, ${ago(latest.modified_ms)}`;
      if (shown === latest.modified_ms) return;
      shown = latest.modified_ms;
      container.replaceChildren(h("iframe", { src: found.at + encodeURIComponent(latest.name), title: "The pipeline's latest report", sandbox: "allow-scripts", referrerpolicy: "no-referrer" }));
    },
  };
}

// The last hour of live_queue_minutes. An error, such as a missing package, is shown in the card.
function liveCard(api) {
  const note = h("span", {});
  const problem = h("p", { class: "empty", role: "status", hidden: true });
  const queues = new Table(
    "Live aggregates by queue",
    [
      text("Queue", (row) => row.queue, { head: true }),
      number("Put", (row) => row.put),
      number("Delivered", (row) => row.leased),
      number("Acknowledged", (row) => row.acked),
      number("Retries", (row) => row.retries),
      number("Expired", (row) => row.expired),
      number("Dead letters", (row) => row.dead_lettered),
      text("Mean wait", (row) => (row.waits ? seconds(row.wait_sum_ms / row.waits / 1_000) : "–"), { class: "number" }),
      text("Longest wait", (row) => (row.waits ? seconds(row.wait_max_ms / 1_000) : "–"), { class: "number" }),
    ],
    { key: (row) => row.queue, empty: "No aggregates of this universe. Run fastness pipeline live." },
  );
  return {
    element: card("Last hour", note, problem, queues.element),
    load: async () => {
      try {
        const found = await api.get("console/live", { universe: api.universe });
        problem.hidden = true;
        queues.show(found.queues);
        const others = found.left_off ? `, and ${found.left_off} more queues` : "";
        const partial = found.truncated ? "; too many rows, so the counts are too low" : "";
        setText(note, found.newest_ms === null ? "" : `${found.minutes} minutes up to ${clock(found.newest_ms)}${others}${partial}`);
      } catch (error) {
        if (!error.status || error.status === 401) throw error;
        problem.hidden = false;
        setText(problem, error.message);
      }
    },
  };
}

function newTab(cell) {
  const anchor = h("a", { target: "_blank", rel: "noopener noreferrer" });
  cell.append(anchor);
  return (row) => {
    anchor.textContent = row.name;
    anchor.href = row.at + encodeURIComponent(row.name);
  };
}
