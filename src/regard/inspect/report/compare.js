// Of the page of a comparison: what may be pressed, pointed at and chosen, and everything that is shown then.
let current = null; // the opened layers

function show() {
  if (!current) return;
  showTexts(current);
  drawMap(current);
  readout(current);
}

// Shows a state: its layers are opened first, and others that are chosen meanwhile are shown instead.
async function choose() {
  state.layer = within(state.layer, data.count);
  state.otherLayer = within(state.otherLayer, data.count);
  if (data.rows[state.layer][state.otherLayer] < 0) state.otherLayer = state.layer; // maps of other sizes
  state.head = within(state.head, data.layers[state.layer].heads);
  state.otherHead = within(state.otherHead, data.layers[data.count + state.otherLayer].heads);
  const wanted = [state.layer, state.otherLayer].join(),
    one = await openPair();
  if (wanted !== [state.layer, state.otherLayer].join()) return;
  current = one;
  over = null;
  if (state.query === null) Object.assign(state, mostMoved(one));
  state.query = within(state.query, one.queries.n);
  state.key = within(state.key, one.keys.n);
  state.zoom = within(state.zoom, zooms(one));
  showChoices();
  show();
  showMeans(one);
  SIDES.forEach((side) => reveal(at(`${side}-chosen`)));
  writeAddress();
  document.body.dataset.ready = at("name").textContent;
}

// The query whose mass moved most, and the key that it lost or gained most on.
function mostMoved(one) {
  let found = { query: 0, key: 0 },
    most = -1;
  for (let query = 0; query < one.queries.n; query++) {
    let sum = 0,
      key = 0,
      largest = 0;
    for (let n = 0; n < one.keys.n; n++) {
      const size = Math.abs(moved(one, query, n).change) || 0;
      sum += size;
      if (size > largest) [key, largest] = [n, size];
    }
    if (sum > most) [found, most] = [{ query, key }, sum];
  }
  return found;
}

function showChoices() {
  const [before, after] = [nameOf(state.layer, state.head), nameAfter()];
  at("name").textContent = sameHead() ? `${before}  ${current.before.name}` : `${before} before, ${after} after`;
  at("map").setAttribute(
    "aria-label",
    `signed map of ${before} before and ${after} after: ${sizeOf(current)}`,
  );
  const layers = (n) => `${data.layers[n].place || `L${n}`}  ${data.layers[n].name}`;
  fillNumbers(at("before-layer"), data.count, layers, state.layer);
  const layersAfter = (n) => layers(data.count + n).replace(/^L\d+ /, `L${n} `);
  fillNumbers(at("after-layer"), data.count, layersAfter, state.otherLayer);
  [...at("after-layer").options].forEach((option, n) => (option.disabled = data.rows[state.layer][n] < 0));
  fillNumbers(at("before-head"), data.layers[state.layer].heads, (n) => `H${n}`, state.head);
  fillNumbers(at("after-head"), data.layers[data.count + state.otherLayer].heads, (n) => `H${n}`, state.otherHead);
  at("same").hidden = sameHead();
  markGrids();
  document
    .querySelectorAll("[data-choice]")
    .forEach((button) => button.setAttribute("aria-pressed", String(button.value === state[button.dataset.choice])));
}

// Another head, before and after.
function move(layer, head) {
  state.layer = state.otherLayer = within(layer, data.count);
  state.head = state.otherHead = within(head, data.layers[state.layer].heads);
  return choose();
}

// Chooses a row or a column of the map, and with it the column or row that changed most.
function pick(by, place) {
  state.by = by;
  state[by === "queries" ? "query" : "key"] = place;
  over = null;
  const sizes = changes(current).map(Math.abs),
    most = sizes.indexOf(largest(sizes));
  if (most >= 0) state[by === "queries" ? "key" : "query"] = most;
  return choose();
}

// Lists of both sides are linked: what is pointed at or chosen in one is so in the other.
function listenToSide(side, kind) {
  const which = () => {
    if (kind === "chosen" || oneList(current, side)) return state.by;
    return state.by === "queries" ? "keys" : "queries";
  };
  const of = () => sideAxis(current, side, which());
  listen(at(`${side}-${kind}`), {
    hover(n) {
      const by = which(),
        place = placeOf(of(), n);
      if (by !== state.by) return; // the other text shows what the chosen token did
      over = { query: state.query, key: state.key, by, [by === "queries" ? "query" : "key"]: place };
      show();
    },
    pick: (n) => pick(which(), placeOf(of(), n)),
    last: () => of().axis.n - 1,
  });
}

listenToMap();
SIDES.forEach((side) => ["chosen", "shaded"].forEach((kind) => listenToSide(side, kind)));
SIDES.filter((side) => data.pictures[side]).forEach(listenToSidePatches);
at("before-layer").addEventListener("change", (event) => move(Number(event.target.value), state.head));
at("before-head").addEventListener("change", (event) => move(state.layer, Number(event.target.value)));
at("after-layer").addEventListener("change", (event) => {
  state.otherLayer = Number(event.target.value);
  choose();
});
at("after-head").addEventListener("change", (event) => {
  state.otherHead = Number(event.target.value);
  choose();
});
at("same").addEventListener("click", () => move(state.layer, state.head));
document.querySelectorAll("[data-choice]").forEach((button) =>
  button.addEventListener("click", () => {
    state[button.dataset.choice] = button.value;
    choose();
  }),
);
followAddresses();
at("save-row").addEventListener("click", saveRow);
at("save-map").addEventListener("click", saveMap);
at("save-picture").addEventListener("click", () => saveMapPicture("changes.png", changeStops()));
window.addEventListener("resize", show);
listenToTheme(show);
listenToGrids();
at("live").hidden = at("theme").hidden = false;
document.body.classList.add("lively");
readAddress(location.hash);
choose();
