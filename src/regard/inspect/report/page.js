// Of the page: what may be pressed, pointed at and chosen, and everything that is shown when it changes.
let current = null; // the opened layer

function show() {
  const one = current;
  if (!one) return;
  at("text-view").hidden = state.view !== "text";
  at("lines-view").hidden = state.view !== "lines";
  (state.view === "text" ? showText : showLines)(one);
  drawMap(one);
  drawReceived(one);
  readout(one);
  showCircuits(one);
  whenShown(one);
}

function readout(one) {
  const { query, key } = cursor(),
    known = exactRow(one, state.head, query),
    { weight, exact } = known ? { weight: known[key], exact: true } : pair(one, state.head, query, key);
  const name = (axis, n) => `${numberOf(axis, n)}${axis.text < 0 ? "" : ` ‘${isolated(token(axis, n))}’`}`;
  const found = Number.isNaN(weight) ? "cannot attend" : `${exact ? "" : "about "}${percent(weight)}`;
  at("readout").textContent = `query ${name(one.queries, query)} → key ${name(one.keys, key)}: ${found}`;
}

// Shows a state: its layer is opened first, and another that is chosen meanwhile is shown instead.
async function choose() {
  const wanted = state.layer,
    one = await measured(await open(wanted));
  if (wanted !== state.layer || one.measure !== state.measure) return;
  current = one;
  over = null;
  state.head = within(state.head, one.heads);
  state.query = within(state.query, one.queries.n);
  state.key = within(state.key, one.keys.n);
  state.zoom = within(state.zoom, zooms(one));
  state.heads = state.heads.filter((head) => head === within(head, one.heads));
  const name = nameOf(state.layer, state.head);
  at("name").textContent = `${titleOf(one, name)}  ${one.name}`;
  at("map").setAttribute("aria-label", `attention map of ${name}: ${sizeOf(one)}`);
  at("layer").value = String(state.layer);
  fillNumbers(at("head"), one.heads, (n) => String(n), state.head);
  at("numbers").replaceChildren(
    ...data.grids.map((grid) => {
      const item = element("li", "", `${grid.label} `);
      item.append(element("b", "", inWords(grid, state.layer, state.head)));
      return item;
    }),
  );
  markGrids();
  Object.keys(CHOICES).forEach((choice) =>
    document
      .querySelectorAll(`[data-choice="${choice}"]`)
      .forEach((button) => button.setAttribute("aria-pressed", String(button.value === state[choice]))),
  );
  at("hide").value = state.hide;
  at("pair").value = state.pair;
  at("pair-label").hidden = !isPair(one);
  markSheet();
  showBest(one);
  show();
  ["words", "others", "columns"].forEach((list) => reveal(at(list)));
  writeAddress();
  document.body.dataset.ready = name;
}

function move(layer, head) {
  state.layer = within(layer, data.layers.length);
  state.head = within(head, data.layers[state.layer].heads);
  state.heads = [];
  return choose();
}

// Chooses a token of an axis, by its number; and with a query the key that it looks at most, or the reverse.
function pick(by, number) {
  const axis = by === "queries" ? current.queries : current.keys;
  state.by = by;
  state[by === "queries" ? "query" : "key"] = within(number, axis.n);
  over = null;
  const values = shares(current, state.head),
    heaviest = values.indexOf(largest(values, leftOutTokens(current)));
  if (heaviest >= 0) state[by === "queries" ? "key" : "query"] = heaviest;
  return choose();
}

// `axis` tells whose tokens a list holds.
function listenToTokens(id, axis) {
  listen(at(id), {
    hover(n) {
      const by = axis();
      over = { query: state.query, key: state.key, by, [by === "queries" ? "query" : "key"]: n };
      show();
    },
    pick: (n) => pick(axis(), n),
    last: () => current[axis()].n - 1,
  });
}

listenToMap();
listenToTokens("words", () => (oneText(current) ? state.by : "queries"));
listenToTokens("others", () => "keys");
listenToTokens("left", () => "queries");
listenToTokens("right", () => "keys");
if (at("overlay")) listenToPatches();
at("columns").addEventListener("scroll", () => state.view === "lines" && showLines(current));
at("heads").addEventListener("click", async (event) => {
  const head = event.target.dataset.head;
  if (head === undefined) return;
  toggleHead(Number(head));
  await choose();
  at("heads").children[Number(head)].focus();
});
document.querySelectorAll("[data-choice]").forEach((button) =>
  button.addEventListener("click", () => {
    const before = chosen(),
      axes = current;
    state[button.dataset.choice] = button.value;
    // The other direction is asked about the same token.
    if (button.dataset.choice === "by" && oneText(axes)) state[state.by === "queries" ? "query" : "key"] = before;
    choose();
  }),
);
at("hide").addEventListener("change", (event) => {
  state.hide = event.target.value;
  choose();
});
at("pair").addEventListener("change", (event) => {
  state.pair = event.target.value;
  // A token of a text that does not ask, or is not read, shows nothing: the first one that does is chosen instead.
  const axis = chosenAxis(current),
    wanted = state.pair[state.by === "queries" ? 0 : 1],
    shows = (n) => state.pair === "all" || textOfToken(axis, n) === wanted;
  pick(state.by, shows(chosen()) ? chosen() : wanted === "a" ? 0 : data.second - axis.first);
});
at("search").addEventListener("input", (event) => found(event.target.value, 0));
at("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  found(event.target.value, event.shiftKey ? -1 : 1);
});

async function found(wanted, step) {
  const n = search(current, wanted, step);
  if (n !== null) await pick(state.by, n);
}

at("layer").addEventListener("change", (event) => move(Number(event.target.value), state.head));
at("head").addEventListener("change", (event) => move(state.layer, Number(event.target.value)));
listenToGrids();
["sort", "filter"].forEach((name) => at(name).addEventListener("change", fillSheet));
at("sheet").addEventListener("click", (event) => {
  const thumb = event.target.closest(".thumb");
  if (thumb) move(...thumb.dataset.at.split(",").map(Number));
});
at("sheet").addEventListener("keydown", async (event) => {
  const thumb = event.target.closest(".thumb");
  if (!(event.key in ARROWS) || !plain(event) || event.shiftKey || !thumb) return;
  event.preventDefault();
  const [next, layer, head] = besideThumb(thumb, event.key);
  await move(layer, head);
  next.focus();
});
followAddresses(() => (state.heads = []));
at("save-row").addEventListener("click", saveRow);
at("save-map").addEventListener("click", saveMap);
at("save-picture").addEventListener("click", () => saveMapPicture(`${fileOf(current)}map.png`, weightStops()));
window.addEventListener("resize", show);

listenToTheme(() => {
  paintSheet();
  show();
});

at("still").hidden = true;
at("live").hidden = at("all-heads").hidden = at("theme").hidden = false;
document.body.classList.add("lively");
fillNumbers(at("layer"), data.layers.length, (n) => `${data.layers[n].place || n}  ${data.layers[n].name}`, state.layer);
const keyNamed = /[#&]key=/.test(location.hash);
readAddress(location.hash);
listSheet();
fillSheet();
choose().then(() => keyNamed || pick(state.by, chosen()));
