// The frame of the console: sign-in, universe, navigation and connection status.

import { Api, Events, Problem, token } from "./api.js";
import { button, h, icon, setText } from "./dom.js";
import * as entities from "./entities.js";
import * as leases from "./leases.js";
import { login } from "./login.js";
import * as mail from "./mail.js";
import * as overview from "./overview.js";
import * as queues from "./queues.js";
import * as reports from "./reports.js";
import * as runs from "./runs.js";
import { Series } from "./series.js";
import * as space from "./space.js";
import * as worlds from "./worlds.js";

const PAGES = { overview, queues, mail, runs, worlds, leases, entities, space, reports };
const NAMES = { overview: "Overview", queues: "Queues", mail: "Mail", runs: "Runs", worlds: "Worlds", leases: "Leases", entities: "Entities", space: "Space", reports: "Reports" };
const KEYS = { ...Object.fromEntries(Object.keys(NAMES).map((name) => [name, name[0]])), reports: "p" };
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
    this.root.replaceChildren(h("main", { class: "alone" }, h("section", { class: "card" }, h("h1", { text: "Holdfast" }), h("p", { role: "status", text: `${error.message} Retrying…` }))));
    setTimeout(() => this.start(), 2_000);
  }

  askForToken(problem) {
    document.title = "Sign in · Holdfast";
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
    this.links = Object.fromEntries(Object.entries(NAMES).map(([name, words]) => [name, h("a", { href: `#/${name}` }, icon(name), h("span", { text: words }))]));
    this.help = help();
    this.root.replaceChildren(
      h("a", { class: "skip", href: "#main", text: "Skip to content", onclick: (event) => {
        event.preventDefault();
        this.heading.focus();
      } }),
      h(
        "header",
        { class: "side" },
        h("a", { class: "brand", href: "#/overview" }, h("img", { src: "console/icon.svg", alt: "", width: "22", height: "22" }), "Holdfast"),
        h("nav", { "aria-label": "Pages" }, Object.values(this.links)),
        h("div", { class: "foot" }, this.session.tokens ? h("span", { class: "who", title: "Name of your token", text: this.session.name }) : h("span", { class: "who", text: "no authentication" }), theme, keys, leave),
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
    else if (name === "changed" && this.module.sections.some((section) => data.rooms.includes(section))) this.refresh();
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
    const [name = "overview", ...parts] = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(unescaped);
    this.name = Object.hasOwn(PAGES, name) ? name : "overview";
    this.module = PAGES[this.name];
    this.leave();
    this.failed = h("p", { class: "problem", role: "alert", hidden: true });
    const page = this.module.open(
      {
        api: this.api,
        series: this.series,
        session: this.session,
        act: (work, words) => this.act(work, words),
        allows: (verb) => allows(this.session.verbs, verb),
        pages: (load) => new Pages(load, () => this.refresh()),
        filter: filter(),
      },
      ...parts,
    );
    this.page = page;
    const title = page.heading ?? [this.module.title];
    this.heading.replaceChildren(...title.flatMap((part, index) => (index && part !== "" ? [h("span", { class: "between", "aria-hidden": "true", text: typeof part === "string" || part.tagName === "A" ? "/" : "" }), part] : [part])));
    this.actions.replaceChildren(...(page.actions ?? []));
    document.title = `${[...parts].reverse().concat(NAMES[this.name]).join(" · ")} · Holdfast`;
    for (const [each, anchor] of Object.entries(this.links)) each === this.name ? anchor.setAttribute("aria-current", "page") : anchor.removeAttribute("aria-current");
    this.container.replaceChildren(this.failed, page.element);
    page.mounted?.();
    this.refresh();
    if (this.routed) this.heading.focus({ preventScroll: true });
    this.routed = true;
    scrollTo(0, 0);
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
      page.reload = true;
      return;
    }
    page.isLoading = true;
    do {
      page.reload = false;
      try {
        await page.load();
        if (page.every) page.notBefore = Date.now() + page.every * 1_000;
        this.fail(page, null);
      } catch (error) {
        this.fail(page, error);
      }
      await new Promise((resolve) => setTimeout(resolve, REFRESH_PAUSE_MS));
    } while (page.reload && page === this.page);
    page.isLoading = false;
  }

  fail(page, error) {
    if (page !== this.page) return;
    const words = error && error.status !== 0 ? error.message : ""; // The banner reports a lost connection.
    this.failed.hidden = !words;
    setText(this.failed, words);
  }

  async act(work, words = null) {
    try {
      const done = await work();
      if (words) this.toast(words(done));
    } catch (error) {
      this.toast(error.message, "bad");
    }
    this.refresh();
  }

  toast(words, kind = "good") {
    const element = h("p", { class: `toast ${kind}`, text: words });
    this.toasts.replaceChildren(element);
    setTimeout(() => element.remove(), TOAST_MS);
  }

  theme() {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("holdfast-theme", next);
    dispatchEvent(new Event("holdfast-theme"));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    if (this.going) {
      this.going = false;
      const name = Object.keys(NAMES).find((each) => KEYS[each] === event.key);
      if (name) location.hash = `#/${name}`;
    } else if (event.key === "g") this.going = true;
    else if (event.key === "t") this.theme();
    else if (event.key === "r") this.page?.reload ? this.act(() => this.page.reload()) : this.refresh();
    else if (event.key === "?") this.help.showModal();
    else if (event.key === "/") {
      const field = this.container.querySelector("input");
      if (!field) return;
      event.preventDefault();
      field.focus();
    }
  }
}

// A list that is read page by page.
class Pages {
  constructor(load, refresh) {
    this.loadPage = load;
    this.after = null;
    const go = (after) => {
      this.after = after;
      refresh();
    };
    this.first = button("First page", () => go(null), { class: "small" });
    this.following = button("Next page", () => go(this.next), { class: "small" });
    this.element = h("p", { class: "pages", hidden: true }, this.first, this.following);
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

function filter() {
  const element = h("input", { type: "search", class: "filter", placeholder: "Filter  /", "aria-label": "Filter by name" });
  const control = {
    element,
    onchange: () => {},
    get value() {
      return element.value.trim().toLowerCase();
    },
  };
  element.addEventListener("input", () => control.onchange());
  return control;
}

function help() {
  const keys = [...Object.entries(NAMES).map(([name, words]) => [`g ${KEYS[name]}`, words]), ["/", "Filter"], ["r", "Refresh"], ["t", "Toggle dark mode"], ["?", "This list"], ["Esc", "Close"]];
  const dialog = h("dialog", { "aria-labelledby": "keys-title" }, h("h2", { id: "keys-title", text: "Keyboard" }), h("dl", { class: "facts" }, keys.map(([key, words]) => h("div", {}, h("dt", {}, key.split(" ").map((each) => h("kbd", { text: each }))), h("dd", { text: words })))), button("Close", () => dialog.close(), { class: "plain" }));
  return dialog;
}

new App(document.getElementById("app")).start();
