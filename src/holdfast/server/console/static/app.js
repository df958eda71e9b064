// The frame of the console: who is looking, at which universe and page, and whether the server is there.

import { Api, Events, Problem, token } from "./api.js";
import { button, h, icon, say } from "./dom.js";
import * as entities from "./entities.js";
import * as leases from "./leases.js";
import { login } from "./login.js";
import * as mail from "./mail.js";
import * as overview from "./overview.js";
import * as queues from "./queues.js";
import * as reports from "./reports.js";
import { Series } from "./series.js";
import * as worlds from "./worlds.js";

const PAGES = { overview, queues, mail, worlds, leases, entities, reports };
const NAMES = { overview: "Overview", queues: "Queues", mail: "Mail", worlds: "Worlds", leases: "Leases", entities: "Entities", reports: "Reports" };
const EVERY_MS = 5_000; // What only time changes is looked at again so often.
const SESSION_MS = 30_000; // Universes come, and tokens end.
const REST_MS = 400; // Between two looks, however much is written.
const TOAST_MS = 6_000;
const HIDDEN_MS = 300_000; // Then a page that nobody sees gives its connection back; a browser has six for a server.

class App {
  constructor(root) {
    this.root = root;
    this.api = new Api();
    this.api.refused = (problem) => this.out(problem);
    this.series = new Series();
    addEventListener("hashchange", () => this.session && this.route());
    addEventListener("keydown", (event) => this.session && this.key(event));
    document.addEventListener("visibilitychange", () => this.session && this.seen());
    setInterval(() => this.page?.tick?.(), 1_000);
    setInterval(() => document.hidden || !this.live || this.again(), SESSION_MS);
    setInterval(() => document.hidden || !this.live || Date.now() < (this.page?.notBefore ?? 0) || this.refresh(), EVERY_MS);
  }

  async start(problem = null) {
    let session;
    try {
      session = await this.api.get("console/session");
    } catch (error) {
      if (error.status !== 401) return this.lost(error);
      token.forget();
      return this.ask(error);
    }
    if (!session.signed_in) return this.ask(problem);
    this.session = session;
    const wanted = new URLSearchParams(location.search).get("universe") ?? this.api.universe;
    this.api.universe = this.session.universes.includes(wanted) ? wanted : this.session.universes[0];
    this.draw();
    this.route();
    this.listen();
    return null;
  }

  // Nobody could be asked who we are: the server is not there, or not ready.
  lost(error) {
    this.root.replaceChildren(h("main", { class: "alone" }, h("section", { class: "card" }, h("h1", { text: "Holdfast" }), h("p", { role: "status", text: `${error.message} Trying again…` }))));
    setTimeout(() => this.start(), 2_000);
  }

  ask(problem) {
    document.title = "Sign in · Holdfast";
    this.root.replaceChildren(
      login(problem, (shown) => {
        if (!token.canShow(shown)) return this.ask(new Problem(401, { detail: "A token has letters, digits and underscores; copy all of it, and nothing else." }));
        token.set(shown);
        return this.start();
      }),
    );
  }

  // The token is not good any more, or its holder leaves.
  out(problem = null) {
    if (!this.session) return;
    this.session = null;
    this.live = false;
    clearInterval(this.counting);
    this.events?.stop();
    this.leave();
    token.forget();
    this.series = new Series();
    this.ask(problem);
  }

  draw() {
    const theme = button(icon("sun"), () => this.theme(), { class: "ghost", "aria-label": "Dark or light", title: "Dark or light" });
    const keys = button(icon("keys"), () => this.help.showModal(), { class: "ghost", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)" });
    const leave = this.session.tokens && button(icon("out"), () => this.out(), { class: "ghost", "aria-label": `Sign out ${this.session.name}`, title: `Sign out ${this.session.name}` });
    this.universes = h("select", { id: "universe", onchange: () => this.choose(this.universes.value) });
    this.fill();
    this.status = h("span", { class: "status", role: "status" }, h("i", {}), h("span", { text: "Connecting" }));
    this.heading = h("h1", { tabindex: "-1" });
    this.actions = h("div", { class: "actions" });
    this.banner = h("div", { class: "banner", role: "alert", hidden: true });
    this.place = h("div", { class: "page" });
    this.toasts = h("div", { class: "toasts", role: "status" });
    this.links = Object.fromEntries(Object.entries(NAMES).map(([name, words]) => [name, h("a", { href: `#/${name}` }, icon(name), h("span", { text: words }))]));
    this.help = help();
    this.root.replaceChildren(
      h("a", { class: "skip", href: "#main", text: "Skip to the page", onclick: (event) => {
        event.preventDefault();
        this.heading.focus();
      } }),
      h(
        "header",
        { class: "side" },
        h("a", { class: "brand", href: "#/overview" }, h("img", { src: "console/icon.svg", alt: "", width: "22", height: "22" }), "Holdfast"),
        h("nav", { "aria-label": "Pages" }, Object.values(this.links)),
        h("div", { class: "foot" }, this.session.tokens ? h("span", { class: "who", title: "Your token", text: this.session.name }) : h("span", { class: "who", text: "no tokens" }), theme, keys, leave),
      ),
      h("main", { id: "main" }, h("div", { class: "top" }, this.heading, this.actions, h("div", { class: "where" }, h("label", { for: "universe", text: "Universe" }), this.universes, this.status)), this.banner, this.place),
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

  seen() {
    clearTimeout(this.hiding);
    if (!document.hidden && this.events.stopping.signal.aborted) this.listen();
    else if (document.hidden) this.hiding = setTimeout(() => this.events.stop(), HIDDEN_MS);
  }

  listen() {
    this.events?.stop();
    this.live = false;
    this.events = new Events(this.api, { heard: (name, data) => this.heard(name, data), state: (state, about) => this.connection(state, about) });
  }

  heard(name, data) {
    if (name === "history") data.samples.forEach((sample) => this.series.add(sample));
    else if (name === "sample") this.series.add(data);
    else if (name === "changed" && this.module.rooms.some((room) => data.rooms.includes(room))) this.refresh();
    if (name === "history" || name === "sample") this.page?.sample?.();
  }

  connection(state, about) {
    if (!this.session) return;
    if (state === "refused") {
      if (about.status === 401 || this.session.tokens) this.out(about);
      else this.warn(about.message);
      return;
    }
    const was = this.live;
    this.live = state === "live";
    this.status.className = `status ${state}`;
    say(this.status.lastElementChild, this.live ? "Live" : "Reconnecting");
    clearInterval(this.counting);
    if (this.live) {
      this.warn(null);
      if (!was) this.again();
      return;
    }
    const until = Date.now() + about;
    const count = () => this.warn(`The connection to the server is lost. Trying again in ${Math.max(1, Math.ceil((until - Date.now()) / 1000))} s.`, () => this.events.hurry());
    count();
    this.counting = setInterval(count, 1_000);
  }

  // Connected, perhaps to a server that has started since: who we are may have changed, and everything else.
  async again() {
    const before = this.session;
    try {
      const session = await this.api.get("console/session");
      if (this.session !== before) return; // Whoever was looking has signed out, or was asked twice.
      this.session = session;
    } catch {
      return; // Whoever is refused was sent to sign in; whoever lost the connection again tries again.
    }
    this.fill();
    this.refresh();
  }

  warn(words, retry = null) {
    this.banner.hidden = !words;
    if (!words) this.banner.replaceChildren();
    else if (!this.banner.firstElementChild) this.banner.append(h("span", {}), retry ? button("Try now", retry, { class: "small" }) : "");
    if (words) say(this.banner.firstElementChild, words);
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
    this.place.replaceChildren(this.failed, page.element);
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

  // Look again at what the page shows; however often this is asked for, one look at a time, with a rest in between.
  async refresh() {
    const page = this.page;
    if (!page?.load) return;
    if (page.looking) {
      page.again = true;
      return;
    }
    page.looking = true;
    do {
      page.again = false;
      try {
        await page.load();
        if (page.every) page.notBefore = Date.now() + page.every * 1_000;
        this.fail(page, null);
      } catch (error) {
        this.fail(page, error);
      }
      await new Promise((resolve) => setTimeout(resolve, REST_MS));
    } while (page.again && page === this.page);
    page.looking = false;
  }

  fail(page, error) {
    if (page !== this.page) return;
    const words = error && error.status !== 0 ? error.message : ""; // That it is not there the banner says.
    this.failed.hidden = !words;
    say(this.failed, words);
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
      const name = Object.keys(NAMES).find((each) => each[0] === event.key);
      if (name) location.hash = `#/${name}`;
    } else if (event.key === "g") this.going = true;
    else if (event.key === "t") this.theme();
    else if (event.key === "r") this.refresh();
    else if (event.key === "?") this.help.showModal();
    else if (event.key === "/") {
      const field = this.place.querySelector("input");
      if (!field) return;
      event.preventDefault();
      field.focus();
    }
  }
}

// A list of which the server tells a page at a time.
class Pages {
  constructor(load, refresh) {
    this.ask = load;
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
    const found = await this.ask(this.after);
    this.next = found.next;
    this.element.hidden = !this.next && !this.after;
    this.first.disabled = !this.after;
    this.following.disabled = !this.next;
    return found;
  }
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
  const made = {
    element,
    onchange: () => {},
    get value() {
      return element.value.trim().toLowerCase();
    },
  };
  element.addEventListener("input", () => made.onchange());
  return made;
}

function help() {
  const keys = [...Object.entries(NAMES).map(([name, words]) => [`g ${name[0]}`, words]), ["/", "Filter"], ["r", "Look again"], ["t", "Dark or light"], ["?", "This list"], ["Esc", "Close"]];
  const dialog = h("dialog", { "aria-labelledby": "keys-title" }, h("h2", { id: "keys-title", text: "Keyboard" }), h("dl", { class: "facts" }, keys.map(([key, words]) => h("div", {}, h("dt", {}, key.split(" ").map((each) => h("kbd", { text: each }))), h("dd", { text: words })))), button("Close", () => dialog.close(), { class: "plain" }));
  return dialog;
}

new App(document.getElementById("app")).start();
