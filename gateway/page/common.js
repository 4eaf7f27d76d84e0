// What the modules of the page share: elements, and requests with the key. Text from elsewhere only ever becomes text nodes.

export const KEY = "vramq-key";

export const find = (id) => document.getElementById(id);

/** An element with attributes and children. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

/** A request; its answer, or an error with the gateway's own words. */
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

/** Sends JSON; the JSON that comes back. */
export async function post(path, body) {
  const options = { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  return (await ask(path, options)).json();
}
