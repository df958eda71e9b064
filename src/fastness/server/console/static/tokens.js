// Tokens: who may do what in which universes and queues. They are created and revoked here.

import { Table, ago, ask, button, card, clock, command, copyable, countHeading, emptyState, field, h, pill, plural, rate, rowActions, seconds, text } from "./dom.js";

const SECRET_BYTES = 24; // 192 bits: too many to guess.
const ENDS = { 3600: "1 hour", 86400: "1 day", 2592000: "30 days", 31536000: "1 year", "": "never" };
const SHOWN = 4; // Of the verbs and the queues of a token.

export const title = "Tokens";
export const sections = [];
export const verbs = ["token:list"];
export const everywhere = true;

export function open({ api, act, allows, pages, filter, session }) {
  const names = new Map(); // By id, for the column of makers.
  const table = new Table(
    "Tokens",
    [
      text("Name", (row) => row.name, { head: true }),
      { name: "State", cell: (cell) => (row) => cell.replaceChildren(stateOf(row)) },
      { name: "Universes", class: "chips", cell: (cell) => (row) => cell.replaceChildren(...row.universes.map((name) => pill("quiet", name === "*" ? "all" : name))) },
      { name: "Queues", class: "chips", cell: (cell, row) => cell.append(...queuePills(row.queues)) },
      { name: "Verbs", class: "chips", cell: (cell, row) => cell.append(...verbPills(row.verbs)) },
      text("Created", (row) => `${ago(row.created_ms)} ${row.maker ? `by ${names.get(row.maker) ?? row.maker.slice(0, 8)}` : "without a token"}`, { class: "wrap" }),
      text("Expires", (row) => expiryOf(row), { class: "wrap" }),
      text("Limits", (row) => limitsOf(row)),
      { name: "Id", class: "mono dim wrap", cell: (cell, row) => cell.append(row.id, ...sqsKeyOf(row)) },
      ...(allows("token:revoke") ? [rowActions("Revoke", revoke)] : []),
    ],
    { key: (row) => row.id, empty: emptyState("There are no tokens. While the server requires none, every user of this machine may do everything. Create an administrator, then start the server with --tokens:", command(api, "token create admin --universe '*' --allow '*'")) },
  );

  function revoke(cell, row) {
    const isOwn = session.tokens && session.name === row.name;
    const question = {
      title: `Revoke the token ${row.name}?`,
      words: `Calls with it are refused from now on, and so are those with tokens that it created. This cannot be undone.${isOwn ? " This may be the token that you are signed in with." : ""}`,
      yes: "Revoke the token",
      no: "Keep it",
    };
    const end = async () => (await ask(question)) && act(() => api.delete(`v1/tokens/${encodeURIComponent(row.id)}`), (done) => (done.revoked ? `The token ${row.name} is revoked` : `The token ${row.name} was not usable any more`));
    const revoking = button("Revoke…", end, { class: "small danger", "aria-label": `Revoke ${row.name}` });
    cell.append(revoking);
    return (now) => {
      revoking.hidden = !isUsable(now);
    };
  }

  const canHash = Boolean(globalThis.crypto?.subtle);
  const create = button("Create…", () => createToken({ api, act }), { class: "plain", hidden: !allows("token:create"), disabled: !canHash });
  const unsafe = h("p", { class: "empty", hidden: canHash || !allows("token:create"), text: "Tokens are created here over https or on localhost only, because the browser makes the secret. Use `fastness token create` instead." });
  const page = pages((after) => api.get("v1/tokens", { after, limit: 100 }));
  const heading = countHeading("token", "tokens");
  let known = [];
  const show = () => {
    const found = known.filter((row) => [row.name, row.id, row.access_key_id, ...row.universes, ...row.queues, ...row.verbs].some((words) => words.toLowerCase().includes(filter.value)));
    table.show(found, known.length > 0, page);
  };
  filter.onchange = show;
  return {
    actions: [create],
    element: h("div", {}, unsafe, card(heading.element, filter.element, table.element, page.element)),
    load: async () => {
      known = (await page.load()).tokens;
      for (const row of known) names.set(row.id, row.name);
      heading.show(known.length, page.next !== null);
      show();
    },
    tick: show,
  };
}

function isUsable(row) {
  return row.revoked_ms === null && (row.expires_ms === null || row.expires_ms > Date.now());
}

function stateOf(row) {
  if (row.revoked_ms !== null) return pill("bad", "revoked");
  return isUsable(row) ? pill("good", "usable") : pill("quiet", "expired");
}

function expiryOf(row) {
  if (row.revoked_ms !== null) return `revoked ${ago(row.revoked_ms)}`;
  if (row.expires_ms === null) return "never";
  const left = (row.expires_ms - Date.now()) / 1000;
  return left > 0 ? `in ${seconds(left)}` : clock(row.expires_ms);
}

function limitsOf(row) {
  const limits = [row.rate_per_second && `${rate(row.rate_per_second)} calls/s`, row.body_bytes_max && `${row.body_bytes_max} B a call`].filter(Boolean);
  return limits.join(", ") || "–";
}

function verbPills(verbs) {
  return [...verbs.slice(0, SHOWN).map((verb) => pill("accent", verb === "*" ? "all" : verb)), others(verbs)];
}

// The queues that a token is limited to: their names, and beginnings of names with a star.
function queuePills(queues) {
  return queues.length ? [...queues.slice(0, SHOWN).map((name) => pill("delayed", name)), others(queues)] : [pill("quiet", "all")];
}

function others(names) {
  const rest = names.slice(SHOWN);
  return rest.length ? h("span", { class: "dim", title: rest.join(", "), text: `and ${plural(rest.length, "other")}` }) : "";
}

function sqsKeyOf(row) {
  return row.access_key_id ? [h("div", { title: "Signs requests of the SQS endpoint", text: `SQS key ${row.access_key_id}` })] : [];
}

// Asks for the permissions, creates the token, and shows it once: the server stores the hash of its secret only.
async function createToken({ api, act }) {
  const name = h("input", { required: true, pattern: "[A-Za-z0-9._@:+=\\-]{1,255}", title: "Letters, digits and . _ @ : + = -", autocomplete: "off", spellcheck: "false" });
  const universes = h("input", { required: true, value: api.universe, autocomplete: "off", spellcheck: "false" });
  const allowed = h("input", { required: true, placeholder: "queue:put, queue:receive, queue:ack", autocomplete: "off", spellcheck: "false" });
  const queues = h("input", { placeholder: "all queues", autocomplete: "off", spellcheck: "false" });
  const end = h("select", {}, Object.entries(ENDS).map(([value, words]) => h("option", { value, text: words })));
  end.value = "2592000";
  const content = [
    field("Name", name, "Who uses it, as the audit log shows it."),
    field("Universes", universes, "Separated by commas; * is all of them."),
    field("Verbs", allowed, "Separated by commas: queue:put, queue:* or *. You cannot allow more than your own token does."),
    field("Queues", queues, "Separated by commas: names, or beginnings of names with a star, such as orders*. Empty: all that your own token is for."),
    field("Expires after", end),
  ];
  if (!(await ask({ title: "Create a token", yes: "Create the token", content, danger: false }))) return;
  const listed = (input) => input.value.split(",").map((each) => each.trim()).filter(Boolean);
  const secret = hex(crypto.getRandomValues(new Uint8Array(SECRET_BYTES)));
  const hash = hex(new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(secret))));
  await act(async () => {
    const request = { name: name.value.trim(), universes: listed(universes), verbs: listed(allowed), queues: listed(queues), secret_sha256: hash };
    const made = await api.post("v1/tokens", end.value ? { ...request, ttl_seconds: Number(end.value) } : request);
    showOnce(made, `fnt_${made.id}_${secret}`);
  });
}

function showOnce(made, words) {
  const close = button("I have stored it", () => dialog.close(), { class: "plain" });
  const dialog = h("dialog", { "aria-label": `The token ${made.name}` }, h("h2", { text: `The token ${made.name}` }), h("p", { text: "Store it now: it is shown only once. The server keeps the hash of its secret." }), copyable(words, "Copy the token"), h("div", { class: "inline" }, close));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function hex(bytes) {
  return Array.from(bytes, (each) => each.toString(16).padStart(2, "0")).join("");
}
