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
  whenShown(one);
}

function readout(one) {
  const { query, key } = cursor(),
    known = exactRow(one, state.head, query),
    { weight, exact } = known ? { weight: known[key], exact: true } : pair(one, state.head, query, key);
  const name = (axis, n) => `${n + axis.first}${axis.text < 0 ? "" : ` ‘${isolated(token(axis, n))}’`}`;
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
  at("map").setAttribute("aria-label", `attention map of ${name}: ${one.queries.n} queries, ${one.keys.n} keys`);
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

function fillNumbers(select, count, text, shown) {
  if (select.options.length !== count) {
    select.replaceChildren(...Array.from({ length: count }, (_, n) => new Option(text(n), String(n))));
  }
  select.value = String(shown);
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const plain = (event) => !(event.ctrlKey || event.altKey || event.metaKey);

at("map").addEventListener("keydown", (event) => {
  const arrow = ARROWS[event.key];
  if (!plain(event)) return;
  if (arrow && event.shiftKey) {
    state.query = within(cursor().query + arrow[0], current.queries.n);
    state.key = within(cursor().key + arrow[1], current.keys.n);
    choose();
  } else if (arrow) move(state.layer + arrow[0], state.head + arrow[1]);
  else if (event.key === "+" || event.key === "=") zoom(1);
  else if (event.key === "-") zoom(-1);
  else return;
  event.preventDefault();
});

// How many sizes a map has, from all tokens to a few.
function zooms(one) {
  const longest = Math.max(one.queries.n, one.keys.n, LEAST_SHOWN);
  return Math.ceil(Math.log2(longest / LEAST_SHOWN)) + 1;
}

function zoom(by) {
  state.zoom += by;
  choose();
}

// A list of tokens: the pointer shows, a click or an arrow key chooses. `axis` tells whose tokens they are.
function listen(list, axis) {
  const number = (event) => event.target.closest?.("[data-n]")?.dataset.n;
  list.addEventListener("pointerover", (event) => {
    const n = number(event),
      by = axis();
    if (event.pointerType !== "mouse" || n === undefined) return;
    over = { query: state.query, key: state.key, by, [by === "queries" ? "query" : "key"]: Number(n) };
    show();
  });
  list.addEventListener("pointerleave", () => leave());
  list.addEventListener("click", (event) => {
    const n = number(event);
    if (n !== undefined) pick(axis(), Number(n));
  });
  list.addEventListener("keydown", async (event) => {
    const n = Number(number(event)),
      across = list.id === "left" || list.id === "right";
    const by = axis(),
      last = current[by].n - 1;
    const steps = {
      ArrowLeft: across ? 0 : -1,
      ArrowRight: across ? 0 : 1,
      ArrowUp: -1,
      ArrowDown: 1,
      Home: -n,
      End: last - n,
    };
    if (!(event.key in steps) || !plain(event) || event.shiftKey) return;
    event.preventDefault();
    await pick(by, n + steps[event.key]);
    list.querySelector("[tabindex='0']")?.focus();
  });
}

function leave() {
  if (!over) return;
  over = null;
  show();
}

at("map").addEventListener("pointermove", (event) => {
  over = event.pointerType === "mouse" ? pointedAt(event, current) : null;
  show();
});
at("map").addEventListener("pointerleave", leave);
at("map").addEventListener("click", (event) => {
  Object.assign(state, pointedAt(event, current) ?? {});
  choose();
});
at("map").addEventListener("dblclick", () => zoom(1));
at("closer").addEventListener("click", () => zoom(1));
at("wider").addEventListener("click", () => zoom(-1));
listen(at("words"), () => (oneText(current) ? state.by : "queries"));
listen(at("others"), () => "keys");
listen(at("left"), () => "queries");
listen(at("right"), () => "keys");
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
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#L']");
  if (!link) return;
  event.preventDefault(); // a notebook's frame would follow the link to the notebook's own address
  readAddress(link.getAttribute("href"));
  state.heads = [];
  choose();
  at("viewer").scrollIntoView({ block: "start" });
});
window.addEventListener("hashchange", () => {
  readAddress(location.hash);
  choose();
});
at("save-row").addEventListener("click", saveRow);
at("save-map").addEventListener("click", saveMap);
at("save-picture").addEventListener("click", savePicture);
at("theme").addEventListener("click", () => {
  document.body.dataset.theme = dark() ? "light" : "dark";
  restyle();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
window.addEventListener("resize", show);

function restyle() {
  scheme = css("--scheme");
  paintSheet();
  show();
}

at("still").hidden = true;
at("live").hidden = at("all-heads").hidden = at("theme").hidden = false;
document.body.classList.add("lively");
fillNumbers(at("layer"), data.layers.length, (n) => `${data.layers[n].place || n}  ${data.layers[n].name}`, state.layer);
const keyNamed = /[#&]key=/.test(location.hash);
readAddress(location.hash);
listSheet();
fillSheet();
choose().then(() => keyNamed || pick(state.by, chosen()));
