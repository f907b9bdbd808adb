// The form that asks for an API key where the server needs one, and the button that forgets it.

import { get } from "./api.js";
import { $ } from "./dom.js";
import { forgetKey, hasKey, useKey } from "./key.js";

const FORBIDDEN = 403;
const SENDABLE = /^[\x21-\x7e]+$/;

export class KeyForm {
  constructor() {
    this.taken = null;
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try($("key").value.trim());
    });
    // Answers that were given for the key disappear with it.
    $("forget").addEventListener("click", () => {
      forgetKey();
      location.reload();
    });
    this.#offer();
  }

  // Returns once the server takes a key; `words` are those of the refusal of the last one.
  async ask(words) {
    this.#say(hasKey() ? words : "");
    forgetKey();
    this.#offer();
    await new Promise((resolve) => (this.taken = resolve));
  }

  async #try(text) {
    if (!SENDABLE.test(text)) {
      this.#say("A key has letters, digits, - and _ only.");
      return;
    }
    $("use-key").disabled = true;
    useKey(text);
    const refusal = await this.#refusal();
    $("use-key").disabled = false;
    if (refusal) {
      forgetKey();
      this.#say(refusal);
      $("key").select();
    } else {
      $("key").value = "";
      this.#say("");
      this.taken();
    }
    this.#offer();
  }

  // The server's text; "" if it takes the key. A restricted area is no fault of the key.
  async #refusal() {
    try {
      await get("playground/models");
      return "";
    } catch (error) {
      return error.status === FORBIDDEN ? "" : error.message;
    }
  }

  #offer() {
    $("forget").hidden = !hasKey();
  }

  #say(words) {
    $("key-failure").textContent = words;
    $("key-failure").hidden = !words;
  }
}
