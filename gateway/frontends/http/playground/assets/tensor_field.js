// One input of a tensor model: its shape, where that is free, and its values.

import { make } from "./dom.js";
import { FILLS, filled, fitShape, readValues } from "./values.js";

const MOST_FILLED = 4_000_000;
const HINTS = {
  BYTES: "Text; several as lines, or as a JSON list",
  BOOL: "true, false, 1 or 0",
};

export class TensorField {
  constructor({ name, datatype, shape }, { index, optional, batched }) {
    this.name = name;
    this.datatype = datatype;
    this.optional = optional;
    this.dims = shape.map((size, at) => (size < 0 ? freeDim(name, at, batched) : size));
    this.values = make("textarea", {
      id: `input-${index}`,
      rows: 2,
      spellcheck: "false",
      placeholder: HINTS[datatype] ?? "Numbers, or lists of numbers as JSON",
    });
    this.source = this.#source(index);
    this.element = this.#element(index);
  }

  // { name, datatype, shape, literals }, or null for an optional input left out.
  read() {
    const dims = this.dims.map((dim) => (typeof dim === "number" ? dim : chosen(dim)));
    try {
      return this.source.value === "typed" ? this.#typed(dims) : this.#filled(dims);
    } catch (error) {
      throw new Error(`Input ${this.name}: ${error.message}`);
    }
  }

  #typed(dims) {
    if (this.optional && this.values.value === "") return null;
    const single = dims.every((dim) => dim === 1 || dim === null) && !this.values.value.includes("\n");
    const { literals, shape } = readValues(this.values.value, this.datatype, single);
    return this.#tensor(fitShape(dims, literals.length, shape), literals);
  }

  #filled(dims) {
    const shape = dims.map((dim) => dim ?? 1);
    const count = shape.reduce((product, dim) => product * dim, 1);
    if (count > MOST_FILLED) throw new Error(`${count} values are more than this page sends.`);
    return this.#tensor(shape, filled(this.source.value, count, this.datatype));
  }

  #tensor(shape, literals) {
    return { name: this.name, datatype: this.datatype, shape, literals };
  }

  #source(index) {
    const kinds = this.datatype === "BYTES" ? ["typed"] : ["typed", ...Object.keys(FILLS)];
    const select = make("select", { id: `source-${index}` }, kinds.map((kind) => make("option", {}, kind)));
    select.addEventListener("change", () => (this.values.hidden = select.value !== "typed"));
    return select;
  }

  #element(index) {
    const shape = this.dims.flatMap((dim, at) => [at ? " × " : "", typeof dim === "number" ? String(dim) : dim]);
    const legend = make("legend", {}, make("span", { class: "name" }, this.name));
    if (this.optional) legend.append(make("span", { class: "tag" }, "optional"));
    const about = make("div", { class: "about" }, make("span", { class: "tag" }, this.datatype));
    about.append(make("span", { class: "dims" }, shape.length ? shape : "one value"));
    if (this.source.options.length > 1) {
      about.append(make("label", { class: "source" }, "Values ", this.source));
    }
    const label = make("label", { class: "unseen", for: `input-${index}` }, `Values of ${this.name}`);
    return make("fieldset", {}, legend, about, label, this.values);
  }
}

function freeDim(name, at, batched) {
  const what = at === 0 && batched ? "batch" : "any";
  return make("input", {
    type: "number",
    min: 0,
    step: 1,
    placeholder: what,
    "aria-label": `Dimension ${at} of ${name}; empty: as many as there are values`,
  });
}

function chosen(field) {
  if (field.value === "" && !field.validity.badInput) return null;
  if (!field.checkValidity()) throw new Error("a dimension is a whole number, 0 or more.");
  return field.valueAsNumber;
}
