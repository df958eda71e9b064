// What happened in a run, from the records of its journal.

import { fromCbor } from "./cbor.js";

const SENT = new Set(["put", "send", "mail", "signal", "state"]);

// Collects events: {at, kind, name, duration, pending, until, attempts, details}. What lasts is pending until it ends.
export class Timeline {
  constructor() {
    this.ended = []; // All events but those of steps that run.
    this.running = new Map(); // Those, by the numbers of the steps.
    this.next = 0; // The height of the next record.
    this.now = 0; // The time of the turn.
    this.generation = 0;
    this.count = 0; // Of events.
    this.waiting = new Map(); // Pending events by what ends them.
    this.signals = new Map(); // When signals arrived that ended no wait so far, by their names.
    this.failures = new Map(); // Failed attempts by the number of their step.
  }

  add(records) {
    for (const record of records) {
      if (record.kind === "ingress") this.#item(record.value);
      else if (record.kind === "entry") this.#entry(record.value);
      this.next = record.height + 1;
    }
  }

  get events() {
    return [...this.ended, ...this.running.values()];
  }

  get waits() {
    return this.ended.filter((event) => event.pending && event.kind === "wait");
  }

  #item(item) {
    const key = item.key ? textOf(item.key) : "";
    const value = item.payload ? fromCbor(item.payload) : undefined;
    if (item.schema === "run.start") this.#event("started", "", { details: value });
    else if (item.schema === "run.signal") {
      this.#event("signal", key, { details: value });
      if (!this.#finish(`signal ${key}`)) this.signals.set(key, [...(this.signals.get(key) ?? []), this.now]);
    } else if (item.schema === "run.child") {
      this.#event("child ended", key, { details: value });
      this.#finish(`child ${key}`);
    } else if (item.type === "timer_fired") this.#finish(`timer ${item.timer_id}`);
    else if (item.command === "run.cancel") {
      this.#event("cancel", "", { details: item.payload ? textOf(item.payload) : undefined });
      this.#stopRunning(this.now);
      for (const end of this.waiting.keys()) {
        while (!end.startsWith("child ") && this.#finish(end)); // The code does not wait for it any more.
      }
    } else this.#event(item.type, item.schema ?? item.effect_kind ?? item.inbox_name ?? item.command ?? "");
  }

  #entry(entry) {
    if (!Array.isArray(entry)) {
      if (entry?.turn !== undefined) this.now = entry.turn;
      else this.#event(entry?.aside === undefined ? "entry" : "set aside", "", { details: entry });
      return;
    }
    const [word, at, number, name, ...more] = entry;
    if (word === "begin") return;
    if (word === "started") this.running.set(number, this.#made("step", name, { at, pending: true }));
    else if (word === "step") {
      const [started, result, blob] = more;
      this.#finishStep(number, at);
      this.#event("step", name, { at: started, duration: at - started, attempts: this.#attempts(number) + 1, details: blob ? { result_blob: blob } : result });
    } else if (word === "retry") {
      const [started, error, due, ...inputs] = more;
      this.failures.set(number, this.#attempts(number) + 1);
      this.#event("retry", name, { at: started, duration: at - started, attempts: this.#attempts(number), until: due, error: errorText(error, inputs) });
    } else if (word === "failed") {
      const [started, error, attempts, ...inputs] = more;
      this.#finishStep(number, at);
      this.#event("failed", name, { at: started ?? at, duration: at - (started ?? at), attempts, error: errorText(error, inputs) });
    } else if (word === "queued") {
      this.running.delete(number);
      this.#event("queued", name, { at, ends: [`queued ${number}`], details: { queue: more[0], message_id: more[1] } });
    } else if (word === "sleep") this.#event("sleep", name ?? "", { at, until: more[0], ends: [this.#timer(number)] });
    else if (word === "wait") {
      this.#event("wait", name, { at, until: more[0], ends: [`signal ${name}`, this.#timer(number)] });
      // A wait is recorded only if no signal had arrived, but one may arrive before the record is committed.
      const arrived = (this.signals.get(name) ?? []).filter((each) => each >= at);
      if (arrived.length) this.#finish(`signal ${name}`, arrived.shift());
      this.signals.set(name, arrived);
    } else if (word === "child") this.#event("child", more[0], { at, ends: [`child ${more[0]}`], details: { workflow: name } });
    else if (word === "patch") this.#event("patch", number, { at });
    else if (word === "continue") {
      this.#end(at);
      this.generation += 1;
      this.failures.clear();
      this.#event("continued", "", { at, details: name });
    } else if (word === "end") {
      this.#end(at);
      this.#event("ended", number, { at, details: name, error: more[0] ? errorText(more[0]) : null });
    } else if (SENT.has(word)) this.#event(word === "signal" ? "signal sent" : word, name ?? "", { at });
    else this.#event("entry", "", { details: entry });
  }

  #timer(number) {
    return `timer ${this.generation}.${number}`;
  }

  #attempts(number) {
    return this.failures.get(number) ?? 0;
  }

  #event(kind, name, { ends = [], ...more } = {}) {
    const event = this.#made(kind, name, { pending: ends.length > 0, ...more });
    for (const end of ends) this.waiting.set(end, [...(this.waiting.get(end) ?? []), event]);
    this.ended.push(event);
  }

  #made(kind, name, { at = this.now, duration = null, pending = false, attempts = null, until = null, error = null, details }) {
    return { key: this.count++, at, kind, name: String(name ?? ""), duration: duration === null ? null : Math.max(0, duration), pending, until, attempts, error, details };
  }

  #finishStep(number, at) {
    this.running.delete(number);
    this.#finish(`queued ${number}`, at);
  }

  // The code does not wait for running steps any more.
  #stopRunning(at) {
    for (const step of this.running.values()) this.#event("step", step.name, { at: step.at, duration: at - step.at });
    this.running.clear();
  }

  // End the event that has waited longest for this; whether there was one.
  #finish(end, at = this.now) {
    const events = this.waiting.get(end) ?? [];
    while (events.length) {
      const event = events.shift();
      if (!event.pending) continue;
      event.pending = false;
      event.duration = Math.max(0, at - event.at);
      return true;
    }
    return false;
  }

  // The code that waited has ended.
  #end(at) {
    this.#stopRunning(at);
    this.waiting.clear();
    for (const event of this.ended) event.pending = false;
  }
}

// An error with its traceback, and what the step was called with, as far as they are known.
function errorText(error, [inputs, blob] = []) {
  if (!Array.isArray(error)) return String(error);
  const called = inputs ? `\n\nInputs: ${JSON.stringify(inputs, null, 2)}` : blob ? `\n\nInputs: in the blob ${blob}.` : "";
  return `${error[0]}: ${error[1]}${error[2] ? `\n\n${error[2]}` : ""}${called}`;
}

function textOf(base64) {
  return new TextDecoder("utf-8").decode(Uint8Array.from(atob(base64), (each) => each.charCodeAt(0)));
}
