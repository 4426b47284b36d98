// What lies under the pointer or the arrow keys: one cursor for all plots

function addPointer(chart) {
  const { svg } = chart;
  const find = (event) => {
    const box = svg.getBoundingClientRect();
    return nearest(chart, event.clientX - box.left, event.clientY - box.top);
  };
  const move = (event) => { const position = find(event); if (position >= 0) point(chart, position); else leave(); };
  const step = (by) => { if (chart.rows.length) point(chart, Math.min(chart.rows.length - 1, Math.max(0, (chart.at === undefined ? -1 : chart.at) + by))); };
  const enter = () => { if (chart.at >= 0) pick(chart.rows[chart.at].index); };
  listen(svg, { move, leave, step, enter });
  svg.addEventListener("click", (event) => { const position = find(event); if (position >= 0) pick(chart.rows[position].index); });
}
function nearest(chart, x, y) {
  if (chart.figure.kind === "scatter") {
    let best = -1, least = 30;
    chart.points.forEach((at, position) => {
      const distance = Math.hypot(at.x - x, at.y - y);
      if (distance < least) [best, least] = [position, distance];
    });
    return best;
  }
  const last = chart.rows.length - 1;
  const position = last ? Math.round((x - chart.x(0)) / (chart.x(last) - chart.x(0)) * last) : 0;
  return Math.min(last, Math.max(0, position));
}
function point(chart, position) {
  chart.at = position;
  const row = chart.rows[position];
  for (const other of state.charts) drawCursor(other, row);
  say(chart, row);
}
function drawCursor(chart, row) {
  chart.cursor.replaceChildren();
  const position = chart.rows.indexOf(row);
  if (position < 0) return;
  if (chart.figure.kind === "scatter") {
    const { x, y } = chart.points[position];
    element(element(chart.cursor, "g", { class: "main" }), "circle", { class: "at", cx: x, cy: y, r: 4.5 });
    return;
  }
  element(chart.cursor, "path", { class: "cursor", d: `M${one(chart.x(position))} ${TOP}V${chart.height - BOTTOM}` });
  for (const series of chart.figure.series) {
    const at = place(chart, series.y[row.index]);
    if (at) element(element(chart.cursor, "g", { class: series.look }), "circle", { class: "at", cx: chart.x(position), cy: at.y, r: 3.5 });
  }
}
function leave() {
  tooltip.hidden = true;
  for (const chart of state.charts) { chart.cursor.replaceChildren(); chart.at = undefined; }
}
function say(chart, row) {
  tooltip.replaceChildren();
  html(tooltip, "b", "", row.label);
  html(tooltip, "i", "", row.name);
  for (const series of chart.figure.series) sayValue(chart, series, row.index);
  tooltip.hidden = false;
  const box = chart.svg.getBoundingClientRect(), position = chart.rows.indexOf(row);
  const spot = chart.figure.kind === "scatter" ? chart.points[position] : { x: chart.x(position), y: 12 };
  const above = box.top + spot.y - 12 - tooltip.offsetHeight;  // just above the point, or above the plot
  placeTooltip(box.left + spot.x, above > 4 ? above : box.bottom);
}
function sayValue(chart, series, index) {
  const unit = chart.figure.percent ? " %" : "", value = series.y[index];
  if (value === null || value === undefined) return;
  const line = html(tooltip, "div");
  swatch(line, series, series.marker ? "dots" : "line");
  const scatter = chart.figure.kind === "scatter";
  line.append(scatter ? `analytic ${format(value)}, measured ${format(series.x[index])}` : `${series.name} ${format(value)}${unit}`);
  const error = series.error[index];
  if (isNumber(error)) html(line, "i", "", `± ${format(error, 1)}`);
  if (series.low.length) html(tooltip, "i", "range", `half of its units ${format(series.low[index])} to ${format(series.high[index])}`);
}
