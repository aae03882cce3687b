// What is shown, as tables: the weights of a row, a column or the map as CSV.
const PAIR = ["query", "query token", "key", "key token", "weight", "precision"];

function pairRow(one, query, key, weight, precision) {
  return [
    numberOf(one.queries, query),
    token(one.queries, query),
    numberOf(one.keys, key),
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
  saveTable(`${fileOf(one)}${what}-${numberOf(chosenAxis(one), chosen())}.csv`, inUnitsOf(one, PAIR), rows);
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
        const queries = [one.rowEdges[r], last(one.rowEdges, r)].map((n) => numberOf(one.queries, n)),
          keys = [one.colEdges[c], last(one.colEdges, c)].map((n) => numberOf(one.keys, n));
        rows.push([...queries, ...keys, digits(pooledWeight(level))]);
      }
    }
    const head = ["first query", "last query", "first key", "last key", "weight"];
    saveTable(`${fileOf(one)}map.csv`, inUnitsOf(one, head), rows);
    return;
  }
  for (let query = part.row; query < part.row + part.rows; query++) {
    for (let key = part.col; key < part.col + part.cols; key++) {
      if (key < one.first[query] || key > one.last[query]) continue; // a cell's mean is of the pairs that can attend
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
