// The text: a token is chosen, the others are shaded by what it looks at, or by how much they look at it.

const chosenAxis = (one) => (asked() === "queries" ? one.queries : one.keys);
const shadedAxis = (one) => (asked() === "queries" ? one.keys : one.queries);
const chosen = () => (asked() === "queries" ? cursor().query : cursor().key);
const shares = (one, head) =>
  asked() === "queries" ? row(one, head, cursor().query) : column(one, head, cursor().key);

// The exact row that is shown, if one is; and whether every weight of what is shown is known.
const shownRow = (one) => (asked() === "queries" ? exactRow(one, state.head, cursor().query) : undefined);
const complete = (one) => one.whole || shownRow(one) !== undefined;

// The weights that colour the text: where the page does not know one, the mean over its cell of the map.
const shadedWeights = (one) =>
  asked() === "queries"
    ? rowWithMeans(one, state.head, cursor().query)
    : columnWithMeans(one, state.head, cursor().key);

// Where the text's logarithmic scale begins: means over cells are smaller than the cells, by the number of their keys.
const leastShade = (one) => (complete(one) ? data.least : (data.least * one.nc) / one.keys.n);

// Of an image, the text is what is no patch of it.
const textOf = (axis, holds) => (patched(axis) ? [0, data.picture.special] : tokensAround(axis, holds, SHOWN_TOKENS));

function shadeTokens(list, values, scale, skip) {
  [...list.children].forEach((word) => {
    const n = Number(word.dataset.n),
      value = values[n],
      level = skip(n) ? 0 : levelOf(scale.share(value)),
      ground = level > 0 ? colour(level) : null;
    word.style.background = ground ? `rgb(${ground})` : "";
    word.style.color = ground ? inkOn(ground) : "";
    word.classList.toggle("off", Number.isNaN(value));
  });
}

function showText(one) {
  const by = asked(),
    values = shadedWeights(one),
    skip = leftOutTokens(one);
  const scale = scaleOf(values, skip, leastShade(one)),
    same = oneText(one),
    words = at("words"),
    others = at("others");
  others.hidden = at("others-name").hidden = at("words-name").hidden = same;
  const own = same || by === "queries" ? words : others,
    shaded = same || by === "keys" ? words : others;
  const heaviest = Math.max(values.indexOf(scale.most), 0);
  if (own !== shaded) {
    fillTokens(shaded, shadedAxis(one), textOf(shadedAxis(one), heaviest), "shaded");
    mark(shaded, heaviest, false);
    shadeTokens(own, [], scale, () => true);
  }
  fillTokens(own, chosenAxis(one), textOf(chosenAxis(one), chosen()), "chosen");
  mark(own, chosen(), true);
  shadeTokens(shaded, values, scale, skip);
  showScale(at("text-scale"), scale);
  if (at("patches")) showPatches(one, values, scale, skip);
  at("means").textContent = complete(one)
    ? ""
    : `exact for the ${one.rank} heaviest keys of a row; all others have the mean of their cell of the map`;
  showList(one, shares(one, state.head), skip);
}

function described(one) {
  const axis = chosenAxis(one),
    name = `${isolated(token(axis, chosen()))} (${numberOf(axis, chosen())})`;
  return asked() === "queries" ? `query ${name} looks at` : `key ${name} is read by`;
}

const LISTED = 8;

// The heaviest tokens as bars, and how much of the mass they are.
function showList(one, values, skip) {
  const numbers = [...values.keys()].filter((n) => values[n] > 0 && !skip(n)).sort((a, b) => values[b] - values[a]);
  const listed = numbers.slice(0, LISTED),
    mass = listed.reduce((sum, n) => sum + values[n], 0);
  at("about").textContent = described(one);
  // As high as the longest list, so that what stands below does not jump under a pointer.
  at("tops").style.minHeight = `${20 * Math.min(LISTED, complete(one) ? shadedAxis(one).n : one.rank)}px`;
  at("tops").replaceChildren(
    ...listed.map((n) => bar(shadedAxis(one), n, values[n] / values[listed[0]], percent(values[n]))),
  );
  at("mass").textContent = said(one, listed.length, mass, numbers, values);
}

function said(one, count, mass, numbers, values) {
  if (one.measure !== "weights") return saidOfMeasure(one, count, mass);
  const filtered = state.pair !== "all" && isPair(one);
  if (filtered && !count) return "nothing to show: all of it is left out";
  const left = state.hide === "nothing" && !filtered ? "" : "; the mass on what is left out is not counted";
  const known = shownRow(one);
  if (known) {
    const entropy = known.reduce((sum, p) => (p > 0 ? sum - p * Math.log(p) : sum), 0);
    return `exact, ${known.length === 1 ? "the only key" : `all ${countOf(known.length, "key")}`}: ${count} heaviest, ${percent(mass)} of the mass; entropy ${entropy.toFixed(2)} nats${left}`;
  }
  if (asked() === "queries") {
    const [number, query] = place(one, cursor().query);
    const entropy = (one.shares.entropy[state.head * one.carried + number] / SHARES) * one.entropyScale;
    const of =
      query === cursor().query ? "" : ` (of query ${numberOf(one.queries, query)}, the nearest one on this page)`;
    const share = percent(Math.min(mass, 1)); // the steps of weights may add up to a little more
    return `${count} heaviest, ${share} of the mass${of}; entropy ${entropy.toFixed(2)} nats${left}`;
  }
  if (!one.whole) return `queries that have this key among their ${one.rank} heaviest; others may look at it too`;
  const all = numbers.reduce((sum, n) => sum + values[n], 0),
    share = percent(all ? mass / all : 0);
  return `${count} heaviest readers, ${share} of the mass that this key receives (${all.toPrecision(3)})`;
}

function showBest(one) {
  const best = one.best[state.head],
    most = best.length ? best[0][1] : 1;
  at("best").replaceChildren(...best.map(([key, mass]) => bar(one.keys, key, mass / (most || 1), mass.toPrecision(3))));
}

// The next token behind the chosen one that holds what is searched for, from the start again after the last.
function search(one, wanted, step) {
  const axis = chosenAxis(one),
    found = [];
  const same = (text) => text.toLowerCase().includes(wanted.toLowerCase());
  for (let n = 0; wanted && n < axis.n; n++) if (same(token(axis, n))) found.push(n);
  at("found").textContent = wanted ? `${found.length} found` : "";
  if (!found.length) return null;
  return step < 0
    ? (found.findLast((n) => n < chosen()) ?? found.at(-1))
    : (found.find((n) => n > chosen() - (step === 0)) ?? found[0]);
}
