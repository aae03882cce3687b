// The map of a head as a canvas, whole or a part of it, and below the map the mass that each key receives.
const SINGLE = 256; // tokens up to which single pairs are drawn where the page knows the heaviest keys only
let drawn = { key: "", canvas: null, scale: null };

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
  const scale = scaleOf(values);
  const canvas = painted(rows, cols, (r, c) => {
    const value = values[r * cols + c];
    return Number.isNaN(value) ? HIDDEN : levelOf(scale.share(value));
  });
  drawn = { key, canvas, scale };
  return canvas;
}

function drawMap(one) {
  follow(one);
  drawFramed(one, picture(one));
  showScale(at("map-scale"), drawn.scale);
}

const times = (ratio) =>
  ratio > 1000 ? "more than 1,000 times" : `${ratio.toLocaleString("en", { maximumSignificantDigits: 2 })} times`;

function drawReceived(one) {
  const [pen, width, height] = surface(at("received")),
    { left } = margins(one),
    w = width - left;
  const count = one.masses.length / one.heads,
    mass = one.masses.subarray(state.head * count, (state.head + 1) * count);
  const lowest = Math.min(...mass),
    highest = Math.max(...mass);
  at("received-scale").textContent = highest ? `logarithmic: the highest is ${times(highest / lowest)} the lowest` : "";
  const least = Math.max(lowest, 1) / 1.5;
  const range = Math.log(Math.max(highest, 2) / least);
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
