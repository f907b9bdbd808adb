// The page: which view is shown, and the server's state, asked for each second while it is seen.

import { Access } from "./access.js";
import { Chat } from "./chat.js";
import { $ } from "./dom.js";
import { KeyForm } from "./key_form.js";
import { State } from "./state.js";
import { Tensors } from "./tensors.js";

const EVERY_MS = 1000;
const VIEWS = ["chat", "tensors", "state"];
const KEY = "key";
const UNAUTHORIZED = 401;
const access = new Access();
const keyForm = new KeyForm();
const chat = new Chat();
const tensors = new Tensors();
const state = new State();
let locked = false;

function show() {
  const wanted = location.hash.slice(1);
  const view = locked ? KEY : VIEWS.includes(wanted) ? wanted : "chat";
  $(`view-${KEY}`).hidden = !locked;
  document.querySelector("nav").hidden = locked;
  for (const each of VIEWS) {
    $(`view-${each}`).hidden = each !== view;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    if (each === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function firstView(models) {
  if (location.hash || !models.length) return;
  const talks = access.asks && models.some((model) => model.kind === "chat");
  const computes = access.asks && models.some((model) => model.kind === "tensor");
  location.replace(talks ? "#chat" : computes ? "#tensors" : "#state");
}

async function look() {
  try {
    const found = await access.look();
    tell(found.server);
    for (const view of VIEWS) $(`view-${view}`).classList.toggle("shut", !access.opens(view));
    chat.update(found.models);
    tensors.update(found.models);
    if (found.machine) state.update(found, performance.now() / 1000);
    firstView(found.models);
    $("banner").hidden = true;
  } catch (error) {
    if (error.status === UNAUTHORIZED) return await unlock(error.message);
    $("server").className = "server lost";
    $("server").lastElementChild.textContent = "No answer";
    $("banner").textContent = `${error.message} It is asked again every second.`;
    $("banner").hidden = false;
  }
}

// Until the server takes a key there is nothing else to see, and nothing is asked.
async function unlock(refusal) {
  $("server").className = "server unready";
  $("server").lastElementChild.textContent = "locked";
  $("banner").hidden = true;
  locked = true;
  show();
  $("key").focus();
  await keyForm.ask(refusal);
  locked = false;
  show();
  $("question").focus();
  await look();
}

function tell({ name, version, ready }) {
  const words = `${name} ${version} · ${ready ? "ready" : "not ready"}`;
  $("server").className = `server ${ready ? "ready" : "unready"}`;
  if ($("server").lastElementChild.textContent !== words) $("server").lastElementChild.textContent = words;
}

// Nobody asks while the page is not seen.
async function follow() {
  for (;;) {
    if (document.hidden) await seen();
    await look();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

function seen() {
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

// On a narrow screen the parameters of a chat are folded away.
function fold(wide) {
  document.querySelector(".settings").open = wide.matches;
}

const wide = matchMedia("(min-width: 54rem)");
wide.addEventListener("change", () => fold(wide));
fold(wide);
addEventListener("hashchange", show);
show();
$("question").focus();
follow();
