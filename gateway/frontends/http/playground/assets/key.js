// The API key of this tab: in its session storage, sent as a header with each request, never in a URL.

const NAME = "sluice.key";
let key = stored();

// The header with the key; none on a server without keys.
export function keyHeaders() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function hasKey() {
  return Boolean(key);
}

// Sends a key with the next requests; it is gone with the tab.
export function useKey(text) {
  key = text;
  try {
    sessionStorage.setItem(NAME, text);
  } catch {
    // A browser without storage keeps it until the page is reloaded.
  }
}

export function forgetKey() {
  key = "";
  try {
    sessionStorage.removeItem(NAME);
  } catch {
    // Nothing was stored.
  }
}

function stored() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}
