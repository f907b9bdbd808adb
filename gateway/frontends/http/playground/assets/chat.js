// The view that talks to a model: what was said, the answer that comes, and its speed.

import { $, copyButton, make, offer } from "./dom.js";
import { generate } from "./generation.js";
import { render } from "./markdown.js";
import { receiptBar } from "./receipt.js";
import { Speed } from "./speed.js";

const NEAR_END = 60;
const ENDS = {
  length: "ended at its longest",
  abort: "given up by the engine",
};

export class Chat {
  constructor() {
    this.turns = []; // { role, content }, and the last answer even if it failed: { failed: true }
    this.elements = [];
    this.models = [];
    this.running = null;
    this.#listen();
  }

  // What the server serves now.
  update(models) {
    this.models = models.filter((model) => model.kind === "chat");
    const names = [...new Set(this.models.map((model) => model.name))];
    const ready = (name) => this.models.some((each) => each.name === name && each.state === "READY");
    offer(
      $("chat-model"),
      names.length
        ? names.map((name) => ({
            value: name,
            text: ready(name) ? name : `${name} (not ready)`,
            disabled: !ready(name),
          }))
        : [{ value: "", text: "No chat model is loaded", disabled: true }],
    );
    this.#show();
  }

  stop() {
    this.running?.abort();
  }

  #listen() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    $("question").addEventListener("input", () => this.#show());
    $("stop").addEventListener("click", () => this.stop());
    $("retry").addEventListener("click", () => this.#retry());
    $("clear").addEventListener("click", () => this.#clear());
  }

  #send() {
    const content = $("question").value.trim();
    if (!content || this.running || !this.#model) return;
    $("question").value = "";
    this.#add("user", content);
    this.#ask();
  }

  #retry() {
    if (this.turns.at(-1)?.role === "assistant") this.#drop();
    this.#ask();
    $("question").focus();
  }

  #clear() {
    this.stop();
    while (this.turns.length) this.#drop();
    this.#show();
    $("question").focus();
  }

  get #model() {
    return this.models.find((model) => model.name === $("chat-model").value);
  }

  get #messages() {
    const system = $("system").value.trim();
    const messages = this.turns.filter(answered).map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  get #parameters() {
    const fields = [...document.querySelectorAll("#view-chat input[type=number]")];
    const given = fields.filter((field) => field.value !== "");
    return Object.fromEntries(given.map((field) => [field.name, field.valueAsNumber]));
  }

  async #ask() {
    const messages = this.#messages;
    const controller = (this.running = new AbortController());
    const answer = new Answer(this.#add("assistant", ""));
    const model = { name: this.#model.name, door: this.#model.door };
    this.#show();
    try {
      for await (const piece of generate(model, messages, this.#parameters, controller.signal)) {
        answer.heard(piece);
      }
      answer.end(ENDS[answer.finish] ?? "");
    } catch (error) {
      if (controller.signal.aborted) answer.end("stopped");
      else answer.fail(error.message);
    } finally {
      if (this.running === controller) this.running = null;
      this.#show();
    }
  }

  #add(role, content) {
    const turn = { role, content };
    const body = make("div", { class: "body" }, role === "user" ? content : []);
    const name = make("p", { class: "who unseen" }, role === "user" ? "You" : "Model");
    const element = make("article", { class: `turn ${role}` }, name, body);
    this.turns.push(turn);
    this.elements.push(element);
    $("log").append(element);
    $("log").scrollTop = $("log").scrollHeight;
    return { turn, element, body };
  }

  #drop() {
    this.turns.pop();
    this.elements.pop().remove();
  }

  #show() {
    const busy = Boolean(this.running);
    $("welcome").hidden = this.turns.length > 0;
    $("log").setAttribute("aria-busy", String(busy));
    const had = document.activeElement;
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    $("send").disabled = !this.#model || !$("question").value.trim();
    $("retry").disabled = busy || !this.turns.length || !this.#model;
    $("clear").disabled = !this.turns.length;
    if (had === $("stop") || had === $("send")) $("question").focus();
  }
}

// Whether the model is told of a turn: a question without an answer is left out with it, since most
// models insist that roles alternate. The last question is the one that is being asked.
function answered(turn, index, turns) {
  if (turn.role === "assistant") return Boolean(turn.content) && !turn.failed;
  return index === turns.length - 1 || answered(turns[index + 1], index + 1, turns);
}

// The answer that is coming: drawn at most once a frame.
class Answer {
  constructor({ turn, element, body }) {
    this.turn = turn;
    this.body = body;
    this.element = element;
    this.finish = "";
    this.speed = new Speed(performance.now());
    this.meta = make("p", { class: "meta" }, make("span", { class: "speed" }, "waiting for the model"));
    element.append(this.meta);
    element.classList.add("coming");
  }

  heard({ text, tokens, finish, total, timing }) {
    if (text || tokens) this.speed.heard(performance.now(), tokens);
    if (total != null) this.speed.total(total);
    if (timing) this.receipt = receiptBar(timing);
    this.turn.content += text;
    this.finish ||= finish;
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  end(how) {
    this.#close();
    this.meta.firstChild.textContent = [this.speed.toString(), how].filter(Boolean).join(" · ");
    if (this.turn.content) this.meta.append(copyButton("Copy", () => this.turn.content));
    else if (!how) this.meta.firstChild.textContent = "The model answered with nothing.";
  }

  fail(message) {
    this.turn.failed = true;
    this.#close();
    this.meta.before(make("p", { class: "failure", role: "alert" }, message));
    const speed = this.speed.toString();
    this.meta.firstChild.textContent = speed;
    this.meta.hidden = !speed;
  }

  #close() {
    cancelAnimationFrame(this.frame);
    this.#draw();
    this.element.classList.remove("coming");
  }

  #draw() {
    this.frame = null;
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    this.body.replaceChildren(render(this.turn.content));
    if (this.receipt) this.element.append(this.receipt);
    const speed = this.speed.toString();
    if (speed) this.meta.firstChild.textContent = speed;
    if (follows) log.scrollTop = log.scrollHeight;
  }
}
