// Both texts: a token is chosen in either, and with it its counterpart; the others have the colours of their change.
const LISTED = 8;
const SIDES = ["before", "after"];

const chosen = () => (asked() === "queries" ? cursor().query : cursor().key);

// The axis of a side's layer, and the cells that its tokens lie in; of single tokens, each is a cell.
function sideAxis(one, side, which) {
  const layer = one[side],
    edges = data.by === "tokens" ? null : which === "queries" ? layer.rowEdges : layer.colEdges;
  return { axis: layer[which], edges, along: one[which][side] };
}

// The row or column of the map that a token of a side stands in, and the first token that stands in one; -1 for none.
function placeOf({ edges, along }, n) {
  return along.indexOf(edges ? Math.min(cellOf(edges, n), along.length - 1) : n);
}
const firstToken = ({ edges, along }, place) => (along[place] < 0 ? -1 : edges ? edges[along[place]] : along[place]);

const oneList = (one, side) => oneText(one[side]);

function showTexts(one) {
  const by = asked(),
    other = by === "queries" ? "keys" : "queries",
    values = changes(one),
    scale = scaleOf(values.map(Math.abs));
  SIDES.forEach((side) => {
    const own = sideAxis(one, side, by),
      shaded = sideAxis(one, side, other),
      same = oneList(one, side),
      [ownList, shadedList] = [at(`${side}-chosen`), at(`${side}-shaded`)];
    shadedList.hidden = same;
    const holds = Math.max(firstToken(own, chosen()), 0);
    fillTokens(ownList, own.axis, shownTokens(side, own.axis, holds), by);
    mark(ownList, firstToken(own, chosen()), true);
    if (!same) {
      fillTokens(shadedList, shaded.axis, shownTokens(side, shaded.axis, 0), other);
      mark(shadedList, -1, false);
      paintTokens(ownList, own, () => NaN, scale, one[by]);
    }
    if (patchedSide(side, shaded.axis)) showSidePatches(side, own, shaded, values, scale);
    paintTokens(same ? ownList : shadedList, shaded, (place) => values[place], scale, one[other]);
  });
  showSigned(at("text-scale"), scale);
  showLists(one, values, one[other]);
}

// Of an image, the list holds the tokens that are no patch.
const shownTokens = (side, axis, holds) =>
  patchedSide(side, axis) ? [0, data.pictures[side].special] : tokensAround(axis, holds, SHOWN_TOKENS);

// Colours the tokens of a list by the change of their row or column, and underlines those that have no counterpart.
function paintTokens(list, of, value, scale, union) {
  [...list.children].forEach((word) => {
    const place = placeOf(of, Number(word.dataset.n)),
      change = value(place),
      ground = Math.abs(change) > 0 && scale.share(Math.abs(change)) > 0 ? signedColour(change, scale) : null,
      alone = union.before[place] < 0 || union.after[place] < 0;
    word.style.background = ground ? `rgb(${ground})` : "";
    word.style.color = ground ? inkOn(ground) : "";
    word.classList.toggle("alone", alone);
    word.title = alone ? NONE : "";
  });
}

function showLists(one, values, axis) {
  const rows = asked() === "queries",
    name = isolated(token(rows ? one.queries : one.keys, chosen())),
    unpaired = rows && (one.queries.before[chosen()] < 0 || one.queries.after[chosen()] < 0);
  at("about").textContent = rows ? `query ${name}: where its mass moved` : `key ${name}: whose mass it lost and gained`;
  const weights = (n) => (rows ? moved(one, chosen(), n) : moved(one, n, chosen()));
  const share = values.reduce((sum, value) => sum + Math.abs(value || 0), 0) / 2;
  const gain = values.reduce((sum, value) => sum + (value || 0), 0);
  at("mass").textContent = unpaired
    ? "this query has no counterpart in the other text: there is nothing to compare"
    : rows
      ? `${percent(share)} of the mass of this query lies on other keys`
      : `${signed(gain)} in all, summed over the queries`;
  const range = ({ before, after }) => `${short(before)} → ${short(after)}`;
  fillBars("lost", axis, values, -1, (n) => range(weights(n)));
  fillBars("gained", axis, values, 1, (n) => range(weights(n)));
}

const short = (weight) => (weight > 0 ? percent(weight) : "0");

function showMeans(one) {
  const { means, share } = meanChanges(one);
  at("moved").textContent = `${percent(share)} of its mass lies on other keys, mean over queries`;
  fillBars("all-lost", one.keys, means, -1, (n) => signed(means[n]));
  fillBars("all-gained", one.keys, means, 1, (n) => signed(means[n]));
}

// The number of a token in its text, before where it is there; of a cell, that of its first token.
const numberInText = (axis, n) => String(axis.numbers?.[n] ?? (axis.before[n] >= 0 ? axis.before[n] : axis.after[n]));

// The largest changes of one sign as bars.
function fillBars(id, axis, values, sign, text) {
  const found = [...values.keys()].filter((n) => sign * values[n] > 0).sort((a, b) => sign * (values[b] - values[a]));
  const most = Math.abs(values[found[0]] ?? 1);
  at(id).style.minHeight = `${20 * LISTED}px`;
  at(id).replaceChildren(
    ...found.slice(0, LISTED).map((n) => {
      const made = bar(axis, n, Math.abs(values[n]) / most, text(n));
      made.querySelector("small").textContent = numberInText(axis, n);
      return made;
    }),
    ...(found.length ? [] : [element("li", "quiet", "nothing")]),
  );
}
