// Tables and figures as elements. Text only ever enters as text: names come from clients.

export function element(name, attributes = {}, ...inner) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...inner);
  return made;
}

// A column: its title, its cell, and how wide a screen must be to show it: 1 is always, 2 from 760, 3 from 1140 pixels.
// A name may be broken anywhere: it is as long as a client made it.
export function column(title, cell, { number = false, name = false, rank = 1, hint } = {}) {
  return { title, cell, number, name, rank, hint };
}

// `cell` gives text or an element; or [text, figure, value], where the figure is what of the API it shows.
export function fill(table, columns, rows, none) {
  const classes = (each) => [each.number ? "number" : "", each.name ? "name" : "", each.rank > 1 ? `rank${each.rank}` : ""].join(" ").trim() || null;
  if (!rows.length) {
    table.replaceChildren(element("tbody", {}, element("tr", {}, element("td", { class: "quiet" }, none))));
    return;
  }
  const head = element("tr", {}, ...columns.map((each) =>
    element("th", { scope: "col", class: classes(each), title: each.hint }, each.title)));
  const body = rows.map((row) => element("tr", {}, ...columns.map((each, i) => {
    const told = each.cell(row);
    const [text, figure, value] = Array.isArray(told) ? told : [told];
    return element(i ? "td" : "th", {
      scope: i ? null : "row", class: classes(each), "data-figure": figure, "data-value": value,
      title: typeof text === "string" && text.length > 24 ? text : null,
    }, text);
  })));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

// A part of a whole, drawn; the figure stands beside it in text.
export function meter(part, whole, kind) {
  const share = whole ? Math.min(1, part / whole) : 0;
  const svg = shape("svg", { class: "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(shape("rect", { class: "track", width: 100, height: 6 }));
  svg.append(shape("rect", { class: `bar ${kind}`, width: (100 * share).toFixed(2), height: 6 }));
  return svg;
}

export function shape(name, attributes = {}, ...inner) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inner);
  return made;
}

// Title, figure, and a line below it.
export function figure(title, text, below, name, value) {
  return element("div", { class: "figure" },
    element("span", { class: "quiet" }, title),
    element("strong", { "data-figure": name, "data-value": value }, text),
    element("span", { class: "quiet" }, below));
}
