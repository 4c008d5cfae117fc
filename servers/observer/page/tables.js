// Tables that are sorted by their columns' buttons, and whose cells change only where their texts do.

export class Table {
  // columns: {key, title, hint, show(value, row), bar, hot, text}. bar: cells show value as a part of this, or of the
  // largest if it is 0. hot: values from here on stand out. open: called with the row whose button is pressed.
  constructor(table, columns, open) {
    this.columns = columns;
    this.open = open;
    this.order = { key: columns[0].key, down: false };
    this.lines = new Map();
    this.rows = [];
    const head = table.createTHead().insertRow();
    this.heads = columns.map((column) => this.head(head, column));
    this.body = table.createTBody();
    this.mark();
  }

  head(row, column) {
    const cell = document.createElement("th");
    cell.scope = "col";
    if (!column.text) cell.className = "number";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = column.title;
    button.title = column.hint;
    button.addEventListener("click", () => this.sort(column));
    cell.append(button);
    row.append(cell);
    return cell;
  }

  sort(column) {
    const again = this.order.key === column.key;
    this.order = { key: column.key, down: again ? !this.order.down : !column.text };
    this.mark();
    this.render(this.rows);
  }

  mark() {
    this.columns.forEach((column, place) => {
      const own = column.key === this.order.key;
      const cell = this.heads[place];
      if (own) cell.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  render(rows) {
    this.rows = rows;
    const most = this.columns.map((column) =>
      column.bar === 0 ? Math.max(1, ...rows.map((row) => row[column.key] ?? 0)) : column.bar,
    );
    const gone = new Set(this.lines.keys());
    this.sorted(rows).forEach((row, place) => {
      gone.delete(row.name);
      const line = this.lines.get(row.name) ?? this.line(row);
      this.fill(line, row, most);
      if (this.body.rows[place] !== line.element) this.body.insertBefore(line.element, this.body.rows[place] ?? null);
    });
    for (const name of gone) {
      this.lines.get(name).element.remove();
      this.lines.delete(name);
    }
  }

  sorted(rows) {
    const { key, down } = this.order;
    const value = (row) => (key === "name" ? row.place : row[key]);
    return [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if ((x ?? null) === null || (y ?? null) === null) return ((x ?? null) === null) - ((y ?? null) === null) || a.place - b.place;
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1) || a.place - b.place;
    });
  }

  line(row) {
    const element = document.createElement("tr");
    const cells = this.columns.map((column, place) => {
      const cell = document.createElement(place ? "td" : "th");
      const text = document.createElement(place ? "span" : "button");
      if (place) {
        if (!column.text) cell.className = "number";
      } else {
        cell.scope = "row";
        text.type = "button";
        text.addEventListener("click", () => this.open(row.name));
      }
      cell.append(text);
      if (column.bar !== undefined) {
        const bar = document.createElement("i");
        bar.setAttribute("aria-hidden", "true");
        cell.append(bar);
        cell.classList.add("barred");
      }
      element.append(cell);
      return { cell, text, bar: cell.querySelector("i"), shown: "" };
    });
    const line = { element, cells };
    this.lines.set(row.name, line);
    return line;
  }

  fill(line, row, most) {
    if (line.element.dataset.state !== row.state) line.element.dataset.state = row.state;
    this.columns.forEach((column, place) => {
      const cell = line.cells[place];
      const value = row[column.key];
      const shown = column.show(value, row);
      if (cell.shown !== shown) {
        cell.shown = shown;
        cell.text.textContent = shown;
      }
      if (column.hot) cell.cell.classList.toggle("hot", value >= column.hot);
      if (cell.bar) cell.bar.style.width = `${Math.min(100, (100 * (value ?? 0)) / most[place]).toFixed(1)}%`;
    });
  }
}
