// A daemon's status page: draws what looks.js saw with elements.js and chart.js.
"use strict";

const MOST_LOW = 10; // low jobs in the table unless all are asked for
const MOST_AREAS = 4; // low jobs with an area of their own
const COLOURS = 8; // --c1 to --c8
const RESORT_MS = 5000; // rows keep their places for so long, so that one can read them
const MOST_SLOWDOWN = 4; // where values are drawn that are higher, unless more was promised

// Why a low job is held (scheduler/guard/decisions.py), as said of the high job that it is held for.
const REASONS = {
  calibration: "a step runs alone, so that its speed is known",
  learning: "what it costs that job is tried, one launch at a time",
  ban: "it slows what runs there too much, and is banned from it",
  price: "it waits for a part of the step that it slows less",
  budget: "that job has lost all that it may lose on average",
  tail: "the step that runs may not lose more",
  gap: "the next step is expected before it would end",
};

const colours = new Map(); // high job -> index of its colour, for as long as it is open
let areas = []; // low jobs with an area of their own
let order = []; // low jobs as the table has them
let sortedAt = 0;
let all = false; // whether the table shows every low job

// ---- What happens between two looks

function rates(before, now) {
  const passed = before ? now.when - before.when : 0;
  const old = new Map((before ? before.jobs : []).map(job => [job.short, job]));
  return new Map(
    now.jobs.map(job => {
      const was = passed > 0 ? old.get(job.short) : undefined;
      if (!was) return [job.short, {steps: null, device: null}];
      return [
        job.short,
        {steps: (job.steps_done - was.steps_done) / passed, device: (job.device_busy_s - was.device_busy_s) / passed},
      ];
    }),
  );
}
// Over some looks: device time is counted when a piece ends, which makes single looks jump.
const smooth = () => rates(seen[Math.max(0, seen.length - 6)], seen[seen.length - 1]);

// ---- Verdicts

function judged(job, guard) {
  if (!job.promise)
    return {
      mark: "?",
      word: "NOT KNOWN",
      text: guard ? "no step has run yet" : "nothing is promised: this policy has no guard",
    };
  if (job.promise.slowdown === null) return {mark: "?", word: "NOT KNOWN", text: job.promise.verdict};
  return job.promise.kept
    ? {mark: "✓", word: "KEPT", text: job.promise.verdict}
    : {mark: "✗", word: "BROKEN", text: job.promise.verdict};
}
const broken = job => Boolean(job.promise && job.promise.slowdown !== null && !job.promise.kept);
const known = job => Boolean(job.promise && job.promise.slowdown !== null);

function summary(high, guard) {
  const bad = high.filter(broken);
  if (bad.length) {
    const which = high.length === 1 ? "The promise" : `${bad.length} of ${counted(high.length, "promise")}`;
    return `✗ ${which} ${bad.length === 1 ? `is BROKEN: ${label(bad[0])}` : "are BROKEN"}`;
  }
  if (!high.length) return "";
  if (!guard) return "? Nothing is promised: serve with --policy guarded";
  const judged = high.filter(known).length,
    all = counted(high.length, "promise");
  if (judged < high.length)
    return high.length === 1
      ? `? The promise to ${label(high[0])} is not measured yet`
      : `? ${judged} of ${all} known and kept, the rest is not measured yet`;
  return high.length === 1 ? `✓ The promise to ${label(high[0])} is kept` : `✓ All ${high.length} promises are kept`;
}

// ---- Jobs

const word = () => $("filter").value.trim().toLowerCase();
function wanted(job) {
  const held = job.held ? `held ${job.held}` : "";
  const text = `${job.short} ${job.name} ${job.priority} ${job.state} ${held} uid ${job.uid}`.toLowerCase();
  return word()
    .split(/\s+/)
    .every(part => text.includes(part));
}
function doing(job) {
  if (job.state !== "open") return job.state;
  if (job.held) {
    const time = job.held_for_s >= 1 ? `${age(job.held_for_s)} ` : "",
      why = REASONS[job.held] || "see docs/metrics.md";
    return `held ${time}for ${job.held_by || "a high job"} (${job.held}): ${why}`;
  }
  if (job.outstanding) return "runs";
  return job.queued ? "waits for its turn" : "idle";
}
function chooseColours(high) {
  const there = new Set(high.map(job => job.short)),
    free = new Set(Array.from({length: COLOURS}, (_, i) => i + 1));
  for (const [short, colour] of colours) {
    if (there.has(short)) free.delete(colour);
    else colours.delete(short);
  }
  for (const {short} of high) {
    if (colours.has(short)) continue;
    const [colour = (colours.size % COLOURS) + 1] = free;
    free.delete(colour);
    colours.set(short, colour);
  }
}
function drawHigh(last, now) {
  const high = last.jobs.filter(job => job.priority === "high");
  chooseColours(high);
  high.sort((a, b) => broken(b) - broken(a));
  const shown = high.filter(wanted);
  $("important").hidden = !shown.length;
  sync(
    $("high"),
    shown.map(job => ({key: job.short, job})),
    ({job}) => {
      const li = el("li"),
        head = el("div", "head"),
        name = el("b"),
        text = el("span"),
        verdict = el("p", "verdict"),
        facts = el("p", "faint");
      const mark = el("span", "mark"),
        swatch = el("i", "key");
      name.append(swatch, text);
      head.append(mark, name, explainButton(job));
      li.append(head, verdict, facts);
      li.parts = {mark, swatch, text, verdict, facts};
      return li;
    },
    (li, {job}) => {
      const found = judged(job, last.guard),
        r = now.get(job.short),
        p = job.promise;
      li.className = problem ? "stale" : broken(job) ? "broken" : "";
      setText(li.parts.mark, problem ? `? ${found.word} THEN` : `${found.mark} ${found.word}`);
      li.parts.swatch.style.background = `var(--c${colours.get(job.short)})`;
      setText(li.parts.text, label(job));
      setText(li.parts.verdict, found.text);
      setText(
        li.parts.facts,
        [
          job.state === "open" ? "" : job.state,
          `${rate(r.steps)} steps/s`,
          `${percent(r.device)} of device`,
          p && p.solo_step_s ? `step alone ${seconds(p.solo_step_s)}` : "",
          `${job.queued} queued`,
          bytes(job.memory_bytes),
        ]
          .filter(Boolean)
          .map(fact => fact.replaceAll(" ", "\u00a0"))
          .join(" · "),
      );
    },
  );
  return high;
}
function sorted(low, now) {
  const share = job => Math.round(100 * (now.get(job.short).device || 0)),
    number = job => parseInt(job.short.slice(1)) || 0;
  const held = $("low-table").matches(":hover, :focus-within"),
    there = new Set(low.map(job => job.short));
  const fresh = low.some(job => !order.includes(job.short)) || order.some(short => !there.has(short));
  if (fresh || (!held && Date.now() - sortedAt > RESORT_MS)) {
    order = [...low].sort((a, b) => share(b) - share(a) || number(a) - number(b)).map(job => job.short);
    sortedAt = Date.now();
  }
  return order.map(short => low.find(job => job.short === short));
}
function drawLow(last, now) {
  const low = sorted(
      last.jobs.filter(job => job.priority === "low"),
      now,
    ),
    found = low.filter(wanted),
    filtering = word() !== "";
  const shown = all || filtering ? found : found.slice(0, MOST_LOW),
    rest = found.slice(shown.length);
  const share = jobs => percent(jobs.reduce((sum, job) => sum + (now.get(job.short).device || 0), 0));
  const held = jobs => jobs.filter(job => job.held).length;
  const high = last.jobs.some(job => job.priority === "high");
  $("others").hidden = !last.jobs.length;
  setText($("others-title"), `Low jobs (${low.length})`);
  setText(
    $("low-summary"),
    low.length
      ? `${share(low)} of the device; ${held(low)} of ${counted(low.length, "job")} held now` +
          (high ? "" : "; no high job is open: nothing holds them back")
      : "none is open: what the high jobs leave idle stays idle",
  );
  setText(
    $("filtered"),
    filtering ? `${last.jobs.filter(wanted).length} of ${counted(last.jobs.length, "job")} match` : "",
  );
  $("low-table").hidden = !shown.length;
  sync(
    $("low"),
    shown.map(job => ({key: job.short, job})),
    ({job}) => {
      const tr = el("tr"),
        text = el("span"),
        under = el("span", "under"),
        name = el("td", "", text, under),
        now = el("td", "less"),
        steps = el("td", "n"),
        device = el("td", "n"),
        queued = el("td", "n less"),
        memory = el("td", "n less");
      const part = el("span"),
        fill = el("i");
      device.append(part, el("span", "meter", fill));
      tr.append(name, now, steps, device, queued, memory, el("td", "", explainButton(job)));
      tr.parts = {text, under, now, steps, part, fill, queued, memory};
      return tr;
    },
    (tr, {job}) => {
      const r = now.get(job.short);
      setText(tr.parts.text, label(job));
      setText(tr.parts.under, doing(job)); // on a narrow screen, where there is no column for it
      setText(tr.parts.now, doing(job));
      setText(tr.parts.steps, rate(r.steps));
      setText(tr.parts.part, percent(r.device));
      tr.parts.fill.style.width = `${Math.min(100, 100 * (r.device || 0))}%`;
      setText(tr.parts.queued, String(job.queued));
      setText(tr.parts.memory, bytes(job.memory_bytes));
    },
  );
  setText(
    $("rest"),
    rest.length ? `${counted(rest.length, "more job")}: together ${share(rest)} of the device, ${held(rest)} held` : "",
  );
  $("more").hidden = filtering || found.length <= MOST_LOW;
  setText($("more"), all ? `Show ${MOST_LOW}` : `Show all ${found.length}`);
}

// ---- Charts

const highestPromise = series => Math.max(1.1, ...series.filter(each => each.limit).map(each => each.values[0]));
const slowdown = {
  format: v => v.toFixed(2),
  most: series => Math.max(MOST_SLOWDOWN, 1.25 * highestPromise(series)),
  range: (u, low, high, scale, chart) => [Math.min(0.95, low), 1.03 * Math.max(highestPromise(chart.series), high)],
};
const share = {format: v => percent(v), stacked: true, range: (u, low, high) => [0, Math.max(1, high)]};
const charts = {
  mean: new Chart("mean", {title: "Mean slowdown", unit: "recent steps over the same alone", ...slowdown}),
  tail: new Chart("tail", {title: "Tail slowdown", unit: "99 in 100 recent steps stay within", ...slowdown}),
  share: new Chart("share", {title: "Device time", unit: "by job", ...share}),
  held: new Chart("held", {title: "Low work held back", unit: "part of the time, by reason", ...share}),
};

// The looks as the charts need them, with an empty one where some had no answer.
function pastLooks() {
  const looks = [];
  seen.forEach((now, i) => {
    const before = seen[i - 1];
    if (before && (now.gap || now.when - before.when > GAP_S))
      looks.push({when: (before.when + now.when) / 2, jobs: new Map(), rates: new Map(), held: null});
    const passed = before ? now.when - before.when : 0,
      held = {};
    if (passed > 0 && now.guard && before.guard)
      for (const reason in now.guard.held_s)
        held[reason] = Math.max(0, (now.guard.held_s[reason] - (before.guard.held_s[reason] || 0)) / passed);
    looks.push({
      when: now.when,
      jobs: new Map(now.jobs.map(job => [job.short, job])),
      rates: rates(before, now),
      held: passed > 0 ? held : null,
    });
  });
  return looks;
}
function chooseAreas(looks, low) {
  const total = job => looks.reduce((sum, look) => sum + ((look.rates.get(job.short) || {}).device || 0), 0);
  const there = new Set(low.map(job => job.short)),
    gone = areas.some(short => !there.has(short));
  if (gone || areas.length < Math.min(MOST_AREAS, low.length) || seen.length % 30 === 0) {
    const most = low
      .map(job => [total(job), job.short])
      .sort((a, b) => b[0] - a[0])
      .slice(0, MOST_AREAS)
      .map(([, short]) => short);
    areas = low.map(job => job.short).filter(short => most.includes(short));
  }
}
function drawCharts(last) {
  const looks = pastLooks(),
    times = looks.map(look => look.when);
  const every = last.jobs.filter(job => job.priority === "high"),
    high = every.slice(0, COLOURS),
    low = last.jobs.filter(job => job.priority === "low");
  const left = every.length - high.length;
  setText(
    $("pictures-title"),
    `While this page has been open${left ? `; ${counted(left, "high job")} more in no chart` : ""}`,
  );
  const colour = job => `--c${colours.get(job.short)}`;
  const promise = (job, pick) =>
    looks.map(look => {
      const then = look.jobs.get(job.short);
      return then && then.promise ? pick(then.promise) : null;
    });
  const promised = high.filter(job => job.promise),
    targets = [...new Set(promised.map(job => job.promise.target))];
  const lines = (pick, limit) => [
    ...promised.map(job => ({label: label(job), colour: colour(job), values: promise(job, pick)})),
    ...targets.map(target => {
      const to = promised.filter(job => job.promise.target === target),
        whom = targets.length > 1 ? ` to ${to.map(job => job.short).join(", ")}` : "";
      return {
        label: `promised${whom}`,
        colour: to.length === 1 ? colour(to[0]) : "--edge",
        limit: true,
        values: times.map(() => limit(target)),
      };
    }),
  ];
  charts.mean.show(
    times,
    lines(
      p => p.slowdown,
      target => target,
    ),
  );
  const tailTarget = target => 1 + 2 * (target - 1); // as scheduler/verdict.py judges it
  charts.tail.show(
    times,
    lines(p => p.slowdown_p99, tailTarget),
  );
  chooseAreas(looks, low);
  const part = short => looks.map(look => (look.held ? Math.max(0, (look.rates.get(short) || {}).device || 0) : null));
  const own = [
    ...high.map(job => ({label: label(job), colour: colour(job), values: part(job.short)})),
    ...low
      .filter(job => areas.includes(job.short))
      .map((job, i) => ({label: label(job), colour: `--low${i + 1}`, values: part(job.short)})),
  ];
  const named = new Set([...high.map(job => job.short), ...areas]);
  const others = looks.map(look =>
    look.held
      ? [...look.rates].reduce((sum, [short, r]) => sum + (named.has(short) ? 0 : Math.max(0, r.device || 0)), 0)
      : null,
  );
  const count = last.jobs.filter(job => !named.has(job.short)).length;
  if (count || others.some(v => v))
    own.push({label: count ? counted(count, "other job") : "jobs that have ended", colour: "--rest", values: others});
  charts.share.show(times, own);
  const reasons = Object.keys(REASONS);
  charts.held.show(
    times,
    reasons
      .map((reason, i) => ({
        label: `${reason}: ${REASONS[reason]}`,
        colour: `--c${i + 1}`,
        values: looks.map(look => (look.held ? look.held[reason] || 0 : null)),
      }))
      .filter(each => each.values.some(v => v > 0.001)),
  );
}

// ---- Bans and pairs of programs

function drawTables(last) {
  $("bans-part").hidden = !last.bans.length;
  setText($("bans-title"), `Bans in force (${last.bans.length})`);
  plainRows(
    $("bans"),
    last.bans.map(ban => [
      [ban.low],
      [ban.high],
      [ban.ratio.toFixed(2), "n"],
      [ban.why],
      [age(ban.since_s), "n"],
      [ban.left_s < 0.1 ? "a moment" : age(ban.left_s), "n"],
    ]),
  );
  const more = last.pairs_known - last.pairs.length;
  $("pairs-part").hidden = !last.pairs_known;
  setText($("pairs-title"), `Interference, as measured (${counted(last.pairs_known, "pair")})`);
  setText(
    $("pairs-about"),
    "Programs by the first digits of their hash; `gpumux interference` names them, range by range." +
      (more > 0 ? ` It has ${more} more.` : ""),
  );
  plainRows(
    $("pairs"),
    last.pairs.map(pair => [
      [pair.high],
      [pair.low],
      [String(pair.share), "n"],
      [`${pair.slowdown.toFixed(2)} x`, "n"],
      [pair.low_speed.toFixed(2), "n"],
    ]),
  );
}

// ---- The page

function draw() {
  const last = seen[seen.length - 1],
    now = smooth(),
    high = drawHigh(last, now),
    text = summary(high, last.guard);
  const busy = [...now.values()].reduce((sum, r) => sum + (r.device || 0), 0),
    place = `${last.host}: ${last.device.name}`;
  setText($("device"), `gpumux on ${place}`);
  const {total_bytes: total, free_bytes: free} = last.memory,
    jobs = counted(last.jobs.length, "job");
  setText(
    $("about"),
    [
      `${last.device.kind}, gpumux ${last.version}`,
      `${counted(last.sessions, "client")}, ${jobs}`,
      `device busy ${percent(busy)}`,
      `memory ${bytes(total - free)} of ${bytes(total)}`,
      `as of ${clock(last.when)}`,
    ].join("; "),
  );
  setText($("summary"), problem ? text && `? Not known now. At ${clock(last.when)}: ${text.slice(2)}` : text);
  $("summary").className = !problem && high.some(broken) ? "broken" : "";
  $("summary").hidden = !text;
  document.title = `${problem ? "? no answer, " : text ? `${text.split(":")[0]}, ` : ""}${place} - gpumux`;
  $("empty").hidden = last.jobs.length > 0 || Boolean(problem);
  drawLow(last, now);
  const anything = seen.length > 1 && seen.some(look => look.jobs.length);
  $("pictures").hidden = !anything;
  if (anything) drawCharts(last);
  drawTables(last);
}
// What looks.js needs to know of this page.
const PAGE = {
  process: "daemon",
  commands: ["gpumux doctor"], // where it answers but has nothing to say
  restart: ["gpumux doctor", "systemctl status 'gpumux@*'", "gpumux serve"],
  instead: "`gpumux top` shows the same.",
  draw,
  forget() {
    areas = [];
    order = [];
    colours.clear();
  },
  explained(short, found) {
    return [
      el("p", "verdict", found.verdict),
      ...listed("Why", found.causes),
      ...(found.remedies.length
        ? [
            el("h3", "", "What to do"),
            el(
              "ul",
              "",
              ...found.remedies.map(remedy =>
                el("li", "", remedy.text, ...(remedy.command ? [el("code", "", remedy.command)] : [])),
              ),
            ),
          ]
        : []),
      el("h3", "", "More"),
      el("p", "", "This page names no operators. Its owner and operators learn them, and all that is known, by"),
      el("code", "", `gpumux jobs explain ${short} --story`),
    ];
  },
  byCommand: short => `gpumux jobs explain ${short}`,
};

$("filter").addEventListener("input", () => seen.length && draw());
$("more").addEventListener("click", () => {
  all = !all;
  draw();
});
goOn();
