// Requests to this node. The browser sends the session cookie by itself; an answer that takes too long is an error.

const TIMEOUT_MS = 8000;

export class SignedOut extends Error {}

async function request(path, options) {
  const response = await fetch(`/api/v1/${path}`, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (response.status === 401) throw new SignedOut();
  const value = await response.json();
  if (!response.ok) throw new Error(`${value.error}. ${value.fix}`);
  return value;
}

export function ask(path) {
  return request(path, {});
}

export function send(path, body) {
  return request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}
