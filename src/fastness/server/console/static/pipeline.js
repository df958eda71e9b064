// The last run of each job of the pipeline, from the records in its lake.

import { Table, ago, card, clock, countHeading, emptyState, facts, h, number, opener, pill, plural, seconds, setText, text } from "./dom.js";

const PILLS = { running: "leased", ok: "good", findings: "bad", failed: "bad" };
const REPORTED = ["rollup", "audit", "reachability", "report"]; // The report has the results of these jobs.

export const title = "Pipeline";
export const sections = [];
export const verbs = ["metrics:read"];
export const metrics = true;

export function open({ api, filter, session }) {
  let known = [];
  const unfolded = new Map(); // What writes the details of a row, by job.
  const table = new Table(
    "Last runs of jobs",
    [
      opener("Job", (row) => row.job, (row) => `Show the last run of ${row.job}`),
      { name: "State", cell: (cell) => (row) => cell.replaceChildren(pill(PILLS[row.state], row.state)) },
      text("Started", (row) => ago(row.started_ms)),
      text("Took", (row) => (row.ended_at === null ? "–" : seconds(row.seconds)), { class: "number" }),
      number("Rows", (row) => sum(row.rows)),
      number("Findings", (row) => row.findings),
      text("Last success", (row) => ago(Date.parse(row.completed_at)), { class: "dim" }),
      { name: "Report", cell: reportCell },
      text("Error", (row) => row.error ?? "", { class: "error" }),
    ],
    {
      key: (row) => row.job,
      inside: (row) => {
        const shown = h("div", {});
        const write = (now) => shown.replaceChildren(...details(now));
        write(row);
        unfolded.set(row.job, write);
        return shown;
      },
      empty: emptyState("No job has run on this lake yet. Copy the plane into the lake:", "fastness pipeline ingest --data URL --lake FOLDER"),
    },
  );

  // A link to the report with the results of the run. It is the same element after an update, so it keeps the focus.
  function reportCell(cell, { job }) {
    const anchor = h("a", { href: "#/reports", text: "Open", "aria-label": `Open the report with the run of ${job}`, hidden: true });
    const words = h("span", {});
    cell.append(anchor, words);
    return (row) => {
      const isPossible = session.reports && REPORTED.includes(job) && row.completed_at !== null;
      const report = known.find((each) => each.job === "report");
      const isReported = isPossible && Date.parse(report?.completed_at ?? "") >= Date.parse(row.completed_at);
      anchor.hidden = !isReported;
      setText(words, isReported ? "" : isPossible ? "not reported yet" : "–");
    };
  }

  const heading = countHeading("job", "jobs");
  const unreadable = h("p", { class: "empty", role: "status", hidden: true });
  const list = card(heading.element, filter.element, table.element, unreadable);
  const unknown = emptyState("The server does not know the pipeline's lake. Start it with the folder of the lake:", "fastness serve --pipeline-lake FOLDER");
  list.hidden = unknown.hidden = true;
  const show = () => table.show(known.filter((row) => row.job.includes(filter.value)), known.length > 0);
  filter.onchange = show;
  return {
    every: 10,
    element: h("div", {}, list, unknown),
    load: async () => {
      const found = await api.get("console/pipeline");
      known = found.runs.map((run) => ({ ...run, started_ms: Date.parse(run.started_at) }));
      list.hidden = !found.lake;
      unknown.hidden = found.lake;
      heading.show(known.length);
      unreadable.hidden = found.unreadable.length === 0;
      setText(unreadable, `${plural(found.unreadable.length, "record")} cannot be read: ${found.unreadable.join(", ")}. The next run of the job writes it anew.`);
      show();
      for (const run of known) unfolded.get(run.job)?.(run);
    },
    tick: show,
  };
}

function sum(rows) {
  return Object.values(rows).reduce((total, each) => total + each, 0);
}

function details(row) {
  const rows = Object.entries(row.rows).map(([name, number]) => [`Rows of ${name}`, number.toLocaleString("en")]);
  const ended = row.ended_at === null ? "It runs, or was ended before it could record its end." : clock(Date.parse(row.ended_at));
  return [facts([["Started", clock(row.started_ms)], ["Ended", ended], ...rows]), row.error && h("pre", { class: "error", tabindex: "0", "aria-label": `Error of ${row.job}`, text: row.error })].filter(Boolean);
}
