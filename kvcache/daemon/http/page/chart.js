// Charts of a few hundred points: a stack of areas over time, and lines over sizes. A cursor goes with the pointer and,
// where the chart has the focus, with the arrow keys; what stands under it is said in words beside the chart.

import { element, shape } from "./table.js";

const WIDE = 560, HIGH = 190, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;

// `series`: name, class, and values, one each for the places `xs`; null where there is none. `stacked`: each upon those
// before it. `said(i)`: what the place i says in words. `start`: where the cursor stands; at the last by default.
export function draw(holder, { xs, series, stacked, label, xLabel, xTicks, yMax, yLabel, said, start, none }) {
  if (!xs.length) {
    holder.replaceChildren(element("p", { class: "quiet" }, none));
    return;
  }
  const width = WIDE - LEFT - RIGHT, height = HIGH - TOP - BOTTOM;
  const [low, high] = [xs[0], xs[xs.length - 1]];
  const x = (value) => LEFT + (high > low ? (width * (value - low)) / (high - low) : width);
  const y = (value) => TOP + height * (1 - value / yMax);
  const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", tabindex: "0", "aria-label": label });
  for (let i = 0; i <= 4; i += 1) {
    const value = (yMax * i) / 4;
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y(value), y2: y(value) }));
    if (i % 2 === 0) svg.append(shape("text", { x: LEFT - 6, y: y(value) + 4, class: "end" }, yLabel(value)));
  }
  for (const tick of xTicks) {
    const edge = x(tick) > WIDE - 60 ? "end" : x(tick) < LEFT + 20 ? "" : "middle";
    svg.append(shape("text", { x: x(tick), y: HIGH - 6, class: edge }, xLabel(tick)));
  }
  const floor = xs.map(() => 0);
  for (const { name, kind, values } of series) {
    const tops = values.map((value, i) => (value === null ? null : value + (stacked ? floor[i] : 0)));
    for (const [first, end] of stretches(tops)) {
      const over = range(first, end).map((i) => `${x(xs[i]).toFixed(1)},${y(tops[i]).toFixed(1)}`);
      if (stacked) {
        const under = range(first, end).reverse().map((i) => `${x(xs[i]).toFixed(1)},${y(floor[i]).toFixed(1)}`);
        svg.append(shape("polygon", { class: `area ${kind}`, points: [...over, ...under].join(" ") }));
      }
      svg.append(shape("polyline", { class: `line ${kind}`, points: over.join(" ") }));
      if (end - first === 1) svg.append(shape("circle", { class: `dot ${kind}`, cx: x(xs[first]), cy: y(tops[first]), r: 2 }));
    }
    if (stacked) tops.forEach((top, i) => { if (top !== null) floor[i] = top; });
    void name;
  }
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: TOP + height });
  const words = element("p", { class: "said", "aria-live": "off" });
  const rest = start ?? xs.length - 1;  // where it stands while the user does not move it, so that the newest is told
  let at = Math.min(xs.length - 1, Number(holder.dataset.at ?? rest));
  const point = (i, chosen) => {
    at = Math.max(0, Math.min(xs.length - 1, i));
    if (chosen) holder.dataset.at = at;
    if (at === rest) delete holder.dataset.at;
    cursor.setAttribute("x1", x(xs[at]));
    cursor.setAttribute("x2", x(xs[at]));
    words.replaceChildren(said(at));
  };
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDE;
    point(nearest(xs, x, place), true);
  });
  svg.addEventListener("pointerleave", () => point(rest, true));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    words.setAttribute("aria-live", "polite");
    point(step, true);
  });
  point(at, false);
  const keys = element("p", { class: "keys" }, ...series.map(({ name, kind }) =>
    element("span", {}, element("i", { class: kind }), name)));
  const focused = holder.contains(document.activeElement);
  holder.replaceChildren(svg, keys, words);
  if (focused) svg.focus();
}

function nearest(xs, x, place) {
  let best = 0;
  xs.forEach((value, i) => { if (Math.abs(x(value) - place) < Math.abs(x(xs[best]) - place)) best = i; });
  return best;
}

function range(first, end) {
  return Array.from({ length: end - first }, (_, i) => first + i);
}

// Where values stand one behind another without a gap, as [first, end].
function stretches(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i && values[i - 1] !== null) found[found.length - 1][1] = i + 1;
    else found.push([i, i + 1]);
  });
  return found;
}
