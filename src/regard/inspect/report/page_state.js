// What is shown: a head, a query and a key, and how; the same as the address behind #, so that a link shows it again.
const state = {
  layer: data.shown[0],
  head: data.shown[1],
  // Of an image, [CLS] asks first: its row is what the model makes of the whole.
  query: data.picture?.special ? 0 : data.layers[data.shown[0]].queries.n >> 1,
  key: 0,
  by: "queries", // of which axis a token is chosen: a query shows what it looks at, a key who looks at it
  view: "text",
  scale: "auto",
  hide: "nothing",
  pair: "all", // of two texts, the one that asks and the one that is read
  opacity: 70, // of the colours over an image, in percent
  measure: "weights", // what is shown of each pair
  zoom: 0, // how often the map's sides were halved
  heads: [], // drawn as lines besides the head itself
};
const CHOICES = {
  by: ["queries", "keys"],
  view: ["text", "lines"],
  scale: ["auto", "log", "linear"],
  hide: ["nothing", "first", "special"],
  pair: ["all", "aa", "ab", "ba", "bb"],
  measure: ["weights", "carried", "mean", "rollout"],
};
let over = null; // the query and key under the pointer, shown until it leaves; `by` where it is over a token

const cursor = () => over ?? state;
const asked = () => over?.by ?? state.by;
const nameOf = (layer, head) => `${data.layers[layer].place || `L${layer}`}H${head}`;

function written() {
  const parts = [encodeURI(nameOf(state.layer, state.head)), ...chosenParts()];
  if (data.picture && state.opacity !== 70) parts.push(`opacity=${state.opacity}`);
  if (state.zoom) parts.push(`zoom=${state.zoom}`);
  if (state.heads.length) parts.push(`heads=${state.heads.join(",")}`);
  return `#${parts.join("&")}`;
}

// `choose` makes of what does not exist the nearest that does.
function readAddress(address) {
  const given = readHead(address, data.layers.length, ["query", "key", "zoom", "opacity"]);
  if (given?.has("heads")) state.heads = given.get("heads").split(",").map(Number);
}

// Keys that are left out of the colours: the first, or those that no text holds.
function omitted(one) {
  if (state.hide === "first") return (key) => key === 0;
  if (state.hide === "special")
    return (key) => (key === 0 && one.keys.text < 0 ? true : SPECIAL.test(token(one.keys, key)));
  return () => false;
}

// Which of two texts a token is of: the second one begins at a token that the page was given.
const textOfToken = (axis, n) => (n + axis.first >= data.second ? "b" : "a");
const isPair = (one) => data.second > 0 && oneText(one);

// Whether a query and a key are of other texts than those whose attention is shown.
function ofOtherTexts(one) {
  if (state.pair === "all" || !isPair(one)) return () => false;
  const [asking, read] = state.pair;
  return (query, key) => textOfToken(one.queries, query) !== asking || textOfToken(one.keys, key) !== read;
}

// Whether a query's attention to a key is left out of the colours.
function leftOut(one) {
  const hidden = omitted(one),
    other = ofOtherTexts(one);
  return (query, key) => hidden(key) || other(query, key);
}

// The same of the tokens that are shaded; who looks at a key is shown of every key.
function leftOutTokens(one) {
  const { query, key } = cursor();
  if (asked() === "keys") {
    const other = ofOtherTexts(one);
    return (n) => other(n, key);
  }
  const left = leftOut(one);
  return (n) => left(query, n);
}
