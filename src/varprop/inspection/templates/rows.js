// The table, the tree, and what ties them to the plots

const table = document.querySelector("table.sortable");
const lines = ROWS.map(({ index }) => document.getElementById(`row-${index}`));
const entries = ROWS.map(({ index }) => document.getElementById(`tree-${index}`));
const search = document.querySelector(".search input");
const statusLine = document.querySelector(".status");

function sortBy(head) {
  const numeric = head.classList.contains("number"), first = numeric && head.cellIndex ? "descending" : "ascending";
  sortRows(table, lines, head, first, (key) => (numeric && key !== "" ? Number(key) : key));
}

function wanted(row) {
  const inside = ROWS[state.picked], words = search.value.trim().toLowerCase();
  if (inside && inside.end > inside.index + 1 && (row.index < inside.index || row.index >= inside.end)) return false;
  if (words && !`${row.label} ${row.name}`.toLowerCase().includes(words)) return false;
  return row.index === state.picked || state.show === "all" || (state.show === "weighted" ? row.weighted : row.layer);
}
function filterRows() {
  let shown = 0;
  for (const row of ROWS) {
    const visible = Boolean(wanted(row));
    if (lines[row.index].hidden === visible) lines[row.index].hidden = !visible;
    shown += visible;
  }
  const inside = ROWS[state.picked];
  statusLine.textContent = `${shown} of ${ROWS.length} rows` + (inside && inside.end > inside.index + 1 ? `, inside ${inside.label}` : "");
  if (inside) html(statusLine, "button", "", "clear selection").addEventListener("click", () => pick(-1));
}
function pick(index) {
  state.picked = index === state.picked ? -1 : index;
  lines.forEach((line, at) => line.classList.toggle("picked", at === state.picked));
  entries.forEach((entry, at) => entry.parentElement.classList.toggle("picked", at === state.picked));
  filterRows();
  state.charts.filter(({ figure }) => figure.kind === "depth").forEach(redraw);
  if (state.picked >= 0) reveal(state.picked);
}
function reveal(index) {
  for (let box = entries[index].parentElement.parentElement.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  scrollWithin(document.querySelector(".tree-body"), entries[index]);
  scrollWithin(document.querySelector(".scroll"), lines[index]);
}
// the page itself stays where it is
function scrollWithin(box, item) {
  const outer = box.getBoundingClientRect(), inner = item.getBoundingClientRect();
  if (inner.top < outer.top + 34 || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 3;
}
function show(which) {
  state.show = which;
  for (const button of document.querySelectorAll("[data-show]")) button.setAttribute("aria-pressed", String(button.dataset.show === which));
  filterRows();
  leave();
  state.charts.forEach(redraw);
}

for (const head of table.tHead.rows[0].cells) head.firstElementChild.addEventListener("click", () => sortBy(head));
table.tBodies[0].addEventListener("click", (event) => {
  const line = event.target.closest("tr");
  if (event.target.closest("a")) event.preventDefault();
  if (line && String(getSelection()) === "") pick(lines.indexOf(line));
});
document.querySelector(".tree-body").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  pick(entries.indexOf(link));
});
document.querySelector("#findings").addEventListener("click", (event) => {
  const link = event.target.closest("a.place");
  if (!link) return;
  event.preventDefault();
  const index = Number(link.hash.slice(5));
  if (state.picked !== index) pick(index);
  document.getElementById("rows").scrollIntoView();
});
search.addEventListener("input", filterRows);
for (const button of document.querySelectorAll("[data-show]")) button.addEventListener("click", () => show(button.dataset.show));
for (const button of document.querySelectorAll("[data-fold]"))
  button.addEventListener("click", () => {
    const folds = [...document.querySelectorAll(".tree-body details")];
    folds.forEach((fold) => { fold.open = button.dataset.fold === "open" || fold === folds[0]; });
  });

const first = table.querySelector("th[data-first]");
if (first) sortBy(first);
document.querySelectorAll(".plot").forEach(startChart);
filterRows();
document.documentElement.dataset.ready = "yes";
