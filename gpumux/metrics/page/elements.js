// Text and elements, for the other scripts of the page. Users' text becomes text, never markup.
"use strict";

const $ = id => document.getElementById(id);

// ---- Text

const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const percent = x => (x === null ? "-" : x > 0 && x < 0.005 ? "< 1 %" : `${(100 * x).toFixed(0)} %`);
const label = job => (job.name ? `${job.short} ${job.name}` : job.short);
const clock = t => new Date(1000 * t).toLocaleTimeString("en-GB");
function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return `${unit === "B" ? n : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}
function age(s) {
  if (s < 1) return `${Math.max(0, s).toFixed(1)} s`;
  if (s < 120) return `${s.toFixed(0)} s`;
  return s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(0)} h`;
}
function seconds(s) {
  return s === null ? "?" : s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
}
const rate = x => (x === null ? "-" : x < 9.95 ? x.toFixed(1) : x.toFixed(0));

// ---- Elements

function el(name, className = "", ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Give `parent` one child an entry, in that order. A child is kept for as long as its key is there, and with it focus
// and what is selected.
function sync(parent, entries, make, fill) {
  const old = parent.kept || new Map();
  parent.kept = new Map();
  let at = parent.firstElementChild;
  for (const entry of entries) {
    const child = old.get(entry.key) || make(entry);
    old.delete(entry.key);
    parent.kept.set(entry.key, child);
    fill(child, entry);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  for (const child of old.values()) child.remove();
}
function plainRows(body, rows) {
  sync(
    body,
    rows.map((cells, i) => ({key: i, cells})),
    () => el("tr"),
    (tr, entry) => {
      sync(
        tr,
        entry.cells.map(([text, className], i) => ({key: i, text, className})),
        cell => el("td", cell.className || ""),
        (td, cell) => setText(td, cell.text),
      );
    },
  );
}
