// A coordinator's status page: draws what looks.js saw with elements.js and chart.js.
"use strict";

const MOST = {nodes: 10, waiting: 8, users: 8, placed: 8}; // rows of each table unless all are asked for
const RATE_S = 60; // starts and moves are counted over so long
const all = new Set(); // tables that show every row

// ---- Verdicts

const broken = node => node.high && node.kept === false;
function promise(node) {
  if (!node.high) return {mark: "", text: "no high job"};
  if (node.state === "lost" || node.state === "away") return {mark: "? NOT KNOWN", text: `it is ${node.state}`};
  if (node.kept === null) return {mark: "? NOT KNOWN", text: node.verdict || "its daemon has not said yet"};
  return {mark: node.kept ? "✓ KEPT" : "✗ BROKEN", text: node.verdict};
}
function summary(nodes) {
  const high = nodes.filter(node => node.high),
    bad = high.filter(broken),
    known = high.filter(node => node.kept !== null).length,
    promises = counted(high.length, "promise");
  if (bad.length) {
    const which = high.length === 1 ? "The promise" : `${bad.length} of ${promises}`;
    return `✗ ${which} ${bad.length === 1 ? "is" : "are"} BROKEN: on ${bad
      .slice(0, 3)
      .map(node => node.name)
      .join(", ")}${bad.length > 3 ? " ..." : ""}`;
  }
  if (!high.length) return "No high job runs: nothing is promised";
  if (known < high.length) return `? ${known} of ${promises} known and kept, the rest is not known`;
  return high.length === 1 ? `✓ The promise on ${high[0].name} is kept` : `✓ All ${high.length} promises are kept`;
}
function matters(last) {
  const found = ["away", "lost", "draining"].map(state => {
    const which = last.nodes.filter(node => node.state === state);
    const names = which.slice(0, 3).map(node => node.name);
    return which.length
      ? `${counted(which.length, "node")} ${state} (${names.join(", ")}${which.length > 3 ? ", ..." : ""})`
      : "";
  });
  const [first] = last.waiting;
  found.push(
    first ? `${counted(last.waiting.length, "job")} waiting, the longest for ${age(first.since_s)}` : "no job waits",
  );
  return found.filter(Boolean).join("; ");
}

// ---- Tables

const word = () => $("filter").value.trim().toLowerCase();
const has = text =>
  word()
    .split(/\s+/)
    .every(part => text.toLowerCase().includes(part));
const wantedNode = node => has(`${node.name} ${node.host} ${node.state} ${promise(node).mark} ${promise(node).text}`);
const wantedJob = job =>
  has(`${job.short} ${job.name} ${job.user} ${job.priority} ${job.state} ${job.nodes.join(" ")} ${job.why}`);

// The rows of one table: the first ones, or all. Each cell is {mark, text, more, under, className, meter}.
function drawTable(name, entries, cells, button) {
  const shown = all.has(name) || word() ? entries : entries.slice(0, MOST[name]);
  $(`${name}-table`).hidden = !shown.length;
  sync(
    $(name),
    shown.map(entry => ({key: entry.key, entry, cells: cells(entry)})),
    made => {
      const tr = el("tr");
      tr.parts = made.cells.map(cell => {
        const parts = {
          mark: el("span", "mark"),
          text: el("span"),
          more: el("span", "less"),
          under: el("span", "under"),
          fill: el("i"),
        };
        const td = el("td", cell.className || "", parts.mark, " ", parts.text, parts.more, parts.under);
        if ("meter" in cell) td.append(el("span", "meter", parts.fill));
        tr.append(td);
        return parts;
      });
      if (button) tr.append(el("td", "", button(made.entry)));
      return tr;
    },
    (tr, made) => {
      made.cells.forEach((cell, i) => {
        const parts = tr.parts[i];
        parts.mark.hidden = !cell.mark;
        setText(parts.mark, cell.mark || "");
        setText(parts.text, cell.text);
        setText(parts.more, cell.more || ""); // only where there is room
        setText(parts.under, cell.under || ""); // only where there is none
        if ("meter" in cell) parts.fill.style.width = `${Math.min(100, 100 * cell.meter)}%`;
      });
      tr.className = made.entry.className || "";
    },
  );
  const rest = entries.length - shown.length;
  setText($(`${name}-rest`), rest ? `${rest} more` : "");
  $(`${name}-more`).hidden = Boolean(word()) || entries.length <= MOST[name];
  setText($(`${name}-more`), all.has(name) ? `Show ${MOST[name]}` : `Show all ${entries.length}`);
  const label = $(`${name}-title`).textContent;
  $(`${name}-more`).setAttribute("aria-label", `${$(`${name}-more`).textContent}: ${label}`);
}
const ORDER = {lost: 1, away: 1, draining: 2, up: 4};
function since(node) {
  const then = problem ? " THEN" : "";
  if (node.state === "up") return {mark: "", text: `up${then.toLowerCase()}`};
  const time =
    node.since_s === null
      ? node.state === "draining"
        ? "since before the coordinator was started"
        : ""
      : `for ${age(node.since_s)}, since ${clock(seen[seen.length - 1].when - node.since_s)}`;
  return {mark: `${node.state.toUpperCase()}${then}`, text: `${time}${node.why ? `: ${node.why}` : ""}`};
}
function drawNodes(last) {
  const unknown = node => node.high && node.state === "up" && node.kept === null;
  const place = node => (broken(node) ? 0 : unknown(node) ? 3 : ORDER[node.state]);
  const nodes = last.nodes
    .filter(wantedNode)
    .sort((a, b) => place(a) - place(b) || b.high - a.high || a.name.localeCompare(b.name, "en", {numeric: true}))
    .map(node => ({...node, key: node.name, className: problem ? "stale" : broken(node) ? "broken" : ""}));
  $("nodes-part").hidden = !last.nodes.length;
  setText($("nodes-title"), `Nodes (${last.nodes.length})`);
  drawTable("nodes", nodes, node => {
    const state = since(node),
      found = promise(node),
      part = node.memory_bytes ? node.used_bytes / node.memory_bytes : 0;
    return [
      {text: node.name, under: [state.mark, state.text].filter(Boolean).join(" ")},
      {mark: state.mark, text: state.text, className: "less"},
      {mark: problem && found.mark ? `? ${found.mark.slice(2)} THEN` : found.mark, text: found.text},
      {text: String(node.jobs), className: "n less"},
      {
        text: node.memory_bytes ? percent(part) : "-",
        more: node.memory_bytes ? ` of ${bytes(node.memory_bytes)}` : "",
        className: "n",
        meter: part,
      },
    ];
  });
}
const asked = job => `${job.devices} x ${bytes(job.memory_bytes)}`;
const of = job => ({text: label(job), rest: `${job.priority}, ${job.user}`});
function drawWaiting(last) {
  const jobs = last.waiting.filter(wantedJob).map(job => ({...job, key: job.short}));
  $("waiting-part").hidden = !last.waiting.length;
  setText($("waiting-title"), `Waiting jobs, longest first (${last.waiting.length})`);
  drawTable(
    "waiting",
    jobs,
    job => {
      const why = job.why || "Explain says why";
      return [
        {text: `${of(job).text} ${of(job).rest}`, under: why},
        {text: why, className: "less"},
        {text: age(job.since_s), className: "n"},
        {text: asked(job), className: "n less"},
      ];
    },
    explainButton,
  );
}
function drawPlaced(last) {
  const jobs = last.placed
    .filter(wantedJob)
    .sort((a, b) => (b.priority === "high") - (a.priority === "high") || b.since_s - a.since_s)
    .map(job => ({...job, key: job.short}));
  $("placed-part").hidden = !last.placed.length;
  setText($("placed-title"), `Jobs on devices (${last.placed.length})`);
  drawTable(
    "placed",
    jobs,
    job => {
      const state = job.state === "running" ? "" : `${job.state} `,
        moves = job.moves ? `; moved ${job.moves === 1 ? "once" : `${job.moves} times`}` : "",
        where = `${state}on ${job.nodes.join(", ")}${moves}`;
      return [
        {text: `${of(job).text} ${of(job).rest}`, under: where},
        {text: where, className: "less"},
        {text: age(job.since_s), className: "n"},
        {text: bytes(job.memory_bytes), className: "n"},
      ];
    },
    explainButton,
  );
}
function quota(user) {
  const {devices, high_devices: high, jobs} = user.quota;
  const limits = [
    devices === null ? "" : `${user.devices} of ${counted(devices, "device")}`,
    high === null ? "" : `${user.high_devices} of ${high} with high jobs`,
    jobs === null ? "" : `${user.jobs} of ${counted(jobs, "job")}`,
  ].filter(Boolean);
  const fair = user.fair_share === undefined ? "" : `; fair share ${percent(user.fair_share)}`;
  return `${limits.length ? limits.join(", ") : "no quota"}${fair}`;
}
function drawUsers(last) {
  const users = [...last.users, ...last.groups].filter(user => has(user.user)).map(user => ({...user, key: user.user}));
  $("users-part").hidden = !last.users.length;
  setText($("users-title"), `Users (${last.users.length})`);
  drawTable("users", users, user => [
    {text: user.user, under: quota(user)},
    {text: quota(user), className: "less"},
    {text: String(user.devices), className: "n"},
    {text: user.share === undefined ? "-" : percent(user.share), className: "n", meter: user.share || 0},
    {text: `${user.jobs}, ${user.waiting}`, className: "n"},
  ]);
}

// ---- Charts

const count = {format: v => v.toFixed(0), range: (u, low, high) => [0, Math.max(4, 1.05 * high)]};
const charts = {
  numbers: new Chart("numbers", {title: "Jobs", unit: "by where they stand", ...count}),
  waits: new Chart("waits", {
    title: "Longest wait",
    unit: "since the job was submitted",
    format: age,
    range: (u, low, high) => [0, Math.max(10, 1.05 * high)],
  }),
  moves: new Chart("moves", {title: "Placed, moved, ended", unit: "jobs in the last minute", ...count}),
  memory: new Chart("memory", {
    title: "Memory",
    unit: "of all nodes' devices that jobs have",
    format: percent,
    range: () => [0, 1],
  }),
};

// The looks with an empty one where some had no answer: there no line is drawn.
function pastLooks() {
  const looks = [];
  seen.forEach((now, i) => {
    const before = seen[i - 1];
    if (before && (now.gap || now.when - before.when > GAP_S))
      looks.push({when: (before.when + now.when) / 2, now: null});
    looks.push({when: now.when, now});
  });
  return looks;
}
function recent(names) {
  let first = 0;
  return now => {
    while (seen[first].when < now.when - RATE_S) first++;
    return names.reduce((sum, name) => sum + now.counts[name] - seen[first].counts[name], 0);
  };
}
function drawCharts() {
  const looks = pastLooks(),
    times = looks.map(look => look.when);
  const line = (label, colour, value) => ({
    label,
    colour,
    values: looks.map(look => (look.now ? value(look.now) : null)),
  });
  const waiting = (now, priority) => now.waiting.filter(job => job.priority === priority);
  const longest = (now, priority) => waiting(now, priority).reduce((most, job) => Math.max(most, job.since_s), 0);
  const sum = (now, name) => now.nodes.reduce((total, node) => total + node[name], 0);
  charts.numbers.show(times, [
    line("on devices", "--c1", now => now.placed.length),
    line("high waiting", "--c2", now => waiting(now, "high").length),
    line("low waiting", "--c3", now => waiting(now, "low").length),
  ]);
  charts.waits.show(times, [
    line("high", "--c2", now => longest(now, "high")),
    line("low", "--c3", now => longest(now, "low")),
  ]);
  charts.moves.show(times, [
    line("placed", "--c1", recent(["started"])),
    line("moved", "--c2", recent(["moved"])),
    line("ended", "--c3", recent(["done", "failed", "cancelled", "refused"])),
  ]);
  charts.memory.show(times, [
    line("in use", "--c1", now => (sum(now, "memory_bytes") ? sum(now, "used_bytes") / sum(now, "memory_bytes") : 0)),
  ]);
}

// ---- The page

function draw() {
  const last = seen[seen.length - 1],
    jobs = last.waiting.length + last.placed.length,
    text = last.nodes.length ? summary(last.nodes) : "",
    up = last.nodes.filter(node => node.state === "up").length;
  const total = last.nodes.reduce((sum, node) => sum + node.memory_bytes, 0),
    used = last.nodes.reduce((sum, node) => sum + node.used_bytes, 0);
  setText($("place"), `gpumux cluster on ${last.host}`);
  setText(
    $("about"),
    [
      `gpumux ${last.version}`,
      `${up} of ${counted(last.nodes.length, "node")} up`,
      counted(jobs, "job"),
      `memory ${bytes(used)} of ${bytes(total)}`,
      `as of ${clock(last.when)}`,
    ].join("; "),
  );
  const said = text.replace(/^[✗✓?] /, "");
  setText($("summary"), problem ? text && `? Not known now. At ${clock(last.when)}: ${said}` : text);
  $("summary").className = !problem && last.nodes.some(broken) ? "broken" : "";
  $("summary").hidden = !text;
  setText($("matters"), last.nodes.length ? `${problem ? "Then: " : ""}${matters(last)}` : "");
  document.title = `${problem ? "? no answer, " : text ? `${text.split(":")[0]}, ` : ""}${last.host} - gpumux cluster`;
  $("no-nodes").hidden = last.nodes.length > 0 || Boolean(problem);
  $("empty").hidden = jobs > 0 || !last.nodes.length || Boolean(problem);
  $("filter-part").hidden = !last.nodes.length;
  drawNodes(last);
  drawWaiting(last);
  drawUsers(last);
  drawPlaced(last);
  const found = last.nodes.filter(wantedNode).length,
    foundJobs = [...last.waiting, ...last.placed].filter(wantedJob).length;
  setText(
    $("filtered"),
    word() ? `${found} of ${counted(last.nodes.length, "node")} and ${foundJobs} of ${counted(jobs, "job")} match` : "",
  );
  $("pictures").hidden = seen.length < 2 || !seen.some(look => look.nodes.length);
  if (!$("pictures").hidden) drawCharts();
}

// What looks.js needs to know of this page.
const PAGE = {
  process: "coordinator",
  commands: ["gpumux cluster status"],
  restart: ["gpumux cluster status", "gpumux cluster up cluster.toml"],
  instead: "`gpumux cluster status` shows the same.",
  draw,
  forget() {},
  explained: (short, found) => [
    el("p", "verdict", found.sentences[0]),
    ...listed("Besides", found.sentences.slice(1)),
    el("h3", "", "More"),
    el("p", "", "Its owner and operators get the same in a terminal, and can cancel it:"),
    el("code", "", `gpumux cluster explain ${short}`),
    el("code", "", `gpumux cluster cancel ${short}`),
  ],
  byCommand: short => `gpumux cluster explain ${short}`,
};
for (const name of Object.keys(MOST))
  $(`${name}-more`).addEventListener("click", () => {
    if (!all.delete(name)) all.add(name);
    draw();
  });
$("filter").addEventListener("input", () => seen.length && draw());
goOn();
