// How figures are written: bytes, counts, rates, times. The same in every language of a browser.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// In the largest binary unit that leaves at least 1, four digits at most, as `kvcache` prints sizes.
export function bytes(count) {
  let size = count, power = 0;
  while (Math.abs(size) >= 1024 && power < UNITS.length - 1) {
    size /= 1024;
    power += 1;
  }
  return `${trimmed(size, 4)} ${UNITS[power]}`;
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

export function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

// "12.3k", "4.6M": for figures at a glance and axes.
export function short(value) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size) return trimmed(value / size, 3) + unit;
  }
  return trimmed(value, 3);
}

export function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "";
}

export function rate(bytesPerSecond) {
  const giga = bytesPerSecond / 1e9;
  return giga === 0 ? "0" : giga < 0.001 ? "<0.001" : giga.toFixed(3);
}

export function ago(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit} ago`;
  }
  return `${Math.max(0, Math.round(seconds))} s ago`;
}

export function span(seconds) {
  return ago(seconds).replace(" ago", "");
}

// Of the day, where the reader is.
export function clock(seconds) {
  const date = new Date(1000 * seconds);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((n) => String(n).padStart(2, "0")).join(":");
}

export function sum(values) {
  return Object.values(values ?? {}).reduce((total, value) => total + value, 0);
}
