// What every plot is made of: axes on a frame, which holds its edges, lines, bands, markers, and what follows the pointer

const tooltip = document.getElementById("tooltip");
const one = (value) => value.toFixed(1);
const middle = (text) => ({ "text-anchor": "middle", ...text });

// the axis of values; a number that would touch another is left out
function drawValueAxis(svg, { left, right, top, bottom }, axis, label) {
  const y = (value) => bottom - axis.at(value) * (bottom - top), written = [];
  for (const tick of axis.ticks) {
    if (written.some((other) => Math.abs(other - y(tick)) < 13)) continue;
    element(svg, "path", { class: "grid", d: `M${left} ${one(y(tick))}H${right}` });
    element(svg, "text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick));
    written.push(y(tick));
  }
  const height = (top + bottom) / 2;
  element(svg, "text", middle({ x: 11, y: height, transform: `rotate(-90 11 ${height})` }), label);
  return y;
}
function drawPlaceAxis(svg, { left, right, top, bottom }, axis, ticks) {
  const x = (value) => left + axis.at(value) * (right - left);
  let free = 0;
  for (const tick of ticks) {
    const half = tickText(tick).length * 3;
    element(svg, "path", { class: "grid", d: `M${one(x(tick))} ${top}V${bottom}` });
    if (x(tick) - half <= free) continue;
    element(svg, "text", middle({ class: "tick", x: x(tick), y: bottom + 15 }), tickText(tick));
    free = x(tick) + half + 4;
  }
  return x;
}
function drawFrame(svg, { left, right, top, bottom }, label) {
  element(svg, "path", { class: "frame", d: `M${left} ${top}V${bottom}H${right}` });
  element(svg, "text", middle({ x: (left + right) / 2, y: bottom + 34 }), label);
}

// points are pairs; a line is broken where one is missing
const pair = ([x, y]) => `${one(x)} ${one(y)}`;
function linePath(points) {
  return points.map((point, index) => (point ? (index && points[index - 1] ? "L" : "M") + pair(point) : "")).join("");
}
const closedPath = (points) => (points.length ? `M${points.map(pair).join("L")}Z` : "");
const bandPath = (upper, lower) => closedPath([...upper, ...lower.slice().reverse()]);

// markers have matplotlib's names; all that are not here are circles
const PLUS = [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]];
const SHAPES = {
  s: [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]],
  "^": [[0, -1.2], [1.15, 0.9], [-1.15, 0.9]],
  v: [[0, 1.2], [1.15, -0.9], [-1.15, -0.9]],
  P: PLUS,
  X: PLUS.map(([x, y]) => [(x - y) * 0.75, (x + y) * 0.75]),
  D: [[0, -1.35], [1.35, 0], [0, 1.35], [-1.35, 0]],
};
function mark(shape, x, y, size) {
  if (SHAPES[shape]) return closedPath(SHAPES[shape].map(([dx, dy]) => [x + dx * size, y + dy * size]));
  return `M${one(x - size)} ${one(y)}a${size} ${size} 0 1 0 ${size * 2} 0a${size} ${size} 0 1 0 ${-size * 2} 0`;
}

// the pointer, and the arrow keys in its place
function listen(svg, { move, leave, step, enter }) {
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, move);
  for (const kind of ["pointerleave", "blur"]) svg.addEventListener(kind, leave);
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && enter) enter();
    if (!by) return;
    event.preventDefault();
    step(by);
  });
}
// beside a place of the window, on the side where there is room
function placeTooltip(x, top) {
  const width = tooltip.offsetWidth, fits = x + 14 + width < document.documentElement.clientWidth - 4;
  tooltip.style.left = `${fits ? x + 14 : Math.max(4, x - 14 - width)}px`;
  tooltip.style.top = `${top}px`;
}
