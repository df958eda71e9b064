// Decodes CBOR, as the payloads of a run's inbox items are encoded. Byte strings become their size.

const TEXT = new TextDecoder("utf-8");
const DEPTH_MAX = 64;

// The value in base64; undefined if it is not one CBOR value.
export function fromCbor(base64) {
  try {
    const raw = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
    const reader = new Reader(raw);
    const value = reader.value(0);
    return reader.at === raw.length ? value : undefined;
  } catch {
    return undefined;
  }
}

class Reader {
  constructor(raw) {
    this.raw = raw;
    this.view = new DataView(raw.buffer);
    this.at = 0;
  }

  value(depth) {
    if (depth > DEPTH_MAX) throw new RangeError("nested too deeply");
    const first = this.view.getUint8(this.at);
    this.at += 1;
    const kind = first >> 5;
    const info = first & 31;
    if (kind === 7) return this.#simple(info);
    const size = this.#size(info);
    if (kind === 0) return size;
    if (kind === 1) return -1 - size;
    if (kind === 2) return `${this.#bytes(size).length} bytes`;
    if (kind === 3) return TEXT.decode(this.#bytes(size));
    if (kind === 4) return Array.from({ length: this.#checked(size) }, () => this.value(depth + 1));
    if (kind === 5) return Object.fromEntries(Array.from({ length: this.#checked(size) }, () => [String(this.value(depth + 1)), this.value(depth + 1)]));
    return this.value(depth + 1); // A tag says how to read its value; the value is enough here.
  }

  #simple(info) {
    if (info === 20) return false;
    if (info === 21) return true;
    if (info === 22 || info === 23) return null;
    if (info === 25) return this.#read(2, (at) => half(this.view.getUint16(at)));
    if (info === 26) return this.#read(4, (at) => this.view.getFloat32(at));
    if (info === 27) return this.#read(8, (at) => this.view.getFloat64(at));
    throw new RangeError("unknown simple value");
  }

  #size(info) {
    if (info < 24) return info;
    if (info === 24) return this.#read(1, (at) => this.view.getUint8(at));
    if (info === 25) return this.#read(2, (at) => this.view.getUint16(at));
    if (info === 26) return this.#read(4, (at) => this.view.getUint32(at));
    if (info === 27) return this.#read(8, (at) => Number(this.view.getBigUint64(at)));
    throw new RangeError("unknown length");
  }

  // Every element has at least one byte, so a longer list cannot be complete.
  #checked(size) {
    if (size > this.raw.length - this.at) throw new RangeError("too short");
    return size;
  }

  #read(size, get) {
    const value = get(this.at);
    this.at += size;
    return value;
  }

  #bytes(size) {
    this.at += this.#checked(size);
    return this.raw.subarray(this.at - size, this.at);
  }
}

function half(bits) {
  const sign = bits >> 15 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
