// Analytic against measured

function drawScatter(chart) {
  const { figure, svg, frame } = chart, series = figure.series[0];
  chart.rows = plottedRows(figure).filter(({ index }) => isNumber(series.x[index]) && isNumber(series.y[index]));
  const axis = chart.axis = axisOf(figure.axis, chart.rows.flatMap(({ index }) => [series.x[index], series.y[index]]));
  chart.y = drawValueAxis(svg, frame, axis, "analytic");
  chart.across = drawPlaceAxis(svg, frame, axis, axis.ticks);
  element(svg, "path", { class: "equal", d: `M${frame.left} ${frame.bottom}L${frame.right} ${frame.top}` });
  drawScatterPoints(chart, series);
  drawFrame(svg, frame, "measured" + (axis.log ? ", log axes" : ""));
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
    dots += mark("o", at.x, at.y, 2.6);
    const low = chart.axis.log && x <= error ? LEFT : chart.across(x - error), high = chart.across(x + error);
    if (high - low > 3) bars += `M${one(low)} ${one(at.y)}H${one(high)}`;
  }
  element(group, "path", { class: "errors", d: bars });
  element(group, "path", { class: "dots", d: dots });
}
