// Light and dark, and tables on a phone

function theme(which) {
  if (which === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = which;
  for (const button of document.querySelectorAll("button[data-theme]")) button.setAttribute("aria-pressed", String(button.dataset.theme === which));
}
for (const button of document.querySelectorAll("button[data-theme]")) button.addEventListener("click", () => theme(button.dataset.theme));

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
