// The map of a head, queries down and keys across, whole or a part of it, and below it the mass that each key receives.
const NAME = 12; // CSS pixels that a token needs for its name at an axis
const SINGLE = 256; // tokens up to which single pairs are drawn where the page knows the heaviest keys only
const LEAST_SHOWN = 8; // tokens that a map shows at least
let part = { row: 0, rows: 0, col: 0, cols: 0 }; // the tokens that the map shows
let drawn = { key: "", canvas: null };

// A canvas as sharp as the screen; drawn in CSS pixels.
function surface(canvas) {
  const box = canvas.getBoundingClientRect(),
    ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  return [pen, box.width, box.height];
}

// Moves the part only where the cursor has left it: under a pointer, the map stands still.
function follow(one) {
  const side = (n, at, from, size) => {
    const wanted = Math.max(Math.min(n, LEAST_SHOWN), Math.ceil(n / 2 ** state.zoom));
    const inside = size === wanted && at >= from && at < from + size;
    return [inside ? from : Math.min(Math.max(at - (wanted >> 1), 0), n - wanted), wanted];
  };
  const [row, rows] = side(one.queries.n, cursor().query, part.row, part.rows);
  const [col, cols] = side(one.keys.n, cursor().key, part.col, part.cols);
  part = { row, rows, col, cols };
}

// Whether the map draws single pairs, not cells.
const singlePairs = (one) => one.whole || Math.max(part.rows, part.cols) <= SINGLE;

function picture(one) {
  const key = [state.layer, state.head, state.scale, state.hide, state.pair, state.measure, dark(), ...Object.values(part)].join();
  if (drawn.key === key) return drawn.canvas;
  const skip = leftOut(one),
    single = singlePairs(one);
  const r0 = single ? part.row : cellOf(one.rowEdges, part.row),
    c0 = single ? part.col : cellOf(one.colEdges, part.col);
  const rows = single ? part.rows : Math.min(cellOf(one.rowEdges, part.row + part.rows - 1), one.nr - 1) - r0 + 1;
  const cols = single ? part.cols : Math.min(cellOf(one.colEdges, part.col + part.cols - 1), one.nc - 1) - c0 + 1;
  const weight = (r, c) => {
    if (single) return pair(one, state.head, r0 + r, c0 + c).weight;
    const level = one.cells[(state.head * one.nr + r0 + r) * one.nc + c0 + c];
    return level === HIDDEN ? NaN : pooledWeight(level);
  };
  // A cell is of the texts that its first query and key are of; a key alone is not left out of cells.
  const other = ofOtherTexts(one),
    gone = (r, c) => (single ? skip(r0 + r, c0 + c) : other(one.rowEdges[r0 + r], one.colEdges[c0 + c]));
  const values = new Float32Array(rows * cols).map((_, n) => {
    const r = Math.floor(n / cols),
      c = n % cols;
    return gone(r, c) ? NaN : weight(r, c);
  });
  const most = largest(values);
  const canvas = painted(rows, cols, (r, c) => {
    const value = values[r * cols + c];
    return Number.isNaN(value) ? HIDDEN : levelOf(shade(value, most));
  });
  drawn = { key, canvas, most };
  return canvas;
}

// Whether an axis names its tokens: they have names, and room for them.
const named = (axis, shown) => axis.text >= 0 && (at("map").clientWidth - 96) / shown >= NAME;

function margins(one) {
  return { left: named(one.queries, part.rows) ? 96 : 64, below: named(one.keys, part.cols) ? 96 : 38 };
}

function drawMap(one) {
  follow(one);
  const [pen, width, height] = surface(at("map")),
    { left, below } = margins(one);
  const w = width - left,
    h = height - below;
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture(one), left, 0, w, h);
  pen.fillStyle = css("--quiet");
  ticks(one.queries, part.row, part.rows).forEach(([n, text]) =>
    label(pen, text, left - 6, Math.max((h * (n + 0.5)) / part.rows, 6), 0, left - 26),
  );
  const upright = !named(one.keys, part.cols);
  ticks(one.keys, part.col, part.cols).forEach(([n, text]) => {
    const x = left + (w * (n + 0.5)) / part.cols,
      half = upright ? pen.measureText(text).width / 2 : 0;
    label(pen, text, Math.min(x, width - half), h + 6, upright ? null : -Math.PI / 2, upright ? Infinity : below - 26);
  });
  pen.fillStyle = css("--ink");
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  pen.fillText("key", left + w / 2, height - 4);
  pen.save();
  pen.translate(11, h / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText("query", 0, 0);
  pen.restore();
  pen.strokeStyle = css("--accent");
  pen.lineWidth = 2;
  const { query, key } = cursor(),
    cellWide = Math.max(w / part.cols, 5),
    cellHigh = Math.max(h / part.rows, 5);
  const x = left + (w * (key - part.col + 0.5)) / part.cols,
    y = (h * (query - part.row + 0.5)) / part.rows;
  pen.globalAlpha = 0.55;
  pen.lineWidth = 1;
  pen.beginPath(); // the line of the token that the text beside the map is about
  if (asked() === "queries") pen.rect(left, y - cellHigh / 2, w, cellHigh);
  else pen.rect(x - cellWide / 2, 0, cellWide, h);
  pen.stroke();
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.strokeRect(x - cellWide / 2, y - cellHigh / 2, cellWide, cellHigh);
  showScale(at("map-scale"), drawn.most);
}

// All tokens where there is room for their names, else a few round numbers.
function ticks(axis, from, count) {
  if (named(axis, count)) return [...Array(count).keys()].map((n) => [n, isolated(token(axis, from + n))]);
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];
  const step = steps.find((s) => count / s <= 8) || count,
    first = Math.ceil((axis.first + from) / step) * step;
  const found = [];
  for (let n = first; n < axis.first + from + count; n += step) found.push([n - axis.first - from, String(n)]);
  return found;
}

function label(pen, text, x, y, turn, room) {
  while (text.length > 4 && pen.measureText(text).width > room)
    text = `${text.slice(0, text.endsWith("…\u2069") ? -3 : -2)}…\u2069`;
  pen.save();
  pen.translate(x, y);
  pen.rotate(turn ?? 0);
  pen.textAlign = turn === null ? "center" : "right";
  pen.textBaseline = turn === null ? "top" : "middle";
  pen.fillText(text, 0, 0);
  pen.restore();
}

function drawReceived(one) {
  const [pen, width, height] = surface(at("received")),
    { left } = margins(one),
    w = width - left;
  const count = one.masses.length / one.heads,
    mass = one.masses.subarray(state.head * count, (state.head + 1) * count);
  const least = Math.max(Math.min(...mass), 1) / 1.5; // logarithmic, from the least of all
  const range = Math.log(Math.max(...mass, 2) / least);
  const high = (value) => (Math.log(Math.max(value, least) / least) / range) * (height - 4);
  const first = (n) => (one.keyEdges ? one.keyEdges[n] : n);
  const x = (key) => left + (w * (key - part.col)) / part.cols;
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, w, height);
  pen.clip();
  pen.fillStyle = css("--accent");
  pen.beginPath(); // one shape: bars of broken width would shimmer
  pen.moveTo(x(0), height);
  mass.forEach((value, n) => {
    pen.lineTo(x(first(n)), height - 1 - high(value));
    pen.lineTo(x(n + 1 < count ? first(n + 1) : one.keys.n), height - 1 - high(value));
  });
  pen.lineTo(x(one.keys.n), height);
  pen.fill();
  const marked = one.keyEdges ? cellOf(one.keyEdges, cursor().key) : cursor().key;
  pen.fillStyle = css("--ink");
  pen.fillRect(x(first(marked)), height - 1 - high(mass[marked]), Math.max(w / part.cols, 2), high(mass[marked]) + 1);
  pen.restore();
}

// The query and key under a pointer; null outside of the map.
function pointedAt(event, one) {
  const box = at("map").getBoundingClientRect(),
    { left, below } = margins(one);
  const x = (event.clientX - box.left - left) / (box.width - left),
    y = (event.clientY - box.top) / (box.height - below);
  if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
  return { query: part.row + Math.floor(y * part.rows), key: part.col + Math.floor(x * part.cols) };
}
