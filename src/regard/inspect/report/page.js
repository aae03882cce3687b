// Of the page: one head of a model at a time; what the query under the cursor looks at, and what may be pressed.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const page = document.body;
const state = { layer: data.shown[0], head: data.shown[1], row: 0, col: 0, query: 0 };
const decoded = [];
const STEPS = 65535; // in which shares are given
const NAMED = 32; // tokens up to which the axes name each of them

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const shorts = (text) => new Uint16Array(bytes(text).buffer);

function layer() {
  const one = data.layers[state.layer];
  decoded[state.layer] ??= {
    cells: bytes(one.maps),
    entropies: shorts(one.entropy),
    masses: shorts(one.received),
    weights: shorts(one.topWeights),
    heaviest: one.wide ? new Uint32Array(bytes(one.topKeys).buffer) : shorts(one.topKeys),
  };
  return { ...one, ...decoded[state.layer], nr: one.rowEdges.length - 1, nc: one.colEdges.length - 1 };
}

const token = (axis, n) => (axis.text < 0 ? `#${axis.first + n}` : data.texts[axis.text][n]);
const percent = (share) => (share >= 0.1 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toPrecision(2)} %`);
const dark = () => css("--scheme") === "dark";
const css = (name) => getComputedStyle(page).getPropertyValue(name).trim();
const colour = (level) => data.palette[dark() ? data.palette.length - 1 - level : level];
const weight = (level) => data.least ** (1 - level / (data.levels - 1));

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text; // never markup: tokens may hold any
  return made;
}

function line(axis, key, share, number) {
  const made = element("div", "key"), word = element("span", "word", token(axis, key)), track = element("span", "track"), fill = element("i");
  fill.style.setProperty("--w", `${Math.min(100, 100 * share)}%`);
  track.append(fill);
  word.append(element("small", "", ` ${key + axis.first}`));
  made.append(word, track, element("span", "share", number));
  return made;
}

// The queries of the marked cell of which the page carries the heaviest keys, as [query, its place].
function queries(one) {
  const from = one.rowEdges[state.row], to = one.rowEdges[state.row + 1];
  if (one.rows) return [[one.rows[state.row], state.row]];
  return [...Array(Math.max(to - from, 0)).keys()].slice(0, 4).map((n) => [from + n, from + n]);
}

function heaviest(one, place) {
  const count = one.rows ? one.rows.length : one.queries.n, start = (state.head * count + place) * one.rank;
  const found = [];
  for (let n = start; n < start + one.rank; n++) {
    if (one.heaviest[n] < one.keys.n) found.push([one.heaviest[n], one.weights[n] / STEPS]); // beyond: none
  }
  return found;
}

function showTops(one) {
  const count = one.rows ? one.rows.length : one.queries.n;
  const rows = queries(one).map(([query, place]) => {
    const row = element("div", "row"), name = element("div", "query", token(one.queries, query)), keys = element("div");
    const entropy = (one.entropies[state.head * count + place] / STEPS) * one.entropyScale;
    name.append(element("small", "", `query ${query + one.queries.first}, entropy ${entropy.toFixed(2)} nats`));
    heaviest(one, place).forEach(([key, p]) => keys.append(line(one.keys, key, p, percent(p))));
    row.append(name, keys);
    return row;
  });
  at("tops").replaceChildren(...rows);
}

function showBest(one) {
  const best = one.best[state.head], most = best.length ? best[0][1] : 1;
  at("best").replaceChildren(...best.map(([key, mass]) => {
    const item = element("li");
    item.append(line(one.keys, key, mass / (most || 1), mass.toPrecision(3)));
    return item;
  }));
}

function span(axis, from, to) {
  const number = to - from > 1 ? `${axis.first + from}–${axis.first + to - 1}` : `${axis.first + from}`;
  if (axis.text < 0) return number;
  const words = [...Array(Math.min(to - from, 4)).keys()].map((n) => token(axis, from + n)).join(" ");
  return `${number} ‘${words}${to - from > 4 ? " …" : ""}’`;
}

function readout(one) {
  const level = one.cells[(state.head * one.nr + state.row) * one.nc + state.col];
  const said = level === 255 ? "cannot attend" : level === 0 ? `${data.least} or less` : weight(level).toPrecision(2);
  const query = span(one.queries, one.rowEdges[state.row], one.rowEdges[state.row + 1]);
  const key = span(one.keys, one.colEdges[state.col], one.colEdges[state.col + 1]);
  at("readout").textContent = `query ${query} → key ${key}: ${said}`;
}

function showText(one) {
  const fits = one.queries.text >= 0 && one.queries.text === one.keys.text && one.queries.n <= 2048;
  at("reading").hidden = !fits;
  if (!fits) return;
  const words = at("words");
  if (words.dataset.text !== String(one.queries.text)) {
    words.dataset.text = String(one.queries.text);
    words.replaceChildren(...data.texts[one.queries.text].map((text, n) => {
      const word = element("span", "word-token", text);
      word.dataset.n = n;
      return word;
    }));
  }
  const rows = queries(one), [query, place] = rows.find(([n]) => n === state.query) ?? rows[0], shades = new Map(heaviest(one, place));
  [...words.children].forEach((word, n) => {
    word.style.setProperty("--w", `${Math.round(100 * Math.sqrt(shades.get(n) ?? 0))}%`);
    word.classList.toggle("on", n === query);
  });
}

function show() {
  const one = layer();
  state.row = Math.min(Math.max(state.row, 0), one.nr - 1);
  state.col = Math.min(Math.max(state.col, 0), one.nc - 1);
  drawMap(one);
  drawReceived(one);
  showTops(one);
  readout(one);
  showText(one);
  return one;
}

function choose(layerNumber, headNumber) {
  state.layer = Math.min(Math.max(layerNumber, 0), data.layers.length - 1);
  state.head = Math.min(Math.max(headNumber, 0), data.layers[state.layer].heads - 1);
  const one = show(), name = `L${state.layer}H${state.head}`;
  showBest(one);
  at("name").textContent = `${name}  ${one.name}`;
  at("map").setAttribute("aria-label", `attention map of ${name}: ${one.queries.n} queries, ${one.keys.n} keys`);
  at("layer").value = String(state.layer);
  fill(at("head"), one.heads, (n) => String(n), state.head);
  at("numbers").replaceChildren(...data.grids.map((grid) => {
    const item = element("li", "", `${grid.label} `), value = grid.values[state.layer][state.head];
    item.append(element("b", "", value === null ? "–" : Number(value).toPrecision(3)));
    return item;
  }));
  document.querySelectorAll(".grid td[data-at]").forEach((cell) =>
    cell.classList.toggle("on", cell.dataset.at === `${state.layer},${state.head}`));
}

function fill(select, count, text, chosen) {
  if (select.options.length !== count) {
    select.replaceChildren(...[...Array(count).keys()].map((n) => new Option(text(n), String(n))));
  }
  select.value = String(chosen);
}

function pointed(event) {
  const one = layer(), box = at("map").getBoundingClientRect(), { left, below } = margins(data.layers[state.layer]);
  const x = (event.clientX - box.left - left) / (box.width - left), y = (event.clientY - box.top) / (box.height - below);
  if (x < 0 || x >= 1 || y < 0 || y >= 1) return;
  state.col = Math.floor(x * one.nc);
  state.row = Math.floor(y * one.nr);
  show();
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function pressed(event) {
  const move = MOVES[event.key];
  if (!move || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("select, input")) return;
  event.preventDefault();
  if (event.shiftKey) {
    state.row += move[0];
    state.col += move[1];
    show();
  } else {
    choose(state.layer + move[0], state.head + move[1]);
  }
}

function restyle() {
  paintRamp();
  show();
}

at("still").hidden = true;
at("live").hidden = false;
at("theme").hidden = false;
page.classList.add("lively");
fill(at("layer"), data.layers.length, (n) => `${n}  ${data.layers[n].name}`, state.layer);
at("layer").addEventListener("change", (event) => choose(Number(event.target.value), state.head));
at("head").addEventListener("change", (event) => choose(state.layer, Number(event.target.value)));
at("theme").addEventListener("click", () => {
  page.dataset.theme = dark() ? "light" : "dark";
  restyle();
});
at("map").addEventListener("pointermove", pointed);
at("map").addEventListener("pointerdown", pointed);
at("words").addEventListener("click", (event) => {
  const n = Number(event.target.dataset.n), edges = layer().rowEdges;
  if (Number.isNaN(n)) return;
  state.query = n;
  state.row = edges.findLastIndex((edge) => edge <= n);
  show();
});
document.querySelectorAll(".grids").forEach((grids) => grids.addEventListener("click", (event) => {
  const cell = event.target.closest("td[data-at]");
  if (cell) choose(...cell.dataset.at.split(",").map(Number));
}));
document.addEventListener("keydown", pressed);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
window.addEventListener("resize", show);
paintRamp();
choose(state.layer, state.head);
