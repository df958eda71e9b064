// The frame of the console: sign-in, universe, navigation and connection status.

import { Api, Events, Problem, token } from "./api.js";
import { button, errorHelp, errorState, h, icon, setText } from "./dom.js";
import * as audit from "./audit.js";
import * as entities from "./entities.js";
import * as leases from "./leases.js";
import { login } from "./login.js";
import * as mail from "./mail.js";
import * as nodes from "./nodes.js";
import * as overview from "./overview.js";
import * as pipeline from "./pipeline.js";
import * as queues from "./queues.js";
import * as reports from "./reports.js";
import * as runs from "./runs.js";
import { Series } from "./series.js";
import * as space from "./space.js";
import * as tokens from "./tokens.js";
import * as usage from "./usage.js";
import * as worlds from "./worlds.js";

const PAGES = { overview, queues, mail, runs, worlds, leases, entities, space, usage, nodes, tokens, audit, pipeline, reports };
const NAMES = { overview: "Overview", queues: "Queues", mail: "Mail", runs: "Runs", worlds: "Worlds", leases: "Leases", entities: "Entities", space: "Space", usage: "Usage", nodes: "Nodes", tokens: "Tokens", audit: "Audit", pipeline: "Pipeline", reports: "Reports" };
const KEYS = { ...Object.fromEntries(Object.keys(NAMES).map((name) => [name, name[0]])), pipeline: "i", reports: "p" };
const REFRESH_MS = 5_000; // Refreshes values that change with time only.
const SESSION_MS = 30_000; // Refreshes the list of universes, and detects expired tokens.
const REFRESH_PAUSE_MS = 400; // Minimum pause between two refreshes, however much is written.
const TOAST_MS = 6_000;
const HIDDEN_MS = 300_000; // Then a hidden page closes its event stream; browsers allow six connections per server.

class App {
  constructor(root) {
    this.root = root;
    this.api = new Api();
    this.api.onUnauthorized = (problem) => this.signOut(problem);
    this.series = new Series();
    addEventListener("hashchange", () => this.session && this.route());
    addEventListener("keydown", (event) => this.session && this.key(event));
    document.addEventListener("visibilitychange", () => this.session && this.visibilityChanged());
    setInterval(() => this.page?.tick?.(), 1_000);
    setInterval(() => document.hidden || !this.live || this.reloadSession(), SESSION_MS);
    setInterval(() => document.hidden || !this.live || Date.now() < (this.page?.notBefore ?? 0) || this.refresh(), REFRESH_MS);
  }

  async start(problem = null) {
    let session;
    try {
      session = await this.api.get("console/session");
    } catch (error) {
      if (error.status !== 401) return this.showUnreachable(error);
      token.forget();
      return this.askForToken(error);
    }
    if (!session.signed_in) return this.askForToken(problem);
    this.session = session;
    const wanted = new URLSearchParams(location.search).get("universe") ?? this.api.universe;
    this.api.universe = this.session.universes.includes(wanted) ? wanted : this.session.universes[0];
    this.draw();
    this.route();
    this.listen();
    return null;
  }

  // The session cannot be read: the server is unreachable or not ready.
  showUnreachable(error) {
    this.root.replaceChildren(h("main", { class: "alone" }, h("section", { class: "card" }, h("h1", { text: "Fastness" }), h("p", { role: "status", text: `${error.message} Retrying…` }))));
    setTimeout(() => this.start(), 2_000);
  }

  askForToken(problem) {
    document.title = "Sign in · Fastness";
    this.root.replaceChildren(
      login(problem, (value) => {
        if (!token.isValid(value)) return this.askForToken(new Problem(401, { detail: "A token has only letters, digits and underscores; copy it again." }));
        token.set(value);
        return this.start();
      }),
    );
  }

  // The token was revoked or has expired, or the user signs out.
  signOut(problem = null) {
    if (!this.session) return;
    this.session = null;
    this.live = false;
    clearInterval(this.counting);
    this.events?.stop();
    this.leave();
    token.forget();
    this.series = new Series();
    this.askForToken(problem);
  }

  draw() {
    const theme = button(icon("sun"), () => this.theme(), { class: "ghost", "aria-label": "Toggle dark mode", title: "Toggle dark mode" });
    const keys = button(icon("keys"), () => this.help.showModal(), { class: "ghost", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)" });
    const leave = this.session.tokens && button(icon("out"), () => this.signOut(), { class: "ghost", "aria-label": `Sign out ${this.session.name}`, title: `Sign out ${this.session.name}` });
    this.universes = h("select", { id: "universe", onchange: () => this.choose(this.universes.value) });
    this.fill();
    this.status = h("span", { class: "status", role: "status" }, h("i", {}), h("span", { text: "Connecting" }));
    this.heading = h("h1", { tabindex: "-1" });
    this.actions = h("div", { class: "actions" });
    this.banner = h("div", { class: "banner", role: "alert", hidden: true });
    this.storage = h("div", { class: "banner", role: "alert", hidden: true }, h("span", {}), h("a", { href: "#/space", text: "Show space" }));
    this.container = h("div", { class: "page" });
    this.toasts = h("div", { class: "toasts", role: "status" });
    this.links = Object.fromEntries(Object.entries(NAMES).filter(([name]) => isAllowed(PAGES[name], this.session)).map(([name, words]) => [name, h("a", { href: `#/${name}` }, icon(name), h("span", { text: words }))]));
    this.help = help();
    this.root.replaceChildren(
      h("a", { class: "skip", href: "#main", text: "Skip to content", onclick: (event) => {
        event.preventDefault();
        this.heading.focus();
      } }),
      h(
        "header",
        { class: "side" },
        h("a", { class: "brand", href: "#/overview" }, h("img", { src: "console/icon.svg", alt: "", width: "22", height: "22" }), "Fastness"),
        h("nav", { "aria-label": "Pages" }, Object.values(this.links)),
        h("div", { class: "foot" }, this.session.tokens ? h("span", { class: "who", title: "Name of your token", text: this.session.name }) : h("span", { class: "who", text: "no tokens", title: "This server requires no tokens" }), theme, keys, leave),
      ),
      h("main", { id: "main" }, h("div", { class: "top" }, this.heading, this.actions, h("div", { class: "where" }, h("label", { for: "universe", text: "Universe" }), this.universes, this.status)), this.banner, this.storage, this.container),
      this.toasts,
      this.help,
    );
  }

  fill() {
    const shown = Array.from(this.universes.options, (option) => option.value);
    if (shown.join() === this.session.universes.join()) return;
    this.universes.replaceChildren(...this.session.universes.map((name) => h("option", { value: name, text: name })));
    this.universes.value = this.api.universe;
  }

  choose(universe) {
    this.api.universe = universe;
    const address = new URL(location.href);
    address.searchParams.set("universe", universe);
    history.replaceState(null, "", address);
    this.route();
    this.listen();
  }

  visibilityChanged() {
    clearTimeout(this.hiding);
    if (!document.hidden && this.events.stopping.signal.aborted) this.listen();
    else if (document.hidden) this.hiding = setTimeout(() => this.events.stop(), HIDDEN_MS);
  }

  listen() {
    this.events?.stop();
    this.live = false;
    this.events = new Events(this.api, { onEvent: (name, data) => this.onEvent(name, data), onState: (state, detail) => this.onConnectionState(state, detail) });
  }

  onEvent(name, data) {
    if (name === "history") {
      data.samples.forEach((sample) => this.series.add(sample));
      this.showStorage({ failure: null, disk_low: false }); // An event follows if it is otherwise.
    } else if (name === "sample") this.series.add(data);
    else if (name === "storage") this.showStorage(data);
    else if (name === "changed" && this.module.sections.some((section) => data.sections.includes(section))) this.refresh();
    if (name === "history" || name === "sample") this.page?.sample?.();
  }

  onConnectionState(state, detail) {
    if (!this.session) return;
    if (state === "refused") {
      if (detail.status === 401 || this.session.tokens) this.signOut(detail);
      else this.warn(detail.message);
      return;
    }
    const was = this.live;
    this.live = state === "live";
    this.status.className = `status ${state}`;
    setText(this.status.lastElementChild, this.live ? "Live" : "Reconnecting");
    clearInterval(this.counting);
    if (this.live) {
      this.warn(null);
      if (!was) this.reloadSession();
      return;
    }
    const until = Date.now() + detail;
    const count = () => this.warn(`The connection to the server is lost. Reconnecting in ${Math.max(1, Math.ceil((until - Date.now()) / 1000))} s.`, () => this.events.reconnectNow());
    count();
    this.counting = setInterval(count, 1_000);
  }

  // Read the session again: the server may have restarted, and the token and the universes may have changed.
  async reloadSession() {
    const before = this.session;
    try {
      const session = await this.api.get("console/session");
      if (this.session !== before) return; // Signed out, or another reload was faster.
      this.session = session;
    } catch {
      return; // A 401 shows the sign-in page; after a lost connection the event stream retries.
    }
    this.fill();
    this.refresh();
  }

  warn(words, retry = null) {
    this.banner.hidden = !words;
    if (!words) this.banner.replaceChildren();
    else if (!this.banner.firstElementChild) this.banner.append(h("span", {}), retry ? button("Reconnect now", retry, { class: "small" }) : "");
    if (words) setText(this.banner.firstElementChild, words);
  }

  // Shows on every page that the server refuses writes.
  showStorage({ failure, disk_low: isLow }) {
    const words = failure
      ? `The key space has failed (${failure}): writes are refused until the server has reopened it. Its log has the cause.`
      : isLow
        ? "The disk is nearly full: new data is refused. Reads, acks and deletes still work. Free disk space."
        : "";
    this.storage.hidden = !words;
    setText(this.storage.firstElementChild, words);
  }

  route() {
    const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
    const [name = "overview", ...parts] = path.split("/").filter(Boolean).map(unescaped);
    this.name = Object.hasOwn(PAGES, name) ? name : "overview";
    this.module = PAGES[this.name];
    this.leave();
    this.failed = h("div", {});
    this.shown = h("div", {});
    const parameters = new Query(query);
    const page = this.module.open(
      {
        api: this.api,
        series: this.series,
        session: this.session,
        act: (work, words) => this.act(work, words),
        allows: (verb) => allows(this.session.verbs, verb),
        query: parameters,
        refresh: () => this.refresh(),
        pages: (load, name = "after") => new Pages(load, () => this.refresh(), parameters, name),
        filter: filter(parameters),
      },
      ...parts,
    );
    this.page = page;
    const title = page.heading ?? [this.module.title];
    this.heading.replaceChildren(...title.flatMap((part, index) => (index && part !== "" ? [h("span", { class: "between", "aria-hidden": "true", text: typeof part === "string" || part.tagName === "A" ? "/" : "" }), part] : [part])));
    this.actions.replaceChildren(...(page.actions ?? []));
    document.title = `${[...parts].reverse().concat(NAMES[this.name]).join(" · ")} · Fastness`;
    for (const [each, anchor] of Object.entries(this.links)) each === this.name ? anchor.setAttribute("aria-current", "page") : anchor.removeAttribute("aria-current");
    this.shown.replaceChildren(page.element);
    this.container.replaceChildren(this.failed, this.shown);
    this.showLink(this.links[this.name]);
    page.mounted?.();
    this.refresh();
    if (this.routed) this.heading.focus({ preventScroll: true });
    this.routed = true;
    scrollTo(0, 0);
  }

  // On a narrow screen the navigation scrolls. `scrollIntoView` would also move the start of the Tab key.
  showLink(link) {
    const list = link?.parentElement;
    if (!list) return;
    const start = link.offsetLeft - list.offsetLeft;
    if (start < list.scrollLeft) list.scrollLeft = start;
    else if (start + link.offsetWidth > list.scrollLeft + list.clientWidth) list.scrollLeft = start + link.offsetWidth - list.clientWidth;
  }

  leave() {
    this.page?.dispose?.();
    this.page = null;
  }

  // Reload the page's data. Concurrent calls are merged: one load at a time, with a pause in between.
  async refresh() {
    const page = this.page;
    if (!page?.load) return;
    if (page.isLoading) {
      page.isStale = true;
      return;
    }
    page.isLoading = true;
    do {
      page.isStale = false;
      try {
        await page.load();
        page.isLoaded = true;
        if (page.every) page.notBefore = Date.now() + page.every * 1_000;
        this.fail(page, null);
      } catch (error) {
        this.fail(page, error);
      }
      await new Promise((resolve) => setTimeout(resolve, REFRESH_PAUSE_MS));
    } while (page.isStale && page === this.page);
    page.isLoading = false;
  }

  fail(page, error) {
    if (page !== this.page) return;
    const words = error && error.status !== 0 ? error.message : ""; // The banner reports a lost connection.
    if (words !== (page.failure ?? "")) this.failed.replaceChildren(...(words ? [errorState(error, () => this.refresh())] : []));
    page.failure = words;
    this.shown.hidden = words !== "" && !page.isLoaded && !page.sample; // Later, what was loaded stays visible.
  }

  async act(work, words = null) {
    try {
      const done = await work();
      if (words) this.toast(words(done));
    } catch (error) {
      this.toast(error.message, "bad", errorHelp(error));
    }
    this.refresh();
  }

  toast(words, kind = "good", more = "") {
    const close = button("×", () => element.remove(), { class: "ghost", "aria-label": "Close this notice" });
    const element = h("div", { class: `toast ${kind}` }, h("p", {}, words, more && " ", more), kind === "bad" && close);
    this.toasts.replaceChildren(element);
    if (kind !== "bad") setTimeout(() => element.remove(), TOAST_MS);
  }

  // Focus the link or the button of the next or the previous row of the page's tables.
  moveToRow(step) {
    const rows = Array.from(this.container.querySelectorAll("tbody tr:not(.inside)")).filter((row) => row.offsetParent && row.querySelector("a, button, input"));
    const at = rows.findIndex((row) => row.contains(document.activeElement));
    const row = rows[at < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, at + step))];
    row?.querySelector("a, button, input").focus();
  }

  theme() {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("fastness-theme", next);
    dispatchEvent(new Event("fastness-theme"));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input:not([type=checkbox]), select, textarea, dialog")) return;
    if (this.going) {
      this.going = false;
      const name = Object.keys(NAMES).find((each) => KEYS[each] === event.key);
      if (name) location.hash = `#/${name}`;
    } else if (event.key === "g") this.going = true;
    else if (event.key === "t") this.theme();
    else if (event.key === "r") this.page?.reload ? this.act(() => this.page.reload()) : this.refresh();
    else if (event.key === "?") this.help.showModal();
    else if (event.key === "j" || event.key === "k") this.moveToRow(event.key === "j" ? 1 : -1);
    else if (event.key === "x") document.activeElement.closest("tr")?.querySelector("input[type=checkbox]")?.click();
    else if (event.key === "/") {
      const field = this.container.querySelector("input");
      if (!field) return;
      event.preventDefault();
      field.focus();
    }
  }
}

// The parameters of an address, such as `#/queues?filter=mail`.
class Query {
  constructor(words) {
    this.values = new URLSearchParams(words);
  }

  get(name) {
    return this.values.get(name);
  }

  // Change parameters, and the address with them; null or "" removes one. The page is not opened again.
  set(parameters) {
    for (const [name, value] of Object.entries(parameters)) value === null || value === "" ? this.values.delete(name) : this.values.set(name, value);
    const [path] = location.hash.split("?");
    history.replaceState(null, "", `${location.pathname}${location.search}${path}${this.values.size ? `?${this.values}` : ""}`);
  }
}

// A list that is read page by page. The address has the start of the page as its parameter `name`.
class Pages {
  constructor(load, refresh, query, name) {
    this.loadPage = load;
    this.after = query.get(name);
    this.go = (after) => {
      this.after = after;
      query.set({ [name]: after });
      refresh();
    };
    this.first = button("First page", () => this.restart(), { class: "small" });
    this.following = button("Next page", () => this.go(this.next), { class: "small" });
    this.element = h("p", { class: "pages", hidden: true }, this.first, this.following);
  }

  // Whether the list has other pages.
  get isPartial() {
    return Boolean(this.next || this.after);
  }

  restart() {
    this.go(null);
  }

  async load() {
    const found = await this.loadPage(this.after);
    this.next = found.next;
    this.element.hidden = !this.next && !this.after;
    this.first.disabled = !this.after;
    this.following.disabled = !this.next;
    return found;
  }
}

// Whether the token of a session allows what a page needs: its `verbs`, every universe if it is `everywhere`, and
// every universe and queue if it shows `metrics`.
function isAllowed({ verbs, everywhere = false, metrics = false }, session) {
  return verbs.every((verb) => allows(session.verbs, verb)) && !(everywhere && session.limited) && !(metrics && !session.metrics);
}

// Whether verbs of a token, or patterns of verbs, cover a verb.
function allows(verbs, verb) {
  return ["*", verb, `${verb.split(":")[0]}:*`].some((each) => verbs.includes(each));
}

function unescaped(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// A field that filters a list. Its value is in the address.
function filter(query) {
  const element = h("input", { type: "search", class: "filter", placeholder: "Filter  /", "aria-label": "Filter by name", value: query.get("filter") ?? "" });
  const control = {
    element,
    onchange: () => {},
    get value() {
      return element.value.trim().toLowerCase();
    },
  };
  element.addEventListener("input", () => {
    query.set({ filter: element.value.trim() });
    control.onchange();
  });
  return control;
}

function help() {
  const keys = [...Object.entries(NAMES).map(([name, words]) => [`g ${KEYS[name]}`, words]), ["/", "Filter"], ["j", "Next row"], ["k", "Previous row"], ["Enter", "Open the row"], ["x", "Select the row"], ["r", "Refresh"], ["t", "Toggle dark mode"], ["?", "This list"], ["Esc", "Close"]];
  const dialog = h("dialog", { "aria-labelledby": "keys-title" }, h("h2", { id: "keys-title", text: "Keyboard" }), h("dl", { class: "facts" }, keys.map(([key, words]) => h("div", {}, h("dt", {}, key.split(" ").map((each) => h("kbd", { text: each }))), h("dd", { text: words })))), button("Close", () => dialog.close(), { class: "plain" }));
  return dialog;
}

new App(document.getElementById("app")).start();
