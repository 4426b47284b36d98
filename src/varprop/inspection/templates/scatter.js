// Analytic against measured

function drawScatter(chart) {
  const { figure, svg, frame } = chart, series = figure.series[0];
  const known = plottedRows(figure).filter(({ index }) => isNumber(series.x[index]) && isNumber(series.y[index]));
  const axis = chart.axis = axisOf(figure.axis, known.flatMap(({ index }) => [series.x[index], series.y[index]]));
  chart.rows = known.filter(({ index }) => !axis.log || (series.x[index] > 0 && series.y[index] > 0));
  chart.y = drawValueAxis(svg, frame, axis, "analytic");
  chart.across = drawPlaceAxis(svg, frame, axis, axis.ticks);
  element(svg, "path", { class: "equal", d: `M${frame.left} ${frame.bottom}L${frame.right} ${frame.top}` });
  drawScatterPoints(chart, series);
  drawFrame(svg, frame, "measured" + (axis.log ? ", log axes" : ""));
}
function drawScatterPoints(chart, series) {
  const group = element(clip(chart), "g", { class: series.look });
  let dots = "", bars = "";
  chart.points = chart.rows.map(({ index }) => {
    const [x, error] = [series.x[index], series.error[index]], at = { x: chart.across(x), y: chart.y(series.y[index]) };
    dots += mark("o", at.x, at.y, 2.6);
    const low = chart.axis.log && x <= error ? LEFT : chart.across(x - error), high = chart.across(x + error);
    if (high - low > 3) bars += `M${one(low)} ${one(at.y)}H${one(high)}`;
    return at;
  });
  element(group, "path", { class: "errors", d: bars });
  element(group, "path", { class: "dots", d: dots });
}
