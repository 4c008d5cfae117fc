// Numbers as people read them: three digits, and a unit. Null is unknown, and a dash.

const NONE = "–";
const SIZES = ["B", "kB", "MB", "GB", "TB"];

function digits(value) {
  const size = Math.abs(value);
  return size >= 100 || value === 0 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (value !== 0 && Math.abs(value) < 0.01) return value.toPrecision(2);
  return Math.abs(value) >= 10000 ? Math.round(value).toLocaleString("en") : digits(value);
}

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en");
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < SIZES.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? digits(value) : Math.round(value)} ${SIZES[unit]}`;
}

export function rate(value) {
  return value === null || value === undefined ? NONE : `${bytes(value)}/s`;
}

export function share(value) {
  if (value === null || value === undefined) return NONE;
  const percent = 100 * value;
  return `${percent > 0 && percent < 9.95 ? percent.toFixed(1) : percent.toFixed(0)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  return value < 1 ? `${Math.round(1000 * value)} ms` : value < 100 ? `${digits(value)} s` : duration(value);
}

export function duration(value) {
  const whole = Math.max(0, Math.floor(value));
  const [d, h, m, s] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${String(m).padStart(2, "0")} min`;
  return m ? `${m} min ${String(s).padStart(2, "0")} s` : `${s} s`;
}

// A time since the job began, as a clock shows it: 1:02:03.
export function clock(value) {
  const whole = Math.max(0, Math.floor(value));
  const two = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const rest = `${hours ? two(Math.floor(whole / 60) % 60) : Math.floor(whole / 60)}:${two(whole % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

// Ranks in few words: 0–2, 5.
export function ranks(list) {
  const parts = [];
  for (let first = 0; first < list.length; ) {
    let last = first;
    while (list[last + 1] === list[last] + 1) last += 1;
    parts.push(last === first ? `${list[first]}` : last === first + 1 ? `${list[first]}, ${list[last]}` : `${list[first]}–${list[last]}`);
    first = last + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 11).join(", ")}, …` : parts.join(", ");
}

export function plural(amount, noun) {
  return `${count(amount)} ${noun}${amount === 1 ? "" : "s"}`;
}
