// Bytes a second between each worker and each server, as a map: the darker, the more.

import { plural, rate } from "./figures.js";

export class LinkMap {
  constructor(canvas, summary, readout) {
    this.canvas = canvas;
    this.summary = summary;
    this.readout = readout;
    this.rows = [];
    this.cell = null;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  set(workers) {
    this.rows = workers.filter((worker) => worker.links?.length);
    this.columns = Math.max(0, ...this.rows.map((worker) => worker.links.length));
    const all = this.rows.flatMap((worker) => worker.links);
    this.most = Math.max(0, ...all);
    this.canvas.hidden = !all.length;
    this.readout.hidden = !all.length;
    if (!all.length) {
      this.tell(this.summary, "No worker has sent anything yet.");
      return;
    }
    const total = all.reduce((sum, value) => sum + value, 0);
    const busiest = this.rows.find((worker) => worker.links.includes(this.most));
    const place = busiest.links.indexOf(this.most);
    this.tell(
      this.summary,
      `${plural(this.rows.length, "worker")} × ${plural(this.columns, "server")}, ${rate(total)} in all. ` +
        `Busiest: ${busiest.name} and ${this.server(place)}, ${rate(this.most)}.`,
    );
    this.draw();
    this.say();
  }

  server(place) {
    return this.aggregated ? "its aggregator" : `server ${place}`;
  }

  draw() {
    if (!this.rows.length || this.canvas.hidden) return;
    const width = this.canvas.parentElement.clientWidth;
    const side = Math.min(width / this.columns, 72);
    const height = Math.max(7, Math.min(28, Math.floor(420 / this.rows.length)));
    const ratio = window.devicePixelRatio || 1;
    this.side = side;
    this.height = height;
    this.canvas.style.width = `${side * this.columns}px`;
    this.canvas.style.height = `${height * this.rows.length}px`;
    this.canvas.width = Math.round(side * this.columns * ratio);
    this.canvas.height = Math.round(height * this.rows.length * ratio);
    const style = getComputedStyle(document.documentElement);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = style.getPropertyValue("--line-1").trim();
    this.rows.forEach((worker, row) => {
      worker.links.forEach((value, column) => {
        pen.globalAlpha = 0.06 + 0.94 * (this.most ? value / this.most : 0);
        pen.fillRect(column * side + 0.5, row * height + 0.5, side - 1, height - 1);
      });
    });
    pen.globalAlpha = 1;
    if (this.cell) {
      pen.strokeStyle = style.getPropertyValue("--ink").trim();
      pen.lineWidth = 2;
      pen.strokeRect(this.cell.column * side + 1, this.cell.row * height + 1, side - 2, height - 2);
    }
  }

  point(event) {
    const column = Math.floor(event.offsetX / this.side);
    const row = Math.floor(event.offsetY / this.height);
    this.choose(this.rows[row]?.links[column] === undefined ? null : { row, column });
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (!step) return;
    event.preventDefault();
    const from = this.cell ?? { row: 0, column: 0 };
    const row = this.cell ? Math.min(this.rows.length - 1, Math.max(0, from.row + step[0])) : 0;
    const column = this.cell ? Math.min(this.columns - 1, Math.max(0, from.column + step[1])) : 0;
    this.choose({ row, column });
  }

  choose(cell) {
    this.cell = cell;
    this.draw();
    this.say();
  }

  say() {
    const worker = this.cell && this.rows[this.cell.row];
    const value = worker?.links[this.cell.column];
    this.tell(
      this.readout,
      value === undefined || !worker
        ? "Point at a cell, or move with the arrow keys. Rows are workers, columns servers."
        : `${worker.name} and ${this.server(this.cell.column)}: ${rate(value)}`,
    );
  }

  tell(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }
}
