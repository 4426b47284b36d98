// Analytic against measured

function drawScatter(chart) {
  const { figure, svg, width, height } = chart, series = figure.series[0], bottom = height - BOTTOM;
  chart.rows = plottedRows(figure).filter(({ index }) => isNumber(series.x[index]) && isNumber(series.y[index]));
  const axis = chart.axis = axisOf(figure.axis, chart.rows.flatMap(({ index }) => [series.x[index], series.y[index]]));
  chart.y = drawValueAxis(chart, axis);
  chart.across = (value) => LEFT + axis.at(value) * (width - LEFT - RIGHT);
  let free = 0;
  for (const tick of axis.ticks) {
    const x = chart.across(tick), half = tickText(tick).length * 3;
    element(svg, "path", { class: "grid", d: `M${one(x)} ${TOP}V${bottom}` });
    if (x - half > free && x + half < width) { element(svg, "text", { x, y: bottom + 15, "text-anchor": "middle" }, tickText(tick)); free = x + half + 4; }
  }
  element(svg, "path", { class: "equal", d: `M${LEFT} ${bottom}L${width - RIGHT} ${TOP}` });
  drawScatterPoints(chart, series);
  drawFrame(chart);
  element(svg, "text", { class: "label", x: (LEFT + width - RIGHT) / 2, y: height - 5, "text-anchor": "middle" }, "measured" + (axis.log ? ", log axes" : ""));
}
function drawScatterPoints(chart, series) {
  const group = element(clip(chart), "g", { class: series.look });
  let dots = "", bars = "";
  chart.points = [];
  for (const { index } of chart.rows) {
    const [x, y, error] = [series.x[index], series.y[index], series.error[index]];
    if (chart.axis.log && (x <= 0 || y <= 0)) continue;
    const at = { x: chart.across(x), y: chart.y(y), index };
    chart.points.push(at);
    dots += mark("circle", at.x, at.y, 2.6);
    const low = chart.axis.log && x <= error ? LEFT : chart.across(x - error), high = chart.across(x + error);
    if (high - low > 3) bars += `M${one(low)} ${one(at.y)}H${one(high)}`;
  }
  element(group, "path", { class: "errors", d: bars });
  element(group, "path", { class: "dots", d: dots });
}
