// The signed map: the weight after less the weight before, on rows and columns that correspond.
let drawn = { key: "", canvas: null, scale: null };

// The two layers with their alignments; `queries` and `keys` are the axes of the map.
async function openPair() {
  const [before, after] = await Promise.all([open(state.layer), open(data.count + state.otherLayer)]);
  const rows = data.axes[data.rows[state.layer][state.otherLayer]],
    cols = data.axes[data.cols[state.layer][state.otherLayer]];
  return { before, after, queries: rows, keys: cols };
}

// A weight on one side: undefined where the query has no counterpart there; NaN where it cannot attend to the key, or
// the text lacks the key.
function weightAt(layer, head, query, key) {
  if (query < 0) return undefined;
  if (key < 0) return NaN;
  if (data.by === "tokens") return pair(layer, head, query, key).weight;
  const level = layer.cells[(head * layer.nr + query) * layer.nc + key];
  return level === HIDDEN ? NaN : pooledWeight(level);
}

// What a query gave a key before and gives it after; the change is NaN where there is nothing to compare.
function moved(one, r, c) {
  const before = weightAt(one.before, state.head, one.queries.before[r], one.keys.before[c]),
    after = weightAt(one.after, state.otherHead, one.queries.after[r], one.keys.after[c]);
  const none = before === undefined || after === undefined || (Number.isNaN(before) && Number.isNaN(after));
  return { before, after, change: none ? NaN : (after || 0) - (before || 0) };
}

// The changes of a query on all keys, or of all queries on a key.
function changes(one) {
  const { query, key } = cursor(),
    rows = asked() === "queries",
    count = rows ? one.keys.n : one.queries.n;
  return Float32Array.from({ length: count }, (_, n) => (rows ? moved(one, query, n) : moved(one, n, key)).change);
}

// The mean change of each key, over the queries that have a counterpart, and the share of mass that moved.
function meanChanges(one) {
  const sums = new Float32Array(one.keys.n);
  let count = 0,
    share = 0;
  for (let r = 0; r < one.queries.n; r++) {
    if (one.queries.before[r] < 0 || one.queries.after[r] < 0) continue;
    let sees = false;
    for (let c = 0; c < one.keys.n; c++) {
      const { before, after, change } = moved(one, r, c);
      sees ||= before > 0 || after > 0;
      sums[c] += change || 0;
      share += Math.abs(change || 0) / 2;
    }
    count += Number(sees);
  }
  const rows = Math.max(count, 1);
  return { means: sums.map((sum) => sum / rows), share: share / rows };
}

function signedPicture(one) {
  const heads = [state.layer, state.head, state.otherLayer, state.otherHead],
    key = [...heads, state.scale, dark(), ...Object.values(part)].join();
  if (drawn.key === key) return drawn.canvas;
  const { row, rows, col, cols } = part,
    change = (_, n) => moved(one, row + Math.floor(n / cols), col + (n % cols)).change,
    values = Float32Array.from({ length: rows * cols }, change),
    scale = scaleOf(values.map(Math.abs)),
    hidden = rgb("--nowhere"),
    image = new ImageData(cols, rows);
  values.forEach((value, n) => {
    const shown = Number.isNaN(value) ? hidden : signedColour(value, scale);
    image.data.set([...shown.slice(0, 3), 255], 4 * n);
  });
  const canvas = element("canvas");
  canvas.width = cols;
  canvas.height = rows;
  canvas.getContext("2d").putImageData(image, 0, 0);
  drawn = { key, canvas, scale };
  return canvas;
}

function drawMap(one) {
  follow(one);
  drawFramed(one, signedPicture(one));
  showSigned(at("map-scale"), drawn.scale);
}

const NONE = "no counterpart";

function readout(one) {
  const { query, key } = cursor(),
    { before, after, change } = moved(one, query, key);
  const said = (weight, n) => {
    if (weight === undefined || n < 0) return NONE;
    return Number.isNaN(weight) ? "cannot attend" : percent(weight);
  };
  const name = (axis, n) => isolated(token(axis, n));
  at("readout").textContent =
    `query ${name(one.queries, query)} → key ${name(one.keys, key)}: before ${said(before, one.keys.before[key])}, ` +
    `after ${said(after, one.keys.after[key])}${Number.isNaN(change) ? "" : ` (${signed(change)})`}`;
}

function saveChanges(name, pairs) {
  const place = (axis, side, n) => (axis[side][n] < 0 ? "" : axis[side][n]),
    number = (weight) => (weight === undefined || Number.isNaN(weight) ? "" : digits(weight));
  const rows = pairs.map(([r, c]) => {
    const { before, after, change } = moved(current, r, c);
    const [query, key] = [current.queries, current.keys].map((axis, n) => [
      token(axis, [r, c][n]),
      place(axis, "before", [r, c][n]),
      place(axis, "after", [r, c][n]),
    ]);
    return [...query, ...key, number(before), number(after), number(change)];
  });
  const of = (what) => [what, `${what} number before`, `${what} number after`];
  saveTable(name, [...of("query"), ...of("key"), "weight before", "weight after", "change"], rows);
}

function saveMap() {
  const { row, rows, col, cols } = part;
  const pair = (_, n) => [row + Math.floor(n / cols), col + (n % cols)];
  saveChanges("changes.csv", Array.from({ length: rows * cols }, pair));
}

function saveRow() {
  const { query, key } = cursor(),
    rows = asked() === "queries";
  const pairs = rows ? current.keys.before.map((_, n) => [query, n]) : current.queries.before.map((_, n) => [n, key]);
  saveChanges(`changes-${rows ? "query" : "key"}.csv`, pairs);
}
