// What the server shows and takes: all without keys, with one what its roles allow.

import { get } from "./api.js";

const FORBIDDEN = 403;
const ANY = null; // the roles of a page on a server without keys

export class Access {
  constructor() {
    this.roles = ANY;
  }

  get asks() {
    return this.#has("infer");
  }

  opens(view) {
    return view === "state" ? this.#has("observe", "admin") : this.asks;
  }

  // The server's state; for a key that may not see it, the models that it may ask.
  async look() {
    const found = this.opens("state") ? await this.#state() : await json("playground/models");
    this.roles = found.roles ?? ANY;
    if (!this.#has("admin")) found.server.explicit = false;
    return found;
  }

  async #state() {
    try {
      return await json("playground/state");
    } catch (error) {
      if (error.status !== FORBIDDEN) throw error;
      const found = await json("playground/models");
      this.roles = found.roles ?? ANY;
      if (this.opens("state")) throw error; // its area needs a header that the page does not send
      return found;
    }
  }

  #has(...roles) {
    return this.roles === ANY || roles.some((role) => this.roles.includes(role));
  }
}

async function json(path) {
  return await (await get(path)).json();
}
