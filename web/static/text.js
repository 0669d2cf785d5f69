// Words and numbers. Everything here returns plain strings for textContent: what a peer wrote is never markup.

// controls, bidi overrides and isolates, invisible separators: shown as escapes, so that no text can pose as another
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

export function shown(value, limit = 200) {
  const text = String(value ?? "");
  const escape = (character) => "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0");
  const cut = text.slice(0, limit).replace(INVISIBLE, escape);
  return text.length > limit ? `${cut}… (${text.length.toLocaleString("en")} characters)` : cut;
}

export function line(value, limit) {
  return shown(value, limit).replace(/\s+/g, " ");
}

export function number(value, digits = 0) {
  if (typeof value !== "number") return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function change(now, start, step = 0) {
  if (typeof now !== "number" || typeof start !== "number") return "";
  const difference = now - start;
  const sign = difference < 0 ? "−" : "+";
  const since = step ? `step ${number(step)}` : "the start";
  return `${sign}${number(Math.abs(difference), 2)} since ${since} (${number(start, 2)})`;
}

export function megabytes(value) {
  if (typeof value !== "number") return "–";
  return value >= 1024 ? `${number(value / 1024, 1)} GB` : `${number(value)} MB`;
}

export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 60) return `${number(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function clock(seconds) {
  const at = new Date(seconds * 1000);
  if (Number.isNaN(at.getTime())) return "–";
  const today = at.toDateString() === new Date().toDateString();
  return today ? at.toLocaleTimeString("en-GB") : at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

export function shortPeer(id) {
  const text = line(id, 80);
  return text.length > 12 ? `…${text.slice(-8)}` : text;
}

export function counts(byName) {
  return Object.entries(byName ?? {}).map(([name, count]) => `${number(count)} ${line(name, 40)}`).join(", ");
}

// The mean of what is a number, or null.
export function mean(values) {
  const known = (values ?? []).filter((value) => typeof value === "number");
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

export function ago(seconds, now = Date.now() / 1000) {
  return typeof seconds === "number" ? `${duration(Math.max(0, now - seconds))} ago` : "–";
}

// A clock time today, a day and time otherwise; `zoned` where the node's zone may be another one than the browser's.
export function moment(seconds, zoned = false) {
  const at = new Date(seconds * 1000);
  if (typeof seconds !== "number" || Number.isNaN(at.getTime())) return "–";
  const time = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(zoned ? { timeZoneName: "short" } : {}) });
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}
