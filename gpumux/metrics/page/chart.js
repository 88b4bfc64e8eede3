// One chart over time, of uPlot, with a legend that says the values of now or of the moment under the cursor.
"use strict";

class Chart {
  // title, unit: what is drawn. format: a value as text. stacked: values lie on one another. range: of the axis.
  // most(series): values above it are drawn there, so that a line that leaves the axis is still seen.
  constructor(id, {title, unit, format, stacked, range, most}) {
    Object.assign(this, {format, stacked, range, most, title, series: [], times: [], made: ""});
    this.figure = $(id);
    this.plotAt = el("div");
    this.legend = el("ul", "legend");
    this.note = el("span");
    this.figure.append(el("figcaption", "", `${title} `, el("span", "", unit), this.note), this.plotAt, this.legend);
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.figure);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.made = "";
      this.show(this.times, this.series);
    });
  }
  size() {
    return {width: Math.max(160, this.figure.clientWidth), height: 180};
  }
  // series: {label, colour (a CSS variable), limit (dashed), values}. Null: not known.
  show(times, series) {
    this.figure.hidden = !series.length;
    if (!series.length) return;
    Object.assign(this, {times, series});
    const made = JSON.stringify(series.map(each => [each.label, each.colour]));
    let drawn = series.map(each => each.values);
    if (this.stacked) {
      const sum = times.map(() => 0);
      drawn = drawn.map(values => values.map((v, i) => (v === null ? null : (sum[i] += v))));
    }
    if (this.most) {
      const most = this.most(series);
      const above = drawn.some(values => values.some(v => v !== null && v > most));
      drawn = drawn.map(values => values.map(v => (v === null ? null : Math.min(v, most))));
      setText(this.note, above ? `; drawn at ${this.format(most)} where it is more` : "");
    }
    if (made !== this.made) this.make(made);
    this.plot.setData([times, ...drawn]);
    this.values(this.plot.cursor.idx);
    const shown = series.filter(each => !each.limit).map(each => `${each.label} ${this.at(each, null)}`);
    this.plot.root
      .querySelector(".u-wrap")
      .setAttribute(
        "aria-label",
        `${this.title} from ${clock(times[0])} to ${clock(times[times.length - 1])}; now ${shown.join(", ")}`,
      );
  }
  make(made) {
    if (this.plot) this.plot.destroy();
    this.made = made;
    const style = getComputedStyle(document.documentElement),
      css = name => style.getPropertyValue(name).trim();
    const font = "12px system-ui, sans-serif",
      axis = {
        stroke: css("--faint"),
        font,
        grid: {stroke: css("--line"), width: 1},
        ticks: {stroke: css("--line"), width: 1, size: 5},
      };
    const steps = uPlot.paths.stepped({align: -1});
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [8, 28, 0, 0],
        legend: {show: false},
        cursor: {sync: {key: "all"}, y: false, drag: {x: false, y: false}, points: {show: !this.stacked}},
        scales: {
          x: {time: true, range: (u, low, high) => [Math.min(low, high - 30), high]},
          y: {range: (...at) => this.range(...at, this)},
        },
        axes: [
          {
            ...axis,
            space: 70,
            size: 30,
            values: (u, splits) =>
              splits.map(t => clock(t).slice(0, splits.length > 1 && splits[1] - splits[0] >= 60 ? 5 : 8)),
          },
          {...axis, size: 50, values: (u, splits) => splits.map(v => this.format(v))},
        ],
        series: [
          {},
          ...this.series.map((each, i) => {
            const colour = css(each.colour);
            if (this.stacked)
              return {
                stroke: css("--paper"),
                width: 1,
                paths: steps,
                points: {show: false},
                fill: i ? undefined : colour,
              };
            return {
              stroke: colour,
              width: each.limit ? 1.5 : 2,
              dash: each.limit ? [6, 5] : undefined,
              points: {show: false},
            };
          }),
        ],
        bands: this.stacked
          ? this.series.slice(1).map((each, i) => ({series: [i + 2, i + 1], fill: css(each.colour)}))
          : [],
        hooks: {setCursor: [u => this.values(u.cursor.idx)]},
      },
      [this.times, ...this.series.map(each => each.values)],
      this.plotAt,
    );
    this.plot.root.querySelector(".u-wrap").setAttribute("role", "img");
  }
  at(each, index) {
    const value = index === null ? each.values.findLast(v => v !== null) : each.values[index];
    return value === null || value === undefined ? "-" : this.format(value);
  }
  // Say the values where the cursor is, or the newest.
  values(index = null) {
    const when = {key: "when", label: index === null ? "now" : clock(this.times[index]), value: ""};
    const entries = this.series.map((each, i) => ({
      key: `${i} ${each.label} ${each.colour}`,
      label: each.label,
      each,
      value: this.at(each, index),
    }));
    sync(
      this.legend,
      [when, ...entries],
      ({each}) => {
        const swatch = each ? el("i", this.stacked ? "key" : each.limit ? "key line limit" : "key line") : "",
          li = el("li"),
          text = el("span"),
          value = el("span", "value");
        if (each) swatch.style[this.stacked ? "background" : "borderColor"] = `var(${each.colour})`;
        li.append(swatch, text, value);
        li.parts = {text, value};
        return li;
      },
      (li, entry) => {
        setText(li.parts.text, entry.label);
        setText(li.parts.value, entry.value);
      },
    );
  }
}
