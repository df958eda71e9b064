// Reports of the pipeline, in a sandboxed frame without an origin. The policy of the file allows only the scripts of reports.

import { Table, ago, bytes, card, h, link, text } from "./dom.js";

export const title = "Reports";
export const sections = [];

export function open({ api, session }) {
  if (!session.reports) {
    const words = "Reports are not available. Start the server with --pipeline-reports FOLDER, where FOLDER is the reports folder of the lake, and use a token that allows metrics:read.";
    return { element: h("p", { class: "empty", text: words }), load: async () => {} };
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
    element: h("div", {}, card("Latest report", note, container), card("Files", "", files.element)),
    load: async () => {
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

function newTab(cell) {
  const anchor = h("a", { target: "_blank", rel: "noopener noreferrer" });
  cell.append(anchor);
  return (row) => {
    anchor.textContent = row.name;
    anchor.href = row.at + encodeURIComponent(row.name);
  };
}
