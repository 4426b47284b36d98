// Light and dark, and tables: sorted by a click, and on a phone

function theme(which) {
  if (which === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = which;
  for (const button of document.querySelectorAll("button[data-theme]")) button.setAttribute("aria-pressed", String(button.dataset.theme === which));
}
for (const button of document.querySelectorAll("button[data-theme]")) button.addEventListener("click", () => theme(button.dataset.theme));

// `first` is the direction of the first click; what has no key stays below
function sortRows(table, rows, head, first, key) {
  const heads = [...table.tHead.rows[0].cells], column = heads.indexOf(head);
  const other = first === "ascending" ? "descending" : "ascending";
  const direction = head.getAttribute("aria-sort") === first ? other : first, sign = direction === "ascending" ? 1 : -1;
  for (const each of heads) each.setAttribute("aria-sort", each === head ? direction : "none");
  const keyed = rows.map((row) => [key(row.cells[column].dataset.key), row]);
  keyed.sort(([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : a < b ? -sign : a > b ? sign : 0));
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

// the names of the columns beside every value: done on narrow screens alone, since a table may have thousands of rows
function labelTables() {
  for (const table of document.querySelectorAll("table.sortable:not([data-labelled])")) {
    const names = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, column) => { cell.dataset.label = names[column]; });
    table.dataset.labelled = "";
  }
}
const narrow = matchMedia("(max-width: 560px)");
if (narrow.matches) labelTables();
narrow.addEventListener("change", (event) => { if (event.matches) labelTables(); });
