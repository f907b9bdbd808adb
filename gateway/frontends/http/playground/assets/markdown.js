// Light Markdown to elements: code, bold, italics, lists, headings; everything else is text.

import { copyButton, make } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^#{1,6}\s+(.*?)\s*#*$/;
const INLINE = /(`[^`\n]+`|\*\*(?!\s)[^*\n]+\*\*|\*(?!\s)[^*\n]+(?<!\s)\*)/;

// A fragment that shows the text; a code block without an end goes on to the end of the text.
export function render(text) {
  const lines = text.split("\n");
  const fragment = document.createDocumentFragment();
  let at = 0;
  while (at < lines.length) {
    const [block, next] = blockAt(lines, at);
    if (block) fragment.append(block);
    at = next;
  }
  return fragment;
}

function blockAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return code(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [make("p", { class: "heading" }, inline(heading[1])), at + 1];
  return paragraph(lines, at);
}

function code(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence)) end += 1;
  const source = lines.slice(at + 1, end).join("\n");
  const head = make("div", { class: "code-head" }, language || "code", copyButton("Copy", () => source));
  const body = make("pre", { tabindex: 0 }, make("code", {}, source));
  return [make("div", { class: "code" }, head, body), end + 1];
}

function list(lines, at) {
  const number = ITEM.exec(lines[at])[1];
  const element = number ? make("ol", { start: number }) : make("ul");
  let end = at;
  for (; end < lines.length; end += 1) {
    const item = ITEM.exec(lines[end]);
    if (!item || Boolean(item[1]) !== Boolean(number)) break;
    element.append(make("li", {}, inline(item[2])));
  }
  return [element, end];
}

function paragraph(lines, at) {
  let end = at + 1;
  const ends = (line) => !line.trim() || FENCE.test(line) || ITEM.test(line) || HEADING.test(line);
  while (end < lines.length && !ends(lines[end])) end += 1;
  return [make("p", {}, inline(lines.slice(at, end).join("\n"))), end];
}

function inline(text) {
  return text.split(INLINE).map((part, index) => (index % 2 ? marked(part) : part));
}

function marked(part) {
  if (part.startsWith("`")) return make("code", {}, part.slice(1, -1));
  if (part.startsWith("**")) return make("strong", {}, part.slice(2, -2));
  return make("em", {}, part.slice(1, -1));
}
