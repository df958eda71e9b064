// Calls to the server, and the events that it sends. The token is shown in a header and kept in this tab only.

const TOKEN = "holdfast-token";
const PAUSE_MS = 500;
const PAUSE_MS_MAX = 8_000;
const SILENCE_MS_MAX = 10_000; // The server says something every second.

export class Problem extends Error {
  constructor(status, problem) {
    super(problem.detail ?? "The server did not say what is wrong");
    this.status = status;
    this.code = problem.code ?? "unreachable";
  }
}

export const token = {
  // Whether a header can carry it. A browser sends no other, and would not say that this is why.
  canShow: (value) => /^[ -~]+$/.test(value),
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

export class Api {
  constructor() {
    this.universe = "main";
    this.refused = () => {};
  }

  headers(more = {}) {
    const shown = token.get();
    return { ...(shown ? { Authorization: `Bearer ${shown}` } : {}), "X-Holdfast-Universe": this.universe, ...more };
  }

  async get(path, query = {}) {
    const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined));
    const asked = words.size ? `${path}?${words}` : path;
    return this.#answer(asked, { headers: this.headers() });
  }

  // A write that may be sent again without being done twice.
  async post(path, body = {}) {
    const headers = this.headers({ "Content-Type": "application/json", "Idempotency-Key": key() });
    return this.#answer(path, { method: "POST", headers, body: JSON.stringify(body) });
  }

  async #answer(path, options) {
    let answer;
    try {
      answer = await fetch(path, { ...options, cache: "no-store", credentials: "omit", redirect: "error" });
    } catch {
      throw new Problem(0, { detail: "The server cannot be reached." });
    }
    const body = await answer.json().catch(() => ({}));
    if (answer.ok) return body;
    const problem = new Problem(answer.status, body);
    if (answer.status === 401) this.refused(problem);
    throw problem;
  }
}

function key() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
}

// Listens to /console/events, and comes back with longer and longer pauses when the connection is lost.
export class Events {
  constructor(api, { heard, state }) {
    this.api = api;
    this.heard = heard; // (name, data)
    this.state = state; // ("live"), ("lost", in how many ms) or ("refused", problem)
    this.stopping = new AbortController();
    this.hurry = () => {};
    addEventListener("online", () => this.hurry(), { signal: this.stopping.signal });
    this.#run();
  }

  stop() {
    this.stopping.abort();
    this.hurry();
  }

  async #run() {
    let pause = PAUSE_MS;
    while (!this.stopping.signal.aborted) {
      let wasLive = false;
      try {
        await this.#listen(() => {
          wasLive = true;
          this.state("live");
        });
      } catch (error) {
        if (this.stopping.signal.aborted) return;
        if (error instanceof Problem && [400, 401, 403].includes(error.status)) {
          this.state("refused", error);
          return;
        }
      }
      if (this.stopping.signal.aborted) return;
      pause = wasLive ? PAUSE_MS : Math.min(pause * 1.7, PAUSE_MS_MAX);
      const rest = pause * (0.75 + Math.random() / 2);
      this.state("lost", rest);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, rest);
        this.hurry = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  async #listen(began) {
    const silence = new AbortController();
    const signal = AbortSignal.any([this.stopping.signal, silence.signal]);
    let timer = setTimeout(() => silence.abort(), SILENCE_MS_MAX);
    try {
      const path = `console/events?${new URLSearchParams({ universe: this.api.universe })}`;
      const answer = await fetch(path, { headers: this.api.headers(), signal, cache: "no-store", credentials: "omit" });
      if (!answer.ok) throw new Problem(answer.status, await answer.json().catch(() => ({})));
      began();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS_MAX);
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) this.#tell(event);
      }
    } finally {
      clearTimeout(timer);
      silence.abort(); // Whatever ended it, the server is not to go on.
    }
  }

  #tell(event) {
    let name = "message";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!data) return;
    const told = JSON.parse(data);
    if (name === "problem") throw new Problem(told.status, told);
    this.heard(name, told);
  }
}
