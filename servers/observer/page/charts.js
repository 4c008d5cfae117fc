// Charts of columns over the time since the job began. uPlot draws them.

import { clock } from "./figures.js";

const HEIGHT = 118;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  // lines: {column, label, color: a custom property of the style sheet}. show: a number as text. least, most: what the
  // axis has at least; null leaves it to the numbers.
  constructor(parent, title, lines, show, least = 0, most = null) {
    this.lines = lines;
    this.show = show;
    this.least = least;
    this.most = most;
    this.data = [[], ...lines.map(() => [])];
    this.card = document.createElement("figure");
    this.card.className = "chart";
    const caption = document.createElement("figcaption");
    this.values = lines.map((line) => {
      const value = document.createElement("span");
      value.className = "value";
      value.style.setProperty("--line", `var(${line.color})`);
      const label = document.createElement("span");
      label.textContent = line.label ?? title;
      const amount = document.createElement("b");
      value.append(label, amount);
      caption.append(value);
      return amount;
    });
    this.box = document.createElement("div");
    this.box.className = "plot";
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", `${title} over time`);
    this.card.append(caption, this.box);
    parent.append(this.card);
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.box);
    this.draw();
  }

  draw() {
    this.plot?.destroy();
    const ink = color("--faint");
    const grid = { stroke: color("--grid"), width: 1 };
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", grid, ticks: { show: false } };
    const options = {
      width: Math.max(80, this.box.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 14, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, size: 24, gap: 7, space: 70, values: (_, ticks) => ticks.map(clock), grid: { show: false } },
        { ...axis, size: 62, gap: 8, space: 30, values: (_, ticks) => ticks.map((tick) => this.show(tick)) },
      ],
      series: [
        {},
        ...this.lines.map((line, place) => ({
          stroke: color(line.color),
          width: 1.75,
          dash: place ? [6, 3] : undefined,
          fill: place === 0 && this.lines.length === 1 ? color("--wash") : undefined,
          spanGaps: false,
          points: { show: false },
        })),
      ],
      hooks: { setCursor: [() => this.point()] },
    };
    this.plot = new window.uPlot(options, this.data, this.box);
  }

  range(low, high) {
    if (low === null || high === null) return [this.least ?? 0, this.most ?? 1];
    const room = Math.max(0.08 * (high - low), (high === low ? 0.05 : 0.01) * Math.abs(high), 1e-9);
    const top = high + (high === 0 ? 1 : room);
    return [this.least === null ? low - room : Math.min(this.least, low), this.most === null ? top : Math.max(this.most, high)];
  }

  resize() {
    const width = Math.max(80, this.box.clientWidth);
    if (this.plot && this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  // history: {times, columns}.
  set(history) {
    const none = new Array(history.times.length).fill(null);
    this.data = [history.times, ...this.lines.map((line) => history.columns[line.column] ?? none)];
    this.plot.setData(this.data);
    this.point();
  }

  // The numbers at the cursor, or else the latest.
  point() {
    const place = this.plot?.cursor.idx ?? this.data[0].length - 1;
    this.values.forEach((value, line) => {
      const text = this.show(this.data[line + 1][place] ?? null);
      if (value.textContent !== text) value.textContent = text;
    });
  }

  remove() {
    this.resizing.disconnect();
    this.plot.destroy();
    this.card.remove();
  }
}
