// Requests to this node. The browser sends the session cookie by itself; an answer that takes too long is an error.

const TIMEOUT_MS = 8000;

export class SignedOut extends Error {}

// What the node says it will not do: what is wrong, and what to do about it.
export class Refused extends Error {
  constructor(status, error, fix) {
    super(`${error}. ${fix}`);
    Object.assign(this, { status, error, fix });
  }
}

async function request(path, options, until) {
  const signals = [AbortSignal.timeout(TIMEOUT_MS), ...(until ? [until] : [])];
  const response = await fetch(`/api/v1/${path}`, { ...options, signal: AbortSignal.any(signals), cache: "no-store" });
  if (response.status === 401) throw new SignedOut();
  const value = await response.json();
  if (!response.ok) throw new Refused(response.status, value.error, value.fix);
  return value;
}

// `until`: an AbortSignal of who no longer wants the answer.
export function ask(path, until) {
  return request(path, {}, until);
}

export function send(path, body) {
  return request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

// `path?a=1&b=2` of the values that are not empty.
export function asking(path, values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}
