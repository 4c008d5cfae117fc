// The page: it listens to the stream of events, and shows what comes.

import { Chart } from "./charts.js";
import { bytes, clock, count, duration, number, plural, ranks, rate, seconds, share } from "./figures.js";
import { LinkMap } from "./links.js";
import { Table } from "./tables.js";

const QUIET_MS = 5000; // without news, the page says so
const AGAIN_MS = 2000; // until a stream of events that was refused is asked for again
const BRIEF_S = 0.1; // waits that are shorter belong to every round
const PLAIN = ["epoch", "step", "batch"]; // values that are told, not drawn
const element = (id) => document.getElementById(id);

const page = { span: "recent", history: { width: 1, times: [], columns: {} }, heard: performance.now(), over: false, view: null, drawing: false };

// ---- small things

function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// Show items in a list, each by its key; a row changes only where its text does.
function list(parent, items, make, none) {
  const shown = items.length ? items : [{ key: "", none: true }];
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  shown.forEach((item, place) => {
    let row = known.get(item.key);
    if (!row) {
      row = document.createElement("li");
      row.dataset.key = item.key;
    }
    known.delete(item.key);
    if (item.none) {
      row.className = "none";
      write(row, none);
    } else make(row, item);
    if (parent.children[place] !== row) parent.insertBefore(row, parent.children[place] ?? null);
  });
  for (const row of known.values()) row.remove();
}

// The element of a class in a row; it is made if it is not there.
function part(row, kind, name) {
  let found = row.querySelector(`:scope > .${name}`);
  if (!found) {
    found = document.createElement(kind);
    found.className = name;
    row.append(found);
  }
  return found;
}

function announce(text) {
  write(element("announcer"), text);
}

function banner(text, kind) {
  const target = element("banner");
  target.hidden = !text;
  target.dataset.kind = kind ?? "";
  write(target, text);
}

function state(name, text) {
  const target = element("state");
  if (target.dataset.state === name && element("state-text").textContent === text) return;
  target.dataset.state = name;
  write(element("state-text"), text);
  announce(`The job: ${text}.`);
}

// ---- tables

const STATES = { joined: "joining", ready: "ready", left: "left", lost: "lost" };

function stateOf(value, row) {
  const again = row.starts > 1 ? `, start ${row.starts}` : "";
  const silent = value === "ready" && row.silent > 5 ? `, silent ${seconds(row.silent)}` : "";
  return `${STATES[value] ?? value}${again}${silent}`;
}

const NAME = { key: "name", title: "Name", hint: "Sort by name", show: (value) => value, text: true };
const STATE = { key: "state", title: "State", hint: "Sort by state", show: stateOf, text: true };
const MEMORY = { key: "memory", title: "Memory", hint: "Memory of the process", show: bytes };
const CORES = { key: "cores", title: "Cores", hint: "Processor cores in use", show: number };
const ROUNDS = { key: "rounds", title: "Rounds", hint: "Rounds since it joined", show: count };
const HOST = { key: "host", title: "Host", hint: "Sort by the host that it runs on", show: (value) => value || "–", text: true };
const PROCESS = { key: "pid", title: "Process", hint: "Number of its process, on that host", show: (value) => `${value ?? "–"}` };
const RATE = { key: "rate", title: "Rounds/s", hint: "Rounds a second", show: number };

const workers = new Table(
  element("workers"),
  [
    NAME,
    STATE,
    ROUNDS,
    RATE,
    { key: "waiting", title: "Waits", hint: "Part of the time in which it waits for answers", show: share, bar: 1 },
    { key: "last", title: "Comes last", hint: "Part of the rounds in which its push is the last", show: share, bar: 1, hot: 0.8 },
    { key: "alone", title: "Is awaited", hint: "Part of the time in which others wait for it alone", show: share, bar: 1, hot: 0.1 },
    { key: "input", title: "Input", hint: "Part of the time in which it waits for data", show: share },
    { key: "ahead", title: "Ahead", hint: "Pushes ahead of the slowest worker: its staleness", show: count },
    CORES,
    MEMORY,
    { key: "sent", title: "Sends", hint: "Bytes a second to servers", show: rate },
    { key: "received", title: "Receives", hint: "Bytes a second from servers", show: rate },
    HOST,
    PROCESS,
  ],
  openMember,
);
const servers = new Table(
  element("servers"),
  [
    NAME,
    STATE,
    ROUNDS,
    RATE,
    { key: "busy", title: "Busy", hint: "Part of the time in which it handles messages", show: share, bar: 1, hot: 0.8 },
    { key: "held", title: "Holds", hint: "Bytes of parameters that are placed there", show: bytes, bar: 0 },
    { key: "received", title: "Receives", hint: "Bytes a second of gradients", show: rate },
    { key: "sent", title: "Sends", hint: "Bytes a second of values", show: rate },
    { key: "version", title: "Version", hint: "The newest version that is published for followers", show: count },
    { key: "followers", title: "Followers", hint: "Readers that follow versions", show: count },
    { key: "behind", title: "Behind", hint: "Versions that the last of these is behind", show: count },
    { key: "waiting", title: "Wait there", hint: "Workers that wait for its answer", show: count },
    CORES,
    MEMORY,
    HOST,
    PROCESS,
  ],
  openMember,
);
const links = new LinkMap(element("links"), element("links-text"), element("links-cell"));

// ---- charts

const charts = new Map();

function chart(key, ...rest) {
  if (!charts.has(key)) charts.set(key, new Chart(element("charts"), ...rest));
}

function makeCharts() {
  chart("rounds", "Rounds per second", [{ column: "rounds", color: "--line-1" }], number);
  const waits = [
    { column: "waiting", label: "Workers wait", color: "--line-2" },
    { column: "busy", label: "Busiest server", color: "--line-1" },
  ];
  chart("waiting", "Waiting and work", waits, share, 0, 1);
  const traffic = [
    { column: "pushed", label: "To servers", color: "--line-1" },
    { column: "pulled", label: "From servers", color: "--line-3" },
  ];
  chart("traffic", "Network", traffic, rate);
  const memory = [
    { column: "worker memory", label: "Memory of workers", color: "--line-1" },
    { column: "server memory", label: "of servers", color: "--line-3" },
  ];
  chart("memory", "Memory", memory, bytes);
}

function moreCharts() {
  for (const column of Object.keys(page.history.columns)) {
    const name = column.slice(6);
    if (column.startsWith("value ") && !PLAIN.includes(name)) {
      chart(column, name, [{ column, color: "--line-4" }], number, null);
    }
  }
  if (page.history.columns.ahead?.some((value) => value > 0)) {
    chart("ahead", "Staleness", [{ column: "ahead", label: "Staleness: pushes ahead, at most", color: "--line-2" }], count);
  }
}

function drawCharts() {
  moreCharts();
  for (const each of charts.values()) each.set(page.history);
}

// Draw the charts and the map of links when the browser has shown the rest: word of a death does not wait for them.
function drawSoon() {
  if (page.drawing) return;
  page.drawing = true;
  requestAnimationFrame(() =>
    setTimeout(() => {
      page.drawing = false;
      links.set(page.view.workers);
      if (page.span === "recent") drawCharts();
    }),
  );
}

async function fetchHistory(span, member) {
  const query = new URLSearchParams({ span, ...(member ? { member } : {}) });
  const answer = await fetch(`history?${query}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function refresh() {
  const span = page.span;
  page.refreshed = performance.now();
  try {
    const history = await fetchHistory(span);
    if (span === page.span) page.history = history;
    drawCharts();
  } catch {
    page.refreshed = 0; // the stream of events says what is wrong
  }
}

// Add the numbers of a view at the end of what is drawn, in the bucket of its time.
function extend(view) {
  const { times, columns, width } = page.history;
  const now = { ...view.figures };
  delete now.round;
  for (const [name, value] of Object.entries(view.values)) now[`value ${name}`] = value;
  const begun = Math.floor(view.age / width) * width;
  const fresh = !times.length || begun > times.at(-1);
  if (fresh && times.length && begun - times.at(-1) > 3 * width) {
    refresh(); // the page was asleep
    return;
  }
  if (fresh) times.push(begun);
  for (const name of Object.keys(now)) columns[name] ??= new Array(times.length - (fresh ? 1 : 0)).fill(null);
  for (const [name, column] of Object.entries(columns)) {
    if (fresh) column.push(now[name] ?? null);
    else column[column.length - 1] = now[name] ?? null;
  }
  while (page.span === "recent" && times.length > 601) {
    times.shift();
    for (const column of Object.values(columns)) column.shift();
  }
}

// ---- one member

const dialog = element("member");
const own = { name: "", charts: [] };

function openMember(name) {
  own.name = name;
  own.charts.forEach((each) => each.remove());
  const parent = element("member-charts");
  const first = name.startsWith("worker")
    ? new Chart(parent, "Waits", [{ column: "waiting", color: "--line-2" }], share, 0, 1)
    : new Chart(parent, "Busy", [{ column: "busy", color: "--line-1" }], share, 0, 1);
  own.charts = [
    first,
    new Chart(parent, "Network", [{ column: "traffic", color: "--line-1" }], rate),
    new Chart(parent, "Cores", [{ column: "cores", color: "--line-3" }], number),
    new Chart(parent, "Memory", [{ column: "memory", color: "--line-1" }], bytes),
  ];
  write(element("member-title"), name);
  dialog.showModal();
  showMember();
}

async function showMember() {
  if (!dialog.open) return;
  const name = own.name;
  const row = [...(page.view?.workers ?? []), ...(page.view?.servers ?? [])].find((each) => each.name === name);
  if (row) {
    const runs = row.pid ? `; process ${row.pid} on ${row.host}` : "";
    const where = row.address ? `, at ${row.address}` : "";
    write(element("member-about"), `${stateOf(row.state, row)}; last heard ${seconds(row.silent)} ago${where}${runs}`);
  }
  try {
    const history = await fetchHistory(page.span, name);
    if (name === own.name) own.charts.forEach((each) => each.set(history));
  } catch {
    // It has reported nothing yet.
  }
}

dialog.addEventListener("close", () => {
  own.charts.forEach((each) => each.remove());
  own.charts = [];
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
element("member-close").addEventListener("click", () => dialog.close());

// ---- a view

const KINDS = { worker: "worker", server: "server", standby: "standby", aggregator: "aggregator" };

function crew(view) {
  const here = (role) => [...view.workers, ...view.servers].filter((each) => each.role === role && each.state === "ready").length;
  return Object.keys(KINDS)
    .filter((role) => view.expected[role])
    .map((role) => `${here(role)} of ${plural(view.expected[role], role).replace("standbys", "standbys")}`)
    .join(" · ");
}

function told(view) {
  return PLAIN.filter((name) => name in view.values).map((name) => `${name} ${count(view.values[name])}`);
}

function stateOfJob(view) {
  const lost = [...view.workers, ...view.servers].filter((each) => each.state === "lost").length;
  const joined = view.workers.filter((each) => each.state !== "joined").length;
  if (view.failure) state("failed", "failed");
  else if (lost) state("hurt", `${lost} lost`);
  else if (joined < view.expected.worker) state("connecting", "starting");
  else if (ending(view)) state("over", "ending");
  else state("running", "running");
  banner(view.failure ? `The job has failed: ${view.failure}` : "", "bad");
}

const FINDINGS = {
  straggler_compute: "Slow to compute",
  straggler_input: "Slow to read its input",
  straggler_network: "Slow network",
  straggler_local: "Slow",
  stuck: "Stuck",
  uneven_servers: "Uneven servers",
  bound_by_store: "The servers are the limit",
  bound_by_network: "The network is the limit",
  bound_by_input: "The input is the limit",
};
const advised = new Set();

// What is said where there is nothing to show.
function nothing(view, text) {
  if (ending(view)) return "The workers have ended.";
  return view.figures.rounds === null ? "Nothing has been seen yet." : text;
}

function showAdvice(view) {
  const items = view.advice.map((each) => ({ ...each, key: `${each.kind} ${each.about}` }));
  list(
    element("advice"),
    items,
    (row, item) => {
      row.dataset.severity = item.severity;
      write(part(row, "strong", "about"), [FINDINGS[item.kind] ?? item.kind, item.about].filter(Boolean).join(": "));
      write(part(row, "span", "text"), item.text.replaceAll(" %", "\u00a0%"));
      if (!advised.has(item.key)) {
        advised.add(item.key);
        announce(item.text);
      }
    },
    nothing(view, "Nothing stands out."),
  );
}

function showWaiting(view) {
  const groups = new Map();
  for (const wait of view.waiting.filter((each) => each.seconds >= BRIEF_S)) {
    const key = wait.missing.join(" ") || wait.why;
    const group = groups.get(key) ?? { key, missing: wait.missing, seconds: 0, at: [], waiting: new Set(), why: wait.why };
    group.at.push(wait.at);
    group.seconds = Math.max(group.seconds, wait.seconds);
    wait.waiting.forEach((rank) => group.waiting.add(rank));
    groups.set(key, group);
  }
  const items = [...groups.values()].sort((a, b) => b.seconds - a.seconds).slice(0, 8);
  if (view.waits) items.unshift({ key: "scheduler", seconds: null, missing: [], waiting: new Set(), at: ["scheduler"], why: view.waits });
  list(
    element("waiting"),
    items,
    (row, item) => {
      const waiting = [...item.waiting].sort((a, b) => a - b);
      const who = waiting.length ? `${waiting.length === 1 ? "worker" : "workers"} ${ranks(waiting)}` : item.at.join(", ");
      const whom = item.missing.length ? `${item.missing.length === 1 ? "worker" : "workers"} ${ranks(item.missing)}` : "";
      write(part(row, "span", "who"), who);
      write(part(row, "span", "arrow"), whom ? "wait for" : "wait");
      write(part(row, "strong", "whom"), whom);
      write(part(row, "span", "long"), item.seconds === null ? "" : seconds(item.seconds));
      write(part(row, "span", "why"), item.why);
    },
    nothing(view, "Nobody has waited for more than 0.1 s."),
  );
}

function showEvents(view) {
  const items = view.events.map((each) => ({ ...each, key: String(each.number) })).reverse();
  list(
    element("events"),
    items,
    (row, item) => {
      write(part(row, "time", "at"), clock(item.at));
      write(part(row, "span", "text"), item.text);
    },
    "Nothing has happened yet.",
  );
}

function show(view) {
  page.view = view;
  const title = view.title || "A job";
  write(element("title"), title);
  element("title").title = title;
  document.title = view.failure ? `✗ ${title}` : title;
  const round = view.figures.round === null ? [] : [`round ${count(view.figures.round)}`];
  write(element("about"), [duration(view.age), crew(view), ...round, ...told(view)].join(" · "));
  stateOfJob(view);
  showAdvice(view);
  showWaiting(view);
  view.workers.forEach((each, place) => (each.place = place));
  view.servers.forEach((each, place) => (each.place = place));
  workers.render(view.workers);
  servers.render(view.servers);
  links.aggregated = view.expected.aggregator > 0;
  showEvents(view);
  if (page.span === "recent") extend(view);
  else if (performance.now() - page.refreshed > 1000 * page.history.width) refresh();
  drawSoon();
  showMember();
}

function hear(message) {
  page.heard = performance.now();
  if (message.kind === "view") show(message);
  else if (message.kind === "over") {
    page.over = true;
    state(page.view?.failure ? "failed" : "over", page.view?.failure ? "failed" : "over");
    if (!page.view?.failure) banner(`${message.text} The page shows how it was in the end.`, "");
  } else if (!page.view) write(element("about"), "Waiting for the scheduler …");
  else if (!ending(page.view) && message.since > 3) banner(`The scheduler has not answered for ${seconds(message.since)}: ${message.text}`, "bad");
}

// Whether a job ends: nobody answers any more, and that is well.
function ending(view) {
  return view.failure || (view.workers.length && view.workers.every((each) => each.state === "left"));
}

function listen() {
  const stream = new EventSource("events");
  stream.addEventListener("message", (event) => {
    hear(JSON.parse(event.data));
    if (page.over) stream.close();
  });
  stream.addEventListener("open", refresh);
  stream.addEventListener("error", () => {
    // The browser tries again by itself when a connection breaks, but not when it has been refused.
    if (stream.readyState === EventSource.CLOSED && !page.over) setTimeout(listen, AGAIN_MS);
  });
}

function watch() {
  setInterval(() => {
    if (page.over || performance.now() - page.heard < QUIET_MS) return;
    state("silent", "no news");
    banner(`No news for ${seconds((performance.now() - page.heard) / 1000)}: the process that serves this page does not answer. The job may run on.`, "bad");
  }, 1000);
}

element("span").addEventListener("change", (event) => {
  page.span = event.target.value;
  page.history = { width: 1, times: [], columns: {} };
  refresh();
  showMember();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const each of [...charts.values(), ...own.charts]) each.draw();
  links.draw();
});

makeCharts();
listen();
watch();
