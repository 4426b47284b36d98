(function () {
  const W = 380, H = 268, FRAME = { left: 56, right: 368, top: 26, bottom: 228 };
  const CENTRE = (FRAME.left + FRAME.right) / 2;
  const DASH = { solid: "", dashed: "7 4", dashdot: "9 3 2 3", dotted: "2 3" };
  const figures = JSON.parse(document.getElementById("data").textContent);
  const shows = (value, log) => isNumber(value) && (!log || value > 0);
  const colours = (series) => `--c:light-dark(${series.colour},${series.dark_colour})`;

  // One figure: its controls and its panels, drawn again whenever something changes

  function start(box) {
    const figure = figures[box.dataset.figure];
    if (!figure) return;
    savedAs(box.querySelector("img"), figure);
    const state = { figure, box, log: figure.y_log, hidden: new Set(), panels: null };
    addControls(state);
    state.panels = html(box, "div", "panels" + (figure.panels.length === 1 ? " single" : ""));
    draw(state);
  }
  // the picture, which is there for readers without scripts, becomes a link to save it by
  function savedAs(picture, figure) {
    if (!picture) return;
    const link = html(picture.closest("figure").querySelector(".caption"), "a", "", "save as PNG");
    link.href = picture.src;
    link.download = figure.name + ".png";
    picture.remove();
  }
  function allSeries(figure) {
    const found = new Map();
    for (const panel of figure.panels) for (const series of panel.series) if (!found.has(series.label)) found.set(series.label, series);
    return [...found.values()].sort((a, b) => a.rank - b.rank);
  }
  function addControls(state) {
    const controls = html(state.box, "div", "controls");
    for (const series of allSeries(state.figure)) addLegendButton(state, controls, series);
    const values = state.figure.panels.flatMap((panel) => panel.series.flatMap((series) => series.y));
    if (values.every((value) => value === null || value > 0)) addAxisButton(state, controls);
  }
  function addLegendButton(state, controls, series) {
    const button = html(controls, "button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.title = "hide or show " + series.label;
    swatch(button, series);
    button.append(series.label);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!shown));
      if (shown) state.hidden.add(series.label); else state.hidden.delete(series.label);
      draw(state);
    });
  }
  function addAxisButton(state, controls) {
    const button = html(controls, "button", "axis");
    button.type = "button";
    const say = () => { button.textContent = state.log ? "linear axis" : "log axis"; };
    button.addEventListener("click", () => { state.log = !state.log; say(); draw(state); });
    say();
  }
  function swatch(parent, series) {
    const svg = element(parent, "svg", { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true", style: colours(series) });
    element(svg, "path", { class: "c-line", d: "M1 6H25", "stroke-dasharray": DASH[series.dash] });
    if (series.dash !== "dashed") marker(svg, series, 13, 6, 3.2);
  }
  function draw(state) {
    const { figure, log, hidden } = state;
    const shown = figure.panels.flatMap((panel) => panel.series).filter((series) => !hidden.has(series.label));
    const base = shown.length ? shown : figure.panels.flatMap((panel) => panel.series);
    const places = [...base.flatMap((series) => series.x), ...figure.panels.flatMap((panel) => panel.bounds)];
    const axes = {
      x: axisOf(figure.x_log ? "log" : "linear", places),
      y: axisOf(log ? "log" : "linear", base.flatMap((series) => [...series.y, ...series.low, ...series.high])),
    };
    state.panels.replaceChildren();
    for (const panel of figure.panels) drawPanel(state, panel, axes);
  }
  function drawPanel(state, panel, axes) {
    const { figure, log, hidden } = state;
    const svg = element(state.panels, "svg", { viewBox: `0 0 ${W} ${H}`, tabindex: 0, role: "img" });
    const shown = panel.series.filter((series) => !hidden.has(series.label));
    svg.setAttribute("aria-label", `${figure.title}, ${panel.title}: ${shown.map((series) => series.label).join(", ") || "no data"}`);
    const [x, y] = drawAxes(svg, figure, panel, axes);
    for (const bound of panel.bounds) element(svg, "path", { class: "bound", d: `M${x(bound)} ${FRAME.top}V${FRAME.bottom}` });
    const view = { svg, x, y, log, figure, panel, shown };
    for (const series of shown) if (series.low.length) drawBand(view, series);
    for (const series of shown) drawSeries(view, series);
    for (const series of shown) for (const mark of series.marks) drawMark(view, series, mark);
    if (!panel.series.length)
      element(svg, "text", middle({ class: "note", x: CENTRE, y: (FRAME.top + FRAME.bottom) / 2 }), "no data");
    addCursor(view);
  }
  function drawAxes(svg, figure, panel, axes) {
    const x = drawPlaceAxis(svg, FRAME, axes.x, xTicks(figure, panel, axes.x)), y = drawValueAxis(svg, FRAME, axes.y, figure.y_label);
    drawFrame(svg, FRAME, figure.x_label);
    const missing = panel.series.length && panel.missing.length ? `  (no data: ${panel.missing.join(", ")})` : "";
    element(svg, "text", middle({ class: "title", x: CENTRE, y: 15 }), panel.title + missing);
    return [x, y];
  }
  function xTicks(figure, panel, axis) {
    if (figure.x_label === "batch size") return [...new Set(panel.series.flatMap((series) => series.x))];
    return figure.x_label === "epoch" ? axis.ticks.filter(Number.isInteger) : axis.ticks;
  }

  // What is in a panel

  function drawSeries(view, series) {
    const points = positions(view, series);
    const group = element(view.svg, "g", { style: colours(series), class: "series" });
    element(group, "path", { class: series.points ? "c-thin" : "c-line", d: linePath(points), "stroke-dasharray": series.points ? "" : DASH[series.dash] });
    if (series.points || points.length <= 3)
      for (const point of points) if (point) marker(group, series, point[0], point[1], 2.6);
  }
  function positions({ x, y, log }, series) {
    return series.x.map((at, index) => shows(series.y[index], log) ? [x(at), y(series.y[index])] : null);
  }
  function drawBand({ svg, x, y, log }, series) {
    const whole = series.x.map((at, i) => [at, series.low[i], series.high[i]]).filter((edge) => shows(edge[1], log) && shows(edge[2], log));
    if (whole.length < 2) return;
    const edge = (side) => whole.map((found) => [x(found[0]), y(found[side])]);
    element(svg, "path", { class: "c-band", style: colours(series), d: bandPath(edge(2), edge(1)) });
  }
  function marker(parent, series, x, y, size) {
    if (series.marker) element(parent, "path", { class: series.open_marker ? "c-open" : "c-dot", d: mark(series.marker, x, y, size) });
  }
  function drawMark({ svg, x, y, log }, series, mark) {
    const cx = x(mark.x), cy = shows(mark.y, log) ? y(mark.y) : FRAME.top + 5;
    const group = element(svg, "g", { style: colours(series) });
    element(group, "title", {}, `${series.label}: ${mark.kind}`);
    if (mark.kind === "diverged") element(group, "path", { class: "c-cross", d: `M${cx - 4} ${cy - 4}l8 8m0 -8l-8 8` });
    if (mark.kind === "chosen") element(group, "circle", { class: "c-ring", cx, cy, r: 5.5 });
    if (mark.kind === "at bound") element(group, "path", { class: "c-star", d: star(cx, cy, 7) });
  }
  function star(cx, cy, size) {
    const corners = [];
    for (let corner = 0; corner < 10; corner++) {
      const angle = Math.PI * (corner / 5 - 0.5), radius = corner % 2 ? size * 0.42 : size;
      corners.push([cx + radius * Math.cos(angle), cy + radius * Math.sin(angle)]);
    }
    return closedPath(corners);
  }

  // Values under the pointer, or under the arrow keys

  function addCursor(view) {
    const cursor = element(view.svg, "g", { class: "hover" });
    const places = [...new Set(view.shown.flatMap((series) => series.x))].sort((a, b) => a - b);
    let index = -1;
    const hide = () => { cursor.replaceChildren(); tooltip.hidden = true; };
    const show = (place) => {
      index = place;
      cursor.replaceChildren();
      const anchor = view.shown.some((series) => series.points) ? null : places[index];
      if (anchor !== null) showColumn(view, cursor, anchor);
    };
    const move = (event) => {
      if (!places.length) return;
      const box = view.svg.getBoundingClientRect();
      const at = [(event.clientX - box.left) * W / box.width, (event.clientY - box.top) * H / box.height];
      if (view.shown.some((series) => series.points)) { cursor.replaceChildren(); showPoint(view, cursor, at); }
      else show(nearest(places.map((place) => view.x(place)), at[0]));
    };
    const step = (by) => { if (places.length) show(Math.min(places.length - 1, Math.max(0, index + by))); };
    listen(view.svg, { move, leave: hide, step });
  }
  function nearest(values, wanted) {
    let best = 0;
    values.forEach((value, index) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = index; });
    return best;
  }
  function showColumn(view, cursor, place) {
    element(cursor, "path", { class: "cursor", d: `M${view.x(place)} ${FRAME.top}V${FRAME.bottom}` });
    const rows = [];
    for (const series of view.shown) {
      const index = series.x.indexOf(place);
      if (index < 0 || !shows(series.y[index], view.log)) continue;
      const dot = element(cursor, "g", { style: colours(series) });
      element(dot, "circle", { class: "c-dot", cx: view.x(place), cy: view.y(series.y[index]), r: 3.5 });
      rows.push([series, format(series.y[index], 4), bandText(series, index)]);
    }
    say(view, `${view.panel.title}, ${view.figure.x_label} ${tickText(place)}`, rows, view.x(place), FRAME.top);
  }
  function bandText(series, index) {
    if (!series.low.length || (series.seeds < 2 && series.seeds > 0)) return "";
    return `${format(series.low[index], 4)} to ${format(series.high[index], 4)}`;
  }
  function showPoint(view, cursor, [px, py]) {
    let best = null;
    for (const series of view.shown)
      positions(view, series).forEach((point, index) => {
        const distance = point ? Math.hypot(point[0] - px, point[1] - py) : Infinity;
        if (distance < (best ? best.distance : 40)) best = { series, index, point, distance };
      });
    if (!best) { tooltip.hidden = true; return; }
    element(cursor, "circle", { class: "c-ring", style: colours(best.series), cx: best.point[0], cy: best.point[1], r: 8 });
    const { series, index } = best;
    say(view, `${view.panel.title}, ${view.figure.x_label} ${format(series.x[index])}`, [[series, format(series.y[index], 4), ""]], best.point[0], best.point[1]);
  }
  function say(view, title, rows, px, py) {
    tooltip.replaceChildren();
    html(tooltip, "b", "", title);
    for (const [series, value, band] of rows) {
      const row = html(tooltip, "div");
      swatch(row, series);
      row.append(`${series.label}: ${value} `);
      html(row, "i", "", band);
    }
    tooltip.hidden = false;
    const box = view.svg.getBoundingClientRect();
    placeTooltip(box.left + px * box.width / W, box.top + py * box.height / H + 8);
  }

  // Tables

  function sortable(table) {
    const key = (text) => Number(text.replace("inf", "Infinity"));
    for (const head of table.tHead.rows[0].cells)
      head.querySelector("button").addEventListener("click", () => sortRows(table, [...table.tBodies[0].rows], head, "ascending", key));
  }

  document.querySelectorAll(".plot").forEach(start);
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.documentElement.dataset.ready = "yes";
})();
