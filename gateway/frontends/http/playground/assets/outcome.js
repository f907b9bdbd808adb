// What a tensor model has answered, for people: shapes, first values, norms.

import { ServerError } from "./api.js";
import { make } from "./dom.js";
import { milliseconds, rounded } from "./speed.js";
import { summaries } from "./values.js";

const FIRST_VALUES = 48;
const FIRST_RESPONSES = 50;
const NO_OUTPUT = new Set(["id", "model_name", "model_version", "sequence_id", "sequence_start", "sequence_end"]);

export class Outcome {
  // A list of outputs for each response.
  constructor(responses) {
    this.responses = responses;
  }

  // The outputs in an event of generate_stream, which has neither shapes nor datatypes.
  static of(members) {
    if (typeof members.error === "string") throw new ServerError(members.error);
    const outputs = Object.entries(members).filter(([name]) => !NO_OUTPUT.has(name));
    return outputs.map(([name, value]) => ({ name, data: [value].flat() }));
  }

  words(ms) {
    const count = this.responses.length;
    return `${count === 1 ? "Answered" : `${count} responses`} in ${milliseconds(ms)}`;
  }

  elements() {
    const shown = this.responses.slice(0, FIRST_RESPONSES);
    const left = this.responses.length - shown.length;
    const found = shown.flatMap((outputs, index) => outputs.map((each) => element(each, this.#title(index))));
    if (left > 0) found.push(make("p", { class: "hint" }, `and ${left} more responses`));
    return found.length ? found : [make("p", { class: "hint" }, "The model answered without outputs.")];
  }

  #title(index) {
    return this.responses.length > 1 ? `response ${index + 1}` : "";
  }
}

function element({ name, datatype, shape, data = [] }, title) {
  const tags = [title, datatype, shape && (shape.join(" × ") || "one value")].filter(Boolean);
  const head = make("p", { class: "about" }, make("span", { class: "name" }, name));
  head.append(...tags.map((tag) => make("span", { class: "tag" }, tag)));
  const facts = summaries(data, shape ?? [data.length]).map((row) => make("p", { class: "facts" }, told(row)));
  return make("article", { class: "output" }, head, facts, values(data));
}

function values(data) {
  const shown = data.slice(0, FIRST_VALUES).map(written);
  const left = data.length - shown.length;
  const texts = data.some((each) => typeof each === "string");
  const body = make("pre", { tabindex: 0 }, shown.join(texts ? "\n" : "  "));
  if (left > 0) body.append(make("span", { class: "more" }, ` … and ${left} more`));
  return body;
}

function written(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(7)));
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function told({ name, norm, argmax, least, most }) {
  const facts = [`norm ${rounded(norm)}`, `argmax ${argmax}`, `from ${rounded(least)} to ${rounded(most)}`];
  return [name && `${name}: `, facts.join(" · ")].join("");
}
