// DOM helpers, and the formatting of numbers, times and values. Text is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Set the text of `element` only if it differs, so that nothing flickers and selections survive.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

export function toggle(element, name, on) {
  if (element.hasAttribute(name) !== on) element.toggleAttribute(name, on);
}

const ICONS = {
  overview: "M2 13h3l2-7 3 5 2-4 2 6",
  queues: "M2 4h12M2 8h12M2 12h7",
  mail: "M2 4h12v8H2zM2 4.5l6 4.5 6-4.5",
  runs: "M3 3v10l5-5zM9 4h5M11 8h3M9 12h5",
  worlds: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M2 8h12M8 2c2 2 2 10 0 12M8 2c-2 2-2 10 0 12",
  leases: "M4 7h8v6H4zM5.5 7V5a2.5 2.5 0 0 1 5 0v2",
  entities: "M8 2l6 3-6 3-6-3zM2 8l6 3 6-3M2 11l6 3 6-3",
  space: "M3 4c0-2.500 10-2.500 10 0v8c0 2.500-10 2.500-10 0zM3 4c0 2.500 10 2.500 10 0M3 8c0 2.500 10 2.500 10 0",
  reports: "M4 2h6l3 3v9H4zM6 8h5M6 11h5",
  tokens: "M10.500 2a3.500 3.500 0 1 0 0 7 3.500 3.500 0 0 0 0-7M8 8l-6 6M4 12l2 2M6 10l2 2",
  nodes: "M2 3h12v4H2zM2 9h12v4H2zM4.500 5h1M4.500 11h1",
  audit: "M3 2h10v12H3zM5.500 6l1 1 2-2M5.500 10.500l1 1 2-2M10 6.500h1M10 11h1",
  usage: "M2 12a6 6 0 1 1 12 0M8 12l3-4M2 12h12",
  pipeline: "M2 3h4v4H2zM10 9h4v4h-4zM6 5h6v4M4 7v4h6",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6M8 1v1.5M8 13.500v1.500M1 8h1.500M13.500 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  out: "M6 3H3v10h3M7 8h7M11 5l3 3-3 3",
  keys: "M2 4h12v8H2zM4.500 6.500h1M7.500 6.500h1M10.500 6.500h1M5 9.500h6",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

// A table that keeps the elements of rows with the same key, so that focus and expanded rows survive an update.
export class Table {
  constructor(caption, columns, { empty = "No entries.", key = (row) => row.key, inside = null } = {}) {
    this.columns = columns;
    this.inside = inside; // Creates the details below a row when its `opener` is pressed.
    this.keyOf = key;
    this.rows = new Map();
    this.body = h("tbody", { role: "rowgroup" });
    this.none = typeof empty === "string" ? h("p", { class: "empty", text: empty }) : empty;
    this.unmatched = h("p", { class: "empty", hidden: true });
    const heads = columns.map((column) =>
      h("th", { scope: "col", role: "columnheader", class: column.class }, column.name || h("span", { class: "unseen", text: column.label })),
    );
    // A phone shows rows as cards. The roles keep the meaning of the table, which other display types remove.
    this.table = h("table", { role: "table" }, h("caption", { class: "unseen", text: caption }), h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)), this.body);
    this.scroller = h("div", { class: "scroller", role: "region", "aria-label": caption, tabindex: "0" }, this.table);
    this.element = h("div", { class: "table" }, this.scroller, this.none, this.unmatched);
    this.none.hidden = this.scroller.hidden = true; // Until the first data arrives.
  }

  // `isFiltered`: a filter has selected the rows, so no rows does not mean that there are no entries. `page`: the page
  // that it has selected them from, if the list has several.
  show(rows, isFiltered = false, page = null) {
    // Remove obsolete rows first: moving an element would lose the focus.
    const kept = new Set(rows.map(this.keyOf));
    for (const [key, known] of this.rows) {
      if (!kept.has(key)) {
        for (const element of known.elements) element.remove();
        this.rows.delete(key);
      }
    }
    let before = this.body.firstElementChild;
    for (const row of rows) {
      const key = this.keyOf(row);
      let known = this.rows.get(key);
      if (!known) {
        const cells = this.columns.map((column) => {
          const cell = h(column.head ? "th" : "td", { class: column.class, scope: column.head ? "row" : null, role: column.head ? "rowheader" : "cell", "data-label": column.name || null });
          cell.update = column.cell(cell, row) ?? (() => {});
          return cell;
        });
        known = { elements: [h("tr", { role: "row" }, cells)], cells };
        known.elements[0].addEventListener("click", (event) => event.target.closest(".opener") && this.#unfold(known));
        this.rows.set(key, known);
      }
      known.row = row;
      for (const cell of known.cells) cell.update(row);
      for (const element of known.elements) {
        if (element === before) before = before.nextElementSibling;
        else this.body.insertBefore(element, before);
      }
    }
    this.none.hidden = rows.length > 0 || isFiltered;
    this.unmatched.hidden = rows.length > 0 || !isFiltered;
    setText(this.unmatched, page?.isPartial ? "Nothing on this page matches the filter. It searches one page at a time: open another page to search that one." : "Nothing matches the filter.");
    this.scroller.hidden = rows.length === 0;
  }

  #unfold(known) {
    const [element, open] = known.elements;
    element.querySelector(".opener").setAttribute("aria-expanded", String(!open));
    if (open) {
      open.remove();
      known.elements = [element];
      return;
    }
    const shown = h("tr", { class: "inside", role: "row" }, h("td", { colspan: this.columns.length, role: "cell" }, this.inside(known.row)));
    known.elements = [element, shown];
    element.after(shown);
  }
}

// A column whose cells expand and collapse the details of their rows.
export function opener(name, write, about) {
  const cell = (cell, row) => {
    cell.append(h("button", { type: "button", class: "opener", "aria-expanded": "false", title: about(row) }, h("code", { text: write(row) })));
  };
  return { name, cell, head: true, class: "tight" };
}

// A column whose cells are text.
export function text(name, write, options = {}) {
  return { name, cell: (cell) => (row) => setText(cell, write(row)), ...options };
}

export function number(name, write, options = {}) {
  return text(name, (row) => count(write(row)), { class: "number", ...options });
}

// A column whose cells are links.
export function link(name, write, address, options = {}) {
  const cell = (cell) => {
    const anchor = h("a", {});
    cell.append(anchor);
    return (row) => {
      setText(anchor, write(row));
      anchor.href = address(row);
    };
  };
  return { name, cell, head: true, ...options };
}

export function pill(kind, words) {
  return h("span", { class: `pill ${kind}`, text: words });
}

export function button(words, onclick, props = {}) {
  return h("button", { type: "button", ...props, onclick }, words);
}

// The last column of a table: buttons that stay visible while the rest scrolls. `make(cell, row)` adds them.
export function rowActions(label, make) {
  return { name: "", label, class: "row-actions", cell: make };
}

// Asks before an action; resolves to whether it is confirmed. With `typed`, this name must be typed first.
// `content` are fields of the question, which must be valid. Another address closes the question.
export function ask({ title, words = "", yes, no = "Cancel", typed = null, content = [], danger = true }) {
  return new Promise((resolve) => {
    const closing = new AbortController();
    const confirm = h("button", { type: "submit", class: danger ? "danger" : "confirm", text: yes, disabled: typed !== null });
    const name = typed === null ? null : h("input", { type: "text", autocomplete: "off", spellcheck: "false", oninput: () => toggle(confirm, "disabled", name.value !== typed) });
    const fields = [...[content].flat(), ...(name ? [field(`Type ${typed} to confirm`, name)] : [])];
    const keep = button(no, () => dialog.close(), { class: "plain", autofocus: fields.length === 0 });
    const confirmed = (event) => {
      event.preventDefault();
      dialog.close("yes");
    };
    const dialog = h("dialog", { "aria-label": title }, h("form", { onsubmit: confirmed }, h("h2", { text: title }), words && h("p", {}, words), fields, h("div", { class: "inline" }, keep, confirm)));
    dialog.addEventListener("close", () => {
      closing.abort();
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    addEventListener("hashchange", () => dialog.close(), { signal: closing.signal });
    document.body.append(dialog);
    dialog.showModal();
    fields[0]?.querySelector("input, select, textarea")?.focus();
  });
}

let fields = 0;

// An input with its label, and a note below it.
export function field(words, input, note = "") {
  input.id ||= `field-${++fields}`;
  if (note) input.setAttribute("aria-describedby", `${input.id}-note`);
  return h("div", { class: "field" }, h("label", { for: input.id, text: words }), input, note && h("small", { id: `${input.id}-note`, text: note }));
}

// A control in a line with others, and its label, which stays beside it.
export function labelled(words, control) {
  return h("span", { class: "labelled" }, h("label", { for: control.id, text: words }), control);
}

// What a list shows while it has no entries: what to do next, and a command that does it.
export function emptyState(words, command = null) {
  return h("div", { class: "empty" }, h("p", { text: words }), command && copyable(command, "Copy the command"));
}

// A command of the shell for this server and universe: `command(api, "queue put jobs hello")`.
export function command(api, words) {
  const universe = api.universe === "main" ? "" : ` --universe ${api.universe}`;
  return `fastness --url ${location.origin}${universe} ${words}`;
}

// Text with a button that copies it.
export function copyable(words, label = "Copy") {
  const code = h("code", { text: words });
  const copy = button("Copy", () => copyText(code, words, copy), { class: "small", "aria-label": label });
  return h("div", { class: "copyable" }, code, copy);
}

async function copyText(element, words, copy) {
  try {
    await navigator.clipboard.writeText(words); // Only on https and localhost.
  } catch {
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
  }
  setText(copy, "Copied");
  setTimeout(() => setText(copy, "Copy"), 2_000);
}

// What a page shows instead of what it could not load.
export function errorState(problem, retry) {
  const next = nextStep(problem);
  const about = errorHelp(problem);
  return h("div", { class: "problem", role: "alert" }, h("div", {}, h("p", { text: problem.message }), (next || about) && h("p", { class: "next" }, next && `${next} `, about)), button("Try again", retry, { class: "small" }));
}

// A link to the page of the server about an error, if the server has named its code.
export function errorHelp({ status, code }) {
  return status > 0 && code !== "unreachable" && h("a", { class: "help", href: `docs/errors/${encodeURIComponent(code)}`, target: "_blank", rel: "noopener noreferrer", text: `About the error ${code}` });
}

function nextStep({ status }) {
  if (status === 403) return "Sign in with a token that allows it. A token with more verbs is created with `fastness token create`.";
  if (status === 404) return "It may have been removed, or the address is wrong.";
  if (status === 429 || status === 503) return "The server is busy. The page tries again.";
  if (status >= 500) return "The log of the server has the cause. The page tries again.";
  return "";
}

// The address of a page: `address(["queues", "jobs"], { state: "dead" })`.
export function address(parts, query = {}) {
  const parameters = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return `#/${parts.map(encodeURIComponent).join("/")}${parameters.size ? `?${parameters}` : ""}`;
}

export function card(title, note, ...children) {
  const heading = title instanceof Element ? title : h("h2", { text: title });
  return h("section", { class: "card" }, h("header", {}, heading, h("div", { class: "aside" }, note)), children);
}

// A number with its noun.
export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// The heading of a list, with the number of its entries.
export function countHeading(one, many) {
  const element = h("h2", { text: many });
  return { element, show: (known, more = false) => setText(element, `${count(known)}${more ? " of more" : ""} ${known === 1 && !more ? one : many}`) };
}

export function tiles(names) {
  const values = Object.fromEntries(Object.keys(names).map((name) => [name, h("b", { text: "–" })]));
  const element = h("div", { class: "tiles" }, Object.entries(names).map(([name, words]) => h("div", { class: `tile ${name}` }, h("span", { text: words }), values[name])));
  return { element, show: (name, words) => setText(values[name], words) };
}

// Numbers and times.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Math.abs(value) >= 100_000 ? SHORT.format(value) : WHOLE.format(value);
}

export function rate(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(value < 0.1 ? 2 : 3)} ms`;
  if (value < 10) return `${Number.isInteger(value) ? value : value.toFixed(1)} s`;
  if (value < 60) return `${Math.floor(value)} s`;
  const two = (unit, name, part, partName) => [`${Math.floor(value / unit)} ${name}`, Math.floor((value % unit) / part) && `${Math.floor((value % unit) / part)} ${partName}`].filter(Boolean).join(" ");
  if (value < 3600) return two(60, "min", 1, "s");
  if (value < 86_400) return two(3600, "h", 60, "min");
  return two(86_400, "d", 3600, "h");
}

export function bytes(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 1024) return `${count(value)} B`;
  const steps = ["KiB", "MiB", "GiB", "TiB"];
  let step = -1;
  while (value >= 1024 && step < 3) {
    value /= 1024;
    step += 1;
  }
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${steps[step]}`;
}

export function ago(ms) {
  return ms ? `${seconds(Math.max(0, Math.floor((Date.now() - ms) / 1000)))} ago` : "–";
}

export function clock(ms) {
  return ms ? new Date(ms).toLocaleString("sv-SE") : "–";
}

// A value in one line.
export function brief(value, length = 120) {
  const words = typeof value === "string" ? value : JSON.stringify(value);
  return words === undefined ? "" : words.length > length ? `${words.slice(0, length)}…` : words;
}

export function pretty(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

// The payload of a message or a mail: JSON and text as they are, other types as their size.
export function payload(message) {
  if (message.payload !== undefined) return message.payload;
  if (message.payload_blob !== undefined) return `${bytes(message.payload_bytes)} in the blob ${message.payload_blob}`;
  return decoded(message.payload_base64 ?? "", message.payload_content_type ?? "");
}

export function decoded(base64, kind) {
  const raw = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
  try {
    const words = new TextDecoder("utf-8", { fatal: true }).decode(raw);
    if (!kind.includes("json")) return words;
    try {
      return JSON.parse(words);
    } catch {
      return words;
    }
  } catch {
    return `${bytes(raw.length)} of ${kind || "unknown type"}`;
  }
}

// Names and values in two columns.
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", {}, value))));
}

// A collapsible element whose content is created when it is first expanded.
export function fold(summary, make) {
  const details = h("details", {}, h("summary", {}, summary));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(...[make()].flat());
  });
  return details;
}
