// Plots by depth

function drawDepth(chart) {
  const { figure, svg, width } = chart, rows = plottedRows(figure), last = rows.length - 1;
  chart.rows = rows;
  chart.x = (position) => last ? LEFT + 6 + position / last * (width - LEFT - RIGHT - 12) : (LEFT + width - RIGHT) / 2;
  const values = valuesOf(figure, rows);
  const floor = figure.percent || figure.id === "std" || figure.id === "gradient" ? 0 : undefined;
  chart.axis = axisOf(figure.axis, values, floor, figure.percent ? 5 : 0);
  drawPicked(chart);
  chart.y = drawValueAxis(svg, chart.frame, chart.axis, figure.label + (chart.axis.log ? ", log axis" : ""));
  drawParts(chart);
  const inner = clip(chart);
  for (const series of figure.series) drawBands(chart, inner, series);
  for (const series of figure.series) drawSeries(chart, inner, series);
  drawFrame(svg, chart.frame, "layers, in order of execution");
}
// what the axis has to hold: bands count up to a tenth and ten times of the lines on a logarithmic axis
function valuesOf(figure, rows) {
  const lines = figure.series.flatMap(({ y }) => rows.map(({ index }) => y[index])).filter(isNumber);
  const bands = figure.series.flatMap(({ low, high }) => rows.flatMap(({ index }) => [low[index], high[index]])).filter(isNumber);
  if (figure.axis !== "log") return [...lines, ...bands];
  const positive = lines.filter((value) => value > 0), least = Math.min(...positive) / 10, most = Math.max(...positive) * 10;
  return [...lines, ...bands.filter((value) => value > 0).map((value) => Math.min(most, Math.max(least, value)))];
}
function drawPicked(chart) {
  const row = ROWS[state.picked];
  if (!row) return;
  const inside = chart.rows.map(({ index }, position) => index >= row.index && index < row.end ? position : -1).filter((position) => position >= 0);
  if (!inside.length) return;
  const from = chart.x(inside[0]) - 3, to = chart.x(inside[inside.length - 1]) + 3;
  element(chart.svg, "rect", { class: "picked", x: from, y: TOP, width: to - from, height: chart.height - TOP - BOTTOM });
}
// the parts of the model: a line where each begins, and its name where there is room
function drawParts(chart) {
  const parts = [], bottom = chart.height - BOTTOM;
  chart.rows.forEach(({ group }, position) => {
    const open = parts[parts.length - 1];
    if (open && open.group === group) open.last = position; else parts.push({ group, first: position, last: position });
  });
  const room = (chart.width - LEFT) / parts.length;
  for (const part of room > 26 ? parts.slice(1) : []) {
    const x = (chart.x(part.first) + chart.x(part.first - 1)) / 2;
    element(chart.svg, "path", { class: "part", d: `M${one(x)} ${TOP}V${bottom + 4}` });
  }
  nameParts(chart, parts.filter(({ group }) => group), bottom + 15);
}
function nameParts(chart, parts, y) {
  const taken = [], size = (part) => part.last - part.first;
  for (const part of parts.sort((a, b) => size(b) - size(a) || a.first - b.first)) {
    const name = part.group.length > 12 ? part.group.split(".").pop() : part.group;
    const middle = (chart.x(part.first) + chart.x(part.last)) / 2, half = name.length * 3 + 4;
    if (middle + half > chart.width || taken.some(([from, to]) => middle + half > from && middle - half < to)) continue;
    element(chart.svg, "text", { class: "tick", x: middle, y, "text-anchor": "middle" }, name);
    taken.push([middle - half, middle + half]);
  }
}
// where a value stands; zero on a logarithmic axis and infinity stand at the edge
function place(chart, value) {
  const bottom = chart.height - BOTTOM;
  if (value === "inf") return { y: TOP + 5, beyond: true };
  if (value === "-inf" || (chart.axis.log && isNumber(value) && value <= 0)) return { y: bottom - 5, beyond: true };
  return isNumber(value) ? { y: chart.y(value), beyond: false } : null;
}
function drawBands(chart, inner, series) {
  const group = element(inner, "g", { class: series.look });
  for (const [low, high, look] of [[series.least, series.most, "outer"], [series.low, series.high, "band"]]) {
    if (!low.length) continue;
    const upper = [], lower = [];
    chart.rows.forEach(({ index }, position) => {
      const [from, to] = [place(chart, low[index]), place(chart, high[index])];
      if (!from || !to) return;
      const floor = from.beyond ? chart.height - BOTTOM : Math.min(from.y, chart.height);
      upper.push([chart.x(position), Math.max(to.y, -9)]);
      lower.push([chart.x(position), floor]);
    });
    if (upper.length) element(group, "path", { class: look, d: bandPath(upper, lower) });
  }
}
function drawSeries(chart, inner, series) {
  const group = element(inner, "g", { class: series.look });
  const size = Math.min(2.8, Math.max(1.4, chart.width / chart.rows.length * 0.45));
  let line = "", pen = "M", dots = "", bars = "", beyond = "";
  chart.rows.forEach(({ index }, position) => {
    const value = series.y[index], at = place(chart, value), x = chart.x(position);
    if (!at) { if (!series.marker) pen = "M"; return; }
    if (at.beyond) { beyond += mark("^", x, at.y, 3.5); pen = "M"; return; }
    line += `${pen}${one(x)} ${one(at.y)}`;
    pen = "L";
    if (series.marker) dots += mark(series.marker, x, at.y, size);
    const error = series.error[index];
    if (isNumber(error)) bars += errorBar(chart, value, error, x);
  });
  const alone = line.indexOf("L") < 0;
  if (!series.error.length) element(group, "path", { class: `line${series.dashed ? " dashed" : ""}${series.marker ? " faint" : ""}`, d: line });
  if (dots || alone) element(group, "path", { class: "dots", d: dots || line.replace(/M([\d.]+) ([\d.]+)/g, (_, x, y) => mark("o", Number(x), Number(y), 2.8)) });
  if (bars) element(group, "path", { class: "errors", d: bars });
  if (beyond) element(group, "path", { class: "beyond", d: beyond });
}
function errorBar(chart, value, error, x) {
  const [low, high] = [place(chart, value - error), place(chart, value + error)];
  if (Math.abs(low.y - high.y) < 3) return "";
  return `M${one(x)} ${one(low.y)}V${one(high.y)}M${one(x - 2)} ${one(low.y)}h4M${one(x - 2)} ${one(high.y)}h4`;
}
