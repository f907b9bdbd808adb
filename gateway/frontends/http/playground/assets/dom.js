// Elements made of values: text always becomes text, never markup.

export const $ = (id) => document.getElementById(id);

// An element with attributes (functions are listeners) and children (anything else is text).
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

// A button that copies what `text()` says, and shows for a moment that it did.
export function copyButton(label, text) {
  const button = make("button", { type: "button", class: "quiet" }, label);
  copies(button, text);
  return button;
}

export function copies(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Could not copy";
    setTimeout(() => (button.textContent = label), 1500);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // The clipboard is there for pages of https and localhost only.
  }
}

function copyBySelection(text) {
  const before = document.activeElement;
  const field = make("textarea", { class: "unseen" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return copied;
}

// The options of a select, changed only if they differ, so that an open list stays as it is.
export function offer(select, options) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options === wanted) return;
  const chosen = select.value;
  select.dataset.options = wanted;
  select.replaceChildren(
    ...options.map(({ value, text, disabled }) => make("option", { value, disabled }, text)),
  );
  const kept = options.find((each) => each.value === chosen && !each.disabled);
  const first = kept ?? options.find((each) => !each.disabled) ?? options[0];
  if (first) select.value = first.value;
}
