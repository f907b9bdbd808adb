// Requests to the server that has served this page; every failure becomes words.

import { keyHeaders } from "./key.js";

// `status` is that of the response, 0 without one.
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// Where requests for a model go; names may hold any character.
export function modelPath(name, version = "") {
  const path = `v2/models/${encodeURIComponent(name)}`;
  return version ? `${path}/versions/${encodeURIComponent(version)}` : path;
}

export async function get(path, signal) {
  return await answer(path, { signal, cache: "no-store" });
}

export async function post(path, body, signal, more = {}) {
  const headers = { "Content-Type": "application/json", ...more };
  return await answer(path, { method: "POST", headers, body, signal });
}

async function answer(path, options) {
  const headers = { ...options.headers, ...keyHeaders() };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new ServerError("The server cannot be reached.");
  });
  if (!response.ok) {
    throw new ServerError(words(response, await response.text().catch(() => "")), response.status);
  }
  return response;
}

function words(response, text) {
  try {
    // Of a stream it is an event, and a comment with its receipt may follow.
    const { error } = JSON.parse(text.split("\n\n", 1)[0].replace(/^data: /, ""));
    const message = typeof error === "string" ? error : error?.message;
    if (message) return message;
  } catch {
    // Whatever stands between here and the server may answer with something else.
  }
  return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}

// The data of each server-sent event of a response, as they come.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError("The connection broke off.");
    });
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

// JSON as servers write it: NaN and infinities become text, whole numbers keep every digit.
export function parseJson(text) {
  const exact = (key, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source)
      ? BigInt(context.source)
      : value;
  try {
    return JSON.parse(text, exact);
  } catch {
    const literals = /"(?:[^"\\]|\\.)*"|-?Infinity|NaN/g;
    const quoted = (found) => (found.startsWith('"') ? found : `"${found}"`);
    return JSON.parse(text.replace(literals, quoted), exact);
  }
}
