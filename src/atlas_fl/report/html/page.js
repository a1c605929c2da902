"use strict";
(() => {
  const MOST_SHAPES = 4000, MOST_ROWS = 1000, MOST_DIGITS = 6, NARROW = 400;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const unpack = ({ names, rows }) => rows.map((row) => Object.fromEntries(names.map((name, place) => [name, row[place]])));

  // A canvas knows no CSS variables; an SVG does, and so follows the theme and the printer by itself.
  function resolve(node) {
    if (typeof node === "string") return node.replace(/var\((--[\w-]+)\)/g, (_, name) => css(name));
    if (Array.isArray(node)) return node.map(resolve);
    if (node && typeof node === "object") {
      return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, resolve(value)]));
    }
    return node;
  }

  const font = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
  const look = document.getElementById("look");
  const config = look && { font, ...JSON.parse(look.textContent) };

  // Vega groups by names in plain objects, which have these names themselves; a space without width makes others of them.
  function harmless(_, value) {
    return typeof value === "string" && value in {} ? value + "\u200b" : value;
  }

  function draw(element) {
    const payload = JSON.parse(document.getElementById("data-" + element.dataset.chart).textContent, harmless);
    const rows = unpack(payload);
    const isLarge = rows.length > MOST_SHAPES;
    const spec = isLarge ? resolve(payload.spec) : payload.spec;
    element.style.background = isLarge ? css("--ground") : "";
    if (isLarge) dark.addEventListener("change", () => draw(element), { once: true });
    // on a telephone a third column of the legend would be cut off
    const isNarrow = element.clientWidth < NARROW;
    const legend = { ...config.legend, ...(isNarrow ? { columns: 2, labelLimit: 95 } : {}) };
    const axis = { ...config.axis, ...(isNarrow ? { labelLimit: 80 } : {}) };
    const fitting = { ...config, axis, legend, mark: { tooltip: { content: "data" } } };
    const options = {
      mode: "vega-lite", renderer: isLarge ? "canvas" : "svg", actions: false,
      config: isLarge ? resolve(fitting) : fitting, tooltip: { theme: "page", formatTooltip: tip },
    };
    return vegaEmbed(element, { ...spec, data: { values: rows } }, options).then(({ view }) => {
      element.dataset.drawn = "yes";
      addNumbers(element.parentElement.querySelector("details.numbers"), payload.names, rows, element.dataset.chart);
      return view;
    });
  }

  function shown(value) {
    return typeof value === "number" ? String(Number(value.toPrecision(MOST_DIGITS))) : value ?? "";
  }

  function tip(row, html) {
    const cells = Object.entries(row).map(([name, value]) => `<tr><td class="key">${html(name)}</td><td>${html(shown(value))}</td></tr>`);
    return `<table>${cells.join("")}</table>`;
  }

  function addNumbers(details, names, rows, name) {
    details.addEventListener("toggle", () => fillNumbers(details, names, rows, name), { once: true });
  }

  function fillNumbers(details, names, rows, name) {
    if (!rows.length || details.querySelector("table")) return;
    const table = document.createElement("table"), box = document.createElement("div");
    const line = (parent, tag, values) => {
      const row = parent.insertRow();
      values.forEach((value, place) => {
        const cell = Object.assign(document.createElement(tag), { textContent: shown(value) });
        cell.dataset.name = names[place];
        row.append(cell);
      });
    };
    line(table.createTHead(), "th", names);
    const body = table.createTBody();
    rows.slice(0, MOST_ROWS).forEach((row) => line(body, "td", names.map((key) => row[key])));
    box.className = "table";
    box.tabIndex = 0;
    box.append(table);
    const save = Object.assign(document.createElement("button"), { textContent: "Save as CSV" });
    save.addEventListener("click", () => saveCsv(names, rows, name));
    details.append(save, box);
    if (rows.length > MOST_ROWS) details.append(`The first ${MOST_ROWS} of ${rows.length} rows; the file has all.`);
  }

  function saveCsv(names, rows, name) {
    const quote = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
    const lines = [names, ...rows.map((row) => names.map((key) => row[key]))].map((row) => row.map(quote).join(","));
    const url = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
    Object.assign(document.createElement("a"), { href: url, download: `${name}.csv` }).click();
    URL.revokeObjectURL(url);
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const key = (row, index) => {
      const data = row.cells[index].querySelector("data");
      return data ? Number(data.value) : row.cells[index].textContent;
    };
    const compare = (left, right) => {
      if (typeof left === "number" && typeof right === "number") return left - right;
      if (typeof left !== typeof right) return typeof left === "number" ? -1 : 1;
      return left.localeCompare(right, undefined, { numeric: true });
    };
    heads.forEach((head, index) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const sign = head.ariaSort === "descending" || (head.ariaSort !== "ascending" && !head.matches(".number")) ? 1 : -1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        body.append(...[...body.rows].sort((one, other) => sign * compare(key(one, index), key(other, index))));
      });
    });
  }

  document.querySelectorAll("main table").forEach((table) => { if (table.tBodies[0].rows.length > 1) sortable(table); });
  const drawn = [...document.querySelectorAll("[data-chart]")].map(draw);
  Promise.all(drawn).then(() => { document.documentElement.dataset.ready = "yes"; });
})();
