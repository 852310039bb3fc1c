// Shows a table of any length: only the rows in sight are in the page, and they are fetched as one scrolls.

import { h, redraw } from "./dom.js";

const BLOCK = 100; // rows that are fetched at a time
const AROUND = 8; // rows drawn above and below those in sight

// `columns` are {title, key, cell(row), number, wide, ascending, why}; `load(offset, limit)` returns {total, rows}.
export class LongTable {
  constructor({ caption, columns, rowHeight, load, sort, onsort, empty }) {
    Object.assign(this, { columns, rowHeight, load, sort, onsort, empty });
    this.blocks = new Map(); // by number: rows, or the promise of them
    this.drawn = new Map(); // by place: {element, shown}
    this.total = null;
    this.time = 0; // of the last question: what was asked before is not drawn any more
    this.above = h("tr", { class: "space", "aria-hidden": "true" }, h("td"));
    this.below = this.above.cloneNode(true);
    this.body = h("tbody");
    this.headers = h("tr", { "aria-rowindex": "1" });
    this.table = h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, this.headers), this.body);
    this.message = h("p", { class: "empty", role: "status" }, "Reading …");
    this.view = h("div", { class: "long", tabindex: "0", role: "region", "aria-label": caption }, this.table);
    this.element = h("div", {}, this.view, this.message);
    this.view.addEventListener("scroll", () => this.soon(), { passive: true });
    new ResizeObserver(() => this.soon()).observe(this.view);
    this.drawHeaders();
  }

  // Reads what is in sight again; with `anew`, from the first row.
  async refresh(anew = false) {
    this.time += 1;
    if (anew) this.view.scrollTop = 0;
    this.stale = this.blocks;
    this.blocks = new Map();
    const { first, last } = this.sight();
    await Promise.all(this.numbers(first, last).map((number) => this.block(number)));
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  sight() {
    const top = Math.floor(this.view.scrollTop / this.rowHeight);
    const shown = Math.ceil((this.view.clientHeight || 600) / this.rowHeight);
    return { first: Math.max(0, top - AROUND), last: Math.min(this.total ?? BLOCK, top + shown + AROUND) };
  }

  numbers(first, last) {
    const found = [];
    for (let number = Math.floor(first / BLOCK); number * BLOCK < Math.max(last, 1); number++) found.push(number);
    return found;
  }

  block(number) {
    if (this.blocks.has(number)) return this.blocks.get(number);
    const time = this.time;
    const promised = this.load(number * BLOCK, BLOCK).then(({ total, rows }) => {
      if (time !== this.time) return;
      this.total = total;
      this.blocks.set(number, rows.map((row) => ({ row, text: JSON.stringify(row) })));
      this.draw();
    }, (error) => {
      if (time !== this.time) return;
      this.blocks.delete(number);
      throw error;
    });
    this.blocks.set(number, promised);
    return promised;
  }

  // The row at a place, with its text, by which a change is seen; undefined while it is fetched.
  row(place) {
    const number = Math.floor(place / BLOCK);
    const rows = [this.blocks.get(number), this.stale?.get(number)].find(Array.isArray);
    return rows?.[place % BLOCK];
  }

  draw() {
    if (this.total === null) return;
    const { first, last } = this.sight();
    for (const number of this.numbers(first, last)) Promise.resolve(this.block(number)).catch(() => {});
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    for (const [place, { element }] of this.drawn) {
      if (place >= first && place < last) continue;
      element.remove();
      this.drawn.delete(place);
    }
    let previous = null;
    for (let place = first; place < last; place++) {
      const element = this.drawRow(place);
      if (previous ? previous.nextSibling !== element : this.body.querySelector("tr:not(.space)") !== element) {
        previous ? previous.after(element) : this.above.isConnected ? this.above.after(element) : this.body.prepend(element);
      }
      previous = element;
    }
    this.space(this.above, first, "prepend");
    this.space(this.below, this.total - last, "append");
    this.table.setAttribute("aria-rowcount", String(this.total + 1));
    this.view.hidden = !this.total;
    this.message.hidden = this.total > 0;
    this.message.textContent = this.total ? "" : this.empty();
    if (focused && !focused.isConnected && !this.body.contains(document.activeElement)) this.focusAgain(focused);
  }

  // Keeps the keyboard where it was: on the same link or button, wherever its row is now, or on the table.
  focusAgain(old) {
    const name = ["aria-label", "href"].find((each) => old.hasAttribute(each));
    const same = name && this.body.querySelector(`${old.tagName}[${name}="${CSS.escape(old.getAttribute(name))}"]`);
    (same ?? this.view).focus({ preventScroll: true });
  }

  space(element, rows, where) {
    if (rows <= 0) return element.remove();
    element.firstChild.style.height = `${rows * this.rowHeight}px`;
    if (where === "prepend" ? this.body.firstChild !== element : this.body.lastChild !== element) this.body[where](element);
  }

  drawRow(place) {
    const { row, text: shown } = this.row(place) ?? { row: null, text: "" };
    let drawn = this.drawn.get(place);
    if (!drawn) {
      drawn = { element: h("tr", { "aria-rowindex": String(place + 2) }), shown: null };
      this.drawn.set(place, drawn);
    }
    if (drawn.shown !== shown) {
      drawn.shown = shown;
      drawn.element.className = row?.pinned ? "pinned" : "";
      redraw(drawn.element, ...this.columns.map((column) => h("td", { class: kind(column) }, row ? column.cell(row, place) : "…")));
    }
    return drawn.element;
  }

  drawHeaders() {
    redraw(this.headers, ...this.columns.map((column) => {
      const now = column.key && column.key === this.sort.column;
      const order = now ? (this.sort.descending ? "descending" : "ascending") : "none";
      const mark = h("span", { class: "order", "aria-hidden": "true" }, now ? (this.sort.descending ? "▼" : "▲") : "");
      return h("th", { scope: "col", class: kind(column), "aria-sort": column.key ? order : null },
        column.key ? h("button", { type: "button", class: "by", "aria-label": column.said ?? column.title, onclick: () => this.sortBy(column) }, column.title, mark)
          : column.title ? column.title : h("span", { class: "hidden" }, column.said),
        column.why ?? null);
    }));
  }

  sortBy(column) {
    const same = this.sort.column === column.key;
    this.sort = { column: column.key, descending: same ? !this.sort.descending : !column.ascending };
    this.drawHeaders();
    this.onsort(this.sort);
    this.refresh(true).catch(() => {});
  }
}

const kind = (column) => [column.number && "number", column.wide && "wide", column.short && "short", column.name].filter(Boolean).join(" ") || null;
