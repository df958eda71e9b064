// Rates and quantiles from the counters of samples. Samples of different server starts are never compared.

const KEPT = 300;
const LIVE_SECONDS = 300;
// Upper bounds of the server's histograms, in the order of their buckets.
export const SECONDS = [
  0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30, Infinity,
];
export const SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, Infinity];

// The ranges of charts. Up to five minutes there is a sample a second, then one of the server's history.
export const RANGES = [
  { name: "5 min", seconds: LIVE_SECONDS },
  { name: "1 h", seconds: 3_600 },
  { name: "6 h", seconds: 21_600 },
  { name: "24 h", seconds: 86_400 },
];

export class Series {
  constructor(kept = KEPT) {
    this.kept = kept;
    this.samples = [];
    this.operations = {};
    this.earlier = {};
  }

  add(sample) {
    const last = this.samples.at(-1);
    if (last && sample.at_ms <= last.at_ms) return;
    const { operations, ...lean } = sample;
    if (operations) {
      this.earlier = last?.started_ms === sample.started_ms ? this.operations : {};
      this.operations = operations;
    }
    this.samples.push(lean);
    if (this.samples.length > this.kept) this.samples.shift();
  }

  // The samples of a server's history and the newer ones of this series.
  after(history) {
    const joined = new Series(Infinity);
    const first = this.samples[0]?.at_ms ?? Infinity;
    for (const sample of history) if (sample.at_ms < first) joined.add(sample);
    for (const sample of this.samples) joined.add(sample);
    return joined;
  }

  get times() {
    return this.samples.map((sample) => sample.at_ms / 1000);
  }

  // The value of `of` for each sample.
  values(of) {
    return this.samples.map((sample) => of(sample) ?? null);
  }

  // The growth of a counter per second.
  rates(of) {
    return this.#pairs((before, after, passed) => Math.max(0, (of(after) ?? 0) - (of(before) ?? 0)) / passed);
  }

  // A quantile of a histogram over the last few seconds before each sample.
  quantiles(name, bounds, part, over = 5) {
    return this.#windows(over, (before, after) => quantile(bounds, after[name] ?? [], before[name] ?? [], part));
  }

  means(name, over = 5) {
    return this.#windows(over, (before, after) => {
      const times = (after[name]?.at(-1) ?? 0) - (before[name]?.at(-1) ?? 0);
      return times > 0 ? ((after[`${name}_sum`] ?? 0) - (before[`${name}_sum`] ?? 0)) / times : null;
    });
  }

  // For each operation: calls per second since the last sample, errors, and latency quantiles since the start.
  table() {
    const [before, after] = this.samples.slice(-2);
    const passed = after ? (after.at_ms - before.at_ms) / 1000 : 0;
    return Object.entries(this.operations).map(([op, now]) => {
      const then = this.earlier[op];
      return {
        key: op,
        calls: now.calls,
        errors: now.errors,
        rate: passed && then ? Math.max(0, now.calls - then.calls) / passed : null,
        p50: quantile(SECONDS, now.buckets, [], 0.5),
        p99: quantile(SECONDS, now.buckets, [], 0.99),
      };
    });
  }

  #pairs(of) {
    return this.samples.map((after, index) => {
      const before = this.samples[index - 1];
      if (!before || before.started_ms !== after.started_ms) return null;
      return of(before, after, (after.at_ms - before.at_ms) / 1000);
    });
  }

  #windows(over, of) {
    return this.samples.map((after, index) => {
      const before = this.samples[Math.max(0, index - over)];
      return before === after || before.started_ms !== after.started_ms ? null : of(before, after);
    });
  }
}

// A quantile of a cumulative histogram, interpolated between its bounds.
export function quantile(bounds, after, before, part) {
  const total = (after.at(-1) ?? 0) - (before.at(-1) ?? 0);
  if (!(total > 0)) return null;
  const wanted = total * part;
  let below = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    const upTo = (after[index] ?? 0) - (before[index] ?? 0);
    if (upTo >= wanted) {
      const least = index ? bounds[index - 1] : 0;
      if (bounds[index] === Infinity) return least;
      const inside = upTo - below;
      return least + (bounds[index] - least) * (inside > 0 ? (wanted - below) / inside : 1);
    }
    below = upTo;
  }
  return null;
}
