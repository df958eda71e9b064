// Calls to the server, and its event stream. The token is sent in a header and kept in this tab only.

const TOKEN = "fastness-token";
const PAUSE_MS = 500;
const PAUSE_MS_MAX = 8_000;
const UNANSWERED = "The connection was lost before the server answered. The action may or may not have happened: check it when the server is back, before you repeat it.";
const SILENCE_MS_MAX = 10_000; // The server sends an event every second.

export class Problem extends Error {
  constructor(status, problem) {
    super(problem.detail ?? "The server sent no error details.");
    this.status = status;
    this.code = problem.code ?? "unreachable";
  }
}

export const token = {
  // Whether a header can contain it. A browser refuses to send any other value, without a useful error.
  isValid: (value) => /^[ -~]+$/.test(value),
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

export class Api {
  constructor() {
    this.universe = "main";
    this.onUnauthorized = () => {};
  }

  headers(more = {}) {
    const value = token.get();
    return { ...(value ? { Authorization: `Bearer ${value}` } : {}), "X-Fastness-Universe": this.universe, ...more };
  }

  async get(path, query = {}) {
    const parameters = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined));
    const url = parameters.size ? `${path}?${parameters}` : path;
    return this.#fetch(url, { headers: this.headers() });
  }

  // A write with an idempotency key.
  async post(path, body = {}) {
    const headers = this.headers({ "Content-Type": "application/json", "Idempotency-Key": key() });
    return this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  }

  async put(path, body = {}) {
    const headers = this.headers({ "Content-Type": "application/json", "Idempotency-Key": key() });
    return this.#fetch(path, { method: "PUT", headers, body: JSON.stringify(body) });
  }

  async patch(path, body = {}) {
    const headers = this.headers({ "Content-Type": "application/json", "Idempotency-Key": key() });
    return this.#fetch(path, { method: "PATCH", headers, body: JSON.stringify(body) });
  }

  async delete(path) {
    return this.#fetch(path, { method: "DELETE", headers: this.headers({ "Idempotency-Key": key() }) });
  }

  async #fetch(path, options) {
    let response;
    try {
      response = await fetch(path, { ...options, cache: "no-store", credentials: "omit", redirect: "error" });
    } catch {
      throw new Problem(0, { detail: options.method ? UNANSWERED : "The server cannot be reached." });
    }
    const body = await response.json().catch(() => ({}));
    if (response.ok) return body;
    const problem = new Problem(response.status, body);
    if (response.status === 401) this.onUnauthorized(problem);
    throw problem;
  }
}

// For calls that a token may not allow: the page shows the rest.
export function orNullIfRefused(problem) {
  if (problem.status === 403) return null;
  throw problem;
}

function key() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
}

// Reads /console/events, and reconnects with growing pauses when the connection is lost.
export class Events {
  constructor(api, { onEvent, onState }) {
    this.api = api;
    this.onEvent = onEvent; // (name, data)
    this.onState = onState; // ("live"), ("lost", milliseconds until the next attempt) or ("refused", problem)
    this.stopping = new AbortController();
    this.reconnectNow = () => {};
    addEventListener("online", () => this.reconnectNow(), { signal: this.stopping.signal });
    this.#run();
  }

  stop() {
    this.stopping.abort();
    this.reconnectNow();
  }

  async #run() {
    let pause = PAUSE_MS;
    while (!this.stopping.signal.aborted) {
      let wasLive = false;
      try {
        await this.#listen(() => {
          wasLive = true;
          this.onState("live");
        });
      } catch (error) {
        if (this.stopping.signal.aborted) return;
        if (error instanceof Problem && [400, 401, 403].includes(error.status)) {
          this.onState("refused", error);
          return;
        }
      }
      if (this.stopping.signal.aborted) return;
      pause = wasLive ? PAUSE_MS : Math.min(pause * 1.7, PAUSE_MS_MAX);
      const delay = pause * (0.75 + Math.random() / 2);
      this.onState("lost", delay);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, delay);
        this.reconnectNow = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  async #listen(onOpen) {
    const silence = new AbortController();
    const signal = AbortSignal.any([this.stopping.signal, silence.signal]);
    let timer = setTimeout(() => silence.abort(), SILENCE_MS_MAX);
    try {
      const path = `console/events?${new URLSearchParams({ universe: this.api.universe })}`;
      const response = await fetch(path, { headers: this.api.headers(), signal, cache: "no-store", credentials: "omit" });
      if (!response.ok) throw new Problem(response.status, await response.json().catch(() => ({})));
      onOpen();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS_MAX);
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) this.#dispatch(event);
      }
    } finally {
      clearTimeout(timer);
      silence.abort(); // Ends the stream on the server, too.
    }
  }

  #dispatch(event) {
    let name = "message";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!data) return;
    const value = JSON.parse(data);
    if (name === "problem") throw new Problem(value.status, value);
    this.onEvent(name, value);
  }
}
