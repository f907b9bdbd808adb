// How fast does an answer come? Times are in milliseconds.

const LEAST_SECS = 0.1; // What comes in one go has no speed.

export class Speed {
  constructor(now) {
    this.begun = now;
    this.first = null;
    this.last = null;
    this.tokens = 0;
    this.tokensOfFirst = 0;
    this.counted = false;
  }

  // A piece of the answer has come; `tokens` is null where the model does not count them.
  heard(now, tokens) {
    this.counted ||= tokens != null;
    const gained = tokens ?? 1;
    this.tokens += gained;
    if (this.first === null) {
      this.first = now;
      this.tokensOfFirst = gained;
    }
    this.last = now;
  }

  // What only the end of an answer says: how many tokens there were in all.
  total(tokens) {
    this.counted = true;
    this.tokens = tokens;
  }

  // As words; "" before anything has come.
  toString() {
    if (this.first === null) return "";
    const unit = this.counted ? "token" : "piece";
    const words = [`first token after ${milliseconds(this.first - this.begun)}`];
    const gained = this.tokens - this.tokensOfFirst;
    const secs = (this.last - this.first) / 1000;
    if (gained > 0 && secs >= LEAST_SECS) words.push(`${rounded(gained / secs)} ${unit}s/s`);
    words.push(`${this.tokens} ${unit}${this.tokens === 1 ? "" : "s"}`);
    return words.join(" · ");
  }
}

export function milliseconds(value) {
  return value < 1000 ? `${rounded(value)} ms` : `${rounded(value / 1000)} s`;
}

// Three digits are enough to read.
export function rounded(value) {
  if (value === 0) return "0";
  return Math.abs(value) >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}
