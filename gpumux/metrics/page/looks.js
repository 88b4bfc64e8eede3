// Looks: /status.json is asked for once a second and what it said is remembered; if no answer comes, the page says so. And
// the explanation of one job, in a dialog. The script of the page, which comes after this one, defines PAGE.
"use strict";

const KEEP = 600; // looks that are remembered
const EVERY_MS = 1000;
const ANSWER_MS = 5000; // a request without an answer for so long has failed
const GAP_S = 300; // between two looks: a line is not drawn across more (a page in the background looks once a minute)

const seen = []; // answers of /status.json, oldest first
let failed = false; // whether the newest look had no answer
let problem = null; // {title, text, commands}: why what is shown is not of now

function tell() {
  const leaving = !problem && seen.length && seen[seen.length - 1].leaving;
  const title = `The ${PAGE.process} is leaving and takes no more work.`;
  const found = problem || (leaving ? {title, text: leaving, commands: []} : null);
  $("alert").hidden = !found;
  const text = found ? JSON.stringify(found) : "";
  if ($("alert").told === text) return; // a reader of the screen reads it once
  $("alert").told = text;
  $("alert").replaceChildren(
    ...(found
      ? [
          el("p", "", el("strong", "", found.title), ` ${found.text}`),
          ...found.commands.map(command => el("p", "", el("code", "", command))),
        ]
      : []),
  );
}
const shownUntil = () => (seen.length ? `What is below was seen at ${clock(seen[seen.length - 1].when)}.` : "");

async function ask(path) {
  const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS)}),
    text = await answer.text();
  let body = {};
  try {
    body = JSON.parse(text);
  } catch {
    body = {error: text.slice(0, 200)};
  }
  if (!answer.ok)
    throw Object.assign(new Error(body.error || `HTTP ${answer.status}`), {answered: true, status: answer.status});
  return body;
}
let asking = null;
const look = () =>
  (asking ||= lookOnce().finally(() => {
    asking = null;
  }));
async function lookOnce() {
  try {
    const got = await ask("/status.json"),
      last = seen[seen.length - 1];
    if (last && (got.started !== last.started || got.when < last.when)) {
      // A new process, of which nothing that was seen is true; or its machine's clock was set back, and what was seen
      // has times that are still to come.
      seen.length = 0;
      PAGE.forget();
    }
    if (seen.length && got.when === seen[seen.length - 1].when) {
      problem = {
        title: `The ${PAGE.process}'s loop stands still.`,
        text: `It answers, but with nothing newer. ${shownUntil()} Its log may say why; on its machine:`,
        commands: PAGE.commands,
      };
    } else {
      problem = null;
      seen.push({...got, gap: failed});
      failed = false;
      if (seen.length > KEEP) seen.shift();
    }
  } catch (error) {
    failed = true;
    problem = error.answered
      ? {
          title: `The ${PAGE.process} has no answer yet.`,
          text: `${error.message}. ${shownUntil()} If this lasts, on its machine:`,
          commands: PAGE.commands,
        }
      : {
          title: `No answer from the ${PAGE.process}.`,
          text:
            `It has ended, hangs, or the connection to it is cut. ${shownUntil()} ` +
            "This page goes on by itself when it is back. On its machine:",
          commands: PAGE.restart,
        };
  }
  try {
    if (seen.length) PAGE.draw();
    else if (problem) setText($("about"), "nothing was seen yet");
    tell();
  } catch (error) {
    problem = {
      title: "This page could not draw the answer.",
      text: `${error.message}. Reload it: the ${PAGE.process} may be of another version. ${PAGE.instead}`,
      commands: [],
    };
    setText($("summary"), "? Not known now");
    $("summary").className = "";
    document.title = "? not known now - gpumux";
    tell();
  }
}
async function goOn() {
  await look();
  setTimeout(goOn, EVERY_MS);
}

// ---- The explanation of one job

let explained = "";
const AGAIN_MS = 200; // after another reader has just asked; one job is explained at a time
function explainButton(job) {
  const made = el("button", "", "Explain");
  made.type = "button";
  made.setAttribute("aria-label", `Explain ${job.short}`);
  made.addEventListener("click", () => explain(job.short));
  return made;
}
function listed(title, lines) {
  return lines.length ? [el("h3", "", title), el("ul", "", ...lines.map(line => el("li", "", line)))] : [];
}
async function askAbout(short) {
  for (let tries = 1; ; tries++) {
    try {
      return await ask(`/explain.json?job=${encodeURIComponent(short)}`);
    } catch (error) {
      if (error.status !== 429 || tries === 10) throw error;
      await new Promise(done => setTimeout(done, AGAIN_MS));
    }
  }
}
async function explain(short) {
  explained = short;
  setText($("explained"), short);
  $("explained-text").replaceChildren(el("p", "faint", "asking ..."));
  if (!$("explanation").open) $("explanation").showModal();
  let parts;
  try {
    const found = await askAbout(short);
    if (explained !== short) return; // another one was asked for meanwhile
    setText($("explained"), `${label(found)} (${found.priority})`);
    parts = PAGE.explained(short, found);
  } catch (error) {
    parts = [
      el("p", "", `There is no explanation: ${error.message}.`),
      el("p", "", `Ask again, or on the ${PAGE.process}'s machine:`),
      el("code", "", PAGE.byCommand(short)),
    ];
  }
  if (explained === short) $("explained-text").replaceChildren(...parts);
}
$("again").addEventListener("click", () => explain(explained));
$("close").addEventListener("click", () => $("explanation").close());
