// The data of the page, and what all plots have in common

const DATA = JSON.parse(document.getElementById("data").textContent);
const ROWS = DATA.rows.map(([label, name, group, layer, weighted, end], index) => ({ label, name, group, layer, weighted, end, index }));
const LEFT = 54, RIGHT = 10, TOP = 10, BOTTOM = 40;
const state = { show: "layers", picked: -1, charts: [] };

// shares of units are known of activations, which have no weights
function plottedRows(figure) {
  const chosen = ROWS.filter(state.show === "weighted" && !figure.percent ? (row) => row.weighted : (row) => row.layer);
  return chosen.length ? chosen : ROWS;
}

// Legends

function addLegend(box, figure) {
  const list = html(box, "ul", "legend");
  const banded = figure.series.filter(({ low }) => low.length).pop();
  for (const series of figure.series) {
    const name = figure.kind === "scatter" ? "a layer" : series.name;
    addKey(list, series, name + (series.error.length ? " ± standard error" : ""), series.marker ? "dots" : "line");
  }
  if (banded) addKey(list, banded, "middle half of units", "band");
  if (banded && banded.least.length) addKey(list, banded, "all units", "outer");
  if (figure.kind === "scatter") addKey(list, { look: "before", dashed: true }, "equal", "line");
}
function addKey(list, series, text, look) {
  const item = html(list, "li");
  swatch(item, series, look);
  item.append(text);
}
function swatch(parent, series, look) {
  const svg = element(parent, "svg", { width: 20, height: 10, "aria-hidden": "true", class: series.look });
  if (look === "dots") element(svg, "path", { class: "dots", d: mark(series.marker, 10, 5, 3.5) });
  else if (look === "line") element(svg, "path", { class: "line" + (series.dashed ? " dashed" : ""), d: "M0 5H20" });
  else element(svg, "rect", { class: look, width: 20, height: 10 });
}

// A chart: the frame common to all plots

function startChart(box) {
  const figure = DATA.figures[box.dataset.figure];
  addLegend(box, figure);
  const svg = element(box, "svg", { class: "chart", tabindex: 0, role: "img", "aria-label": `${figure.title}: ${figure.label}` });
  const chart = { box, figure, svg, draw: figure.kind === "scatter" ? drawScatter : drawDepth, width: 0 };
  state.charts.push(chart);
  addPointer(chart);
  new ResizeObserver(() => { if (Math.round(box.clientWidth) !== chart.width) redraw(chart); }).observe(box);
  redraw(chart);
}
function redraw(chart) {
  chart.width = Math.max(220, Math.round(chart.box.clientWidth));
  chart.height = chart.figure.kind === "scatter" ? Math.min(340, chart.width) : 270;
  chart.frame = { left: LEFT, right: chart.width - RIGHT, top: TOP, bottom: chart.height - BOTTOM };
  chart.svg.setAttribute("height", chart.height);
  chart.svg.setAttribute("viewBox", `0 0 ${chart.width} ${chart.height}`);
  chart.svg.replaceChildren();
  chart.draw(chart);
  chart.cursor = element(chart.svg, "g", { "pointer-events": "none" });
}
function clip(chart) {
  const id = `clip-${chart.figure.id}`, holder = element(chart.svg, "clipPath", { id });
  element(holder, "rect", { x: LEFT, y: TOP, width: chart.width - LEFT - RIGHT, height: chart.height - TOP - BOTTOM });
  return element(chart.svg, "g", { "clip-path": `url(#${id})` });
}
