// What is shown, as files: the weights of a row, a column or the map as CSV, the map as PNG.
const SPACE = 30; // CSS pixels above and below a saved map, for its title and its scale

const PAIR = ["query", "query token", "key", "key token", "weight", "precision"];

function pairRow(one, query, key, weight, precision) {
  return [
    query + one.queries.first,
    token(one.queries, query),
    key + one.keys.first,
    token(one.keys, key),
    digits(weight),
    precision,
  ];
}

// The weights that the text shows: of a query on all keys, or of all queries on a key.
function saveRow() {
  const one = current,
    by = asked(),
    skip = leftOutTokens(one),
    known = shares(one, state.head),
    precision = (n) => (Number.isNaN(known[n]) ? "mean of a cell" : shownRow(one) ? "exact" : "rounded");
  const rows = [];
  shadedWeights(one).forEach((weight, n) => {
    const [query, key] = by === "queries" ? [cursor().query, n] : [n, cursor().key];
    if (!Number.isNaN(weight) && !skip(n)) rows.push(pairRow(one, query, key, weight, precision(n)));
  });
  const what = by === "queries" ? "query" : "key";
  saveTable(`${fileOf(one)}${what}-${chosen() + chosenAxis(one).first}.csv`, inUnitsOf(one, PAIR), rows);
}

// The part of the map that is shown: pairs, or where the page holds none of them and they are many, cells.
function saveMap() {
  const one = current,
    skip = leftOut(one),
    other = ofOtherTexts(one),
    rows = [];
  if (!singlePairs(one)) {
    const last = (edges, n) => edges[n + 1] - 1;
    for (let r = 0; r < one.nr; r++) {
      for (let c = 0; c < one.nc; c++) {
        const level = one.cells[(state.head * one.nr + r) * one.nc + c];
        if (level === HIDDEN || !inPart(one, r, c) || other(one.rowEdges[r], one.colEdges[c])) continue;
        const queries = [one.rowEdges[r], last(one.rowEdges, r)].map((n) => n + one.queries.first),
          keys = [one.colEdges[c], last(one.colEdges, c)].map((n) => n + one.keys.first);
        rows.push([...queries, ...keys, digits(pooledWeight(level))]);
      }
    }
    const head = ["first query", "last query", "first key", "last key", "weight"];
    saveTable(`${fileOf(one)}map.csv`, inUnitsOf(one, head), rows);
    return;
  }
  for (let query = part.row; query < part.row + part.rows; query++) {
    for (let key = part.col; key < part.col + part.cols; key++) {
      const { weight, exact } = pair(one, state.head, query, key);
      if (!Number.isNaN(weight) && !skip(query, key))
        rows.push(pairRow(one, query, key, weight, exact ? "rounded" : "mean of a cell"));
    }
  }
  saveTable(`${fileOf(one)}map.csv`, inUnitsOf(one, PAIR), rows);
}

// Whether a cell of the map holds tokens of the part that is shown.
function inPart(one, r, c) {
  const meets = (edges, n, from, size) => edges[n] < from + size && edges[n + 1] > from;
  return meets(one.rowEdges, r, part.row, part.rows) && meets(one.colEdges, c, part.col, part.cols);
}

// The map as it stands on the page, between its title and its scale.
function savePicture() {
  const map = at("map"),
    made = element("canvas"),
    ratio = map.width / map.getBoundingClientRect().width,
    space = Math.round(SPACE * ratio);
  made.width = map.width;
  made.height = map.height + 2 * space;
  const pen = made.getContext("2d");
  pen.fillStyle = css("--ground");
  pen.fillRect(0, 0, made.width, made.height);
  pen.drawImage(map, 0, space);
  pen.scale(ratio, ratio);
  pen.fillStyle = css("--ink");
  pen.textBaseline = "middle";
  pen.font = "bold 14px system-ui, sans-serif";
  pen.fillText(at("name").textContent, 4, SPACE / 2);
  const [least, most] = [".least", ".most"].map((end) => at("map-scale").querySelector(end).textContent),
    wide = 160,
    y = made.height / ratio - SPACE / 2;
  pen.font = "11px system-ui, sans-serif";
  const x = 70 + pen.measureText(least).width,
    ramp = pen.createLinearGradient(x, 0, x + wide, 0);
  pen.fillText(least, 64, y);
  pen.fillText(`${most}  ${namedScale(drawn.scale)}`, x + wide + 6, y);
  for (let n = 0; n <= 8; n++) ramp.addColorStop(n / 8, `rgb(${colour(levelOf(n / 8))})`);
  pen.fillStyle = ramp;
  pen.fillRect(x, y - 5, wide, 10);
  made.toBlob((blob) => saveFile(`${fileOf(current)}map.png`, blob, "image/png"));
}
