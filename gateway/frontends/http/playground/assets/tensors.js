// The view that asks a tensor model: a form made of its metadata, and what it answers.

import { events, get, modelPath, parseJson, post } from "./api.js";
import { $, copies, make, offer } from "./dom.js";
import { hasKey } from "./key.js";
import { Outcome } from "./outcome.js";
import { TensorField } from "./tensor_field.js";

export class Tensors {
  constructor() {
    this.models = [];
    this.fields = [];
    this.described = "";
    this.requests = new AbortController();
    $("tensor-model").addEventListener("change", () => this.#describe());
    $("tensor-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#infer();
    });
    copies($("copy-curl"), () => this.curl);
  }

  // What the server serves now; the form stays as long as its model does.
  update(models) {
    this.models = models.filter((model) => model.kind === "tensor" && model.state === "READY");
    $("tensors-none").hidden = this.models.length > 0;
    $("tensor-form").hidden = this.models.length === 0;
    offer($("tensor-model"), this.#options());
    if (this.described !== $("tensor-model").value) this.#describe();
  }

  // One entry per model, and one per version where several are ready.
  #options() {
    const names = [...new Set(this.models.map((model) => model.name))];
    return names.flatMap((name) => {
      const versions = this.models.filter((model) => model.name === name).map((each) => each.version);
      const several = versions.length > 1 ? versions : [];
      return ["", ...several].map((version) => ({
        value: JSON.stringify([name, version]),
        text: version ? `${name}, version ${version}` : name,
      }));
    });
  }

  get #target() {
    return JSON.parse($("tensor-model").value || '["",""]');
  }

  // What the server says of the chosen version; without one the highest answers.
  get #row() {
    const [name, version] = this.#target;
    return this.models.findLast((model) => model.name === name && (!version || model.version === version));
  }

  // A new form ends the requests of the last one: a late answer would empty the fields again.
  async #describe() {
    const chosen = (this.described = $("tensor-model").value);
    this.requests.abort();
    const { signal } = (this.requests = new AbortController());
    $("answer").hidden = true;
    $("infer-status").textContent = "";
    $("inputs").replaceChildren();
    this.fields = [];
    $("infer").disabled = true;
    if (!chosen) return;
    const row = this.#row;
    try {
      const metadata = await (await get(modelPath(...this.#target), signal)).json();
      this.#build(metadata, row);
    } catch (error) {
      if (signal.aborted) return;
      this.described = "";
      this.#refuse(error);
    }
  }

  #build(metadata, { decoupled, batched, optional }) {
    this.decoupled = decoupled;
    this.fields = metadata.inputs.map(
      (input, index) => new TensorField(input, { index, optional: optional.includes(input.name), batched }),
    );
    $("inputs").replaceChildren(...this.fields.map((field) => field.element));
    $("infer").disabled = false;
    if (!this.fields.length) $("inputs").append(make("p", { class: "hint" }, "The model has no inputs."));
  }

  async #infer() {
    let body;
    try {
      body = this.#body(this.fields.map((field) => field.read()).filter(Boolean));
    } catch (error) {
      this.#refuse(error);
      return;
    }
    const path = `${modelPath(...this.#target)}/${this.decoupled ? "generate_stream" : "infer"}`;
    const { signal } = this.requests;
    $("infer").disabled = true;
    this.#say("Waiting for the model");
    const begun = performance.now();
    try {
      const outcome = await this.#ask(path, body, signal);
      this.#show(outcome, performance.now() - begun);
      this.#tellCommand(path, body);
    } catch (error) {
      if (!signal.aborted) this.#refuse(error);
    } finally {
      if (!signal.aborted) $("infer").disabled = false;
    }
  }

  // The elements are JSON already, with all their digits.
  #body(tensors) {
    const data = (tensor) => `[${tensor.literals.join(",")}]`;
    if (this.decoupled) {
      return `{${tensors.map((each) => `${JSON.stringify(each.name)}:${data(each)}`).join(",")}}`;
    }
    const inputs = tensors.map(({ name, shape, datatype, ...rest }) =>
      `${JSON.stringify({ name, shape, datatype }).slice(0, -1)},"data":${data(rest)}}`,
    );
    return `{"inputs":[${inputs.join(",")}]}`;
  }

  async #ask(path, body, signal) {
    const response = await post(path, body, signal);
    if (!this.decoupled) return [parseJson(await response.text()).outputs];
    const responses = [];
    for await (const data of events(response)) responses.push(Outcome.of(parseJson(data)));
    return responses;
  }

  #show(responses, ms) {
    const outcome = new Outcome(responses);
    $("outputs").replaceChildren(...outcome.elements());
    $("answer").hidden = false;
    this.#say(outcome.words(ms));
  }

  #tellCommand(path, body) {
    const url = new URL(path, document.baseURI);
    const quoted = body.replaceAll("'", String.raw`'\''`);
    const key = hasKey() ? ` -H "Authorization: Bearer $SLUICE_API_KEY"` : "";
    this.curl = `curl ${this.decoupled ? "-N" : "-s"} '${url}'${key} -H 'Content-Type: application/json' -d '${quoted}'`;
    const shown = this.curl.length > 2000 ? `${this.curl.slice(0, 2000)}… (the copy has all of it)` : this.curl;
    $("curl").textContent = shown;
  }

  #say(words) {
    $("infer-status").className = "hint";
    $("infer-status").textContent = words;
  }

  #refuse(error) {
    $("answer").hidden = true;
    $("infer-status").className = "failure";
    $("infer-status").textContent = error.message;
  }
}
