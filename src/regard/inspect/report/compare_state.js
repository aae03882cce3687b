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
const within = (value, count) => Math.min(Math.max(Math.trunc(value) || 0, 0), count - 1);
const sameHead = () => state.layer === state.otherLayer && state.head === state.otherHead;

function written() {
  const parts = [encodeURI(nameOf(state.layer, state.head))];
  if (!sameHead()) parts.push(`after=${state.otherLayer},${state.otherHead}`);
  parts.push(`query=${state.query}`, `key=${state.key}`);
  Object.entries(CHOICES).forEach(
    ([name, values]) => state[name] !== values[0] && parts.push(`${name}=${state[name]}`),
  );
  if (state.zoom) parts.push(`zoom=${state.zoom}`);
  return `#${parts.join("&")}`;
}

// Takes what an address says, and leaves the rest as it is; the head after is the same one where none is named.
function readAddress(address) {
  const [name, ...parts] = address.replace(/^#/, "").split("&"),
    found = /^(.*L(\d+))H(\d+)$/.exec(decodeURI(name)),
    given = new URLSearchParams(parts.join("&"));
  if (!found) return;
  const named = data.layers.slice(0, data.count).findIndex((one) => one.place === found[1]);
  state.layer = named < 0 ? within(found[2], data.count) : named;
  state.head = Number(found[3]);
  [state.otherLayer, state.otherHead] = given.has("after")
    ? given.get("after").split(",").map(Number)
    : [state.layer, state.head];
  ["query", "key", "zoom"].forEach((number) => given.has(number) && (state[number] = Number(given.get(number))));
  Object.entries(CHOICES).forEach(([choice, values]) => {
    if (values.includes(given.get(choice))) state[choice] = given.get(choice);
  });
}

function writeAddress() {
  // A frame made of a string (a notebook's) has no address of its own.
  if (location.protocol !== "about:" && location.hash !== written()) history.replaceState(null, "", written());
}
