// What the page was given: layers, opened when they are first shown, and how their numbers are read and written.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const HIDDEN = 255; // in place of a level: the query may not see the key
const SHARES = 65535; // the largest of the numbers that are given as shares
let whenShown = () => {}; // what else is to be done with the layer that is shown
const loading = []; // of each layer that was opened, the promise of its numbers

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const shorts = (bytes) => new Uint16Array(bytes.buffer);

// Whole numbers from the differences between neighbours.
function summed(bytes) {
  let sum = 0;
  return new Int32Array(bytes.buffer).map((step) => (sum += step));
}

function open(number) {
  loading[number] ??= load(data.layers[number], number);
  return loading[number];
}

async function load(given, number) {
  const names = ["weights", "maps", "topKeys", "topWeights", ...given.columns];
  const bytes = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await inflate(given[name])])));
  const [first, last] = (await Promise.all(given.spans.map(inflate))).map(summed);
  return {
    ...given,
    number,
    measure: "weights",
    exact: new Map(), // rows that a server has computed, by head and query
    whole: bytes.weights.length > 0, // every weight is here; else the heaviest keys of rows, and a pooled map
    weights: bytes.weights,
    cells: bytes.maps,
    heaviest: given.wide ? new Uint32Array(bytes.topKeys.buffer) : shorts(bytes.topKeys),
    heaviestWeights: shorts(bytes.topWeights),
    shares: Object.fromEntries(given.columns.map((name) => [name, shorts(bytes[name])])),
    masses: shorts(bytes.received), // what is carried, where the page shows that
    first, // of each query, the first key that it may see, and the last; empty where every weight is here
    last,
    carried: given.rows ? given.rows.length : given.queries.n,
    nr: given.rowEdges.length - 1,
    nc: given.colEdges.length - 1,
  };
}

const weightOf = (level) => (level / data.steps) ** 2;
const pooledWeight = (level) => (level === 0 ? 0 : data.least ** (1 - level / (data.levels - 1)));

// The number under which a query's row is carried, and the query itself: of long texts, the first of each cell is.
function place(one, query) {
  if (!one.rows) return [query, query];
  const found = Math.max(
    one.rows.findLastIndex((row) => row <= query),
    0,
  );
  return [found, one.rows[found]];
}

function heaviestKeys(one, head, query) {
  const start = (head * one.carried + place(one, query)[0]) * one.rank,
    found = [];
  for (let n = start; n < start + one.rank; n++) {
    if (one.heaviest[n] < one.keys.n) found.push([one.heaviest[n], one.heaviestWeights[n] / SHARES]); // beyond: none
  }
  return found;
}

// The row of a query with every weight in full, of a page that is served; undefined where there is none.
const exactRow = (one, head, query) => one.exact.get(`${head},${query}`);

// What a query looks at: a weight for each key; NaN where it may not look, or where the page does not know.
function row(one, head, query) {
  const known = exactRow(one, head, query);
  if (known) return known;
  const found = new Float32Array(one.keys.n).fill(NaN);
  if (!one.whole) {
    heaviestKeys(one, head, query).forEach(([key, weight]) => (found[key] = weight));
    return found;
  }
  const start = (head * one.queries.n + query) * one.keys.n;
  for (let key = 0; key < found.length; key++) {
    const level = one.weights[start + key];
    if (level !== HIDDEN) found[key] = weightOf(level);
  }
  return found;
}

// Who looks at a key: a weight for each query, NaN as above.
function column(one, head, key) {
  const found = new Float32Array(one.queries.n).fill(NaN);
  if (one.whole) {
    for (let query = 0; query < found.length; query++) {
      const level = one.weights[(head * one.queries.n + query) * one.keys.n + key];
      if (level !== HIDDEN) found[query] = weightOf(level);
    }
    return found;
  }
  for (let number = 0; number < one.carried; number++) {
    const start = (head * one.carried + number) * one.rank;
    for (let n = start; n < start + one.rank; n++) {
      if (one.heaviest[n] === key) found[one.rows ? one.rows[number] : number] = one.heaviestWeights[n] / SHARES;
    }
  }
  return found;
}

const cellOf = (edges, token) =>
  Math.max(
    edges.findLastIndex((edge) => edge <= token),
    0,
  );

// The mean weight of the pairs of a cell of the map, NaN where none of them may be seen.
function cellMean(one, head, r, c) {
  const level = one.cells[(head * one.nr + r) * one.nc + c];
  return level === HIDDEN ? NaN : pooledWeight(level) / (one.colEdges[c + 1] - one.colEdges[c]);
}

// What a query looks at, as `row` has it, with the means of the cells for keys whose weights the page does not know.
function rowWithMeans(one, head, query) {
  const found = row(one, head, query);
  if (one.whole || exactRow(one, head, query)) return found;
  const r = Math.min(cellOf(one.rowEdges, query), one.nr - 1);
  for (let c = 0; c < one.nc; c++) {
    const mean = cellMean(one, head, r, c),
      end = Math.min(one.colEdges[c + 1], one.last[query] + 1);
    for (let key = Math.max(one.colEdges[c], one.first[query]); key < end; key++)
      if (Number.isNaN(found[key])) found[key] = mean;
  }
  return found;
}

// Who looks at a key, likewise.
function columnWithMeans(one, head, key) {
  const found = column(one, head, key);
  if (one.whole) return found;
  const c = Math.min(cellOf(one.colEdges, key), one.nc - 1);
  for (let r = 0; r < one.nr; r++) {
    const mean = cellMean(one, head, r, c);
    for (let query = one.rowEdges[r]; query < one.rowEdges[r + 1]; query++)
      if (Number.isNaN(found[query]) && one.first[query] <= key && key <= one.last[query]) found[query] = mean;
  }
  return found;
}

// One weight, and whether it is exact: where the page does not know it, it is the mean over its cell of the map.
function pair(one, head, query, key) {
  if (one.whole) {
    const level = one.weights[(head * one.queries.n + query) * one.keys.n + key];
    return { weight: level === HIDDEN ? NaN : weightOf(level), exact: true };
  }
  const known = place(one, query)[1] === query && heaviestKeys(one, head, query).find(([other]) => other === key);
  if (known) return { weight: known[1], exact: true };
  const r = Math.min(cellOf(one.rowEdges, query), one.nr - 1),
    c = Math.min(cellOf(one.colEdges, key), one.nc - 1);
  return { weight: cellMean(one, head, r, c), exact: false };
}

// The position of a token; in a comparison, the number of its cell.
const numberOf = (axis, n) => axis.numbers?.[n] ?? axis.first + n;
const token = (axis, n) => (axis.text < 0 ? `#${numberOf(axis, n)}` : data.texts[axis.text][n]);
const isolated = (text) => `\u2066${text}\u2069`; // its direction changes no other text's
const oneText = (one) => one.queries.text === one.keys.text && one.queries.n === one.keys.n;
const SPECIAL = /^(\[[A-Za-z ]+\d*\]|<\/?[a-z_ ]+>|<\|.*\|>)$/i; // [CLS], </s>, <|endoftext|>

function percent(share) {
  if (!(share >= 1e-4)) return "< 0.01 %";
  return share >= 0.0995 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toPrecision(2)} %`;
}

// A number and its noun: "1 key", "4,096 keys".
function countOf(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

// How many queries and keys a map has, for those who do not see it.
function sizeOf({ queries, keys }) {
  return `${countOf(queries.n, "query", "queries")}, ${countOf(keys.n, "key")}`;
}

// A token's text, left to right whatever it holds, as are the tokens themselves.
function tokenElement(name, text) {
  const made = element("bdi", name, text);
  made.dir = "ltr";
  return made;
}

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text; // never markup: tokens may hold any
  return made;
}
