// Numbers of heads, and the tables that show them: each can be read in full, by the pointer or by the arrow keys.
function number(grid, layer, head) {
  const value = grid.values[layer][head] ?? null;
  if (value === null) return "–";
  const size = Math.abs(value),
    text = size > 0 && size < 1e-4 ? size.toExponential(1) : size.toPrecision(3);
  return `${value < 0 ? "−" : grid.signs && value > 0 ? "+" : ""}${text}`;
}

const side = (grid, layer, head) => (grid.values[layer][head] < 0 ? "below" : "above");

// The number, and what its sign means, where it has a meaning.
function inWords(grid, layer, head) {
  const value = grid.values[layer][head],
    text = number(grid, layer, head);
  return grid.signs && value ? `${text}, ${grid.signs[Number(value > 0)]}` : text;
}

// What a table says of a head, below it; of the head that is shown, where none is under the pointer.
function readCell(region, layer = state.layer, head = state.head) {
  const grid = data.grids.find((one) => one.label === region.getAttribute("aria-label"));
  region.querySelector(".read").textContent = `${nameOf(layer, head)}: ${inWords(grid, layer, head)}`;
}

function listenToGrids() {
  document.querySelectorAll(".grids .scroll").forEach((region) => {
    const read = element("p", "read");
    read.setAttribute("aria-live", "polite");
    region.append(read);
    region.addEventListener("pointerover", (event) => {
      const cell = event.target.closest("td[data-at]");
      if (cell) readCell(region, ...cell.dataset.at.split(",").map(Number));
    });
    region.addEventListener("pointerleave", () => readCell(region));
    region.addEventListener("click", (event) => {
      const cell = event.target.closest("td[data-at]");
      if (cell) move(...cell.dataset.at.split(",").map(Number));
    });
    region.addEventListener("keydown", (event) => {
      const arrow = ARROWS[event.key];
      if (!arrow || !plain(event) || event.shiftKey) return;
      event.preventDefault();
      move(state.layer + arrow[0], state.head + arrow[1]);
    });
  });
}

// Marks the head that is shown in every table, and brings its cell into view where its table is the one in use.
function markGrids() {
  const here = `${state.layer},${state.head}`;
  document.querySelectorAll(".grids .scroll").forEach((region) => {
    const cell = region.querySelector(`td[data-at="${here}"]`);
    region.querySelector("td.on")?.classList.remove("on");
    cell.classList.add("on");
    if (document.activeElement === region) cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    readCell(region);
  });
}
