// Fetches from this server, and from no other.

export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(name, one);
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

const pending = new Map(); // requests under way, so that none is sent twice at a time

export function get(path, parameters) {
  const where = address(path, parameters);
  if (!pending.has(where)) pending.set(where, fetched(where).finally(() => pending.delete(where)));
  return pending.get(where);
}

export const post = (path, token) => fetched(path, { method: "POST", headers: { Authorization: `Bearer ${token}` } });

async function fetched(where, options = { headers: { Accept: "application/json" } }) {
  const response = await fetch(where, options);
  if (!response.ok) {
    const detail = await response.json().then((body) => body.detail, () => null);
    throw new Error(typeof detail === "string" ? detail : `The server answered ${response.status}.`);
  }
  return response.json();
}

export const csv = (path, parameters) => address(path, { ...parameters, format: "csv" });
