// What is shown of a comparison: a head before and one after, a query and a key; the same as the address behind #.
const [first, second] = data.shown;
const state = {
  layer: first[0],
  head: first[1],
  otherLayer: second[0], // the head after, which may be another one
  otherHead: second[1],
  query: null, // a row and a column of the map, counted over the tokens of both texts; null until one is chosen
  key: 0,
  by: "queries", // of which axis a token is chosen: a query shows what it looks at, a key who looks at it
  scale: "auto",
  zoom: 0, // how often the map's sides were halved
};
const CHOICES = { by: ["queries", "keys"], scale: ["auto", "log", "linear"] };
let over = null; // the query and key under the pointer, shown until it leaves; `by` where it is over a token

const cursor = () => over ?? state;
const asked = () => over?.by ?? state.by;
const nameOf = (layer, head) => `${data.layers[layer].place || `L${layer}`}H${head}`;
const nameAfter = () =>
  nameOf(data.count + state.otherLayer, state.otherHead).replace(/^L\d+H/, `L${state.otherLayer}H`);
const sameHead = () => state.layer === state.otherLayer && state.head === state.otherHead;

function written() {
  const [head, after] = [encodeURI(nameOf(state.layer, state.head)), `after=${state.otherLayer},${state.otherHead}`];
  const parts = [head, ...(sameHead() ? [] : [after]), ...chosenParts()];
  if (state.zoom) parts.push(`zoom=${state.zoom}`);
  return `#${parts.join("&")}`;
}

// The head after is the same one where none is named.
function readAddress(address) {
  const given = readHead(address, data.count, ["query", "key", "zoom"]);
  if (!given) return;
  [state.otherLayer, state.otherHead] = given.has("after")
    ? given.get("after").split(",").map(Number)
    : [state.layer, state.head];
}
