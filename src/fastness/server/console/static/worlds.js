// Worlds: their journals to scale, their records, and their verification.

import { Table, brief, button, bytes, card, clock, command, count, countHeading, emptyState, fold, h, link, number, pill, plural, pretty, setText, svg, text } from "./dom.js";
import { hosting } from "./hosting.js";

const RECORDS = 50;
const MARKS = 1_000; // Segments and snapshots that are drawn and listed.
const KINDS = { entry: "quiet", ingress: "leased", snapshot: "accent", baseline: "good", manifest: "delayed" };
const STATES = { active: "good", paused: "delayed", pausing: "delayed", archived: "quiet", archiving: "quiet", deleted: "bad", deleting: "bad" };

export const title = "Worlds";
export const sections = ["worlds"];
export const verbs = ["world:survey"];

export function open(context, name) {
  return name ? openOne(context, name) : openAll(context);
}

function openAll({ api, pages, filter }) {
  const table = new Table(
    "Worlds",
    [
      link("World", (row) => row.name, (row) => `#/worlds/${encodeURIComponent(row.name)}`),
      { name: "State", cell: (cell) => (row) => cell.replaceChildren(pill(STATES[row.state], row.state)) },
      { name: "Journal", class: "bar", cell: (cell) => (row) => cell.replaceChildren(strip(row)) },
      number("Records", (row) => row.head),
      number("Cold", (row) => row.hot),
      number("Hot", (row) => row.head - row.hot),
      number("Baseline", (row) => row.baseline),
      text("Created", (row) => clock(row.created_ms), { class: "dim" }),
    ],
    { key: (row) => row.name, empty: emptyState("This universe has no worlds yet. A program creates one, or this command:", command(api, "world create ledger")) },
  );
  const page = pages((after) => api.get("v1/surveys/worlds", { after, limit: 100, tier: "important" }));
  let known = [];
  const show = () => {
    const most = Math.max(1, ...known.map((row) => row.head));
    table.show(known.filter((row) => row.name.toLowerCase().includes(filter.value)).map((row) => ({ ...row, most })), known.length > 0, page);
  };
  filter.onchange = show;
  const heading = countHeading("world", "worlds");
  return {
    element: card(heading.element, filter.element, table.element, page.element),
    load: async () => {
      known = (await page.load()).worlds;
      heading.show(known.length, page.next !== null);
      show();
    },
  };
}

// The journal of a world as a bar: cold and hot records, and the baseline. Its length compares worlds.
function strip({ head, hot, baseline, most }) {
  const scale = (height) => (100 * height) / most;
  return svg(
    "svg",
    { class: "strip", role: "img", "aria-label": `${count(hot)} cold, ${count(head - hot)} hot, baseline at ${count(baseline)}`, preserveAspectRatio: "none", viewBox: "0 0 100 10" },
    svg("rect", { class: "cold", x: 0, y: 1, width: scale(hot), height: 8 }),
    svg("rect", { class: "hot", x: scale(hot), y: 1, width: scale(head - hot), height: 8 }),
    baseline ? svg("rect", { class: "mark", x: Math.max(0, scale(baseline) - 0.4), y: 0, width: 0.8, height: 10 }) : "",
  );
}

function openOne(context, name) {
  const { api, act } = context;
  const run = hosting(context, name);
  const path = `v1/worlds/${encodeURIComponent(name)}`;
  const state = h("span", {});
  const timeline = h("div", { class: "timeline" });
  const size = h("span", {});
  const from = h("input", { id: "from", type: "number", min: 0, value: "0", inputmode: "numeric" });
  const records = new Table(
    "Journal records",
    [
      text("Height", (row) => count(row.height), { head: true, class: "number mono tight" }),
      { name: "Kind", class: "tight", cell: (cell, row) => cell.append(pill(KINDS[row.kind] ?? "quiet", row.kind)) },
      {
        name: "Value",
        class: "mono",
        cell: (cell, row) => {
          cell.append(fold(brief(row.value, 140), () => h("pre", { tabindex: "0", text: pretty(row.value) })));
        },
      },
    ],
    { key: (row) => `${row.height}`, empty: "No records from this height on." },
  );
  const snapshots = new Table(
    "Snapshots",
    [
      text("Height", (row) => count(row.height), { head: true, class: "number mono tight" }),
      { name: "", label: "Baseline", cell: (cell) => (row) => cell.replaceChildren(row.isBaseline ? pill("good", "baseline") : "") },
      text("Blob", (row) => row.snapshot_ref.slice(0, 16), { class: "mono dim" }),
    ],
    { key: (row) => row.height, empty: "No snapshots yet." },
  );
  const segments = new Table(
    "Segments",
    [
      text("Records", (row) => `${count(row.start)} – ${count(row.end)}`, { head: true, class: "mono" }),
      text("Bytes", (row) => bytes(row.size), { class: "number" }),
      text("Checksum", (row) => row.checksum.slice(0, 23), { class: "mono dim" }),
    ],
    { key: (row) => row.start, empty: "No segments yet." },
  );
  const verdict = h("p", { class: "verdict", role: "status" });
  const progress = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress of the verification" });
  const verify = button("Verify", () => check(), { class: "plain" });
  let world = null;
  let follow = true; // Shows the newest records until the user selects a height.
  let typed = false; // Do not overwrite a height that the user is typing.
  let gone = false;
  let start = 0;
  from.addEventListener("input", () => {
    typed = true;
  });

  async function read(height) {
    start = Math.max(0, Math.floor(height || 0));
    if (!typed) from.value = String(start);
    const found = (await api.get(`${path}/entries`, { start, limit: RECORDS, tier: "important" })).records;
    records.show(follow ? found.reverse() : found); // Newest first.
  }

  function go(height) {
    follow = typed = false;
    return act(() => read(height));
  }

  async function check() {
    verify.disabled = true;
    progress.hidden = false;
    const seen = { records: 0, segments: 0, snapshots: 0 };
    const head = Math.max(1, world.head); // Records that are appended meanwhile do not count.
    try {
      for (let next = 0; next !== null && !gone; ) {
        const found = await api.get(`${path}/check`, { start: next });
        for (const each of Object.keys(seen)) seen[each] += found[each];
        next = found.next;
        progress.value = next === null ? 1 : Math.min(1, next / head);
        if (found.fault) {
          verdict.className = "verdict bad";
          setText(verdict, `Damaged. ${found.fault}`);
          return;
        }
      }
      verdict.className = "verdict good";
      setText(verdict, `No damage found: ${plural(seen.records, "record")} without gaps, ${plural(seen.segments, "segment")} with matching checksums, ${plural(seen.snapshots, "readable snapshot")}.`);
    } catch (error) {
      verdict.className = "verdict bad";
      setText(verdict, error.message);
    } finally {
      verify.disabled = false;
      progress.hidden = true;
    }
  }

  const form = h(
    "form",
    {
      class: "inline",
      onsubmit: (event) => {
        event.preventDefault();
        go(Number(from.value));
      },
    },
    h("label", { for: "from", text: "From height" }),
    from,
    h("button", { type: "submit", class: "small", text: "Read" }),
    button("Older", () => go(start - RECORDS), { class: "small" }),
    button("Newer", () => go(Math.min(start + RECORDS, Math.max(0, world.head - 1))), { class: "small" }),
    button("Newest", () => {
      follow = true;
      typed = false;
      return act(load);
    }, { class: "small" }),
  );

  async function load() {
    world = await api.get(path, { tier: "important" });
    state.replaceChildren(pill(STATES[world.state], world.state));
    if (world.state === "deleted" || world.state === "deleting") return;
    const [cold, kept, baseline] = await Promise.all([
      api.get(`${path}/segments`, { limit: MARKS, tier: "important" }),
      api.get(`${path}/snapshots`, { limit: MARKS, tier: "important" }),
      api.get(`${path}/baseline`, { tier: "important" }),
    ]);
    size.textContent = `${plural(world.head, "record")}: ${count(world.hot)} cold in ${many(cold.segments, "segment")}, ${count(world.head - world.hot)} hot`;
    timeline.replaceChildren(...drawn(world, cold.segments, kept.snapshots, go));
    segments.show([...cold.segments].reverse());
    snapshots.show([...kept.snapshots].reverse().map((each) => ({ ...each, isBaseline: each.height === baseline.height })));
    if (follow) await read(world.head - RECORDS);
    const hosted = await run.load();
    if (hosted?.is_stopped) state.append(pill("bad", "stopped"));
  }

  return {
    heading: [h("a", { href: "#/worlds", text: "Worlds" }), name, state],
    actions: [verify, run.resume],
    element: h(
      "div",
      {},
      run.element,
      card("Journal", size, timeline, progress, verdict),
      card("Records", form, records.element),
      h("div", { class: "columns" }, card("Snapshots", "", snapshots.element), card("Segments", "", segments.element)),
    ),
    load,
    tick: run.tick,
    dispose: () => {
      gone = true;
    },
  };
}

function many(found, one) {
  return found.length < MARKS ? plural(found.length, one) : `${count(found.length)} or more ${one}s`;
}

// The journal to scale: segments, the hot tail, snapshots and the baseline.
function drawn(world, segments, snapshots, go) {
  const width = 1_000;
  const end = Math.max(1, world.head);
  const x = (height) => (width * height) / end;
  const blocks = segments.map((each) =>
    svg("rect", { class: "cold", x: x(each.start), y: 26, width: Math.max(0.6, x(each.end + 1) - x(each.start) - 1), height: 26 }, svg("title", { text: `Segment ${each.start} – ${each.end}, ${bytes(each.size)}` })),
  );
  const hot = svg("rect", { class: "hot", x: x(world.hot), y: 26, width: Math.max(0.6, x(world.head) - x(world.hot)), height: 26 }, svg("title", { text: `Hot: ${world.hot} – ${world.head - 1}` }));
  const ticks = snapshots.map((each) => svg("rect", { class: "tick", x: x(each.height) - 0.6, y: 16, width: 1.2, height: 40 }, svg("title", { text: `Snapshot at ${each.height}` })));
  const mark = svg("rect", { class: "mark", x: Math.min(width - 3, Math.max(0, x(world.baseline) - 1.5)), y: 8, width: 3, height: 50 }, svg("title", { text: `Baseline at ${world.baseline}` }));
  const picture = svg("svg", { viewBox: `0 0 ${width} 60`, preserveAspectRatio: "none", class: "journal", role: "img", "aria-label": `Journal of ${world.name}: ${plural(segments.length, "segment")} up to ${world.hot}, hot from there to ${world.head}, baseline at ${world.baseline}, ${plural(snapshots.length, "snapshot")}` }, blocks, hot, ticks, mark);
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    go(Math.floor((end * (event.clientX - box.left)) / box.width));
  });
  const scale = h("div", { class: "scale", "aria-hidden": "true" }, [0, 0.25, 0.5, 0.75, 1].map((part) => {
    const label = h("span", { text: count(Math.round(end * part)) });
    label.style.left = `${100 * part}%`;
    label.style.transform = `translateX(-${100 * part}%)`;
    return label;
  }));
  const key = (kind, words) => h("span", { class: "key" }, h("i", { class: `dot ${kind}` }), words);
  return [picture, scale, h("p", { class: "keys" }, key("cold", "segments, in the object store"), key("hot", "hot tail, in the key space"), key("tick", many(snapshots, "snapshot")), key("mark", `baseline at ${count(world.baseline)}`))];
}
