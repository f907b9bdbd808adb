// From what a person types to the data of a tensor, and from data to what a person reads.

const INTEGER = /^[+-]?\d+$/;
const REALS = { nan: "NaN", inf: "Infinity", infinity: "Infinity", "-inf": "-Infinity", "-infinity": "-Infinity" };
const ROWS = 8;

// { literals, shape }: each element as JSON, and the shape of nested lists, or null.
// Raises Error in words.
export function readValues(text, datatype, single) {
  if (datatype === "BYTES") return readTexts(text, single);
  const shape = nested(text);
  const words = text.split(/[\s,[\]]+/).filter(Boolean);
  return { literals: words.map((word) => literal(word, datatype)), shape };
}

function readTexts(text, single) {
  const list = text.trim().startsWith("[") ? parsed(text) : null;
  if (Array.isArray(list)) {
    return { literals: list.flat(Infinity).map((each) => JSON.stringify(asText(each))), shape: nested(text) };
  }
  const lines = single ? [text] : text.split("\n");
  return { literals: lines.map((line) => JSON.stringify(line)), shape: null };
}

function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function literal(word, datatype) {
  if (datatype === "BOOL") return truth(word);
  if (/^U?INT/.test(datatype)) {
    if (INTEGER.test(word)) return BigInt(word.replace(/^\+/, "")).toString();
    throw new Error(`'${word}' is no whole number, as ${datatype} needs.`);
  }
  const known = REALS[word.toLowerCase()];
  if (known) return known;
  if (Number.isFinite(Number(word))) return String(Number(word));
  throw new Error(`'${word}' is no number, as ${datatype} needs.`);
}

function truth(word) {
  const found = { true: "true", 1: "true", false: "false", 0: "false" }[word.toLowerCase()];
  if (found) return found;
  throw new Error(`'${word}' is neither true nor false.`);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// The shape of lists within lists, if they are whole and regular; a flat list has none.
function nested(text) {
  const shape = [];
  for (let level = parsed(text); Array.isArray(level); level = level[0]) shape.push(level.length);
  return shape.length > 1 ? shape : null;
}

// The shape of `count` values; null among the dims is free, and the last free one takes what
// the others leave. Raises Error in words.
export function fitShape(dims, count, shape) {
  if (shape && fits(dims, shape, count)) return shape;
  const last = dims.lastIndexOf(null);
  const known = dims.reduce((product, dim) => product * (dim ?? 1), 1);
  if (last < 0 ? known === count : count % Math.max(known, 1) === 0 && (known > 0 || count === 0)) {
    return dims.map((dim, index) => dim ?? (index === last ? count / Math.max(known, 1) : 1));
  }
  const wanted = dims.map((dim) => dim ?? "any").join(" × ");
  throw new Error(`${count} value${count === 1 ? " does" : "s do"} not fill the shape ${wanted}.`);
}

function fits(dims, shape, count) {
  const same = dims.every((dim, index) => dim === null || dim === shape[index]);
  return same && dims.length === shape.length && shape.reduce((a, b) => a * b, 1) === count;
}

export const FILLS = {
  zeros: () => "0",
  ones: () => "1",
  counting: (index) => String(index % 128),
  random: (index, datatype) => {
    if (datatype === "BOOL") return String(Math.round(Math.random()));
    if (/INT/.test(datatype)) return String(Math.floor(Math.random() * 10));
    return Math.random().toFixed(4);
  },
};

// So many literals of a kind of FILLS.
export function filled(kind, count, datatype) {
  const made = Array.from({ length: count }, (_, index) => FILLS[kind](index, datatype));
  return datatype === "BOOL" ? made.map((each) => (each === "0" ? "false" : "true")) : made;
}

// What there is to say of the vectors of a tensor: [{ name, norm, argmax, ... }], one per row.
export function summaries(data, shape) {
  const width = shape.at(-1) ?? 1;
  if (width < 2 || !data.every((each) => typeof each === "number" || typeof each === "bigint")) return [];
  const rows = Math.min(data.length / width, ROWS);
  return Array.from({ length: rows }, (_, row) => {
    const vector = data.slice(row * width, (row + 1) * width).map(Number);
    return {
      name: data.length > width ? `row ${row}` : "",
      norm: Math.hypot(...chunked(vector)),
      argmax: vector.reduce((best, value, index) => (value > vector[best] ? index : best), 0),
      least: vector.reduce((a, b) => Math.min(a, b)),
      most: vector.reduce((a, b) => Math.max(a, b)),
    };
  });
}

// Partial norms, since a function takes only so many arguments.
function chunked(vector) {
  const parts = [];
  for (let at = 0; at < vector.length; at += 4096) parts.push(Math.hypot(...vector.slice(at, at + 4096)));
  return parts;
}
